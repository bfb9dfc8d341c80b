"""Fixtures for tests of data sets: a private cache, a root to fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SETTINGS: dict[str, Any] = {
    "name": "cora-linqs",
    "root": None,
    "split": "public",
    "split_index": None,
    "split_seed": 0,
    "train_per_class": 20,
    "num_val": 500,
    "num_test": 1000,
    "ratios": None,
    "normalize": True,
    "presence": False,
    "nodes": 10000,
    "classes": 7,
    "degree": 10.0,
    "features": 512,
    "active": 32,
    "homophily": 0.8,
}


@pytest.fixture
def settings() -> Callable[..., SimpleNamespace]:
    """Make the data section of a config, with the given keys changed."""

    def make(**changes: Any) -> SimpleNamespace:
        assert set(changes) <= set(SETTINGS)
        return SimpleNamespace(**{**SETTINGS, **changes})

    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a cache of its own, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty data root, set by the environment variable."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(folder))
    return folder
