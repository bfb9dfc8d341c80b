"""From a name and a config to a checked graph: real sets, splits, generated graphs, own files."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.data import Graph, csbm, describe, load_data, load_graph
from flower_graph.data.cora_linqs import load_cora_linqs, read_packed
from flower_graph.data.features import move_features
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.names import file_path, folder_path, known_names, pyg_name
from flower_graph.errors import DataError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pubmed", ("Planetoid", "PubMed")),
        ("planetoid/citeseer", ("Planetoid", "CiteSeer")),
        ("Squirrel", ("WikipediaNetwork", "squirrel")),
        ("chameleon-filtered", ("WikipediaNetwork", "chameleon-filtered")),
        ("wikics", ("WikiCS", None)),
        ("CitationFull/cora_ml", ("CitationFull", "Cora_ML")),
        # Not in any table of ours: PyG's own list of classes.
        ("heterophilousgraphdataset/Minesweeper", ("HeterophilousGraphDataset", "Minesweeper")),
        ("Reddit2", ("Reddit2", None)),
        ("Corra", "'Cora'"),
        ("cora-linq", "'cora-linqs'"),
        ("Amazon/Foto", "'Amazon/Photo'"),
        ("Redit", "'Reddit'"),
        ("", "Known: cora-linqs"),
        ("qqqqqqqq", "Known: cora-linqs"),
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
    assert len(set(names)) == len(names)
    assert all(pyg_name(name) for name in names[2:] if not name.startswith("ogbn"))
    monkeypatch.chdir(tmp_path)
    for folder in ("Coauthor/CS", "graphs", "clients", "Planetoid/Cora/raw", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("graphs/mine", "Cora", "clients/a.pt"):
        (tmp_path / file).touch()
    for name, is_file, is_folder in (
        ("graphs/mine", True, False),
        ("absent.pt", True, False),
        ("graphs/absent", False, False),
        ("Coauthor/CS", False, False),  # a folder is no saved graph
        ("Cora", False, False),  # no separator: the data set
        ("clients", False, True),
        ("clients/", False, True),
        (str(tmp_path / "clients"), False, True),
        ("clients/a.pt", True, False),
        ("absent/", False, True),
        ("absent", False, False),
        ("Planetoid/Cora", False, False),  # raw data that has the name of a data set
        ("empty", False, False),
    ):
        assert file_path(name) == (Path(name) if is_file else None), name
        assert folder_path(name) == (Path(name) if is_folder else None), name
    with pytest.raises(DataError, match=r"'absent\.pt'"):
        load_data(DataConfig(name="absent.pt"))


# Graphs -----------------------------------------------------------------------------------------


COUNTS = ("nodes", "edges", "features", "classes", "isolated", "train", "val", "test")
REAL = [
    ("Cora", "public", (2708, 5278, 1433, 7, 0, 140, 500, 1000)),
    ("Cora", "geom-gcn", (2708, 5278, 1433, 7, 0, 1192, 796, 497)),
    ("CiteSeer", "public", (3327, 4552, 3703, 6, 48, 120, 500, 1000)),
    ("CiteSeer", "geom-gcn", (3327, 4552, 3703, 6, 48, 1596, 1065, 666)),
    ("PubMed", "public", (19717, 44324, 500, 3, 0, 60, 500, 1000)),
    ("PubMed", "geom-gcn", (19717, 44324, 500, 3, 0, 9463, 6310, 3944)),
    ("chameleon", "geom-gcn", (2277, 31371, 2325, 5, 0, 1092, 729, 456)),
    ("squirrel", "geom-gcn", (5201, 198353, 2089, 5, 0, 2496, 1664, 1041)),
    # Platonov et al. have 890 nodes with 8,854 edges and 2,223 with 46,998
    ("chameleon-filtered", "geom-gcn", (843, 8259, 2325, 5, 0, 386, 271, 186)),
    ("squirrel-filtered", "geom-gcn", (2204, 46809, 2089, 5, 1, 1044, 712, 448)),
]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("name", "split", "counts"), REAL)
def test_real_sets(name, split, counts, data_root, shared_cache, monkeypatch):
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(shared_cache))
    data = load_data(DataConfig(name=name, split=split, root=str(data_root)), download=False)
    if (name, split) == ("CiteSeer", "geom-gcn"):  # some of whose folds leave nodes out
        fold = load_data(DataConfig(name=name, split=split, root=str(data_root)), seed=14)
        file = data_root / "geom-gcn-splits" / "citeseer_split_0.6_0.2_4.npz"
        with np.load(file, allow_pickle=False) as masks:
            assert torch.equal(fold.val_mask, torch.from_numpy(masks["val_mask"].astype(bool)))
        assert int((~(fold.train_mask | fold.val_mask | fold.test_mask)).sum()) == 1207
    assert isinstance(data, Data)
    assert describe(data) == dict(zip(COUNTS, counts, strict=True))
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert data.is_coalesced()
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
        for signal in (0.1, 0.5):
            config = DataConfig(**CSBM, **options, signal=signal, num_val=30, num_test=60)
            graph = load_graph(config, seed=seed)
            assert [describe(graph)[part] for part in ("train", "val", "test")] == [60, 30, 60]
            how = {"features": 64, "active": 4, "homophily": 0.8, "signal": signal, "seed": 4}
            expected = csbm(300, 3, degree=5.0, **how)
            assert torch.equal(graph.edge_index, expected.edge_index)
            assert torch.equal(graph.x, expected.x)


def test_noise_on_features_is_of_the_datas_seed():
    def graph(seed=0, **changes):
        return load_graph(DataConfig(ratios=[0.6, 0.2, 0.2], **CSBM, **changes), seed=seed)

    plain, noisy = graph(), graph(feature_noise=0.25)
    assert torch.equal(noisy.edge_index, plain.edge_index) and torch.equal(noisy.y, plain.y)
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
    assert torch.equal(moved(1.0).sum(1), x.sum(1)) and torch.equal(moved(1.0), moved(1.0))
    # Of two features, two entries change places, and none is lost
    assert torch.equal(moved(1.0, given=torch.tensor([[2.0, 5.0]])), torch.tensor([[5.0, 2.0]]))
    many = torch.ones(100, 1).repeat(1, 50) * (torch.arange(200) < 1)[:50]
    assert 0.6 < float(moved(0.3, given=many)[:, 0].mean()) < 0.8
    met = moved(0.5, given=torch.ones(200, 2))  # both stay, both move, or one is lost
    assert 0.4 < float((met.sum(1) == 1).float().mean()) < 0.6
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
    assert describe(load_graph(config))["train"] == 20
    for name, split, words in (
        *((name, "geom-gcn", "") for name in ("cora-linqs", "csbm", "WikiCS", "CitationFull/Cora")),
        ("csbm", "public", r".*data\.split=random"),
    ):
        with pytest.raises(DataError, match=f"'{name}'{words}"):
            load_data(DataConfig(name=name, split=split, nodes=100))


# The bundled Cora ---------------------------------------------------------------------------------


def test_sizes_split_words_and_the_copy_for_app_bundles(tmp_path):
    found = describe(load_graph(DataConfig()))
    assert found == dict(zip(COUNTS, (2708, 5278, 1433, 7, 0, 140, 500, 1000), strict=True))
    graph = load_cora_linqs()
    assert graph.train_mask is not None
    assert torch.bincount(graph.y[graph.train_mask]).tolist() == [20] * 7
    assert graph.x.unique().tolist() == [0.0, 1.0] and graph.x.sum() == 49_216
    folder = resources.files("flower_graph.data.cora_linqs")
    (tmp_path / "cora.npz.json").write_bytes(folder.joinpath("cora.npz.json").read_bytes())
    assert read_packed(tmp_path) == folder.joinpath("cora.npz").read_bytes()


def invariants(graph: Graph) -> Counter[tuple[object, ...]]:
    """Describe each node by what does not depend on the order of nodes, words or classes."""
    degree = torch.bincount(graph.edge_index[0], minlength=graph.x.size(0))
    words = graph.x.count_nonzero(dim=1)
    class_size = torch.bincount(graph.y)[graph.y]
    own = list(zip(degree.tolist(), words.tolist(), class_size.tolist(), strict=True))
    neighbours: list[list[tuple[int, ...]]] = [[] for _ in own]
    for source, target in graph.edge_index.t().tolist():
        neighbours[source].append(own[target])
    return Counter(
        (node, tuple(sorted(around))) for node, around in zip(own, neighbours, strict=True)
    )


def test_it_is_the_graph_of_planetoid(data_root, cache):
    options = {"root": str(data_root), "features": "as-is"}
    planetoid = load_data(DataConfig(name="Cora", **options))
    linqs = load_graph(DataConfig(features="as-is"))
    assert invariants(planetoid) == invariants(linqs)
    # Nodes with each word, and words that pairs of words share, whatever the words' order.
    assert sorted(planetoid.x.sum(0).tolist()) == sorted(linqs.x.sum(0).tolist())
