"""ogbn-arxiv on small files as ogb unpacks them; skipped where ogb is not installed."""

from __future__ import annotations

import builtins
import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_graph.config.common import DataConfig
from flower_graph.data import load_data
from flower_graph.errors import DataError


@pytest.fixture
def ogb() -> None:
    pytest.importorskip("ogb.nodeproppred", reason="the package ogb is not installed")


def write_arxiv(root: Path) -> Path:
    """Five nodes; edges 0-1 (twice), 1-2 and a loop; labels up to 39."""
    folder = root / "ogbn_arxiv"
    tables: dict[str, list[Any]] = {
        "raw/edge": ["0,1", "1,0", "1,2", "3,3"],
        "raw/node-feat": ["0.5,0.5", "-1.0,1.0", "0.0,0.0", "2.0,0.0", "0.0,1.0"],
        "raw/node-label": [0, 39, 2, 1, 1],
        "raw/node_year": [2001, 2002, 2003, 2004, 2005],
        "raw/num-node-list": [5],
        "raw/num-edge-list": [4],
        "split/time/train": [0, 1],
        "split/time/valid": [2],
        "split/time/test": [4, 3],
    }
    for name, rows in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.write("".join(f"{row}\n" for row in rows))
    (folder / "mapping").mkdir()
    (folder / "mapping" / "README.md").touch()
    (folder / "RELEASE_v1.txt").touch()
    return folder


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # in ogb
def test_arxiv(ogb: None, cache: Path, root: Path) -> None:
    folder = write_arxiv(root)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for _ in range(2):  # processed, then from the cache
        data = load_data(DataConfig(name="ogbn-arxiv"))
        expected = [[0.5, 0.5], [-0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        torch.testing.assert_close(data.x, torch.tensor(expected))
        assert data.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
        assert data.y.tolist() == [0, 39, 2, 1, 1]
        assert data.num_classes == 40
        assert data.train_mask.tolist() == [True, True, False, False, False]
        assert data.val_mask.tolist() == [False, False, True, False, False]
        assert data.test_mask.tolist() == [False, False, False, True, True]
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    assert len(list(cache.iterdir())) == 1


def test_arxiv_never_asks_a_question(
    ogb: None, cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = builtins.input

    def record(*arguments: Any) -> str:
        asked.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(builtins, "input", record)
    write_arxiv(root)
    load_data(DataConfig(name="ogbn-arxiv"))
    assert asked == []
    # Even if the cache is damaged, which makes ogb ask whether to update: it fails instead.
    (next(cache.iterdir()) / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(DataError, match="cannot be loaded by ogb: EOFError"):
        load_data(DataConfig(name="ogbn-arxiv"))
    assert len(asked) == 1


def test_missing_files_are_named(ogb: None, cache: Path, root: Path) -> None:
    folder = write_arxiv(root)
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(DataError, match=r"no valid\.csv\.gz .*root/ogbn_arxiv.*download failed"):
        load_data(DataConfig(name="ogbn-arxiv"))
    with pytest.raises(DataError, match="downloads are switched off"):
        load_data(DataConfig(name="ogbn-arxiv"), download=False)
    assert list(cache.iterdir()) == []


def test_without_ogb_the_error_says_how_to_get_it(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DataError, match=r"pip install flower-graph\[ogb\]"):
        load_data(DataConfig(name="ogbn-arxiv"))
