"""Loaders of PyG and ogb on small raw files in the format of the real ones; graphs of the user."""

import gzip
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from flower_graph.config.common import DataConfig
from flower_graph.data import csbm, load_data, load_graph
from flower_graph.data import graph as data_graph
from flower_graph.data.description import as_graph
from flower_graph.data.features import ReadOptions, move_features, sketched
from flower_graph.data.folders.client_folder import client_graph_from_data
from flower_graph.data.graph import PARTS
from flower_graph.data.partition.statistics import node_statistics, survey_graph
from flower_graph.data.sources.datasets import load_file, load_pyg, without_duplicates
from flower_graph.data.sources.names import (
    PygName,
    cache_root,
    cached_folder,
    fetching,
    file_path,
    folder_path,
    known_names,
    pyg_name,
)
from flower_graph.errors import DataError, OutputError
from flower_graph.storage.files import data_root
from flower_graph.wire.keys import ROLES

X = np.array([[1, 0, 1], [0, 2, 0], [0, 0, 0], [1, 1, 2]], dtype=np.float32)
# Rows of X divided by their sums.
NORMALISED = [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0], [0.25, 0.25, 0.5]]
OF_ACTOR = [*NORMALISED[:2], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3]]
# The directed edges 0-1, 1-0, 1-2, 2-2; node 3 is isolated.
UNDIRECTED = [[0, 1, 1, 2], [1, 0, 2, 1]]


# 20 splits of WikiCS: split k trains on node k % 2 and stops on the other one.
TRAIN = [[node == k % 2 for node in range(4)] for k in range(20)]
VAL = [[node == 1 - k % 2 for node in range(4)] for k in range(20)]


