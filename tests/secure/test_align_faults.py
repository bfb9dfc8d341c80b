"""Silence, wrong points and wrong sums: named, left out, and the rest still agree."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from align_helpers import RUN, Alignment, shared

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.messages.arrays import pack_integers
from flower_graph.messages.keys import (
    ALIGN_CLIENTS,
    ALIGN_POINTS,
    ALIGN_STAGE,
)
from flower_graph.secure.align.messages import BlindRequest, EvaluateRequest
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.secure.align.sketch import MAX_CLIENTS

DATA = {client: [client, client + 1, 100] for client in range(6)}
NODES = [[0, 1], [2, 3], [4, 5]]
# The point of order two: on the curve, but not in the group of prime order.
BAD_POINT = bytes.fromhex("ec" + "ff" * 30 + "7f")


def enrolled() -> Alignment:
    alignment = Alignment(DATA, NODES)
    alignment.enroll()
    return alignment


def agreed(alignment: Alignment, clients: set[int]) -> bool:
    present = {client: DATA[client] for client in clients}
    slots = alignment.slots()
    return {i for i, slot in slots.items() if slot >= 0} == shared(present)


def test_who_does_not_blind_is_left_out_and_may_come_back() -> None:
    alignment = enrolled()
    alignment.run(lambda node, config: alignment.reply(node, config) if node != 2 else None)
    assert alignment.server.blamed == [
        (client, "did not blind its identities") for client in (2, 3)
    ]
    assert alignment.server.aligned == [0, 1, 4, 5]
    assert agreed(alignment, {0, 1, 4, 5})
    alignment.enroll(2)
    alignment.run()
    assert alignment.server.aligned == [0, 1, 2, 3, 4, 5]
    assert agreed(alignment, set(DATA))


def test_a_lost_key_holder_is_replaced_and_only_the_new_one_asked() -> None:
    alignment = enrolled()
    alignment.exchange()
    first = alignment.exchange(lambda node, c: alignment.reply(node, c) if node != 1 else None)
    assert sorted(first) == [1, 2, 3]  # key-holders on as many machines as there are
    second = alignment.exchange()
    lost = first[1].holders.tolist()
    assert alignment.server.blamed == [(lost[0], "did not answer as key-holder")]
    assert 1 not in second
    assert len(second) == 1
    alignment.run()
    assert agreed(alignment, set(DATA))


def test_a_wrong_answer_of_a_key_holder_is_named_and_replaced() -> None:
    alignment = enrolled()

    def answer(node: int, config: dict[str, Any]) -> dict[str, Any]:
        reply = alignment.reply(node, config)
        if node == 3 and config[ALIGN_STAGE] == "evaluate":
            reply[ALIGN_POINTS] = BAD_POINT + reply[ALIGN_POINTS][32:]
        return reply

    alignment.exchange()
    asked = alignment.exchange(answer)
    holder = asked[3].holders.tolist()[0]
    assert alignment.server.blamed == [(holder, "its answer is not in the group")]
    alignment.run()
    assert agreed(alignment, set(DATA))


def test_without_key_holders_there_is_an_error() -> None:
    alignment = enrolled()
    alignment.exchange()
    alignment.exchange(lambda node, config: None)
    with pytest.raises(AlignmentError, match="0 clients are left"):
        alignment.exchange()


def test_a_key_holder_lost_before_others_join_starts_all_again() -> None:
    alignment = Alignment(DATA, NODES)
    alignment.enroll(1, 2)
    alignment.run()
    assert alignment.server.epoch == 1
    alignment.enroll()
    alignment.run(
        lambda node, config: (
            None
            if config[ALIGN_STAGE] == "evaluate" and config["align-epoch"] == 1
            else alignment.reply(node, config)
        )
    )
    assert alignment.server.epoch == 2
    assert alignment.server.aligned == sorted(DATA)
    assert agreed(alignment, set(DATA))


def test_an_invalid_point_costs_its_client_alone() -> None:
    alignment = enrolled()

    def answer(node: int, config: dict[str, Any]) -> dict[str, Any]:
        reply = alignment.reply(node, config)
        if node == 2 and config[ALIGN_STAGE] == "blind":
            points = reply[ALIGN_POINTS]
            reply[ALIGN_POINTS] = points[: 17 * 32] + BAD_POINT + points[18 * 32 :]
        return reply

    alignment.run(answer)
    assert alignment.server.blamed == [(3, "its point 1 is not in the group")]
    assert agreed(alignment, set(DATA) - {3})


def _blinded(alignment: Alignment) -> tuple[int, dict[str, Any]]:
    node, request = next(iter(alignment.server.requests().items()))
    assert isinstance(request, BlindRequest)
    return node, alignment.reply(node, request.to_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({ALIGN_CLIENTS: pack_integers(np.array([0, 3]))}, r"align-clients: \[0 3\]"),
        ({"align-epoch": 2}, "align-epoch 2, expected 1"),
        ({"align-sizes": pack_integers(np.array([16, 32]))}, "sizes"),
        ({"align-sizes": pack_integers(np.array([32]))}, "1 sizes for 2 clients"),
    ],
)
def test_malformed_blocks_are_refused(change: dict[str, Any], message: str) -> None:
    alignment = enrolled()
    node, reply = _blinded(alignment)
    with pytest.raises(MalformedReplyError, match=message):
        alignment.server.take(node, reply | change)
    alignment.server.take(node, reply)  # nothing of it has been taken


def test_second_and_uncalled_answers_are_refused() -> None:
    alignment = enrolled()
    node, reply = _blinded(alignment)
    alignment.server.take(node, reply)
    for sender in (node, 99):
        with pytest.raises(MalformedReplyError, match="not asked, or has answered"):
            alignment.server.take(sender, reply)


def test_too_few_products_are_refused() -> None:
    alignment = enrolled()
    alignment.exchange()
    node, request = next(iter(alignment.server.requests().items()))
    assert isinstance(request, EvaluateRequest)
    reply = alignment.reply(node, request.to_config())
    with pytest.raises(MalformedReplyError, match="align-points: expected 3072 bytes, got 3040"):
        alignment.server.take(node, reply | {ALIGN_POINTS: reply[ALIGN_POINTS][32:]})


def test_clients_absent_from_the_union_are_left_out() -> None:
    alignment = enrolled()
    while alignment.exchange():
        pass
    alignment.union(absent=[4])
    assert alignment.server.blamed == [(4, "took no part in the union of tokens")]
    assert alignment.server.aligned == [0, 1, 2, 3, 5]
    assert alignment.server.num_slots == len(shared({c: DATA[c] for c in (0, 1, 2, 3, 5)}))


def test_a_key_holder_left_out_of_the_union_is_missed_when_others_join() -> None:
    alignment = Alignment(DATA, NODES)
    alignment.enroll(1, 2)
    alignment.exchange()
    holder = alignment.exchange()[2].holders.tolist()[0]
    assert alignment.exchange() == {}
    alignment.union(absent=[holder])
    alignment.enroll(3)
    alignment.run()
    assert alignment.server.epoch == 2
    assert alignment.server.aligned == sorted(set(DATA) - {holder})
    assert alignment.server.num_slots == len(
        shared({client: DATA[client] for client in alignment.server.aligned})
    )


def test_an_unreadable_union_is_asked_for_at_twice_the_size_and_then_given_up() -> None:
    alignment = enrolled()
    while alignment.exchange():
        pass
    sizes = []
    rng = np.random.default_rng(0)
    with pytest.raises(AlignmentError, match="a client must have sent a wrong one"):
        while True:
            cells = alignment.server.union_requests()[1].cells
            sizes.append(cells)
            noise = rng.integers(0, 2**64, 3 * cells, np.uint64)
            assert not alignment.server.take_union(noise, list(DATA))
    assert len(sizes) == 5
    assert all(b > 1.2 * a for a, b in pairwise(sizes))
    with pytest.raises(ValueError, match="a sum of shape"):
        alignment.server.take_union(np.zeros(12, np.uint64), list(DATA))


def test_more_clients_than_a_table_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_CLIENTS}"):
        AlignmentServer(RUN).enroll(1, range(MAX_CLIENTS + 1))
