"""PPFL-GNN's secure form: trusted, and under a server that may lie."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import who_of
from flwr.app import Context, Message, RecordDict
from graph_helpers import Outcome
from hypothesis import given
from hypothesis import strategies as st
from ppfl import Member, Summed, summed
from public_helpers import (
    ToyModel,
    bytes_of,
    make_distrusting,
    run_secure,
    silent,
    start,
    still_member,
    toy_members,
)
from public_helpers import run as run_in_the_clear
from public_helpers import run_secure as run

from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.errors import RefusedError
from flower_graph.flower_compat import ClientAppCallable, Mod
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import Ring
from flower_graph.strategies.ppfl import client as public
from flower_graph.strategies.ppfl.algorithm import (
    CommonMean,
    FloatArray,
    IntArray,
    common_nodes,
    fewest_holders,
    first_points,
)
from flower_graph.strategies.ppfl.strategy import PublicMembership, SecureConsensus
from flower_graph.wire.codec import Resume
from flower_graph.wire.keys import CHECKPOINT, RUN_TOKEN, SERVER_ROUND

NODES = [10, 11, 12]
STEP = 2.0**-16


def by_hand(rounds: int, absent: Mapping[int, set[int]] | None = None) -> Summed:
    members = {one.number: Member(one.build(), one.nodes, one.rows) for one in toy_members()}
    return summed(members, NODES, first_points(0, len(NODES), 3), rounds, absent or {})


def secrets_of(steps: Summed) -> list[bytes]:
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
        seen.append(bytes_of(message.content))
        reply = call_next(message, context)
        seen.append(bytes_of(reply.content))
        return reply

    return mod


def test_nobodys_embedding_is_in_any_message() -> None:
    # Before means are learnt from, plain and secure runs embed the same, bit for bit.
    members, seen, plain = toy_members(), list[bytes](), list[bytes]()
    secrets = secrets_of(by_hand(2))
    run(members, rounds=2, mods=[watched(seen)])
    assert len(seen) > 4 * 2 * 3
    assert hits(seen, secrets) == 0
    # The same search finds them where they are sent.
    run_in_the_clear(members, rounds=1, mods=[watched(plain)])
    assert hits(plain, secrets) >= 4 * 2


def test_a_client_that_is_away_is_missing_from_the_sum_and_comes_back() -> None:
    outcome = run(toy_members(), mods=[silent({2}, {4})])
    wanted = by_hand(4, {4: {2}}).mean
    assert np.allclose(outcome.weights["mean"], wanted, atol=100 * STEP)
    assert outcome.strategy.contributors == [0, 1, 3]
    # It missed the round, and with it the keys of the next sum.
    later = run(toy_members(), rounds=6, mods=[silent({2}, {4})])
    assert [(one.answered, one.skipped) for one in later.reports[3:]] == [(3, ""), (3, ""), (4, "")]
    away, late, _ = (who_of(report.participation) for report in later.reports[3:])
    assert "away" in away.failed[2]
    assert late.left_out == {2: "its keys for the sum did not come in time"}


def test_with_too_few_clients_there_is_no_sum_and_the_last_mean_stays() -> None:
    before = run(toy_members(), rounds=3)
    outcome = run(toy_members(), rounds=4, mods=[silent({1, 2}, {4})])
    report = outcome.reports[-1]
    assert report.answered == 2
    assert "no sum: 2 of 4 clients sent their vectors, at least 3 must" in report.skipped
    assert np.array_equal(outcome.weights["mean"], before.weights["mean"])


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
    """Notes its vectors and the targets that it is given."""

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        HEARD.append((self.embed()[rows], targets))
        return super().learn(rows, targets, server_round)


HEARD: list[Any] = []


def test_rows_without_enough_holders_stay_the_clients_own() -> None:
    members = toy_members()
    HEARD.clear()
    start = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)
    # Node 50 is public at client 3 and, so that it could be shared, at client 2: two of four.
    for number, model in ((2, ToyModel), (3, Listener)):
        nodes = np.array([10, 50, 51 + number, 52 + number, 11, 12])
        build = partial(model, start)
        members[number] = public.EmbeddingClient(number, nodes, np.array([0, 1, 4, 5]), 3, build)
    outcome = run(members, rounds=4)
    assert outcome.weights["nodes"].tolist() == NODES
    assert [targets is None for _, targets in HEARD] == [True, True, False, False]
    own, targets = HEARD[-1]
    assert np.array_equal(targets[1], own[1])
    assert not np.allclose(targets[0], own[0], atol=1e-3)
    # If nobody may be missing, two holders are enough.
    sure = run(members, rounds=1, strategy=SecureConsensus(dropout=0.0))
    assert sure.weights["nodes"].tolist() == [10, 11, 12, 50]


def test_no_node_with_enough_holders() -> None:
    members = [still_member(i, [[1, 0], [0, 1]], [i, (i + 1) % 4]) for i in range(4)]
    with pytest.raises(ValueError, match=r"3 holders.*4"):
        run(members, rounds=1)


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


@pytest.mark.parametrize(
    ("slots", "length", "what"),
    [
        ([0, 0, 1], 8, "slots"),
        ([0, 1, 2], 7, "slots.*7.*2"),
        ([0, 1, 4], 8, "slots.*3"),
        ([0, 1, -2], 8, "slots"),
    ],
)
def test_slots_that_cannot_be(slots: list[int], length: int, what: str) -> None:
    rows = np.ones((3, 2), np.float32)
    request = public.PublicRequest(1, [0], [np.arange(3)], 2, [0])
    order = public.SumOrder(np.array(slots), 0, is_target=False)
    with pytest.raises(ValueError, match=what):
        public.rotate(request, order, public.PublicReply(request, [1], [0.0], [0.0], rows), length)


@pytest.mark.filterwarnings("error")
def test_a_node_that_stays_keeps_its_mean() -> None:
    mean, ids = CommonMean(), {4: np.array([9, 7]), 5: np.array([7])}
    mean.choose(np.array([5, 7]), ids, 2)
    assert mean.of(4) is None
    mean.take(np.array([1.0, 2, 6, 8]), [4, 5])
    mean.choose(np.array([7, 9]), ids, 2)
    assert mean.rows.tolist() == [[3, 4], [0, 0]]
    own = mean.of(4), mean.of(5)
    assert [one is not None and one.tolist() for one in own] == [[[0, 0], [3, 4]], [[3, 4]]]
    mean.take(np.array([4.0, 6, 5, 7]), [4, 5])
    mean.take(np.array([8.0, 9, 0, 0]), [5])
    assert mean.rows.tolist() == [[8, 9], [5, 7]]  # no holder of node 9 is in the last sum


@given(
    st.lists(st.sets(st.integers(0, 12), min_size=1), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    st.randoms(use_true_random=False),
)
def test_no_sum_is_ever_of_one_client_alone(owned, dropout, chance) -> None:
    ids = [{0: np.array(sorted(own))} for own in owned]
    m = len(owned)
    least = max(2, m - int(dropout * m + 1e-12))  # contributors without which a sum is skipped
    there = chance.sample(range(m), chance.randint(least, m))
    for node in common_nodes(ids, fewest_holders(m, dropout, LEAST_HOLDERS)).tolist():
        assert sum(node in ids[client][0] for client in there) >= 2


RUN = "ab" * 16


def run_untrusted(count: int = 9, supernodes: int = 6, **how: Any) -> Outcome:
    """Run toy clients, unequally many at each SuperNode, without trust in the server."""
    return start(
        *make_distrusting(toy_members(count), supernodes, mods=how.pop("mods", None)), **how
    )


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return run_untrusted()


def test_sums_are_those_of_clients_that_trust_the_server(whole: Outcome) -> None:
    trusting = run_secure(toy_members(9), supernodes=6)
    assert whole.weights["nodes"].tolist() == trusting.weights["nodes"].tolist() == [10, 11, 12]
    # A SuperNode's clients are rounded one by one in both.
    assert np.array_equal(whole.weights["mean"], trusting.weights["mean"])
    for one, other in zip(whole.reports, trusting.reports, strict=True):
        assert (one.answered, one.skipped, one.rejected) == (9, "", [])
        for name in ("loss", "regulariser", "val_accuracy", "test_accuracy"):
            values = getattr(one, name), getattr(other, name)
            assert values[0] == pytest.approx(values[1], abs=STEP, nan_ok=True)
        assert one.alignment == pytest.approx(other.alignment, abs=STEP)


def test_what_clients_measure_is_in_no_message_of_one() -> None:
    seen = []

    def spy(message: Any, context: Context, call_next: Any) -> Any:
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            seen.append(dict(reply.content.metric_records["metrics"]))
        return reply

    run_untrusted(5, 5, rounds=3, mods=[spy])
    assert len(seen) == 15
    for metrics in seen:
        assert np.isnan([metrics["loss"], metrics["disagreement"]]).all()
        assert not any(key.startswith("judged") for key in metrics)


@pytest.mark.parametrize("lost", [{3}, {2, 3}], ids=["one", "two"])
def test_two_of_seven_may_be_lost_and_none_of_six(lost: set[int]) -> None:
    """Sums differ by two SuperNodes or none, so of one that is lost another one is left out."""
    # Who did not prepare the next sum is in the one after it.
    outcome = run_untrusted(9, 7, mods=[silent(lost, {2})])
    assert [report.answered for report in outcome.reports] == [9, 6, 6, 9]
    assert not any(report.skipped for report in outcome.reports)
    outcome = run_untrusted(9, 6, mods=[silent(lost, {2})])
    skipped = [bool(report.skipped) for report in outcome.reports]
    assert skipped == [False, True, True, False]


@pytest.fixture
def parties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrustSettings]:
    monkeypatch.setenv("FLOWER_GRAPH_STATE", str(tmp_path / "state"))
    throwaway_parties(5, [range(i, i + 1) for i in range(6)])
    return [trust_of(context(i)) for i in range(6)]


def context(partition: int) -> Context:
    return Context(5, 1, {"partition-id": partition}, RecordDict(), {})


def test_a_supernode_does_not_go_back_behind_a_sum_that_it_is_in(
    parties: list[TrustSettings], tmp_path: Path
) -> None:
    def client() -> public.SecureConsensusClient:
        where = {"checkpoint_dir": tmp_path}
        return public.SecureConsensusClient(context(0), toy_members(1), trust=parties[0], **where)

    first = client()
    first.get_properties(Resume(RUN).to_config())
    with pytest.raises(RefusedError, match="part"):
        first.get_properties(Resume("cd" * 16).to_config())
    save = {CHECKPOINT: True, SERVER_ROUND: 2}
    with pytest.raises(RefusedError, match="part"):
        first.get_properties(save | {RUN_TOKEN: "cd" * 16})
    journal = replace(parties[0].journal, run=RUN.encode())
    journal.contribute(2, public.ROUNDS)
    assert first.get_properties(save | {RUN_TOKEN: RUN}) == {}
    client().get_properties(Resume(RUN, 2, "again").to_config())
    journal.contribute(3, public.ROUNDS)
    with pytest.raises(RefusedError, match=r"round 3.*2"):
        client().get_properties(Resume(RUN, 2, "again").to_config())


def test_two_honest_holders_are_in_every_sum() -> None:
    """Three tenths may be missing, a tenth may collude."""
    assert [public.fewest_parties(n, 2) for n in (5, 7, 9, 10, 19, 100)] == [3, 4, 4, 6, 8, 42]


def test_nodes_are_counted_once_a_party() -> None:
    one = {0: np.array([5, 7]), 1: np.array([5, 9])}
    held = {0: one, **{party: {party: np.array([9, 5])} for party in range(2, 6)}}
    assert common_nodes(held.values(), 3).tolist() == [5, 9]
    held[2] = {2: np.array([7])}
    held[3] = {3: np.array([7, 9])}
    assert common_nodes(held.values(), 3).tolist() == [5, 7, 9]
    assert common_nodes(held.values(), 4).tolist() == [9]


HELD = {i: {i: np.array([10, 11, *([12] if i < 3 else []), 100 + i])} for i in range(6)}


def signed(trust: TrustSettings, held: Any) -> Any:
    return np.frombuffer(trust.identity.sign(*public.claim_parts(5, held)), np.uint8)


def membership(parties: list[TrustSettings]) -> PublicMembership:
    members = PublicMembership()
    members.registry, members.run_id, members.form = parties[0].registry, lambda: 5, 3
    return members


@pytest.fixture
def claims(parties: list[TrustSettings]) -> public.Claims:
    """What a server shows that took the claims of all."""
    members = membership(parties)
    for party, trust in enumerate(parties):
        signature = signed(trust, HELD[party])
        answer = public.EmbeddingEnrolment.of_clients(HELD[party], 3, None, signature)
        assert members.refusal(public.EmbeddingEnrolment.from_config(answer.to_config())) == ""
    return public.Claims.from_config(public.Claims.of(members.claims.values()).to_config())


@pytest.mark.parametrize(
    ("change", "run_id", "count", "message"),
    [
        (lambda c: {}, 6, 6, "party 0"),  # another run's
        (lambda c: {}, 5, 5, "6 parties.*5"),
        (lambda c: {"nodes": np.where(c.nodes == 104, 103, c.nodes)}, 5, 6, "party 4"),
        (lambda c: {"clients": [*c.clients[:4], 77, 5]}, 5, 6, "party 4"),
        (lambda c: {"clients": [*c.clients, 77], "rows": [*c.rows, 0]}, 5, 6, "clients"),
        (lambda c: {"signatures": c.signatures[[0, 2, 2, 3, 4, 5]]}, 5, 6, "party 1"),
    ],
)
def test_claims_are_refused_that_nobody_signed(
    parties: list[TrustSettings],
    claims: public.Claims,
    change: Callable[[public.Claims], dict[str, Any]],
    run_id: int,
    count: int,
    message: str,
) -> None:
    changed = replace(claims, **change(claims))
    with pytest.raises(RefusedError, match=message):
        changed.agreed(parties[2], run_id, range(count), HELD[2])


@pytest.mark.parametrize(
    ("own", "change", "message"),
    [
        ({2: np.array([10, 11])}, {}, "server"),
        (HELD[2], {"minimum": 4}, "holders"),
        (HELD[2], {"corrupt": 0.4}, "holders"),
    ],
)
def test_who_held_other_nodes_or_counts_on_fewer_takes_no_part(
    parties: list[TrustSettings],
    claims: public.Claims,
    own: Any,
    change: dict[str, Any],
    message: str,
) -> None:
    for party, trust in enumerate(parties):
        assert claims.agreed(trust, 5, range(6), HELD[party]).tolist() == [10, 11, 12]
    assert claims.agreed(parties[2], 5, range(6), HELD[2], 4).tolist() == [10, 11]
    with pytest.raises(RefusedError, match=message):
        claims.agreed(replace(parties[2], **change), 5, range(6), own)


def test_the_server_takes_no_claim_that_is_not_signed(parties: list[TrustSettings]) -> None:
    members = membership(parties)
    answer = public.EmbeddingEnrolment.of_clients({0: np.array([10])}, 3)
    assert "is not signed" in members.refusal(answer)
    other = signed(parties[1], {0: np.array([10])})
    assert "not signed with its key" in members.refusal(replace(answer, signature=other))
    assert "no party may host" in members.refusal(replace(answer, clients=[17], signature=other))
    assert members.claims == {}
