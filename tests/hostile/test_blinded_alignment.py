"""Attacks on the blinded alignment by clients: invented numbers, huge blocks, crafted tables."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from align_helpers import aligned
from ego_strategy_helpers import faulty, run, seven_egos
from flwr.app import Array, ArrayRecord, RecordDict

from flower_graph.errors import AlignmentError
from flower_graph.secure.align import blinded, server
from flower_graph.secure.align.blinded import MAX_CLIENTS, BlindReply, BlindRequest, peel
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.node_config import MOST_BLOCK
from flower_graph.wire.arrays import pack_integers

LIAR = 6  # place of a SuperNode among seven
EVER = range(1, 5)  # rounds


# Invented numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "rounds", "why"),
    [
        (range(10**9, 10**9 + 4), (1,), ""),
        (range(10**6, 10**6 + 17_000), EVER, "17001 clients, at most 8192"),
    ],
)
def test_thousands_of_invented_numbers_are_refused(numbers: Any, rounds: Any, why: str) -> None:
    """A few are left out of the union."""

    def claiming(content: RecordDict) -> None:
        config: Any = content.config_records["config"]
        config["sum-clients"] += pack_integers(np.array(numbers))

    grid = faulty({(LIAR, "query", number): claiming for number in rounds})
    outcome = run(seven_egos(), supernodes=7, make_grid=grid)
    assert outcome.answered == [6, 6, 6]
    said = [entry["reason"] for report in outcome.reports for entry in report.rejected]
    assert any(why in reason for reason in said)


def test_more_clients_than_can_be_aligned_are_named_and_the_rest_aligned() -> None:
    aligner = AlignmentServer()
    aligner.enroll(1, range(MAX_CLIENTS))
    aligner.enroll(2, range(MAX_CLIENTS - 1, MAX_CLIENTS + 2))
    assert [client for client, _ in aligner.blamed] == [MAX_CLIENTS, MAX_CLIENTS + 1]
    assert "no more can be aligned" in aligner.blamed[0][1]
    plain = AlignmentServer(plain=True)
    plain.enroll(1, range(MAX_CLIENTS + 1))
    assert not plain.blamed


# Unions that fail ---------------------------------------------------------------------------------


def spoilt(content: RecordDict) -> None:
    (name,) = content.array_records
    (key,) = content[name]
    shape = content[name][key].numpy().shape
    noise = np.random.default_rng().integers(0, 2**64, shape, np.uint64)
    content[name] = ArrayRecord({key: Array(noise)})


def test_after_a_union_that_nobody_can_read_who_was_aligned_goes_on() -> None:
    """One that joins in the second round spoils every union."""
    script = {(LIAR, "query", 1): "lost"} | {(LIAR, "train.union", n): spoilt for n in EVER}
    outcome = run(seven_egos(), supernodes=7, make_grid=faulty(script))
    assert outcome.answered == [6, 6, 6]
    (out,) = outcome.reports[-1].participation["left-out"]
    assert out["reason"] == "was in no union of tokens that could be read"


@pytest.mark.parametrize("supernodes", [2, 7])
def test_a_first_union_that_nobody_can_read_ends_the_run(supernodes: int) -> None:
    grid = faulty({(1, "train.union", number): spoilt for number in EVER})
    with pytest.raises(AlignmentError, match="client"):
        run(seven_egos(), supernodes=supernodes, make_grid=grid)


# Key-holders --------------------------------------------------------------------------------------


SIXTEEN = AlignmentClient(b"run", {0: [*range(15)]}).blind(BlindRequest(1, np.array([0]))).points


def blind_all(aligner: AlignmentServer, nodes: Mapping[int, Any], huge: int = 0) -> None:
    """Enrol SuperNodes whose clients all have the same block, one of a SuperNode's often."""
    for node, clients in nodes.items():
        aligner.enroll(node, clients)
    for node, request in aligner.requests().items():
        local, times = np.array(request.clients), 2 * MOST_BLOCK // 16 if node == huge else 1
        points = np.concatenate([SIXTEEN] * times * local.size)
        reply = BlindReply(request.epoch, local, np.full(local.size, 16 * times), points)
        aligner.take(node, reply.to_config())


