"""The common mean by secure sum: as in the clear, and nobody's own numbers in a message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from public_helpers import ToyModel, still_member, toy_members
from public_helpers import run as run_in_the_clear
from scipy.linalg import orthogonal_procrustes as reference

from flower_graph.client.adaptor import make_client_app
from flower_graph.report.rounds import RoundReport
from flower_graph.secure.ring import Ring
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.procrustes_alignment.cohort_client import (
    EmbeddingClient,
    FloatArray,
    IntArray,
)
from flower_graph.strategies.procrustes_alignment.rotated_sum import first_points
from flower_graph.strategies.procrustes_alignment.secure_consensus import (
    ACTIONS,
    LEARNT_FROM,
    SecureConsensus,
    SecureConsensusClient,
)
from flower_graph.strategies.procrustes_alignment.strategy import ProcrustesAlignment

NODES = [10, 11, 12]
STEP = 2.0**-16


class Outcome(NamedTuple):
    reports: list[RoundReport]
    weights: dict[str, Any]
    strategy: SecureConsensus
    grid: InProcessGrid


def make_grid(
    members: Sequence[EmbeddingClient],
    supernodes: int,
    mods: list[Mod] | None = None,
    node_config: dict[str, Any] | None = None,
) -> InProcessGrid:
    def client_fn(context: Context) -> SecureConsensusClient:
        part = int(context.node_config["partition-id"])
        here = members[part * len(members) // supernodes : (part + 1) * len(members) // supernodes]
        return SecureConsensusClient(context, here)

    app = make_client_app(client_fn, actions=ACTIONS, mods=mods)
    return InProcessGrid(app, num_supernodes=supernodes, node_config=node_config)


def run(
    members: Sequence[EmbeddingClient],
    *,
    rounds: int = 4,
    supernodes: int | None = None,
    strategy: SecureConsensus | None = None,
    **grid: Any,
) -> Outcome:
    made = make_grid(members, supernodes or len(members), **grid)
    strategy, reports = strategy or SecureConsensus(), list[RoundReport]()
    strategy.start(made, num_rounds=rounds, timeout=5.0, on_round=reports.append)
    return Outcome(reports, strategy.weights(), strategy, made)


class ByHand(NamedTuple):
    mean: np.ndarray
    own: list[dict[int, np.ndarray]]  # X_i of every round
    turned: list[dict[int, np.ndarray]]  # X_i W_i
    turns: list[dict[int, np.ndarray]]


def by_hand(members: Sequence[EmbeddingClient], rounds: int, absent: dict[int, set[int]]) -> ByHand:
    """The same steps in the clear; ``absent`` says who fails in which round."""
    models: dict[int, Any] = {member.number: member.build() for member in members}
    points, mean, made = first_points(0, len(NODES), 3), np.zeros((0, 0)), 0
    found = ByHand(mean, [], [], [])
    turns: dict[int, np.ndarray] = {}
    for number in range(1, rounds + 1):
        own, turned = {}, {}
        for member in members:
            client = member.number
            if client in absent.get(number, set()):
                continue
            at = np.searchsorted(NODES, member.public)
            taught = made >= LEARNT_FROM and client in turns
            target = (mean[at] @ turns[client].T).astype(np.float32) if taught else None
            models[client].learn(member.rows, target, number)
            own[client] = models[client].embed()[member.rows].astype(np.float64)
            turns[client] = reference(own[client], points[at])[0]
            turned[client] = own[client] @ turns[client]
        total, holders = np.zeros((len(NODES), 3)), np.zeros((len(NODES), 1))
        for member in members:
            if member.number in turned:
                at = np.searchsorted(NODES, member.public)
                total[at] += turned[member.number]
                holders[at] += 1
        mean, made = total / holders, made + 1
        points = mean
        found.own.append(own)
        found.turned.append(turned)
        found.turns.append(dict(turns))
    return found._replace(mean=mean)


def silent(numbers: set[int], rounds: set[int]) -> Mod:
    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        here = int(context.node_config["partition-id"]) in numbers
        if here and int(message.metadata.group_id) in rounds:
            raise RuntimeError("away")
        return call_next(message, context)

    return mod


@pytest.mark.parametrize("supernodes", [4, 1])
def test_the_mean_is_that_of_the_same_steps_in_the_clear(supernodes: int) -> None:
    # Client 0 lacks node 12, which three hold: enough, since one may be missing.
    outcome = run(toy_members(), rounds=5, supernodes=supernodes)
    assert outcome.weights["nodes"].tolist() == NODES
    wanted = by_hand(toy_members(), 5, {}).mean
    # Steps of the ring add up over the iterations.
    assert np.allclose(outcome.weights["mean"], wanted, atol=100 * STEP)
    assert [report.answered for report in outcome.reports] == [4] * 5
    assert [report.skipped for report in outcome.reports] == [""] * 5


def test_one_sum_of_the_same_embeddings_is_the_sum_to_the_step_of_the_ring() -> None:
    outcome = run(toy_members(), rounds=1)
    wanted = by_hand(toy_members(), 1, {}).mean
    # Each of up to four numbers is rounded by half a step; the mean is a float32 afterwards.
    assert np.abs(outcome.weights["mean"] - wanted).max() <= STEP / 2 + 1e-6


def test_it_comes_to_lie_as_the_consensus_in_the_clear() -> None:
    """Still points: after some iterations the mean is the plain form's, but for one turn of all."""
    chance = np.random.default_rng(1)
    points = chance.normal(size=(20, 3))
    members = []
    for number in range(4):
        seen = (points + 0.3 * chance.normal(size=points.shape)) @ np.linalg.qr(
            chance.normal(size=(3, 3))
        )[0]
        members.append(still_member(number, seen.tolist(), range(20)))
    found = run(members, rounds=12).weights["mean"]
    plain = run_in_the_clear(members, rounds=1, strategy=ProcrustesAlignment(alignment="consensus"))
    wanted = plain.weights["means-0"].astype(np.float64)
    turn = reference(found.astype(np.float64), wanted)[0]
    assert np.allclose(found @ turn, wanted, atol=1e-3)


