"""The run's graph and the clients cut out of it, made once a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flower_graph.config.common import DataConfig, RunConfig
from flower_graph.data.graph import Graph
from flower_graph.data.sources.datasets import load_graph

# Sections that decide the clients' data, beside the seed (as `run_folder.deciding_settings`)
DECIDING = ("data", "partition", "graph")


@dataclass(frozen=True)
class _Asked:
    """Which clients are wanted; equal questions have one answer."""

    make: Callable[[Any], list[Any]]
    settings: str
    saved: int
    config: RunConfig = field(compare=False)


def cached_data(config: RunConfig) -> Graph:
    """Load the run's graph once a process; clients are built anew for every message."""
    # JSON, because writing YAML takes longer than a client's whole answer.
    settings = json.dumps(asdict(config.data))
    return _cached_data(settings, config.seed, saved_at(config.data.name))


@lru_cache(maxsize=2)
def _cached_data(settings: str, seed: int, saved: int) -> Graph:
    """Load the graph; `saved`, the time of its file, is there to read a new file anew."""
    return load_graph(DataConfig(**json.loads(settings)), seed=seed)


def cached_clients(
    make: Callable[[Any], list[Any]], config: RunConfig, *also: str | int
) -> list[Any]:
    """Make a run's clients once a process: by seed, deciding sections, and what else `make` reads.

    Clients are built anew for every message, so this is asked for each of them.
    """
    sections = [asdict(getattr(config, name)) for name in DECIDING if hasattr(config, name)]
    settings = json.dumps([config.seed, sections, also])
    return _made(_Asked(make, settings, saved_at(config.data.name), config))


@lru_cache(maxsize=2)
def _made(asked: _Asked) -> list[Any]:
    """Make them; the question has the time of the graph's file, to read a new file anew."""
    return asked.make(asked.config)


def saved_at(name: str) -> int:
    """Return when a file, or the last of a folder's, was saved; 0 for other names."""
    # With it a cache reads a new one anew.
    file = Path(name)
    files = [file] if file.is_file() else file.glob("*.pt")
    return max((one.stat().st_mtime_ns for one in files), default=0)
