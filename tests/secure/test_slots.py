"""Slots and pads: the same at all holders, and nobody else's."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from flower_graph.secure.align.blinded import order_tokens
from flower_graph.secure.align.slots import SlotTable, open_table, slot_table

A, B, C, D = (np.full((1, 12), byte, np.uint8) for byte in (9, 3, 5, 7))
NONE = np.zeros((0, 12), np.uint8)
RUN = b"run"


def rows(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def keys(*numbers: int) -> np.ndarray:
    return np.array([[number] * 32 for number in numbers], np.uint8)


def two_clients() -> SlotTable:
    tokens = {4: rows(A, B), 2: rows(C, A, D)}
    return slot_table(rows(C, A), tokens, {4: keys(1, 2), 2: keys(3, 1, 4)}, b"g" * 32)


def test_new_shared_tokens_are_appended_and_single_ones_left_out() -> None:
    first = order_tokens(NONE, rows(B, C, A), np.array([1, 2, 3]))
    assert np.array_equal(first, rows(C, A))
    second = order_tokens(first, rows(B, C, D, A), np.array([2, 1, 1, 4]))
    assert np.array_equal(second, rows(C, A, B))


def test_slots_by_hand() -> None:
    table = two_clients()
    slots = {client: slots.tolist() for client, slots in table.by_client.items()}
    assert slots == {4: [1, -1], 2: [0, 1, -1]}
    assert table.num_slots == 2
    assert table.held.tolist() == [0, 1]
    assert np.array_equal(table.keys, keys(3, 1))


def test_no_clients_and_no_slots() -> None:
    empty = slot_table(NONE, {1: rows(A)}, {1: keys(1)}, b"g" * 32)
    assert empty.by_client[1].tolist() == [-1]
    assert empty.pads(RUN, 1, 4).shape == (0, 4)
    assert slot_table(rows(A), {}, {}, b"").held.size == 0


def test_pads_are_shake_of_the_context_and_the_key_wherever_the_holder_is() -> None:
    both = two_clients()
    context = b"flower-graph/pad/2/\0\0\0\3run\0\0\0\4slot"
    context += (5).to_bytes(8, "big") + (3).to_bytes(8, "big")
    expected = [hashlib.shake_128(context + key * 32).digest(24) for key in (b"\3", b"\1")]
    assert [pad.tobytes() for pad in both.pads(RUN, 5, 3)] == expected
    one = slot_table(rows(C, A), {9: rows(B, A)}, {9: keys(2, 1)}, b"g" * 32)
    assert one.held.tolist() == [1]
    assert one.pads(RUN, 5, 3).tobytes() == expected[1]
    assert np.array_equal(one.group_pad(RUN, 5, 9), both.group_pad(RUN, 5, 9))


def test_pads_of_two_lengths_have_nothing_in_common() -> None:
    table = two_clients()
    assert not (table.pads(RUN, 1, 8)[:, :4] == table.pads(RUN, 1, 4)).any()
    assert not (table.group_pad(RUN, 1, 8)[:4] == table.group_pad(RUN, 1, 4)).any()


def test_pads_differ_by_run_round_slot_and_purpose() -> None:
    table = two_clients()
    streams = [table.pads(run, number, 8) for run in (RUN, b"other") for number in (1, 2)]
    streams += [table.group_pad(run, 1, 8)[None] for run in (RUN, b"other")]
    everything = np.concatenate(streams)
    assert np.unique(everything, axis=0).shape == (10, 8)


def test_a_sum_under_pads_comes_out_exactly() -> None:
    """How pads are used, and that below the guard bits there is nothing but the group's pad."""
    table, holders, guard = two_clients(), 2, 2
    contributors = 4
    values = np.array([[5, 2**40], [7, 1]], np.uint64)  # one row for each holder of slot 1
    pad, group = table.pads(RUN, 1, 2)[1], table.group_pad(RUN, 1, 2)
    sent = [((value + pad) << np.uint64(guard)) + group for value in values]
    sent += [group] * (contributors - holders)
    total = np.sum(sent, axis=0, dtype=np.uint64)
    low = np.uint64((1 << guard) - 1)
    assert not (total & low).any()  # 4 · group: whatever the holders' number, even or odd
    padded = (total - np.uint64(contributors) * group) >> np.uint64(guard)
    ring = np.uint64(2 ** (64 - guard) - 1)
    assert ((padded - np.uint64(holders) * pad) & ring).tolist() == [12, 2**40 + 1]


def test_clear_alignments_have_no_pads() -> None:
    table = open_table(3, {1: np.array([2, -1]), 0: np.array([0, 2])})
    assert table.held.tolist() == [0, 2]
    with pytest.raises(ValueError, match="keys"):
        table.pads(RUN, 1, 4)
    with pytest.raises(ValueError, match="common"):
        table.group_pad(RUN, 1, 4)


def test_pads_are_made_once_a_round() -> None:
    table = two_clients()
    first, common = table.pads(RUN, 1, 4), table.group_pad(RUN, 1, 9)
    assert table.pads(RUN, 1, 4).base is first.base
    assert table.group_pad(RUN, 1, 9) is common
    assert not first.flags.writeable, "they are handed out again"
    assert (table.pads(RUN, 2, 4) != first).all()
    assert np.array_equal(table.pads(RUN, 1, 4), first)
