"""The whole alignment: one order for all, by any assignment, and what the server sees of it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from align_helpers import DATA, FORMS, RUN, Alignment, aligned
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.errors import AlignmentError, RefusedError, StateLostError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    BlindRequest,
    PublishedTokens,
    UnionRequest,
    insert,
    peel,
)
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.wire.keys import ALIGN_STAGE

# Every form of alignment


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(
    data=st.dictionaries(
        st.integers(0, 9), st.lists(st.integers(0, 9), unique=True), min_size=1, max_size=10
    ),
    nodes=st.integers(1, 3),
)
def test_any_sets_dealt_in_any_way(form: str, data: dict[int, Any], nodes: int) -> None:
    clients = sorted(data)
    dealt = [own for first in range(nodes) if (own := clients[first::nodes])]
    alignment = Alignment(data, dealt, form=form)
    alignment.align()
    assert alignment.agree(clients) and alignment.server.blamed == []


def test_with_more_least_holders_what_two_hold_has_no_slot() -> None:
    alignment = Alignment(DATA, [[0, 2], [5]])
    alignment.server = AlignmentServer(least_holders=3)
    alignment.align()
    assert alignment.slots() == {1: -1, 2: -1, 3: 0, 4: -1, 7: -1, 9: -1}
    assert all(host.slots.held.tolist() == [0] for host in alignment.hosts.values())


def test_in_the_clear_a_supernode_gets_the_tokens_of_its_own_identities_alone() -> None:
    alignment = Alignment(DATA, [[0], [5], [2]], form="plain")
    alignment.align()
    assert [int(host.order.any(1).sum()) for host in alignment.hosts.values()] == [2, 1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_who_is_silent_is_named_and_left_out_and_may_come_back(form: str) -> None:
    alignment = Alignment(DATA | {9: [9, 1]}, [[0, 9], [5, 2]], form=form)
    alignment.align(lambda node, config: alignment.reply(node, config) if node != 2 else None)
    why = "did not answer the alignment"
    assert alignment.server.blamed == [(5, why), (2, why)]
    assert alignment.agree([0, 9])
    alignment.align()
    assert alignment.agree([0, 2, 5, 9])


@pytest.mark.parametrize("form", FORMS)
def test_later_clients_are_aligned_with_all(form: str) -> None:
    data = {**DATA, 8: [9, 4, 50], 9: [50]}
    alignment = Alignment(data, [[0, 2], [5], [8, 9]], form=form)
    alignment.align(None, 1, 2)
    before = {i: s for i, s in alignment.slots().items() if s >= 0}
    alignment.received.clear()
    alignment.align()
    assert alignment.agree(data)
    if form == "plain":  # the others are not asked again
        assert len(alignment.received) == 1
    else:
        after = alignment.slots()
        assert {i: after[i] for i in before} == before
        # Only the newcomers blind; key-holders see their points alone.
        assert max(len(_points(message)) for message in alignment.received) == 32


@pytest.mark.parametrize("form", FORMS)
def test_a_host_refuses_what_it_cannot_answer(form: str) -> None:
    alignment = Alignment(DATA, [[0, 5, 2]], form=form)
    alignment.server.enroll(1, [0, 5, 2])
    request = alignment.server.requests()[1].to_config()
    with pytest.raises(RefusedError, match="'sing'"):
        alignment.reply(1, {"align-stage": "sing"})
    with pytest.raises(RefusedError, match=r"\[7\]"):
        alignment.reply(1, request | {"align-clients": b"\7" + bytes(7)})
    alignment.server.take(1, alignment.reply(1, request))
    alignment.align()
    with pytest.raises(StateLostError, match="other identities"):
        AlignmentClient.from_bytes(alignment.hosts[1].to_bytes(), RUN, {0: [1, 2, 3]})
    with pytest.raises(ValueError, match=r"client 4.*0"):
        AlignmentClient(RUN, {1: [1], 4: [2, 2]})


# Blinded identities


def test_what_else_a_host_of_blinded_identities_refuses() -> None:
    alignment = aligned(DATA, [[0, 5, 2]])
    host, order = alignment.hosts[1], alignment.server.publications()[1].tokens
    with pytest.raises(ValueError, match=r"\[7\]"):
        host.sketch(8, [0, 7])
    with pytest.raises(StateLostError, match="alignment 2"):
        host.publish(PublishedTokens(2, order[:0]))
    with pytest.raises(RefusedError, match="change"):
        host.publish(PublishedTokens(1, order[::-1]))
    for run, data in ((b"other", alignment.own(1)), (RUN, {**DATA, 5: [3, 5]})):
        with pytest.raises(StateLostError):
            AlignmentClient.from_bytes(host.to_bytes(), run, data)
    with pytest.raises(ValueError, match=r"clients 1.*4"):
        AlignmentClient(RUN, {1: [1], 4: ["1"]})
    with pytest.raises(RefusedError, match="'identities'"):  # in the clear
        host.answer(ids.PlainRequest(np.array([0])).to_config())


def tokens(alignment: Alignment) -> set[bytes]:
    union = peel(alignment.totals[-1])
    assert union is not None
    return {bytes(token) for token in union[0]}


def test_tokens_of_two_runs_have_nothing_in_common() -> None:
    # Not even under the same number of the run: the key-holders' secrets are fresh.
    sets = [tokens(aligned(DATA, [[0, 2], [5]], run)) for run in (RUN, RUN, b"other")]
    assert [len(one) for one in sets] == [6, 6, 6] and len(set().union(*sets)) == 18


def test_the_server_cannot_name_a_token_by_trying_identities() -> None:
    """What it could do against plain hashes: hash every candidate, with all points that it saw."""
    alignment = aligned(DATA, [[0, 2], [5]])
    seen = tokens(alignment)
    points = {p for message in alignment.received for p in _points(message)}
    for candidate in range(12):
        name = b"i:%d" % candidate
        tries = {ids.hash_to_group(RUN, name), *points}
        assert not seen & {ids.name(RUN, name, point)[: ids.TOKEN] for point in tries}
        assert ids.hash_to_group(RUN, name) not in points


def _points(message: dict[str, Any]) -> list[bytes]:
    data = message["align-points"]
    return [data[i : i + 32] for i in range(0, len(data), 32)]


# Wrong points, lost key-holders, wrong sums and wrong answers: named, and the rest still agree ---

SIX = {client: [client, client + 1, 100] for client in range(6)}
NODES = [[0, 1], [2, 3], [4, 5]]
# The point of order two: on the curve, but not in the group of prime order.
BAD_POINT = bytes.fromhex("ec" + "ff" * 30 + "7f")


def enrolled(stages: int = 0, nodes: Any = (1, 2, 3), form: str = "psi") -> Alignment:
    """Enrol some nodes and run the first stages."""
    alignment = Alignment(SIX, NODES, form=form)
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


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_or_wrong_key_holder_is_named_and_replaced(is_lost: bool) -> None:
    alignment = enrolled(1)
    spoilt = spoiling(alignment, 1, "evaluate", 0)
    first = alignment.exchange(
        lambda node, config: None if is_lost and node == 1 else spoilt(node, config)
    )
    assert sorted(first) == [1, 2, 3]  # key-holders on as many machines as there are
    second = alignment.exchange()
    assert not is_lost or (len(second) == 1 and 1 not in second)  # only a new one is asked
    why = "did not answer as key-holder" if is_lost else "its answer is not in the group"
    assert alignment.server.blamed == [(first[1].holders.tolist()[0], why)]
    alignment.align()
    assert alignment.agree(SIX)


def test_an_invalid_point_costs_its_supernode_alone() -> None:
    """Client 3's block had a name that client 2, at the same SuperNode, cannot do without."""
    alignment = Alignment(SIX, NODES)
    alignment.align(spoiling(alignment, 2, "blind", 17))
    why = {3: "its point 1 is not in the group", 2: "took no part in the union of tokens"}
    assert alignment.server.blamed == list(why.items())
    assert alignment.agree(set(SIX) - {2, 3})
    alignment.align()
    assert alignment.agree(SIX)