def raw_files(name: str) -> dict[str, Any]:
    """Give what lies in the folder ``raw`` of a set."""
    if name == "WikiCS":
        masks = {"train_masks": TRAIN, "val_masks": VAL, "stopping_masks": VAL}
        masks["test_mask"] = [False, False, True, True]
        links = [[1], [0, 2], [2], []]
        content = {"features": X.tolist(), "labels": [0, 1, 2, 1], "links": links}
        return {"data.json": json.dumps({**content, **masks})}
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


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything in a folder."""
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the test a cache of its own, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Give the test an empty data root, set by the environment variable."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(folder))
    return folder


FOLDERS = ("/a", "/b/flower-graph", "/c/.cache/flower-graph")  # of the cache, by variable
# What Actor reads says only which features a node has; node 2 has the first.
LAYOUTS: list[tuple[str, dict[str, Any], int, Any, list[int], list[list[int]]]] = [
    ("WikiCS", {"features": "as-is"}, 0, X.tolist(), [0, 1, 2, 1], [[0], [1], [2, 3]]),
    ("WikiCS", {}, 19, NORMALISED, [0, 1, 2, 1], [[1], [0], [2, 3]]),
    ("Actor", {"split": "geom-gcn"}, 13, OF_ACTOR, [0, 1, 1, 0], [[3], [0], [1]]),
]


@pytest.mark.parametrize(("name", "settings", "seed", "x", "y", "parts"), LAYOUTS)
def test_raw_files_of_each_layout_become_a_graph(name, settings, seed, x, y, parts, cache, root):
    write(root, name)
    data = load_data(DataConfig(name=name, **settings), seed=seed)
    torch.testing.assert_close(data.x, torch.tensor(x, dtype=torch.float32))
    assert data.edge_index.tolist() == UNDIRECTED
    assert (data.y.tolist(), data.num_classes) == (y, max(y) + 1)
    masks = (data[f"{part}_mask"] for part in ("train", "val", "test"))
    found = [mask.nonzero().flatten().tolist() for mask in masks]
    assert found == parts


def test_the_root_is_only_read_once_and_new_raw_files_are_noticed(cache, root):
    write(root, "WikiCS", "Actor")
    before = listing(root)
    first = load_data(DataConfig(name="WikiCS"))
    load_data(DataConfig(name="Actor", split="geom-gcn"))
    assert listing(root) == before
    # Each folder of the cache has the raw files of its own set, and no others.
    names = {path.name for path in cache.glob("*/*/raw/*") if "split" not in path.name}
    assert names == {"data.json", "out1_graph_edges.txt", "out1_node_feature_label.txt"}
    before = listing(cache)
    assert torch.equal(load_data(DataConfig(name="WikiCS")).x, first.x)
    assert listing(cache) == before
    raw = root / "WikiCS" / "raw" / "data.json"
    raw.write_text("{}")  # what is new and broken is reported, and leaves nothing
    with pytest.raises(DataError, match=r"'WikiCS'.*KeyError"):
        load_data(DataConfig(name="WikiCS"))
    assert listing(cache) == before


def test_a_missing_set_says_what_is_missing_where_and_what_to_do(cache, root):
    raw = root / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.cora.x").touch()  # one of eight is there
    for split, words in (
        ("public", rf"no ind\.cora\.tx.* 7 of 8 .*data\.root.*Cora/raw.: {root}.*failed"),
        ("geom-gcn", r"ind\.cora\.tx.* 17 of 18 .*Planetoid/Cora/geom-gcn/raw.*failed"),
    ):
        with pytest.raises(DataError, match=words):
            load_data(DataConfig(name="Cora", split=split), seed=3)
    assert list(cache.iterdir()) == []
    with pytest.raises(DataError, match=r"adj_full\.npz.*switched off"):
        load_data(DataConfig(name="Flickr"), download=False)


def test_what_was_downloaded_is_found_again_without_a_network(cache, root, tmp_path, monkeypatch):
    import torch_geometric.datasets.wikics as module

    write(tmp_path / "server", "WikiCS")
    served = tmp_path / "server" / "WikiCS" / "raw" / "data.json"

    def fetch(url, folder):
        (Path(folder) / url.rpartition("/")[2]).write_bytes(served.read_bytes())

    monkeypatch.setattr(module, "download_url", fetch)
    first = load_data(DataConfig(name="WikiCS"))
    served.unlink()
    again = load_data(DataConfig(name="WikiCS"), download=False)
    assert torch.equal(first.x, again.x)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (PygName("FakeDataset", None), "FakeDataset.*root"),  # generated anew by each process
        (PygName("AmazonBook", None), "AmazonBook"),
        (PygName("Airports", "atlantis"), "Airports/atlantis"),
    ],
)
def test_classes_that_cannot_be_used_are_reported(name, message, cache, root):
    with pytest.raises(DataError, match=message), fetching(False):
        load_pyg(name, root=root)


# Graphs of the user: nothing in a file is executed ----------------------------------------------


OWN = {"x": torch.eye(3), "edge_index": torch.tensor([[0], [1]]), "y": torch.tensor([0, 1, 0])}


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
    content = OWN | {"extra": Harmful(proof)}
    saved = save(tmp_path / "saved.pt", content)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps(content, protocol=2))
    for path in (saved, tmp_path / "pickled.pt", save(tmp_path / "data.pt", Data(**content))):
        with pytest.raises(DataError):
            load_file(path)
    assert not proof.exists()
    torch.load(saved, weights_only=False)  # the same file would have done it
    assert proof.exists()
    assert Data in before  # PyG's own doing, which must last
    load_file(save(tmp_path / "graph.pt", Data(**OWN)))
    assert set(torch.serialization.get_safe_globals()) == before


HETERO = HeteroData()
HETERO["a", "to", "b"].edge_index = torch.tensor([[0], [1]])


def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path):
    whole = save(tmp_path / "whole.pt", OWN).read_bytes()
    for name, content, message in (
        ("cut", whole[: len(whole) // 2], "is not a graph"),
        ("tensor", save(tmp_path / "x.pt", torch.ones(3)).read_bytes(), "holds a Tensor"),
        ("kinds", save(tmp_path / "x.pt", HETERO).read_bytes(), ".*of a HeteroData"),
    ):
        (tmp_path / f"{name}.pt").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.pt: {message}") as caught:
            load_file(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value)
    masks = {f"{part}_mask": torch.ones(4, k) > 0 for part, k in zip(ROLES, (3, 2, 3), strict=True)}
    save(
        tmp_path / "k.pt",
        Data(x=torch.rand(4, 2), edge_index=OWN["edge_index"], y=torch.ones(4).long(), **masks),
    )
    with pytest.raises(DataError, match=r"k\.pt: .*\[2, 3\]"):
        load_graph(DataConfig(str(tmp_path / "k.pt")))
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


def test_arxiv_never_asks_a_question_and_missing_files_are_named(ogb, cache, root):
    folder = write_ogb(root)
    load_data(DataConfig(name="ogbn-arxiv"))
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(DataError, match=r"valid\.csv\.gz.*ogbn_arxiv/raw.*/root"):
        load_data(DataConfig(name="ogbn-arxiv"))
    assert len(list(cache.iterdir())) == 1


def test_of_duplicate_nodes_the_one_that_is_linked_is_kept():
    # 0, 1 and 3 link to 2 alone; 1 is of another class, and 2 links back to 3 alone.
    edges = torch.tensor([[0, 1, 3, 2, 2], [2, 2, 2, 3, 3]])
    kept = without_duplicates(Data(x=torch.eye(4), edge_index=edges, y=torch.tensor([0, 1, 0, 0])))
    assert kept.x.argmax(1).tolist() == [1, 2, 3] and kept.y.tolist() == [1, 0, 0]
    assert kept.edge_index.tolist() == [[0, 2, 1, 1], [1, 1, 2, 2]]
    assert as_graph(kept).notes[0].startswith("3 of 4 nodes kept")


def test_the_data_root_and_the_cache_are_where_setting_and_environment_say(tmp_path, monkeypatch):
    here, absent = str(tmp_path), str(tmp_path / "absent")
    for setting, variable, found in ((here, absent, tmp_path), (None, here, tmp_path)):
        monkeypatch.setenv("FLOWER_GRAPH_DATA", variable)
        assert data_root(setting) == found
    with pytest.raises(DataError, match=r"data\.root = '.*absent'"):
        data_root(absent)
    places = {"FLOWER_GRAPH_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}
    for variable, place in places.items():
        monkeypatch.setenv(variable, place)
    for variable, found in zip(places, FOLDERS, strict=True):
        assert cache_root() == Path(found)
        monkeypatch.delenv(variable)


def test_a_folder_that_cannot_be_filled_leaves_nothing_and_is_reported(
    cache, tmp_path, monkeypatch
):
    def fill(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("key", fill)
    assert list(cache.iterdir()) == []
    (tmp_path / "file").touch()  # a file where the folder would be: refused to root too
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match="file"):
        cached_folder("key", lambda folder: None)


def test_writers_at_once_each_get_a_complete_folder(cache):
    together = threading.Barrier(4)

    def fill(folder):
        (folder / "first").touch()
        together.wait(timeout=30)  # all four are past the look-up, and in the middle
        (folder / "second").touch()

    with ThreadPoolExecutor(4) as pool:
        folders = [*pool.map(lambda _: cached_folder("key", fill), range(4))]
    assert [{path.name for path in one.iterdir()} for one in folders] == [{"first", "second"}] * 4
    assert [path.name for path in cache.iterdir()] == ["key"]


# From a name and a config to a checked graph ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pubmed", ("Planetoid", "PubMed")),
        ("planetoid/citeseer", ("Planetoid", "CiteSeer")),
        ("chameleon-filtered", ("WikipediaNetwork", "chameleon-filtered")),
        ("wikics", ("WikiCS", None)),
        # Not in any table of ours: PyG's own list of classes.
        ("heterophilousgraphdataset/Minesweeper", ("HeterophilousGraphDataset", "Minesweeper")),
        ("Corra", "'Cora'"),
        ("Amazon/Foto", "'Amazon/Photo'"),
        ("Redit", "'Reddit'"),
        ("", "Known: cora-linqs"),
    ],
)
def test_names_stand_for_classes_of_pyg_and_unknown_ones_are_refused_with_the_nearest(
    name, expected
):
    if isinstance(expected, tuple):
        assert pyg_name(name) == expected
        return
    with pytest.raises(DataError, match=f"data.name = '{name}'.*{expected}"):
        pyg_name(name)


def test_a_name_is_a_file_or_a_folder_when_it_looks_like_one(tmp_path, monkeypatch):
    names = known_names()
    assert {"cora-linqs", "csbm", "Cora", "chameleon", "ogbn-arxiv", "Amazon/Photo"} <= set(names)
    assert all(pyg_name(name) for name in names[2:] if not name.startswith("ogbn"))
    monkeypatch.chdir(tmp_path)
    for folder in ("Coauthor/CS", "graphs", "clients", "Planetoid/Cora/raw"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("graphs/mine", "Cora", "clients/a.pt"):
        (tmp_path / file).touch()
    files, folders = (
        {"graphs/mine", "absent.pt", "clients/a.pt"},
        {"clients", "clients/", "absent/"},
    )
    # A folder is no saved graph, and without a separator a name is the data set's
    for name in (*files, *folders, "graphs/absent", "Coauthor/CS", "Cora", "Planetoid/Cora"):
        assert file_path(name) == (Path(name) if name in files else None), name
        assert folder_path(name) == (Path(name) if name in folders else None), name
    with pytest.raises(DataError, match=r"'absent\.pt'"):
        load_data(DataConfig(name="absent.pt"))


COUNTS = ("clients", "edges", "features", "classes", "isolated", "train", "val", "test")
REAL = [
    ("Cora", "public", (2708, 5278, 1433, 7, 0, 140, 500, 1000)),
    ("CiteSeer", "geom-gcn", (3327, 4552, 3703, 6, 48, 1596, 1065, 666)),
    ("PubMed", "public", (19717, 44324, 500, 3, 0, 60, 500, 1000)),
    ("squirrel", "geom-gcn", (5201, 198353, 2089, 5, 0, 2496, 1664, 1041)),
    # Platonov et al. have 2,223 nodes with 46,998 edges
    ("squirrel-filtered", "geom-gcn", (2204, 46809, 2089, 5, 1, 1044, 712, 448)),
]


def counted(data: Any) -> tuple[int, ...]:
    found = node_statistics(data).figures | {"classes": int(data.num_classes)}
    return tuple(found[key] for key in COUNTS)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("name", "split", "counts"), REAL)
def test_real_sets(name, split, counts, data_root, shared_cache, monkeypatch):
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(shared_cache))
    data = load_data(DataConfig(name=name, split=split, root=str(data_root)), download=False)
    assert counted(data) == counts
    assert data.is_undirected() and data.is_coalesced() and not data.has_self_loops()
    sums = data.x.sum(1)
    assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all()


CSBM: dict[str, Any] = {"name": "csbm", "nodes": 300, "classes": 3, "num_features": 64}
CSBM |= {"active": 4, "degree": 5.0, "split": "random", "features": "as-is"}


def test_random_splits_and_generated_graphs_are_of_the_split_seed():
    def masks(seed=0, **how):
        graph = load_graph(DataConfig(split="random", **how), seed=seed)
        return [getattr(graph, part).nonzero().flatten().tolist() for part in PARTS]

    assert masks() == masks(1)
    assert masks()[0] != masks(split_seed=1)[0]
    assert masks(1, split_seed=None) == masks(split_seed=1)
    assert [*map(len, masks(ratios=[0.6, 0.2, 0.2]))] == [1625, 541, 542]
    for seed, options in ((0, {"split_seed": 4}), (4, {"split_seed": None})):
        config = DataConfig(**CSBM, **options, signal=0.5, num_val=30, num_test=60)
        graph = load_graph(config, seed=seed)
        assert counted(graph)[-3:] == (60, 30, 60)
        how = {"features": 64, "active": 4, "homophily": 0.8, "signal": 0.5, "seed": 4}
        expected = csbm(300, 3, degree=5.0, **how)
        assert torch.equal(graph.edge_index, expected.edge_index)
        assert torch.equal(graph.x, expected.x)


def test_noise_on_features_is_of_the_datas_seed():
    def graph(seed=0, **changes):
        return load_graph(DataConfig(ratios=[0.6, 0.2, 0.2], **CSBM, **changes), seed=seed)

    plain, noisy = graph(), graph(feature_noise=0.25)
    assert torch.equal(noisy.edge_index, plain.edge_index)
    assert torch.equal(noisy.train_mask, plain.train_mask)
    kept = float((noisy.x * plain.x).sum() / plain.x.sum())
    assert 0.7 < kept < 0.82 and "25% of the features moved (data.feature_noise)" in noisy.notes
    assert torch.equal(graph(1, feature_noise=0.25).x, noisy.x)
    assert not torch.equal(graph(1, feature_noise=0.25, split_seed=None).x, noisy.x)


@pytest.mark.parametrize("sparse", [False, True])
def test_features_move_to_others(sparse):
    x = torch.tensor([[2.0, 0, 0], [0, 3, 0], [0, 0, 0]])

    def moved(chance, seed=0, given=x):
        rng = torch.Generator().manual_seed(seed)
        found = move_features(given.to_sparse_csr() if sparse else given, chance, rng)
        assert found.layout == (torch.sparse_csr if sparse else torch.strided)
        return found.to_dense()

    assert torch.equal(moved(0.0), x)
    places = {tuple(moved(1.0, seed).nonzero()[:, 1].tolist()) for seed in range(40)}
    assert places == {(1, 0), (1, 2), (2, 0), (2, 2)}  # never where it was
    # Of two features, two entries change places, and none is lost
    assert torch.equal(moved(1.0, given=torch.tensor([[2.0, 5.0]])), torch.tensor([[5.0, 2.0]]))
    with pytest.raises(DataError, match=r"data\.feature_noise = 0\.5"):
        moved(0.5, given=torch.ones(2, 1))


def test_what_is_said_of_a_small_set_without_a_split_works():
    config = DataConfig(name="KarateClub")
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            load_graph(config)
        assert "data.ratios=[0.6,0.2,0.2]" in str(caught.value)
        config.split = "random"  # alone, which classes of 4 to 13 nodes do not stand
    config.ratios = [0.6, 0.2, 0.2]
    assert counted(load_graph(config))[-3] == 20
    assert counted(load_graph(DataConfig())) == (2708, 5278, 1433, 7, 0, 140, 500, 1000)
    for name, split in (("cora-linqs", "geom-gcn"), ("WikiCS", "geom-gcn"), ("csbm", "public")):
        with pytest.raises(DataError, match="geom-gcn" if split == "geom-gcn" else name):
            load_data(DataConfig(name=name, split=split, nodes=100))


# The contextual stochastic block model ------------------------------------------------------------


def test_sizes_degree_and_homophily_are_as_asked_for_and_edges_are_simple():
    sizes: dict[str, Any] = {"degree": 6.0, "features": 64, "active": 8}
    graph = csbm(20_000, 4, **sizes, homophily=0.7, seed=3, sparse=True)
    assert torch.bincount(graph.y).tolist() == [5000] * 4
    assert graph.edge_index.size(1) / 20_000 == pytest.approx(6.0, rel=0.01)
    source, target = graph.edge_index
    assert (graph.y[source] == graph.y[target]).float().mean() == pytest.approx(0.7, abs=0.01)
    for homophily in (0.0, 1.0):
        # 7 nodes in 3 classes: unequal class sizes, where wrong offsets would show.
        graph = csbm(7, 3, degree=4.0, features=4, active=2, homophily=homophily)
        source, target = graph.edge_index
        assert source.numel() > 0
        assert (graph.y[source] == graph.y[target]).float().mean() == homophily
    pairs = csbm(30, 3, degree=20.0, features=4, active=2).edge_index.T.tolist()
    assert len({*map(tuple, pairs)}) == len(pairs)
    assert all([b, a] in pairs and a != b for a, b in pairs)


@pytest.mark.parametrize(("features", "active"), [(512, 32), (10, 3), (5, 1)])
def test_every_node_has_exactly_the_active_features(features, active):
    # More nodes than are drawn at a time.
    graph = csbm(70_000, 2, degree=1.0, features=features, active=active, sparse=True)
    rows = graph.x.col_indices().view(70_000, active)
    assert graph.x.shape == (70_000, features)
    assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < features
    assert torch.equal(graph.x.values(), torch.ones(70_000 * active))
    with pytest.raises(DataError, match="100 nodes"):
        csbm(100, 101, features=features, active=active)


def test_a_graph_too_large_to_be_dense_has_sparse_features_where_they_are_taken(monkeypatch):
    config = DataConfig(
        name="csbm", nodes=30, classes=3, num_features=20, active=4, features="as-is"
    )
    config.split, config.ratios = "random", [0.4, 0.3, 0.3]
    dense = load_graph(config)
    monkeypatch.setattr(data_graph, "DENSE_LIMIT", 4 * 30 * 20 - 1)
    sparse = load_graph(config, how=ReadOptions(sparse=True))
    assert sparse.x.layout == torch.sparse_csr
    assert torch.equal(sparse.x.to_dense(), dense.x)
    assert torch.equal(sparse.edge_index, dense.edge_index)
    with pytest.raises(DataError, match=r"data\.features"):
        load_graph(replace(config, features="row"), how=ReadOptions(sparse=True))
    with pytest.raises(DataError):
        load_graph(config)  # a method that takes none
    with pytest.raises(DataError, match=r"data\.nodes"):
        survey_graph(sparse)


@pytest.mark.parametrize("sparse", [False, True])
def test_each_feature_has_one_bucket_and_one_sign(sparse):
    eye = torch.eye(200)
    hashed = sketched(eye.to_sparse_csr() if sparse else eye, 8, seed=3)
    assert (hashed.abs().sum(1) == 1).all() and (hashed != 0).any(0).all()
    assert {-1.0, 1.0} == set(hashed[hashed != 0].tolist())
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sketched(x, 8, seed=3), x @ hashed, atol=1e-6)
    assert not torch.equal(sketched(eye, 8, seed=4), hashed)
