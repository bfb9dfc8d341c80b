"""The contextual stochastic block model: sizes, structure, determinism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.sparse import csr_matrix

from flower_graph.config.common import DataConfig
from flower_graph.data import csbm, csbm_sparse
from flower_graph.data import graph as data_graph
from flower_graph.data.features import sketched
from flower_graph.data.gaps import Uses
from flower_graph.data.sources.datasets import load_graph
from flower_graph.data.survey import survey_graph
from flower_graph.errors import DataError
from flower_graph.ops import logistic_regression


def test_sizes_degree_and_homophily_are_as_asked_for():
    graph = csbm_sparse(20_000, 4, degree=6.0, features=64, active=8, homophily=0.7, seed=3)
    assert torch.bincount(graph.y).tolist() == [5000] * 4
    assert graph.edge_index.size(1) / 20_000 == pytest.approx(6.0, rel=0.01)
    source, target = graph.edge_index
    assert (graph.y[source] == graph.y[target]).float().mean() == pytest.approx(0.7, abs=0.01)


def test_extremes_of_homophily_hold_exactly_and_edges_are_simple():
    for homophily in (0.0, 1.0):
        # 7 nodes in 3 classes: unequal class sizes, where wrong offsets would show.
        graph = csbm_sparse(7, 3, degree=4.0, features=4, active=2, homophily=homophily)
        source, target = graph.edge_index
        assert source.numel() > 0
        assert (graph.y[source] == graph.y[target]).float().mean() == homophily
    edges = csbm_sparse(30, 3, degree=20.0, features=4, active=2).edge_index
    pairs = {*zip(*edges.tolist(), strict=True)}
    assert len(pairs) == edges.size(1)
    assert all((b, a) in pairs and a != b for a, b in pairs)


@pytest.mark.parametrize(("features", "active"), [(512, 32), (10, 3), (7, 7), (5, 1)])
def test_every_node_has_exactly_the_active_features(features, active):
    # More nodes than are drawn at a time.
    graph = csbm_sparse(70_000, 2, degree=1.0, features=features, active=active)
    rows = graph.x.col_indices().view(70_000, active)
    assert graph.x.shape == (70_000, features)
    assert graph.x.crow_indices().tolist() == [active * row for row in range(70_001)]
    assert (rows.diff(dim=1) > 0).all()  # ascending, so distinct
    assert rows.min() >= 0
    assert rows.max() < features
    assert torch.equal(graph.x.values(), torch.ones(70_000 * active))
    assert (rows.dtype, graph.x.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(
    ("signal", "least", "most"), [(0.0, 0.2, 0.3), (0.1, 0.45, 0.75), (0.5, 0.99, 1), (1.0, 1, 1)]
)
def test_features_tell_as_much_as_asked_for(signal, least, most):
    # Four classes, so chance is 0.25; of 2000 other nodes its deviation is 0.01.
    graph = csbm(3000, 4, degree=2.0, features=128, active=16, signal=signal, seed=5)
    train, test = slice(1000), slice(1000, None)
    weights = logistic_regression.fit(graph.x[train], graph.y[train], 4, strength=0.1)
    found = logistic_regression.scores(graph.x[test], weights).argmax(1)
    assert least <= (found == graph.y[test]).float().mean() <= most


def test_the_signal_changes_features_alone_the_seed_all_and_the_form_nothing():
    before = torch.get_rng_state()
    usual, said, none = csbm(90, 3), csbm(90, 3, signal=0.1), csbm(90, 3, signal=0.0)
    assert torch.equal(usual.x, said.x) and not torch.equal(usual.x, none.x)
    assert torch.equal(usual.edge_index, none.edge_index) and torch.equal(usual.y, none.y)
    same = csbm(90, 3, signal=1.0)
    assert (same.x == same.x[[(same.y == y).nonzero()[0, 0] for y in same.y]]).all()
    other, sparse = csbm(90, 3, seed=1), csbm_sparse(90, 3)
    assert torch.equal(before, torch.get_rng_state())
    for name in ("x", "edge_index", "y"):
        assert not torch.equal(getattr(usual, name), getattr(other, name))
    x = sparse.x
    parts = (part.numpy() for part in (x.values(), x.col_indices(), x.crow_indices()))
    dense = torch.from_numpy(csr_matrix(tuple(parts), shape=tuple(x.shape)).toarray())
    assert torch.equal(dense, usual.x) and usual.train_mask is None
    assert torch.equal(sparse.edge_index, usual.edge_index) and torch.equal(sparse.y, usual.y)


def test_impossible_numbers_are_refused():
    for changes, message in (
        ({"classes": 1}, "data.classes = 1.*data.nodes"),
        ({"degree": -1.0}, "data.degree = -1.0"),
        ({"degree": float("nan")}, "data.degree = nan"),
        ({"active": 9, "features": 8}, "data.active = 9.*data.num_features"),
        ({"homophily": 1.5}, "data.homophily = 1.5"),
        ({"signal": -0.1}, "data.signal = -0.1"),
    ):
        with pytest.raises(DataError, match=message):
            csbm_sparse(**{"nodes": 100, "classes": 2, **changes})
    with pytest.raises(DataError, match=r"2\.0.*csbm_sparse"):
        csbm(1_000_000, 7, features=512)


def test_a_graph_too_large_to_be_dense_has_sparse_features_where_they_are_taken(monkeypatch):
    config = DataConfig(
        name="csbm", nodes=30, classes=3, num_features=20, active=4, features="as-is"
    )
    config.split, config.ratios = "random", [0.4, 0.3, 0.3]
    dense = load_graph(config)
    monkeypatch.setattr(data_graph, "DENSE_LIMIT", 4 * 30 * 20 - 1)
    sparse = load_graph(config, uses=Uses(sparse=True))
    assert sparse.x.layout == torch.sparse_csr
    assert torch.equal(sparse.x.to_dense(), dense.x)
    assert torch.equal(sparse.edge_index, dense.edge_index)
    for rows in (slice(0, 30), slice(7, 19), slice(5, 5)):
        assert torch.equal(data_graph.row_range(sparse.x, rows).to_dense(), dense.x[rows])
        assert torch.equal(data_graph.row_range(dense.x, rows), dense.x[rows])
    with pytest.raises(DataError, match=r"data\.features"):
        load_graph(replace(config, features="row"), uses=Uses(sparse=True))
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
