"""PPFL-GNN where clients do not trust the server: sums as with trust, and what more they take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from graph_helpers import Outcome
from public_helpers import make_distrusting, run_secure, silent, start, toy_members

from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.errors import RefusedError
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.strategies.ppfl.client import (
    ROUNDS,
    Claims,
    EmbeddingEnrolment,
    SecureConsensusClient,
    claim_parts,
    common_nodes,
    fewest_parties,
)
from flower_graph.strategies.ppfl.strategy import PublicMembership
from flower_graph.wire.codec import Resume
from flower_graph.wire.keys import CHECKPOINT, RUN_TOKEN, SERVER_ROUND

STEP = 2.0**-16
RUN = "ab" * 16


def run(count: int = 9, supernodes: int = 6, **how: Any) -> Outcome:
    """Run toy clients, unequally many at each SuperNode, without trust in the server."""
    return start(
        *make_distrusting(toy_members(count), supernodes, mods=how.pop("mods", None)), **how
    )


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return run()


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

    run(5, 5, rounds=3, mods=[spy])
    assert len(seen) == 15
    for metrics in seen:
        assert np.isnan([metrics["loss"], metrics["disagreement"]]).all()
        assert not any(key.startswith("judged") for key in metrics)


@pytest.mark.parametrize("lost", [{3}, {2, 3}], ids=["one", "two"])
def test_two_of_seven_may_be_lost_and_none_of_six(lost: set[int]) -> None:
    """Sums differ by two SuperNodes or none, so of one that is lost another one is left out."""
    # Who did not prepare the next sum is in the one after it.
    outcome = run(9, 7, mods=[silent(lost, {2})])
    assert [report.answered for report in outcome.reports] == [9, 6, 6, 9]
    assert not any(report.skipped for report in outcome.reports)
    outcome = run(9, 6, mods=[silent(lost, {2})])
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
    def client() -> SecureConsensusClient:
        where = {"checkpoint_dir": tmp_path}
        return SecureConsensusClient(context(0), toy_members(1), trust=parties[0], **where)

    first = client()
    first.get_properties(Resume(RUN).to_config())
    with pytest.raises(RefusedError, match="part"):
        first.get_properties(Resume("cd" * 16).to_config())
    save = {CHECKPOINT: True, SERVER_ROUND: 2}
    with pytest.raises(RefusedError, match="part"):
        first.get_properties(save | {RUN_TOKEN: "cd" * 16})
    journal = Journal(parties[0].journal)
    journal.contribute(2, ROUNDS, RUN.encode())
    assert first.get_properties(save | {RUN_TOKEN: RUN}) == {}
    client().get_properties(Resume(RUN, 2, "again").to_config())
    journal.contribute(3, ROUNDS, RUN.encode())
    with pytest.raises(RefusedError, match=r"round 3.*2"):
        client().get_properties(Resume(RUN, 2, "again").to_config())


def test_two_honest_holders_are_in_every_sum() -> None:
    """Three tenths may be missing, a tenth may collude."""
    assert [fewest_parties(n) for n in (5, 7, 9, 10, 19, 100)] == [3, 4, 4, 6, 8, 42]


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
    return np.frombuffer(trust.identity.sign(*claim_parts(5, held)), np.uint8)


def membership(parties: list[TrustSettings]) -> PublicMembership:
    members = PublicMembership()
    members.registry, members.run_id = parties[0].registry, lambda: 5
    return members


@pytest.fixture
def claims(parties: list[TrustSettings]) -> Claims:
    """What a server shows that took the claims of all."""
    members = membership(parties)
    for party, trust in enumerate(parties):
        signature = signed(trust, HELD[party])
        answer = EmbeddingEnrolment([party], [*HELD[party].values()], 3, None, signature)
        answers = {party: EmbeddingEnrolment.from_config(answer.to_config())}
        assert [members.refusal(one) for _, one in members.in_order(answers)] == [""]
    return Claims.from_config(Claims.of(members.claims.values()).to_config())


@pytest.mark.parametrize(
    ("change", "run_id", "count", "message"),
    [
        (lambda c: {}, 6, 6, "party 0"),  # another run's
        (lambda c: {}, 5, 5, "6 parties.*5"),
        (lambda c: {"nodes": [*c.nodes[:4], c.nodes[3], c.nodes[5]]}, 5, 6, "party 4"),
        (lambda c: {"clients": [*c.clients[:4], 77, 5]}, 5, 6, "party 4"),
        (lambda c: {"clients": [*c.clients, 77], "nodes": [*c.nodes, c.nodes[0]]}, 5, 6, "clients"),
        (lambda c: {"signatures": c.signatures[[0, 2, 2, 3, 4, 5]]}, 5, 6, "party 1"),
    ],
)
def test_claims_are_refused_that_nobody_signed(
    parties: list[TrustSettings],
    claims: Claims,
    change: Callable[[Claims], dict[str, Any]],
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
    parties: list[TrustSettings], claims: Claims, own: Any, change: dict[str, Any], message: str
) -> None:
    for party, trust in enumerate(parties):
        assert claims.agreed(trust, 5, range(6), HELD[party]).tolist() == [10, 11, 12]
    assert claims.agreed(parties[2], 5, range(6), HELD[2], 4).tolist() == [10, 11]
    with pytest.raises(RefusedError, match=message):
        claims.agreed(replace(parties[2], **change), 5, range(6), own)


def test_the_server_takes_no_claim_that_is_not_signed(parties: list[TrustSettings]) -> None:
    members = membership(parties)
    answer = EmbeddingEnrolment([0], [np.array([10])], 3)
    assert "is not signed" in members.refusal(answer)
    other = signed(parties[1], {0: np.array([10])})
    assert "not signed with its key" in members.refusal(replace(answer, signature=other))
    assert "no party may host" in members.refusal(replace(answer, clients=[17], signature=other))
    assert members.claims == {}
