"""Which data an app works with: all of the run's, or those of the folder that a party was given."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context

from flower_graph.config.common import RunConfig
from flower_graph.data.folders.run_data import assigned, check_supernodes, read_graph
from flower_graph.data.folders.run_folder import (
    CLIENTS,
    MANIFEST,
    SERVER,
    RunFolder,
    deciding_settings,
    open_folder,
)
from flower_graph.errors import ConfigError

DATA_FOLDER, PARTITION, PARTITIONS = "data-folder", "partition-id", "num-partitions"
HINT = (
    "start the SuperNode with --node-config 'partition-id=0 num-partitions=4', with numbers from 0 "
    "on, or with a data-folder of its own"
)
T = TypeVar("T")


def client_folder(config: RunConfig, context: Context) -> RunFolder | None:
    """Open the folder that a SuperNode's ``data-folder`` names."""
    given = context.node_config.get(DATA_FOLDER)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"node-config {DATA_FOLDER}: {given!r} is no folder; write "
            f"--node-config '{DATA_FOLDER}=\"/path/client-0000\"'"
        )
    return _open(config, Path(given), CLIENTS)


def server_folder(config: RunConfig, given: str) -> RunFolder | None:
    """Open the folder that the run config's ``server-folder`` names; None without one."""
    # The server then reads nothing else. ``DataError`` if the folder cannot be used.
    return _open(config, Path(given), SERVER) if given else None


def graphs_of(folder: RunFolder, kind: type[T]) -> list[T]:
    """Read the graphs of a folder's clients, which are of one class."""
    clients = folder.manifest.clients
    return [read_graph(kind, client, folder.tensors, folder.path) for client in clients]


def share(context: Context, count: int) -> slice:
    """Say which clients a SuperNode hosts: neighbouring numbers, as many for each as can be."""
    part, parts = (_whole(context, key) for key in (PARTITION, PARTITIONS))
    check_supernodes(parts, count)
    if not 0 <= part < parts:
        raise ConfigError(
            f"node-config {PARTITION}: {part} with {PARTITIONS}: {parts}; must be at least 0 and "
            f"below {parts}; {HINT}"
        )
    here = assigned(part, parts, count)
    return slice(here.start, here.stop)


def _whole(context: Context, key: str) -> int:
    """Read a whole number of the node config."""
    value: Any = context.node_config.get(key)
    if value is None:
        raise ConfigError(f"node-config {key}: is missing; {HINT}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"node-config {key}: {value!r:.60} is no whole number; {HINT}")
    return value


def _open(config: RunConfig, path: Path, role: str) -> RunFolder:
    path = path.expanduser().absolute()
    settings = json.dumps(deciding_settings(asdict(config)))
    manifest = path / MANIFEST
    saved = manifest.stat().st_mtime_ns if manifest.is_file() else 0
    return _opened(path, settings, role, saved)


@lru_cache(maxsize=64)
def _opened(path: Path, settings: str, role: str, saved: int) -> RunFolder:
    """Open a folder once a process; `saved` is there to read a new one anew."""
    return open_folder(path, json.loads(settings), role)
