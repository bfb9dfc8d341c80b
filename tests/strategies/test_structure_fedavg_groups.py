"""FedGLS's methods over odd clients: one kind alone, one client, no graph to be made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_structure import FEDGLS, METHODS
from structure_helpers import GRAPHLESS, run, settings_of, toy_clients
from torch import Tensor

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.errors import DataError
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)


def only(graphless: bool) -> list[ClientGraph]:
    return [graph for graph in toy_clients() if graph.is_graphless == graphless]


def test_fed_gnn_mlp_where_all_have_edges_is_fed_gnn() -> None:
    one = run("fed-gnn-mlp", graphs=only(False))
    other = run("fed-gnn", graphs=only(False))
    close(one.figures, other.figures)
    start = run("fed-gnn-mlp", graphs=only(False), rounds=1).arrays
    for name in ("encoder-first", "encoder-rest"):
        assert torch.equal(one.arrays[name], start[name])  # nobody's: they stay
    assert one.arrays["gnn-rest"].isfinite().all()


def test_fed_gnn_mlp_where_nobody_has_edges() -> None:
    one = run("fed-gnn-mlp", graphs=only(True), supernodes=3)
    two = run("fed-gnn-mlp", graphs=only(True), supernodes=1)
    close(one.figures, two.figures)
    assert one.reports[-1].loss < one.reports[0].loss
    assert torch.equal(one.arrays["gnn-rest"], two.arrays["gnn-rest"])


def test_fedproto_knows_no_prototype_of_a_class_that_nobody_has() -> None:
    outcome = run("fedproto", supernodes=3)
    assert (outcome.arrays["prototypes-share"] > 0).tolist() == [True, True, True, False]
    assert (outcome.arrays["prototypes"][3] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_one_client_alone(method: str) -> None:
    for graphs in (only(True)[:1], only(False)[:1]):
        outcome = run(method, graphs=graphs, supernodes=1)
        assert outcome.figures[:, 0].isfinite().all()
        assert [report.rejected for report in outcome.reports] == [[], [], []]


# Clients that no graph can be made for -----------------------------------------------------------


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_too_many_neighbours(method: str) -> None:
    own = settings_of(method)
    many = own._replace(learner=own.learner._replace(neighbours=7))
    with pytest.raises(
        DataError, match=r"client 21 has 7 nodes: 7 neighbours each need at least 8"
    ):
        StructureCohort(toy_clients(), many)
    fits = many._replace(learner=own.learner._replace(neighbours=6))
    assert run(method, settings=fits, rounds=2).figures[:, 0].isfinite().all()


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "inner"])
def test_constant_features_make_some_graph(similarity: str) -> None:
    own = settings_of(FEDGLS)
    own = own._replace(learner=own.learner._replace(similarity=similarity))
    graphs = [replace(g, x=torch.ones_like(g.x.to_dense())) for g in toy_clients()]
    outcome = run(graphs=graphs, settings=own)
    assert outcome.figures[:, 0].isfinite().all()
    assert all(part.isfinite().all() for parts in outcome.learners.values() for part in parts)
    assert [report.rejected for report in outcome.reports] == [[], [], []]


def test_features_that_are_all_zero() -> None:
    graphs = [
        replace(g, x=torch.zeros_like(g.x.to_dense())) if g.client in GRAPHLESS[:2] else g
        for g in toy_clients()
    ]
    outcome = run(graphs=graphs)
    assert outcome.figures[:, 0].isfinite().all()
    assert [report.rejected for report in outcome.reports] == [[], [], []]
