"""FedGLS and its baselines in process: against plain clients, however they are assigned."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_structure import FEDGLS, METHODS, PlainFederation
from structure_helpers import (
    MODEL_KEYS,
    Outcome,
    client_app,
    run,
    settings_of,
    toy_clients,
)
from torch import Tensor

ROUNDS = 3


def close(one: Tensor, other: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)


@lru_cache
def plain(method: str) -> PlainFederation:
    """What the method gives after some rounds, one client at a time."""
    federation = PlainFederation(toy_clients(), method, settings_of(method))
    for number in range(1, ROUNDS + 1):
        federation.round(number)
    return federation


def assert_as_plain(outcome: Outcome, federation: PlainFederation) -> None:
    """Compare the server's models, every client's own, and what the last report says."""
    sent = outcome.arrays
    if federation.shares_models:
        for (first, rest), model in zip(MODEL_KEYS, federation.models, strict=False):
            if first in sent:
                close(sent[first], model.first)
                close(sent[rest], model.rest)
    weights, judged = outcome.weights, []
    for client in federation.clients:
        has = (client.x != 0).any(0)
        for number, model in client.models().items():
            ours = weights[client.graph.client, number]
            close(ours.first[has], model.first[has])
            close(ours.rest, model.rest)
        accuracy, loss = client.judge()
        judged.append([loss, *accuracy])
    wanted = torch.tensor(judged).mean(0)
    last = outcome.reports[-1]
    ours = [last.loss, last.train_accuracy, last.val_accuracy, last.test_accuracy]
    close(torch.tensor(ours), wanted)
    assert (last.asked, last.answered, last.rejected) == (6, 6, [])


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=3, deadline=None)
@given(place=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_dealing_gives_what_plain_clients_give(method: str, place: list[int]) -> None:
    hosts = sorted(set(place))
    deal = [[client for client in range(6) if place[client] == host] for host in hosts]
    outcome = run(method, rounds=ROUNDS, supernodes=len(hosts), deal=deal)
    assert_as_plain(outcome, plain(method))


@pytest.mark.parametrize("method", METHODS)
def test_one_supernode_and_one_per_client_report_the_same(method: str) -> None:
    one, each = (run(method, rounds=2, supernodes=n) for n in (1, 6))
    close(one.figures, each.figures)
    assert one.figures[:, [0, 2, 3, 4]].isfinite().all()
    assert one.arrays.keys() == each.arrays.keys()
    for name in one.arrays:
        close(one.arrays[name], each.arrays[name])
    for client, parts in one.learners.items():
        for ours, theirs in zip(parts, each.learners[client], strict=True):
            close(ours, theirs)
    has_graphs = method == FEDGLS or method.endswith("-knn")
    assert all(bool(report.structure) == has_graphs for report in one.reports)
    assert one.figures[:, 1].isnan().any() == (method != FEDGLS)


def test_the_same_seed_gives_the_same_and_another_another() -> None:
    drops = {"dropout": 0.5, "input_dropout": 0.2}
    one, two, other = (
        run(rounds=2, settings=settings_of(FEDGLS, seed=seed, **drops)).figures
        for seed in (3, 3, 4)
    )
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)


def test_dropout_does_not_depend_on_the_dealing() -> None:
    drops = settings_of(FEDGLS, dropout=0.5, input_dropout=0.2)
    one, each = (run(rounds=2, supernodes=n, settings=drops) for n in (1, 6))
    close(one.figures, each.figures)
    assert not torch.allclose(one.figures, run(rounds=2).figures)


@pytest.mark.parametrize("supernodes", [1, 3, 6])
def test_bytes_are_those_of_each_clients_models(supernodes: int) -> None:
    outcome = run(rounds=2, supernodes=supernodes)
    size = outcome.strategy.arrays.count_bytes()
    numbers = sum(values.numel() for values in outcome.arrays.values())
    assert 4 * numbers <= size < 4 * numbers + 4 * 200  # a header for each array
    both = {"weights": 2 * 6 * size}
    assert outcome.strategy.payload == {"up": both, "down": both}


def test_local_training_sends_no_number_of_a_model() -> None:
    outcome = run("local-gnn-knn", rounds=2)
    assert outcome.arrays == {}
    assert sum(outcome.strategy.payload["up"].values()) == 0
    assert sum(outcome.strategy.payload["down"].values()) == 0


def test_half_of_the_supernodes_train() -> None:
    seen: set[tuple[str, int]] = set()

    def note(message: Message, context: Any, call_next: Any) -> Message:
        number = message.content["config"].get("server-round", 0)  # not in `query`
        seen.add((message.metadata.message_type, number, context.node_id))
        return call_next(message, context)

    app = client_app(FEDGLS, mods=[note])
    outcome = run(app=app, supernodes=6, rounds=2, participation=0.5)
    for number in (1, 2):
        trained = [entry for entry in seen if entry[:2] == ("train", number)]
        measured = [entry for entry in seen if entry[:2] == ("evaluate", number)]
        assert (len(trained), len(measured)) == (3, 6)
    assert [report.answered for report in outcome.reports] == [6, 6]


# Flower's mods -----------------------------------------------------------------------------------


def test_message_size_mod_changes_nothing() -> None:
    with_mod = run(app=client_app(FEDGLS, mods=[message_size_mod]))
    assert torch.equal(with_mod.figures, run().figures)


def test_local_dp_mod_clips_what_a_client_sends() -> None:
    sizes: list[float] = []

    def measure(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        (sent,), (got,) = ([*m.content.array_records.values()] for m in (message, reply))
        moved = [got[key].numpy() - sent[key].numpy() for key in got]
        sizes.append(float(sum((part**2).sum() for part in moved) ** 0.5))
        return reply

    local_dp = LocalDpMod(clipping_norm=0.01, sensitivity=0.01, epsilon=1e9, delta=1e-5)
    outcome = run(app=client_app(FEDGLS, train_mods=[measure, local_dp]))
    assert max(sizes) == pytest.approx(0.01, rel=1e-3)
    assert all(report.rejected == [] for report in outcome.reports)
