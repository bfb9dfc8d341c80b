"""PPFL-GNN's engine, messages and server against the plain reference."""

from typing import Any

import numpy as np
from federation import ALL
from ppfl import Member, PlainGAT, pairs, summed
from public_helpers import run, run_secure, toy_members

from flower_graph.method.registry import method_of
from flower_graph.strategies.ppfl.algorithm import first_points
from flower_graph.strategies.ppfl.method import make_member
from flower_graph.strategies.ppfl.strategy import ProcrustesAlignment

STEPS = ["rounds=4", "gat.epochs=5", "gat.dropout=0", "gat.heads=2", "judge.every=9"]


def plain_gats(graphs: Any, config: Any, classes: int) -> dict[int, Member]:
    """Make plain clients with the engine's first weights."""
    members = {}
    for graph in graphs:
        own = make_member(graph, config, classes)
        engine: Any = own.build()
        model = PlainGAT(graph, config.model.dimension, classes, config.gat)
        model.take_over(engine.alone(graph.client).module.state_dict())
        members[graph.client] = Member(model, own.nodes, own.rows)
    return members


def test_twenty_steps_of_four_gats() -> None:
    config: Any = ALL["gat"].load(*STEPS)
    method: Any = method_of(config)
    graphs, classes = method.graphs(config), method.whole(config).classes
    members = [make_member(graph, config, classes) for graph in graphs]
    outcome = run(members, rounds=4, supernodes=2, strategy=ProcrustesAlignment())
    plain = plain_gats(graphs, config, classes)
    for client, wanted in pairs(plain, 4).items():
        np.testing.assert_allclose(outcome.weights[f"means-{client}"], wanted, atol=1e-5)
        kept = outcome.strategy.clients.embeddings[client]
        own = plain[client].model.embed()[plain[client].rows]
        np.testing.assert_allclose(kept, own, atol=1e-5)
    assert len(plain) == 4


def toys() -> dict[int, Member]:
    return {one.number: Member(one.build(), one.nodes, one.rows) for one in toy_members()}


def test_rounds_as_written_in_the_paper() -> None:
    """Client 0 lacks one of the public nodes."""
    outcome = run(toy_members(), rounds=3, supernodes=2)
    for client, wanted in pairs(toys(), 3).items():
        assert np.allclose(outcome.weights[f"means-{client}"], wanted, atol=1e-5)
    assert outcome.weights["nodes-3"].tolist() == [10, 11, 12]


def test_the_mean_is_that_of_the_same_steps_in_the_clear() -> None:
    # Client 0 lacks node 12, which three hold: enough, since one may be missing.
    nodes, step = [10, 11, 12], 2.0**-16
    outcome = run_secure(toy_members(), rounds=5)
    assert outcome.weights["nodes"].tolist() == nodes
    wanted = summed(toys(), nodes, first_points(0, 3, 3), 5, {}).mean
    # Steps of the ring add up over the iterations.
    assert np.allclose(outcome.weights["mean"], wanted, atol=100 * step)
    assert [(one.answered, one.skipped) for one in outcome.reports] == [(4, "")] * 5
    once = run_secure(toy_members(), rounds=1).weights["mean"]
    # Each of up to four numbers is rounded by half a step; the mean is a float32 afterwards.
    wanted = summed(toys(), nodes, first_points(0, 3, 3), 1, {}).mean
    assert np.abs(once - wanted).max() <= step / 2 + 1e-6
