"""Loaders of PyG and ogb on small raw files in the format of the real ones; graphs of the user."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from partition_helpers import own_graph
from scipy.sparse import csr_matrix
from torch_geometric.data import Data, HeteroData

from flower_graph.config.common import DataConfig
from flower_graph.data import load_data
from flower_graph.data.description import as_graph
from flower_graph.data.folders.client_folder import client_graph_from_data
from flower_graph.data.sources import cache as cache_module
from flower_graph.data.sources.cache import (
    cache_root,
    cached_folder,
    check_reachable,
    copy_tree,
    stall_limit,
)
from flower_graph.data.sources.names import PygName
from flower_graph.data.sources.pyg import load_file, load_pyg, without_duplicates
from flower_graph.errors import DataError
from flower_graph.storage.files import data_root

Listing = dict[str, tuple[int, int]]

X = np.array([[1, 0, 1], [0, 2, 0], [0, 0, 0], [1, 1, 2]], dtype=np.float32)
# Rows of X divided by their sums.
NORMALISED = [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0], [0.25, 0.25, 0.5]]
BINARY = [*NORMALISED[:3], [1 / 3, 1 / 3, 1 / 3]]
# The directed edges 0-1, 1-0, 1-2, 2-2; node 3 is isolated.
UNDIRECTED = [[0, 1, 1, 2], [1, 0, 2, 1]]


LINKS = csr_matrix((np.ones(4), ([0, 1, 1, 2], [1, 0, 2, 2])), shape=(4, 4))
CLASSES = np.array([0, 1, 0, 1])
# 20 splits of WikiCS: split k trains on node k % 2 and stops on the other one.
TRAIN = [[node == k % 2 for node in range(4)] for k in range(20)]
VAL = [[node == 1 - k % 2 for node in range(4)] for k in range(20)]
SPARSE = ("data", "indices", "indptr", "shape")


def raw_files(name: str) -> dict[str, Any]:
    """Give what lies in the folder ``raw`` of a set."""
    if name == "WikiCS":
        masks = {"train_masks": TRAIN, "val_masks": VAL, "stopping_masks": VAL}
        masks["test_mask"] = [False, False, True, True]
        links = [[1], [0, 2], [2], []]
        content = {"features": X.tolist(), "labels": [0, 1, 2, 1], "links": links}
        return {"data.json": json.dumps({**content, **masks})}
    if name == "Actor":
        nodes = "node_id\tfeature\tlabel\n0\t0,2\t0\n1\t1\t1\n2\t0\t1\n3\t0,1,2\t0\n"
        edges = "a\tb\n0\t1\n1\t0\n1\t2\n2\t2\n"
        files = {"out1_node_feature_label.txt": nodes, "out1_graph_edges.txt": edges}
        parts = [*enumerate(("train", "val", "test"))]
        return files | {
            f"film_split_0.6_0.2_{fold}.npz": {
                f"{part}_mask": np.arange(4) == (fold + k) % 4 for k, part in parts
            }
            for fold in range(10)
        }
    both = (("adj_", LINKS), ("attr_", csr_matrix(X)))
    arrays = {f"{start}{key}": getattr(matrix, key) for start, matrix in both for key in SPARSE}
    return {"amazon_electronics_photo.npz": {"labels": CLASSES, **arrays}}


def write(root: Path, *names: str) -> None:
    """Write the raw files of some sets."""
    for name in names:
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for file, content in raw_files(name).items():
            if isinstance(content, str):
                (raw / file).write_text(content)
            else:
                np.savez(raw / file, **content)


# What lies in the folder ``raw`` of each set


def listing(folder: Path) -> Listing:
    """Size and time of change of everything in a folder."""
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


# What these two read says only which features a node has; node 2 of Actor has the first.


@pytest.mark.parametrize(
    ("name", "settings", "seed", "x", "y", "parts"),
    [
        ("WikiCS", {"features": "as-is"}, 0, X.tolist(), [0, 1, 2, 1], [[0], [1], [2, 3]]),
        ("WikiCS", {}, 19, NORMALISED, [0, 1, 2, 1], [[1], [0], [2, 3]]),
        # What these two read says only which features a node has; node 2 of Actor has the first.
        (
            "Actor",
            {"split": "geom-gcn"},
            13,
            [*BINARY[:2], [1, 0, 0], BINARY[3]],
            [0, 1, 1, 0],
            [[3], [0], [1]],
        ),
        (
            "Amazon/Photo",
            {"split": "random", "ratios": [0.5, 0.25, 0.25]},
            0,
            BINARY,
            [0, 1, 0, 1],
            None,
        ),
    ],
)
def test_raw_files_of_each_layout_become_a_graph(name, settings, seed, x, y, parts, cache, root):
    write(root, name)
    data = load_data(DataConfig(name=name, **settings), seed=seed)
    torch.testing.assert_close(data.x, torch.tensor(x, dtype=torch.float32))
    assert data.edge_index.tolist() == UNDIRECTED
    assert (data.y.tolist(), data.num_classes) == (y, max(y) + 1)
    masks = (data[f"{part}_mask"] for part in ("train", "val", "test"))
    found = [mask.nonzero().flatten().tolist() for mask in masks]
    assert found == parts if parts else [len(part) for part in found] == [2, 1, 1]
    if parts is None:
        with pytest.raises(DataError, match=f"'{name}'.*data.split=random"):
            load_data(DataConfig(name=name))


def test_the_root_is_only_read_once_and_new_raw_files_are_noticed(cache, root):
    write(root, "WikiCS", "Actor")
    before = listing(root)
    first = load_data(DataConfig(name="WikiCS"))
    load_data(DataConfig(name="Actor", split="geom-gcn"))
    assert listing(root) == before
    # Each folder of the cache has the raw files of its own set, and no others.
    names = {path.name for path in cache.glob("*/raw/*") if "split" not in path.name}
    assert names == {"data.json", "out1_graph_edges.txt", "out1_node_feature_label.txt"}
    before = listing(cache)
    assert torch.equal(load_data(DataConfig(name="WikiCS")).x, first.x)
    assert listing(cache) == before
    raw = root / "WikiCS" / "raw" / "data.json"
    raw.write_text(raw.read_text().replace("[0, 1, 2, 1]", "[1, 0, 2, 10]"))
    assert load_data(DataConfig(name="WikiCS")).y.tolist() == [1, 0, 2, 10]
    raw.write_text("{}")  # what is broken is reported, and leaves nothing
    before = listing(cache)
    with pytest.raises(DataError, match=r"'WikiCS'.*KeyError"):
        load_data(DataConfig(name="WikiCS"))
    assert listing(cache) == before


def test_a_missing_set_says_what_is_missing_where_and_what_to_do(cache, root, monkeypatch):
    raw = root / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.cora.x").touch()  # one of eight is there
    fold = r"geom-gcn-splits/cora_split_0\.6_0\.2_3\.npz.*Planetoid/Cora/geom-gcn/raw.*failed"
    for split, words in (
        ("public", rf"no ind\.cora\.tx.* and 4 more .*{raw}.*{cache}.*data\.root.*\[Errno"),
        ("geom-gcn", fold),
    ):
        with pytest.raises(DataError, match=words):
            load_data(DataConfig(name="Cora", split=split), seed=3)
    assert list(cache.iterdir()) == []
    assert sorted(path.name for path in raw.iterdir()) == ["ind.cora.x"]
    monkeypatch.delenv("FLOWER_GRAPH_DATA")
    # Flickr's addresses are not to be found on its class: the download itself fails.
    for download, why in ((True, "failed"), (False, "switched off")):
        with pytest.raises(DataError, match=rf"adj_full\.npz.*no data root.*{why}"):
            load_data(DataConfig(name="Flickr"), download=download)


def test_what_was_downloaded_is_found_again_without_a_network(cache, root, tmp_path, monkeypatch):
    import torch_geometric.datasets.wikics as module

    write(tmp_path / "server", "WikiCS")
    served = tmp_path / "server" / "WikiCS" / "raw" / "data.json"

    def fetch(url, folder):
        (Path(folder) / url.rpartition("/")[2]).write_bytes(served.read_bytes())

    monkeypatch.setattr(module, "download_url", fetch)
    monkeypatch.setattr("flower_graph.data.sources.pyg.check_reachable", lambda urls: None)
    first = load_data(DataConfig(name="WikiCS"))
    served.unlink()
    again = load_data(DataConfig(name="WikiCS"), download=False)
    assert torch.equal(first.x, again.x)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (PygName("WikiCS", "extra"), "'extra'"),
        (PygName("Airports", None), "Airports"),
        (PygName("FakeDataset", None), "generated"),
        (PygName("MixHopSyntheticDataset", None), "homophily"),
        (PygName("AmazonBook", None), "AmazonBook"),
        (PygName("Airports", "atlantis"), "Airports/atlantis"),
    ],
)
def test_classes_that_cannot_be_used_are_reported(name, message, cache, root):
    with pytest.raises(DataError, match=message):
        load_pyg(name, root=root, download=False)


def test_several_graphs_are_refused(monkeypatch):
    import torch_geometric.datasets as datasets

    for graphs in ([], [object()] * 2):
        monkeypatch.setattr(datasets.KarateClub, "__len__", lambda self, n=graphs: len(n))
        with pytest.raises(DataError, match="'KarateClub'"):
            load_pyg(PygName("KarateClub", None), root=None, download=False)


# Graphs of the user: nothing in a file is executed ----------------------------------------------


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class Harmful:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed_and_no_class_allowed_for_good(tmp_path):
    proof, before = tmp_path / "proof", set(torch.serialization.get_safe_globals())
    content = own_graph(extra=Harmful(proof))
    saved = save(tmp_path / "saved.pt", content)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps(content, protocol=2))
    for path in (saved, tmp_path / "pickled.pt", save(tmp_path / "data.pt", Data(**content))):
        with pytest.raises(DataError):
            load_file(path)
    assert not proof.exists()
    torch.load(saved, weights_only=False)  # the same file would have done it
    assert proof.exists()
    assert Data in before  # PyG's own doing, which must last
    load_file(save(tmp_path / "graph.pt", Data(**own_graph())))
    assert set(torch.serialization.get_safe_globals()) == before


HETERO = HeteroData()
HETERO["a", "to", "b"].edge_index = torch.tensor([[0], [1]])


def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}/absent.pt"):
        load_file(tmp_path / "absent.pt")
    whole = save(tmp_path / "whole.pt", own_graph()).read_bytes()
    half = len(whole) // 2
    for name, content, message in (
        ("empty", b"", "is empty"),
        ("cut", whole[:half], "is cut short"),
        ("spoilt", whole[:half] + b"?" * 99 + whole[half + 99 :], "is not a graph"),
        ("table", b"name,label\n", "is not a graph"),
        ("tensor", save(tmp_path / "x.pt", torch.ones(3)).read_bytes(), "holds a Tensor"),
        ("kinds", save(tmp_path / "x.pt", HETERO).read_bytes(), "holds a HeteroData"),
    ):
        (tmp_path / f"{name}.pt").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.pt: {message}") as caught:
            load_file(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value) and "Errno" not in str(caught.value)
    with pytest.raises(DataError, match=r"client 3.*HeteroData"):
        client_graph_from_data(3, HETERO)


# ogbn-arxiv; skipped where ogb is not installed -------------------------------------------------


@pytest.fixture
def ogb():
    pytest.importorskip("ogb.nodeproppred", reason="the package ogb is not installed")


def write_ogb(root: Path, name: str = "ogbn-arxiv", split: str = "time") -> Path:
    """Five nodes; edges 0-1 (twice), 1-2 and a loop; labels up to 39."""
    folder = root / name.replace("-", "_")
    tables: dict[str, list[Any]] = {
        "raw/edge": ["0,1", "1,0", "1,2", "3,3"],
        "raw/node-feat": ["0.5,0.5", "-1.0,1.0", "0.0,0.0", "2.0,0.0", "0.0,1.0"],
        "raw/node-label": [0, 39, 2, 1, 1],
        "raw/num-node-list": [5],
        "raw/num-edge-list": [4],
        f"split/{split}/train": [0, 1],
        f"split/{split}/valid": [2],
        f"split/{split}/test": [4, 3],
    }
    if name == "ogbn-arxiv":
        tables["raw/node_year"] = [2001, 2002, 2003, 2004, 2005]
    for table, rows in tables.items():
        path = folder / f"{table}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.write("".join(f"{row}\n" for row in rows))
    (folder / "mapping").mkdir()
    (folder / "mapping" / "README.md").touch()
    (folder / "RELEASE_v1.txt").touch()
    return folder


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # in ogb
@pytest.mark.parametrize(
    ("name", "split", "classes"),
    [("ogbn-arxiv", "time", 40), ("ogbn-products", "sales_ranking", 47)],
)
def test_sets_of_ogb(name, split, classes, ogb, cache, root):
    folder = write_ogb(root, name, split)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for _ in range(2):  # processed, then from the cache
        data = load_data(DataConfig(name=name))
        expected = [[0.5, 0.5], [-0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
        torch.testing.assert_close(data.x, torch.tensor(expected))
        assert data.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
        assert (data.y.tolist(), data.num_classes) == ([0, 39, 2, 1, 1], classes)
        masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
        assert masks.int().argmax(0).tolist() == [0, 0, 1, 2, 2] and int(masks.sum()) == 5
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    assert len(list(cache.iterdir())) == 1
    for other, why in (("ogbn-mag", ".*OGB"), ("ogbn-proteins", "")):
        with pytest.raises(DataError, match=f"'{other}'{why}"):
            load_data(DataConfig(name=other))


def test_arxiv_never_asks_a_question(ogb, cache, root, monkeypatch):
    asked = []
    real = builtins.input

    def record(*arguments):
        asked.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(builtins, "input", record)
    write_ogb(root)
    load_data(DataConfig(name="ogbn-arxiv"))
    assert asked == []
    # Even if the cache is damaged, which makes ogb ask whether to update: it fails instead.
    (next(cache.iterdir()) / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(DataError, match="EOFError"):
        load_data(DataConfig(name="ogbn-arxiv"))
    assert len(asked) == 1


def test_missing_files_are_named(ogb, cache, root):
    folder = write_ogb(root)
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(DataError, match=r"valid\.csv\.gz.*root/ogbn_arxiv"):
        load_data(DataConfig(name="ogbn-arxiv"))
    with pytest.raises(DataError):
        load_data(DataConfig(name="ogbn-arxiv"), download=False)
    assert list(cache.iterdir()) == []


def test_of_duplicate_nodes_the_one_that_is_linked_is_kept():
    # 0, 1 and 3 link to 2 alone; 1 is of another class, and 2 links back to 3 alone.
    edges = torch.tensor([[0, 1, 3, 2, 2], [2, 2, 2, 3, 3]])
    masks = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=torch.bool)
    data = Data(x=torch.eye(4), edge_index=edges, y=torch.tensor([0, 1, 0, 0]), train_mask=masks)
    kept = without_duplicates(data)
    assert kept.x.argmax(1).tolist() == [1, 2, 3] and kept.y.tolist() == [1, 0, 0]
    assert kept.edge_index.tolist() == [[0, 2, 1, 1], [1, 1, 2, 2]]
    assert torch.equal(kept.train_mask, masks[1:])
    assert as_graph(kept).notes[0].startswith("3 of 4 nodes kept")


def test_the_setting_counts_before_the_environment(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(two))
    assert data_root(str(one)) == one
    assert data_root(None) == two
    monkeypatch.setenv("FLOWER_GRAPH_DATA", "")
    assert data_root(None) is None
    with pytest.raises(DataError, match=r"data\.root = '.*absent'"):
        data_root(str(tmp_path / "absent"))
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="FLOWER_GRAPH_DATA"):
        data_root(None)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("FLOWER_GRAPH_CACHE")
    assert cache_root() == Path("/b/flower-graph")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/c/.cache/flower-graph")


def test_a_folder_that_cannot_be_filled_leaves_nothing_and_is_reported(
    cache, tmp_path, monkeypatch
):
    def fill(folder):
        (folder / "half").touch()
        raise error

    for error in (ValueError("broken"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            cached_folder("key", fill)
        assert list(cache.iterdir()) == []
    (tmp_path / "file").touch()  # a file where the folder would be: refused to root too
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="FLOWER_GRAPH_CACHE"):
        cached_folder("key", lambda folder: None)
    source, copy = tmp_path / "source", tmp_path / "target" / "deep" / "file"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("content")
    (source / "deep" / "file").chmod(0o444)
    copy_tree(source, tmp_path / "target")  # the copy can be removed again
    assert copy.read_text() == "content" and copy.stat().st_mode & 0o200


def test_writers_at_once_each_get_a_complete_folder(cache):
    together = threading.Barrier(4)
    results = []

    def fill(folder):
        (folder / "first").touch()
        together.wait(timeout=30)  # all four are past the look-up, and in the middle
        (folder / "second").touch()

    def work():
        folder = cached_folder("key", fill)
        results.append({path.name for path in folder.iterdir()})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"first", "second"}] * 4
    assert [path.name for path in cache.iterdir()] == ["key"]


# Hosts ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    """Keep a proxy of the machine out of the way."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_silent_host_does_not_hold_anything_up(monkeypatch):
    monkeypatch.setattr(cache_module, "PROBE_SECONDS", 0.2)
    start, before = time.monotonic(), socket.getdefaulttimeout()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,  # accepts, and never says a word
        pytest.raises(OSError, match="timed out"),
    ):
        check_reachable([f"http://127.0.0.1:{server.getsockname()[1]}/file"])
    assert time.monotonic() - start < 5
    with pytest.raises(KeyError), stall_limit():
        assert socket.getdefaulttimeout() == cache_module.STALL_SECONDS
        raise KeyError
    assert socket.getdefaulttimeout() == before


def test_one_host_that_answers_is_enough_and_none_to_reach_no_failure():
    check_reachable([])
    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody listens there afterwards
        closed = f"http://127.0.0.1:{server.getsockname()[1]}/file"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        check_reachable([closed, f"http://127.0.0.1:{server.getsockname()[1]}/file"])
        thread.join()
