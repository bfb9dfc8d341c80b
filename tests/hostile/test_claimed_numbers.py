"""One SuperNode claims the client numbers of all: neither ids nor order decide whose they are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import structure_helpers
from ego_helpers import SETTINGS, toy_egos
from federation import METHODS, VARIANTS, Federation, Setup, tried
from flwr.app import Context, RecordDict
from hostile_grid import Attacked, Method
from mutations import Mutation, invented
from plain_structure import FEDGLS as NAME
from structure_helpers import settings_of, toy_clients

from flower_graph.apps.run import client_app
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.data.folders.members import Member
from flower_graph.data.folders.party import assigned
from flower_graph.errors import MembershipError
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.server.membership import Admission
from flower_graph.strategies.fedgls.strategy import StructureFedAvg
from flower_graph.strategies.fedscem.baselines import EgoFedAvg, EgoModelClient

# Where there is a registry, it says who may speak for whom
EACH = METHODS | {name: one for name, one in VARIANTS.items() if "untrusted" not in name}
EVERY = tried(EACH)


class Hosted:
    """A federation with one SuperNode that claims all numbers, the lowest id's or another."""

    def __init__(self, setup: Setup, is_lowest: bool = True) -> None:
        config, self.reports = setup.load(), list[RoundReport]()
        app, method = client_app(config, None), method_of(config)
        self.grid = Federation(app, num_supernodes=setup.supernodes, faults=self._fault)
        self.ids = list(self.grid.contexts)
        self.strategy, self.count = method.build_strategy(config, None), method.num_clients(config)
        places = range(len(self.ids))
        self.clients = [[*assigned(k, len(self.ids), self.count)] for k in places]
        self.claimant = min(self.ids) if is_lowest else max(self.ids)

    def _fault(self, partition: int, server_round: int, kind: str) -> Any:
        is_claim = kind == "query" and self.ids[partition] == self.claimant
        return invented("all", self.count, 0, instead=True).apply if is_claim else "good"

    def start(self, members: Iterable[Member] | None = None) -> None:
        """Run two rounds, with a list of members or without."""
        self.strategy.session.admission = Admission(members)
        try:
            self.strategy.start(self.grid, num_rounds=2, timeout=5, on_round=self.reports.append)
        finally:
            forget_run(self.grid.run.run_id)


@pytest.mark.parametrize("is_lowest", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_a_double_stops_the_run_and_both_are_named(name: str, is_lowest: bool) -> None:
    run = Hosted(EACH[name], is_lowest)
    with pytest.raises(MembershipError) as error:
        run.start()
    said = str(error.value)
    assert str(run.claimant) in said
    assert any(str(node) in said for node in run.ids if node != run.claimant)
    assert "members.csv" in said and "registry" in said
    assert run.reports == []


@pytest.mark.parametrize("name", EVERY)
def test_by_the_list_the_right_ones_are_taken_and_the_claimant_is_named(name: str) -> None:
    run = Hosted(EACH[name])
    expected = dict(zip(run.ids, run.clients, strict=True))
    run.start([Member(f"{node}", frozenset(own), node) for node, own in expected.items()])
    del expected[run.claimant]
    assert run.strategy.session.members.clients == expected
    for report in run.reports:
        assert run.claimant in {entry.get("node") for entry in report.rejected}


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
    return structure_helpers.client_app(NAME, GRAPHS), StructureFedAvg(settings_of(NAME), **more)


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
