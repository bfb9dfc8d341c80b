"""The whole alignment: one order for all, by any assignment, and what the server sees of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from align_helpers import RUN, Alignment, shared
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.align import identities as ids
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.messages import PublishedTokens
from flower_graph.secure.align.sketch import peel

DATA = {0: [1, 2, 3], 5: [3, 4], 2: [7, 2, 3, 9]}


def aligned(data: dict[int, Any], nodes: list[list[int]], run_id: bytes = RUN) -> Alignment:
    alignment = Alignment(data, nodes, run_id)
    alignment.enroll()
    alignment.run()
    return alignment


@pytest.mark.parametrize("nodes", [[[0, 5, 2]], [[0, 2], [5]], [[5], [2], [0]]])
def test_shared_identities_get_slots_and_others_none(nodes: list[list[int]]) -> None:
    alignment = aligned(DATA, nodes)
    slots = alignment.slots()
    assert sorted((slots.pop(2), slots.pop(3))) == [0, 1]
    assert set(slots.values()) == {-1}
    assert alignment.server.num_slots == 2
    assert alignment.server.aligned == [0, 2, 5]
    assert alignment.server.blamed == []


@settings(max_examples=8, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 100),
        st.lists(st.text(max_size=2), max_size=6, unique=True),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
)
def test_any_sets_dealt_in_any_way(data: dict[int, list[str]], nodes: int) -> None:
    clients = sorted(data)
    alignment = aligned(data, [own for i in range(nodes) if (own := clients[i::nodes])])
    slots = alignment.slots()
    placed = {identity for identity, slot in slots.items() if slot >= 0}
    assert placed == shared(data)
    assert sorted(slot for slot in slots.values() if slot >= 0) == list(range(len(placed)))


def test_holders_share_keys_and_all_share_the_group_key() -> None:
    alignment = aligned(DATA, [[0, 2], [5]])
    a, b = (host.slots for host in alignment.hosts.values())
    slot = alignment.slots()[3]
    pad_a = a.pads(RUN, 1, 4)[a.held.tolist().index(slot)]
    pad_b = b.pads(RUN, 1, 4)[b.held.tolist().index(slot)]
    assert np.array_equal(pad_a, pad_b)
    assert np.array_equal(a.group_pad(RUN, 1, 8), b.group_pad(RUN, 1, 8))


def tokens(alignment: Alignment) -> set[bytes]:
    union = peel(alignment.totals[-1])
    assert union is not None
    return {bytes(token) for token in union[0]}


def test_tokens_of_two_runs_have_nothing_in_common() -> None:
    first = tokens(aligned(DATA, [[0, 2], [5]]))
    assert len(first) == 6
    # Not even under the same number of the run: the key-holders' secrets are fresh.
    assert not first & tokens(aligned(DATA, [[0, 2], [5]]))
    assert not first & tokens(aligned(DATA, [[0, 2], [5]], b"other"))


def test_the_server_cannot_name_a_token_by_trying_identities() -> None:
    """What it could do against plain hashes: hash every candidate, with all points that it saw."""
    alignment = aligned(DATA, [[0, 2], [5]])
    seen = tokens(alignment)
    points = {p for message in alignment.received for p in _points(message)}
    for candidate in range(12):
        name = b"i:%d" % candidate
        tries = {ids.hash_to_group(RUN, name), *points}
        assert not seen & {ids.names(RUN, name, point)[0] for point in tries}
        assert ids.hash_to_group(RUN, name) not in points


def _points(message: dict[str, Any]) -> list[bytes]:
    data = message["align-points"]
    return [data[i : i + 32] for i in range(0, len(data), 32)]


def test_no_identity_is_in_any_byte_that_the_server_receives() -> None:
    words = {0: ["patient-0417", "patient-1138"], 1: ["patient-1138", "patient-2001"]}
    alignment = aligned(words, [[0], [1]])
    received = b"".join(
        value
        for message in alignment.received
        for value in message.values()
        if isinstance(value, bytes)
    ) + b"".join(total.tobytes() for total in alignment.totals)
    assert len(received) > 1000
    for identity in shared(words) | {"patient-0417"}:
        assert isinstance(identity, str)
        assert identity.encode() not in received


def test_what_the_server_receives_has_the_same_shape_for_other_data_of_the_same_size() -> None:
    def shapes(data: dict[int, list[int]]) -> list[Any]:
        alignment = aligned(data, [[0, 1], [2]])
        received = [
            [(key, len(v) if isinstance(v, bytes) else v) for key, v in message.items()]
            for message in alignment.received
        ]
        return [received, [total.shape for total in alignment.totals]]

    # Sizes show as powers of two only: 17 and the common one, 20 and 31 all fill 32 places.
    base = shapes({0: [*range(17)], 1: [*range(10, 30)], 2: [*range(5, 36)]})
    assert base == shapes({0: [*range(31)], 1: [*range(900, 917)], 2: [*range(5, 25)]})
    assert base != shapes({0: [*range(32)], 1: [*range(10, 30)], 2: [*range(5, 36)]})


def test_later_clients_keep_existing_slots_in_place() -> None:
    data = {**DATA, 8: [9, 4, 50], 9: [50]}
    alignment = Alignment(data, [[0, 2], [5], [8, 9]])
    alignment.enroll(1, 2)
    alignment.run()
    before = {i: s for i, s in alignment.slots().items() if s >= 0}
    alignment.received.clear()
    alignment.enroll()
    alignment.run()
    after = alignment.slots()
    assert {i: after[i] for i in before} == before
    assert {i for i, s in after.items() if s >= 0} == shared(data) == {2, 3, 4, 9, 50}
    # Only the newcomers blind; key-holders see their points alone.
    assert max(len(_points(message)) for message in alignment.received) == 32


def test_state_of_other_identities_is_refused() -> None:
    host = AlignmentClient(RUN, DATA)
    data = host.to_bytes()
    with pytest.raises(StateLostError):
        AlignmentClient.from_bytes(data, RUN, {**DATA, 5: [3, 5]})
    with pytest.raises(StateLostError):
        AlignmentClient.from_bytes(data, b"other", DATA)


def test_a_host_refuses_what_it_cannot_answer() -> None:
    alignment = aligned(DATA, [[0, 5, 2]])
    host = alignment.hosts[1]
    with pytest.raises(RefusedError, match="stage"):
        host.answer({"align-stage": "sing"})
    with pytest.raises(RefusedError, match=r"clients \[7\] that are not hosted"):
        host.answer({"align-stage": "blind", "align-epoch": 1, "align-clients": b"\7" + bytes(7)})
    with pytest.raises(ValueError, match=r"clients \[7\] have no tokens"):
        host.sketch(8, [0, 7])
    with pytest.raises(StateLostError, match="alignment 2"):
        host.publish(PublishedTokens(2, np.zeros((0, 12), np.uint8)))
    order = alignment.server.publications()[1].tokens
    with pytest.raises(RefusedError, match="change the order"):
        host.publish(PublishedTokens(1, order[::-1]))


def test_bad_identities_are_named_with_their_client() -> None:
    with pytest.raises(ValueError, match="client 4 has identities twice: numbers 0 and 1"):
        AlignmentClient(RUN, {1: [1], 4: [2, 2]})
    with pytest.raises(ValueError, match="clients 1 and 4 have identities of different types"):
        AlignmentClient(RUN, {1: [1], 4: ["1"]})