def test_who_knows_run_and_numbers_cannot_become_the_key_holders() -> None:
    run_id = b"known-to-clients"
    numbers = sorted(
        range(20_000), key=lambda c: hashlib.sha256(run_id + b"/%d/%d" % (1, c)).digest()
    )
    hostile = numbers[:3]
    honest = [client for client in range(120) if client not in hostile][:100]
    nodes = {place: [client] for place, client in enumerate([*honest, *hostile], 1)}
    aligner = AlignmentServer()
    blind_all(aligner, nodes)
    asked = aligner.requests()
    holders = [c for request in asked.values() for c in request.holders.tolist()]
    assert len(asked) == 3  # SuperNodes
    assert set(holders) != set(hostile)  # but once in 176,851 times


def test_who_claims_more_numbers_is_not_likelier_to_hold_a_key() -> None:
    for _ in range(60):
        nodes = {1: range(100, 140), 2: [1], 3: [2], 4: [3]}
        aligner = AlignmentServer()
        blind_all(aligner, nodes)
        asked = aligner.requests()
        assert len(asked) == 3
        if 1 not in asked:
            return
    raise AssertionError("it was always a key-holder")  # the chance is 3/4 each time


# Blocks -------------------------------------------------------------------------------------------


def test_a_huge_block_costs_its_client_alone() -> None:
    aligner = AlignmentServer()
    blind_all(aligner, {1: [1], 2: [2], 3: [3]}, huge=3)
    why = f"its block has {2 * MOST_BLOCK} points, at most {MOST_BLOCK} are taken"
    assert aligner.blamed == [(3, why)]
    assert {len(request.points) for request in aligner.requests().values()} == {32}


def test_points_above_a_supernodes_ceiling_cost_their_clients_alone(monkeypatch: Any) -> None:
    """Of three blocks two are taken; who comes again with the third is left out again."""
    monkeypatch.setattr(server, "MOST_POINTS", 32)
    aligner = AlignmentServer()
    blind_all(aligner, {1: [1], 2: [2], 3: [30, 31, 32]})
    blind_all(aligner, {3: [32]})
    assert [client for client, _ in aligner.blamed] == [32, 32]
    assert all("48" in why and "32" in why for _, why in aligner.blamed)
    assert {len(request.points) for request in aligner.requests().values()} == {4 * 16}


def test_key_holders_are_asked_for_so_many_points_at_a_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "AT_A_TIME", 40)
    found = aligned({n: [1, 2, 90 + n] for n in range(1, 8)}, [[n] for n in range(1, 8)])
    answers = [one for one in found.received if "align-sizes" not in one]
    assert {len(one["align-points"]) // 32 for one in answers} == {32, 16}
    assert found.agree(range(1, 8))


# Tables -------------------------------------------------------------------------------------------


def chain(links: int, cells: int) -> Any:
    """Craft a table in which each token lays bare the next one, and nothing else."""
    found: list[tuple[Any, Any]] = []  # a token's places and its content
    alone: list[int] = []  # the cell that each is alone in, once the one before is gone
    while len(found) < links:
        tokens = np.frombuffer(os.urandom(12 * 4096), np.uint8).reshape(-1, 12)
        places, marker = blinded._hash(tokens, cells)
        content = np.concatenate([marker[None], blinded._halves(tokens)])
        wanted = places == found[-1][0] if found else np.ones_like(places, bool)
        free = ~np.isin(places, alone)
        good = (wanted & free).any(axis=1) & (free.sum(axis=1) > 2)
        for number in np.flatnonzero(good)[:1].tolist():
            column = int(np.flatnonzero((wanted & free)[number])[0])
            found.append((places[number], content[:, number]))
            alone.append(int(places[number, column]))
    table = np.zeros((3, cells), np.uint64)
    for number, cell in enumerate(alone):
        before = [content for places, content in found[:number] if cell in places]
        table[:, cell] = found[number][1] + sum(before, np.zeros(3, np.uint64))
    return table.reshape(-1)


def test_a_crafted_table_is_given_up_after_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(wraps=blinded._single)
    monkeypatch.setattr(blinded, "_single", counted)
    assert peel(chain(120, 4 * 400)) is None
    assert counted.call_count <= 30
