"""Wrong points, lost key-holders, wrong sums and wrong answers: named, and the rest still agree."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from align_helpers import Alignment

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.secure.align.blinded import BlindRequest, UnionRequest, insert
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.wire.arrays import pack_integers
from flower_graph.wire.keys import ALIGN_STAGE

DATA = {client: [client, client + 1, 100] for client in range(6)}
NODES = [[0, 1], [2, 3], [4, 5]]
# The point of order two: on the curve, but not in the group of prime order.
BAD_POINT = bytes.fromhex("ec" + "ff" * 30 + "7f")


def enrolled(stages: int = 0, nodes: Any = (1, 2, 3), form: str = "psi") -> Alignment:
    """Enrol some nodes and run the first stages."""
    alignment = Alignment(DATA, NODES, form=form)
    for node in nodes:
        alignment.server.enroll(node, alignment.nodes[node])
    for _ in range(stages):
        alignment.exchange()
    return alignment


def spoiling(alignment: Alignment, node: int, stage: str, place: int) -> Any:
    """Answer as the hosts do, but for one point of a node in a stage, which is a bad one."""

    def answer(sender: int, config: dict[str, Any]) -> dict[str, Any]:
        reply = alignment.reply(sender, config)
        if sender == node and config[ALIGN_STAGE] == stage:
            points = reply["align-points"]
            reply["align-points"] = points[: place * 32] + BAD_POINT + points[(place + 1) * 32 :]
        return reply

    return answer


def test_a_lost_key_holder_is_replaced_and_only_the_new_one_asked() -> None:
    alignment = enrolled(1)
    first = alignment.exchange(lambda node, c: alignment.reply(node, c) if node != 1 else None)
    assert sorted(first) == [1, 2, 3]  # key-holders on as many machines as there are
    second = alignment.exchange()
    lost = first[1].holders.tolist()
    assert alignment.server.blamed == [(lost[0], "did not answer as key-holder")]
    assert 1 not in second
    assert len(second) == 1
    alignment.align()
    assert alignment.agree(DATA)


def test_a_wrong_answer_of_a_key_holder_is_named_and_replaced() -> None:
    alignment = enrolled(1)
    asked = alignment.exchange(spoiling(alignment, 3, "evaluate", 0))
    holder = asked[3].holders.tolist()[0]
    assert alignment.server.blamed == [(holder, "its answer is not in the group")]
    alignment.align()
    assert alignment.agree(DATA)


def test_an_invalid_point_costs_its_supernode_alone() -> None:
    """Client 3's block had a name that client 2, at the same SuperNode, cannot do without."""
    alignment = Alignment(DATA, NODES)
    alignment.align(spoiling(alignment, 2, "blind", 17))
    why = {3: "its point 1 is not in the group", 2: "took no part in the union of tokens"}
    assert alignment.server.blamed == list(why.items())
    assert alignment.agree(set(DATA) - {2, 3})
    alignment.align()
    assert alignment.agree(DATA)


def test_names_are_dealt_evenly_and_a_state_has_those_that_are_there() -> None:
    identities = {4: [*range(40)], 2: [0, 1], 9: list[int]()}
    host = AlignmentClient(b"run", identities)
    reply = host.blind(BlindRequest(1, np.array([4, 2, 9])))
    assert reply.sizes.tolist() == [16, 16, 16]  # 41 with the common one, 14 at most in each
    assert host.points == dict.fromkeys(identities, 16)
    host = AlignmentClient.from_bytes(host.to_bytes(), b"run", identities)
    for client, block in zip([9, 4, 2], [32, 0, 16], strict=True):
        points = reply.points[block : block + 16]
        host.finish(UnionRequest(1, np.array([client]), np.array([16]), points, 8))
        host = AlignmentClient.from_bytes(host.to_bytes(), b"run", identities)
        assert host.finished == {9: [], 4: [9], 2: [2, 4, 9]}[client]
    assert np.array_equal(host.sketch(512, [2]), insert(host._tokens[4][:2], 512))


def test_without_key_holders_there_is_an_error() -> None:
    alignment = enrolled(1)
    alignment.exchange(lambda node, config: None)
    with pytest.raises(AlignmentError, match="0 clients"):
        alignment.exchange()