def test_names_are_dealt_evenly_and_a_state_has_those_that_are_there() -> None:
    identities = {4: [*range(40)], 2: [0, 1], 9: list[int]()}
    host = AlignmentClient(b"run", identities)
    reply = host.blind(BlindRequest(1, np.array([4, 2, 9])))
    assert reply.sizes.tolist() == [16, 16, 16]  # 41 with the common one, 14 at most in each
    assert host.points == dict.fromkeys(identities, 16)
    host = AlignmentClient.from_bytes(host.to_bytes(), b"run", identities)
    for client, block in zip([9, 4, 2], [32, 0, 16], strict=True):
        points = reply.points[block : block + 16]
        host.finish(UnionRequest(1, np.array([client]), np.array([16]), points[None], 8))
        host = AlignmentClient.from_bytes(host.to_bytes(), b"run", identities)
        assert host.finished == {9: [], 4: [9], 2: [2, 4, 9]}[client]
    assert np.array_equal(
        host.sketch(512, [2]), insert(host._names[host._numbers[4][:2], :12], 512)
    )


def test_without_key_holders_there_is_an_error() -> None:
    alignment = enrolled(1)
    alignment.exchange(lambda node, config: None)
    with pytest.raises(AlignmentError, match="0 clients"):
        alignment.exchange()


def test_a_key_holder_lost_before_others_join_starts_all_again() -> None:
    alignment = Alignment(SIX, NODES)
    alignment.align(None, 1, 2)
    assert alignment.server.epoch == 1

    def silent_at_first(node: int, config: dict[str, Any]) -> dict[str, Any] | None:
        is_first = config[ALIGN_STAGE] == "evaluate" and config["align-epoch"] == 1
        return None if is_first else alignment.reply(node, config)

    alignment.align(silent_at_first)
    assert alignment.server.epoch == 2
    assert alignment.agree(SIX)


def test_a_key_holder_left_out_of_the_union_is_missed_when_others_join() -> None:
    alignment = enrolled(1, (1, 2))
    holder = alignment.exchange()[2].holders.tolist()[0]
    assert alignment.exchange() == {}
    alignment.union(absent=[holder])
    assert alignment.server.blamed == [(holder, "took no part in the union of tokens")]
    alignment.align(None, 3)
    assert alignment.server.epoch == 2
    assert alignment.agree(set(SIX) - {holder})


def test_an_unreadable_union_is_asked_for_at_twice_the_size_and_then_given_up() -> None:
    alignment = enrolled(3)
    cells, rng = [], np.random.default_rng(0)
    with pytest.raises(AlignmentError, match="client"):
        while True:
            unions = alignment.server.union_requests()
            assert len(unions) == 3
            cells.append(next(iter(unions.values())).cells)
            noise = rng.integers(0, 2**64, 3 * cells[-1], np.uint64)
            assert not alignment.server.take_union(noise, list(SIX))
    assert len(cells) == 3 and all(b > 1.2 * a for a, b in pairwise(cells))