# What is in messages -----------------------------------------------------------------------------


def all_bytes(content: RecordDict) -> bytes:
    """Lay everything that a message holds in one line."""
    parts: list[bytes] = []
    for record in content.values():
        for value in record.values():
            if isinstance(record, ArrayRecord):
                parts.append(value.numpy().tobytes())
            elif isinstance(value, bytes):
                parts.append(value)
            elif isinstance(value, list) and value and isinstance(value[0], float):
                parts.append(np.array(value).tobytes())
                parts.append(np.array(value, np.float32).tobytes())
            else:
                parts.append(repr(value).encode())
    return b"|".join(parts)


def secrets_of(steps: ByHand) -> list[bytes]:
    """Rows of all embeddings, turned or not, and of the rotations, in all forms they may have."""
    ring = Ring.fit(4, 32.0, STEP)
    found = []
    for round_ in (*steps.own, *steps.turned, *steps.turns):
        for rows in round_.values():
            for row in rows:
                found += [row.tobytes(), row.astype(np.float32).tobytes()]
                found.append(ring.encode(row).tobytes())
    return found


def hits(messages: Sequence[bytes], secrets: Sequence[bytes]) -> int:
    return sum(secret in message for secret in secrets for message in messages)


def watched(seen: list[bytes]) -> Mod:
    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(all_bytes(message.content))
        reply = call_next(message, context)
        seen.append(all_bytes(reply.content))
        return reply

    return mod


def test_nobodys_embedding_is_in_any_message() -> None:
    # Before means are learnt from, plain and secure runs embed the same, bit for bit.
    members, seen, plain = toy_members(), list[bytes](), list[bytes]()
    secrets = secrets_of(by_hand(members, 2, {}))
    run(members, rounds=2, mods=[watched(seen)])
    assert len(seen) > 4 * 2 * 3
    assert hits(seen, secrets) == 0
    # The same search finds them where they are sent.
    run_in_the_clear(members, rounds=1, mods=[watched(plain)])
    assert hits(plain, secrets) >= 4 * 2


def test_a_masked_vector_looks_like_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(400, 4)).tolist()
    sent: list[Any] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            sent.append(reply.content["arrays"]["masked-sum"].numpy())
        return reply

    run([still_member(i, rows, range(400)) for i in range(3)], rounds=1, mods=[watch])
    for words in sent:
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = words.nbytes / 256
        # Chi-square with 255 degrees of freedom: 400 is far beyond its 1 - 10^-7 quantile.
        assert ((counts - expected) ** 2 / expected).sum() < 400


# Faults ------------------------------------------------------------------------------------------


def test_a_client_that_is_away_is_missing_from_the_sum_and_comes_back() -> None:
    outcome = run(toy_members(), rounds=4, mods=[silent({2}, {4})])
    wanted = by_hand(toy_members(), 4, {4: {2}}).mean
    assert np.allclose(outcome.weights["mean"], wanted, atol=100 * STEP)
    assert outcome.strategy.contributors == [0, 1, 3]
    assert any("away" in entry["reason"] for entry in outcome.reports[-1].rejected)
    # It missed the round, and with it the keys of the next sum.
    later = run(toy_members(), rounds=6, mods=[silent({2}, {4})])
    assert [report.answered for report in later.reports] == [4, 4, 4, 3, 3, 4]
    assert [report.skipped for report in later.reports] == [""] * 6
    assert later.strategy.contributors == [0, 1, 2, 3]


def test_with_too_few_clients_there_is_no_sum_and_the_last_mean_stays() -> None:
    before = run(toy_members(), rounds=3)
    outcome = run(toy_members(), rounds=4, mods=[silent({1, 2}, {4})])
    report = outcome.reports[-1]
    assert report.answered == 2
    assert "no sum: 2 of 4 clients sent their vectors, at least 3 must" in report.skipped
    assert np.array_equal(outcome.weights["mean"], before.weights["mean"])
    after = run(toy_members(), rounds=6, mods=[silent({1, 2}, {4})])
    assert after.reports[-1].skipped == "" and after.strategy.contributors == [0, 1, 2, 3]


