"""Fixtures for tests of data sets: a private cache, a root to fill."""

from __future__ import annotations

from pathlib import Path

import pytest


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
