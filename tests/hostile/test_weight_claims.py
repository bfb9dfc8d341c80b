"""A SuperNode that claims a weight with which the mean would be its own model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from attacked_runs import Attacked, Method
from ego_helpers import SETTINGS, toy_egos
from flwr.app import Context, RecordDict
from mutations import Mutation
from plain_structure import FEDGLS as NAME
from structure_helpers import client_app, settings_of, toy_clients

from flower_graph.client.adaptor import make_client_app
from flower_graph.strategies.fedgls.strategy import StructureFedAvg
from flower_graph.strategies.fedscem.baselines import EgoFedAvg, EgoModelClient

HUGE = 10**12
GRAPHS = toy_clients()[:3]
NODES = [int(graph.x.shape[0]) for graph in GRAPHS]


def claim(record: str, weight: int) -> Mutation:
    def apply(content: RecordDict) -> None:
        content[record]["num-examples"] = weight  # type: ignore[index]

    return Mutation(record, "a claim", apply)


def fedavg() -> tuple[Any, Any]:
    egos = toy_egos()

    def client_fn(context: Context) -> EgoModelClient:
        place = int(context.node_config["partition-id"])
        return EgoModelClient(context, egos[2 * place : 2 * place + 2])

    return make_client_app(client_fn), EgoFedAvg(SETTINGS)


def fedgls(**more: Any) -> tuple[Any, Any]:
    return client_app(NAME, GRAPHS), StructureFedAvg(settings_of(NAME), **more)


FEDAVG, FEDGLS = Method("FedAvg", fedavg, 3), Method("FedGLS", fedgls, 3)


def reasons(outcome: Attacked) -> dict[int, list[str]]:
    assert outcome.error is None
    assert outcome.grid.failed == []
    return outcome.named


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_the_roll_call_makes_no_client_of_fedavg_heavier(kind: str) -> None:
    # Each client weighs one, so what the SuperNode says of it does not count.
    plan = {("query", 1): claim("config", HUGE), (kind, 2): claim("metrics", HUGE)}
    outcome = FEDAVG.run(plan, 3)
    assert reasons(outcome)[2][0].endswith(f"num-examples is {HUGE}, its SuperNode has 2")


def test_nobody_has_more_nodes_than_there_are() -> None:
    plan = {("query", 1): claim("config", HUGE), ("train", 2): claim("metrics", sum(NODES) + 1)}
    outcome = Method("FedGLS", partial(fedgls, num_nodes=sum(NODES)), 3).run(plan, 3)
    (why,) = reasons(outcome)[2]
    assert why == f"num-examples is {sum(NODES) + 1}, its SuperNode has {sum(NODES)}"
    assert any(f"says that it has {HUGE} of" in line for line in outcome.log)


def test_without_such_a_bound_a_lie_from_the_start_is_taken_and_named() -> None:
    plan = {("query", 1): claim("config", HUGE)}
    plan |= {("train", number): claim("metrics", HUGE) for number in (1, 2, 3)}
    outcome = FEDGLS.run(plan, 3)
    assert reasons(outcome) == {}
    assert any(f"says that it has {HUGE} of" in line for line in outcome.log)
    clean = FEDGLS.run({}, 3)  # the documented limit: the mean is this SuperNode's model
    moved = [np.abs(w - clean.weights[name]).max() for name, w in outcome.weights.items()]
    assert max(moved) > 1e-4