def test_a_client_alone_has_no_sum() -> None:
    outcome = run([toy_members()[1]], rounds=2)
    assert "a sum needs at least 2" in outcome.reports[0].skipped
    assert outcome.weights == {}


@pytest.mark.parametrize(
    ("value", "why"), [(np.nan, "no vector"), (100.0, "outside the ring's range")]
)
def test_numbers_that_do_not_fit_are_left_out_and_named(value: float, why: str) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 2))
    odd = rows.copy()
    odd[2, 1] = value
    members = [still_member(i, (odd if i == 3 else rows).tolist(), range(4)) for i in range(5)]
    # Client 3 shares its SuperNode with client 4, so that the SuperNode still answers.
    outcome = run(members, rounds=1, supernodes=3)
    assert outcome.strategy.contributors == [0, 1, 2, 4]
    [entry] = [one for one in outcome.reports[0].rejected if one.get("client") == 3]
    assert re.search(why, entry["reason"])


class Listener(ToyModel):
    """Notes the targets that it is given."""

    def __init__(self, start: FloatArray, heard: list[Any]) -> None:
        super().__init__(start)
        self.heard = heard

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        self.heard.append((self.embed()[rows], targets))
        return super().learn(rows, targets, server_round)


def test_rows_without_enough_holders_stay_the_clients_own() -> None:
    members = toy_members()
    heard: list[Any] = []
    start = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)
    # Node 50 is public at client 3 and, so that it could be shared, at client 2: two of four.
    for number in (2, 3):
        nodes = np.array([10, 50, 51 + number, 52 + number, 11, 12])
        rows = np.array([0, 1, 4, 5])
        build = partial(Listener, start, heard if number == 3 else [])
        members[number] = EmbeddingClient(number, nodes, rows, 3, build)
    outcome = run(members, rounds=4)
    assert outcome.weights["nodes"].tolist() == NODES
    assert [targets is None for _, targets in heard] == [True, True, False, False]
    own, targets = heard[-1]
    assert np.array_equal(targets[1], own[1])
    assert not np.allclose(targets[0], own[0], atol=1e-3)
    # If nobody may be missing, two holders are enough.
    sure = run(members, rounds=1, strategy=SecureConsensus(dropout=0.0))
    assert sure.weights["nodes"].tolist() == [10, 11, 12, 50]


def test_no_node_with_enough_holders() -> None:
    members = [still_member(i, [[1, 0], [0, 1]], [i, (i + 1) % 4]) for i in range(4)]
    with pytest.raises(ValueError, match="no public node has 3 holders among 4 clients"):
        run(members, rounds=1)


def test_a_client_that_comes_later_takes_part_from_the_next_sum() -> None:
    members = toy_members(5)[1:]
    grid = make_grid(members, 4)
    late = list(grid.contexts)[3]
    kept = grid.contexts.pop(late)
    strategy, reports = SecureConsensus(), list[RoundReport]()

    def note(report: RoundReport) -> None:
        reports.append(report)
        if report.round == 2:
            grid.contexts[late] = kept

    strategy.start(grid, num_rounds=5, timeout=5.0, on_round=note)
    assert [report.answered for report in reports] == [3, 3, 3, 4, 4]
    assert strategy.contributors == [1, 2, 3, 4]


def test_rotations_only() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2))
    mirrored = [still_member(0, rows.tolist(), range(6))]
    mirrored += [still_member(i, (rows * [-1, 1]).tolist(), range(6)) for i in (1, 2)]
    free = run(mirrored, rounds=6).weights["mean"]
    bound = run(mirrored, rounds=6, strategy=SecureConsensus(rotations_only=True)).weights["mean"]
    size = np.linalg.norm(rows)
    assert np.linalg.norm(free) == pytest.approx(size, rel=1e-4)
    assert np.linalg.norm(bound) < 0.99 * size


def test_what_a_round_reports() -> None:
    outcome = run(toy_members(), rounds=3)
    first, second, last = outcome.reports
    assert (first.val_accuracy, last.val_accuracy, last.test_accuracy) == (1 / 8, 3 / 8, 6 / 8)
    assert first.alignment == {}  # random points are nobody's
    assert set(second.alignment) == {"precision-1", "precision-5", "precision-10"}
    assert last.alignment["precision-5"] == 1  # there are three nodes
    assert np.isnan(second.regulariser) and 0 <= last.regulariser <= 2
    # Rows down from the second round on, 11 of 3 float32; sums of 3 rows up, 32-bit words.
    assert last.bytes == {"down": {"means": 2 * 11 * 12}, "up": {"sums": 3 * 4 * 36}}
    assert outcome.strategy.clients.measured["mlp-test"] == dict.fromkeys(range(4), 0.25)


def test_flowers_own_round_loop_is_refused() -> None:
    strategy = SecureConsensus()
    with pytest.raises(RuntimeError, match="two exchanges"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), make_grid(toy_members(), 4))
    with pytest.raises(RuntimeError, match="two exchanges"):
        strategy.aggregate_train(1, [])
