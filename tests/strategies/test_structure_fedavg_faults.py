"""FedGLS when something goes wrong: who is left out, what the others get, who recovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from plain_structure import FEDGLS, METHODS, PlainFederation
from structure_helpers import assert_as_plain, client_app, cohort_of, run, settings_of, toy_clients

NOT_FINITE = "weights are not finite"
Mod = Callable[[Message, Context, Callable[..., Message]], Message]


def poisoned(clients: Sequence[int], number: int = 2) -> Mod:
    """Make a mod that spoils what Adam keeps of clients: the next step makes their weights NaN."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if is_train(message, number):
            cohort = cohort_of(context)
            gone = [place for place, one in enumerate(cohort.batch.clients) if one in clients]
            cohort.tensors()["exp-avg.rest"][gone] = torch.nan
        return call_next(message, context)

    return mod


def is_train(message: Message, number: int) -> bool:
    kind = message.metadata.message_type
    return kind == "train" and message.content["config"]["server-round"] == number


@lru_cache
def plain(method: str, *bad: int) -> PlainFederation:
    """One client at a time: in round 2 some have no part in the mean, and begin anew."""
    federation = PlainFederation(toy_clients(), method, settings_of(method))
    for number in (1, 2, 3):
        federation.train(number)
        left_out = bad if number == 2 else ()
        for client in federation.clients:
            if client.graph.client in left_out:
                restart(client, federation)
        federation.average(left_out)
    return federation


def restart(client: Any, federation: PlainFederation) -> None:
    """Begin anew, from the models that all began with where there are no shared ones."""
    fresh = PlainFederation([client.graph], federation.method, client.settings)
    for net, new in zip(client.nets, fresh.clients[0].nets, strict=True):
        net.load(new.start)
        net.new_optimiser()


@pytest.mark.parametrize(
    ("method", "supernodes"), [(FEDGLS, 6), *((method, 2) for method in METHODS)]
)
def test_a_client_that_diverges_is_named_and_recovers(method: str, supernodes: int) -> None:
    app = client_app(method, mods=[poisoned([22])])
    outcome = run(method, app=app, supernodes=supernodes)
    ((place, why),) = outcome.reasons(2)
    assert place == 2 % supernodes
    assert f"22: {NOT_FINITE}" in why or f"clients [22]: {NOT_FINITE}" in why
    assert outcome.reasons(1) == outcome.reasons(3) == []
    assert_as_plain(outcome, plain(method, 22))
    assert outcome.figures[:, [0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("supernodes", [1, 6])
def test_a_round_in_which_everybody_diverges(supernodes: int) -> None:
    everyone = range(20, 26)
    outcome = run(app=client_app(FEDGLS, mods=[poisoned(everyone)]), supernodes=supernodes)
    assert len(outcome.reasons(2)) == supernodes
    assert all(f"{NOT_FINITE}; nobody is left" in why for _, why in outcome.reasons(2))
    assert outcome.reports[1].skipped.startswith("none of ")
    assert outcome.reports[1].loss == pytest.approx(outcome.reports[0].loss, abs=0.1)
    assert outcome.reasons(3) == []
    assert_as_plain(outcome, plain(FEDGLS, *everyone))


@pytest.mark.parametrize("spoilt", ["weight", "exp-avg"])
def test_a_graph_learner_that_diverges_begins_anew(spoilt: str) -> None:
    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        cohort = cohort_of(context) if is_train(message, 2) else None
        if cohort is not None and 21 in cohort.clients:
            assert cohort.learners is not None
            rows = slice(*cohort.learners._own.row_ptr[:2])
            cohort.tensors()[f"learner.{spoilt}.first"][rows] = torch.nan
        return call_next(message, context)

    two, three = (
        run(app=client_app(FEDGLS, mods=[mod]), rounds=rounds, supernodes=2) for rounds in (2, 3)
    )
    assert all((part[part != 0] == 1).all() for part in two.learners[21])
    assert any((part[part != 0] != 1).any() for part in two.learners[23])
    assert all(part.isfinite().all() for part in three.learners[21])
    assert any((part[part != 0] != 1).any() for part in three.learners[21])
    assert three.reasons(3) == []
    assert three.figures[:, [0, 2, 3, 4]].isfinite().all()
    models = three.weights.values()
    assert all(m.first.isfinite().all() and m.rest.isfinite().all() for m in models)