def test_a_key_holder_lost_before_others_join_starts_all_again() -> None:
    alignment = Alignment(DATA, NODES)
    alignment.align(None, 1, 2)
    assert alignment.server.epoch == 1

    def silent_at_first(node: int, config: dict[str, Any]) -> dict[str, Any] | None:
        is_first = config[ALIGN_STAGE] == "evaluate" and config["align-epoch"] == 1
        return None if is_first else alignment.reply(node, config)

    alignment.align(silent_at_first)
    assert alignment.server.epoch == 2
    assert alignment.agree(DATA)


@pytest.mark.parametrize(
    ("stages", "change", "message"),
    [
        (0, {"align-epoch": 2}, "align-epoch"),
        (0, {"align-sizes": pack_integers(np.array([16, 32]))}, "sizes"),
        (0, {"align-sizes": pack_integers(np.array([32]))}, "align-sizes"),
        (1, {"align-points": bytes(95 * 32)}, "align-points"),
    ],
)
def test_malformed_blocks_are_refused(stages: int, change: dict[str, Any], message: str) -> None:
    alignment = enrolled(stages)
    node, request = next(iter(alignment.server.requests().items()))
    reply = alignment.reply(node, request.to_config())
    with pytest.raises(MalformedReplyError, match=message):
        alignment.server.take(node, reply | change)
    alignment.server.take(node, reply)  # nothing of it has been taken


def test_clients_absent_from_the_union_are_left_out() -> None:
    alignment = Alignment(DATA, NODES)
    alignment.align(absent=[4])
    assert alignment.server.blamed == [(4, "took no part in the union of tokens")]
    assert alignment.agree(set(DATA) - {4})


def test_a_key_holder_left_out_of_the_union_is_missed_when_others_join() -> None:
    alignment = enrolled(1, (1, 2))
    holder = alignment.exchange()[2].holders.tolist()[0]
    assert alignment.exchange() == {}
    alignment.union(absent=[holder])
    alignment.align(None, 3)
    assert alignment.server.epoch == 2
    assert alignment.agree(set(DATA) - {holder})


def test_an_unreadable_union_is_asked_for_at_twice_the_size_and_then_given_up() -> None:
    alignment = enrolled(3)
    cells, rng = [], np.random.default_rng(0)
    with pytest.raises(AlignmentError, match="client"):
        while True:
            unions = alignment.server.union_requests()
            assert len(unions) == 3
            cells.append(next(iter(unions.values())).cells)
            noise = rng.integers(0, 2**64, 3 * cells[-1], np.uint64)
            assert not alignment.server.take_union(noise, list(DATA))
    assert len(cells) == 3 and all(b > 1.2 * a for a, b in pairwise(cells))


def test_newcomers_that_spoil_the_union_are_left_out_and_the_size_is_as_before() -> None:
    alignment = Alignment(DATA, NODES)
    alignment.align(None, 1, 2)
    alignment.server.enroll(3, NODES[2])
    while alignment.exchange():
        pass
    sizes = []
    while alignment.server.waits():
        sizes.append(next(iter(alignment.server.union_requests().values())).cells)
        noise = np.full(3 * sizes[-1], 7, np.uint64)
        assert not alignment.server.take_union(noise, list(DATA))
    why = "was in no union of tokens that could be read"
    assert alignment.server.blamed == [(4, why), (5, why)]
    assert alignment.server.aligned == [0, 1, 2, 3] and alignment.server.epoch == 1
    alignment.server.enroll(3, NODES[2])
    while alignment.exchange():
        pass
    assert next(iter(alignment.server.union_requests().values())).cells == sizes[0]


def test_a_sum_has_the_size_that_was_asked_for() -> None:
    alignment = enrolled(3)
    with pytest.raises(ValueError, match="shape"):
        alignment.server.take_union(np.zeros(12, np.uint64), list(DATA))


# The form that hides nothing


@pytest.mark.parametrize(
    "text", ["{", "[]", "[[1],[]]", '["i:1","i:1"]', '[["i:1","i:1"],[]]', None]
)
def test_malformed_answers_in_the_clear_are_refused(text: str | None) -> None:
    alignment = enrolled(form="plain")
    node, request = next(iter(alignment.server.requests().items()))
    reply = alignment.reply(node, request.to_config())
    with pytest.raises(MalformedReplyError):
        alignment.server.take(node, reply | {"align-identities": text})
