"""Blinded evaluation, identities in all their forms, and unions from sums of tables alone."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings as sodium

from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import MAX_CLIENTS, cells_for, insert, order_tokens, peel
from flower_graph.secure.align.client import SlotTable, slot_table

RUN = b"run"
SECRETS = [bytes([i]) * 32 for i in (1, 2, 3)]


def test_the_blinded_way_gives_the_openly_computed_product() -> None:
    points = [ids.hash_to_group(RUN, name) for name in (b"i:1", b"i:2", b"i:30")]
    secret, epoch = b"c" * 32, 7
    block = ids.blind(dict(enumerate(points)), secret, epoch, 16)
    answers = [ids.multiply(block, ids.key_share([holder], epoch)) for holder in SECRETS]
    total = ids.add(answers)
    assert total is not None
    # Key-holders on one machine act as one.
    assert np.array_equal(total, ids.multiply(block, ids.key_share(SECRETS, epoch)))
    whole_key = b"\0" * 32
    for holder in SECRETS:
        share = ids.scalar(holder, b"key", epoch)
        whole_key = sodium.crypto_core_ed25519_scalar_add(whole_key, share)
    for number, point in enumerate(points):
        unblinded = ids.unblind(total[number].tobytes(), secret, epoch, number)
        assert unblinded == sodium.crypto_scalarmult_ed25519_noclamp(whole_key, point)


def test_blocks_show_a_power_of_two_and_valid_points_only() -> None:
    assert [ids.padded_size(n) for n in (0, 1, 16, 17, 32, 33, 1000)] == [
        16, 16, 16, 32, 32, 64, 1024
    ]  # fmt: skip
    points = {i: ids.hash_to_group(RUN, b"i:%d" % i) for i in range(17)}
    block = ids.blind(points, b"s" * 32, 1, 32)
    assert block.shape == (32, 32)
    assert ids.invalid_points(block) == []
    assert np.unique(block, axis=0).shape == block.shape


def test_blinds_differ_by_client_epoch_and_place() -> None:
    point = ids.hash_to_group(RUN, b"i:1")
    blocks = [ids.blind({3: point, 5: point}, s, e, 16) for s in SECRETS[:2] for e in (1, 2)]
    assert len({point, *(row.tobytes() for block in blocks for row in block[:2])}) == 9


def test_points_outside_the_group_are_refused_by_number() -> None:
    good = ids.hash_to_group(RUN, b"i:1")
    order_two = bytes.fromhex("ec" + "ff" * 30 + "7f")
    off_curve = b"\x02" + bytes(31)
    block = np.frombuffer(good + order_two + off_curve, np.uint8).reshape(-1, 32)
    assert ids.invalid_points(block) == [1, 2]
    with pytest.raises(ValueError, match="point 1"):
        ids.multiply(block, ids.key_share(SECRETS, 1))
    with pytest.raises(ValueError, match="answer 5"):
        ids.unblind(order_two, b"s" * 32, 1, 5)
    assert ids.add([block[2:], block[:1]]) is None


def test_names_are_bound_to_run_identity_and_key() -> None:
    point = ids.hash_to_group(RUN, b"i:1")
    name = ids.name(RUN, b"i:1", point)
    # What is hashed is framed: no two triples give the same bytes.
    framed = b"".join(len(p).to_bytes(4, "big") + p for p in (RUN, b"name", b"i:1", point))
    digest = hashlib.sha512(ids.DOMAIN + framed).digest()
    assert name == digest[:12] + digest[32:]


def test_identities_are_typed() -> None:
    assert ids.canonical([5, np.int64(-6), 2**70], "x") == [b"i:5", b"i:-6", b"i:%d" % 2**70]
    assert ids.canonical(np.array([1, 2], np.int32), "x") == [b"i:1", b"i:2"]
    assert ids.canonical(["5", "a\0", "", "é"], "x") == [b"s:5", b"s:a\0", b"s:", "s:é".encode()]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([3, "x", 4], "numbers 0 and 1"),
        ([3, 4, np.int64(3)], "client 1.*0"),
        (["a", "b", "a"], "client 1.*0"),
        ([1.0], "client 1.*0"),
        ([True], "identity.*0"),
        ([None], "0.*NoneType"),
    ],
)
def test_bad_identities_are_named(given_: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ids.canonical(given_, "client 1")


# Unions with multiplicities


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 12), np.uint8)


def test_one_token_of_one_client_by_hand() -> None:
    token = np.arange(1, 13, dtype=np.uint8)[None]
    table = insert(token, 8).reshape(3, 8)
    used = np.flatnonzero(table[0])
    assert [cell // 2 for cell in used] == [0, 1, 2, 3]  # one cell in each part
    assert set((table[0, used] & np.uint64(0xFFFF)).tolist()) == {1}
    assert set(table[1, used].tolist()) == {0x060504030201}
    assert set(table[2, used].tolist()) == {0x0C0B0A090807}
    assert np.count_nonzero(table) == 12


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.lists(st.lists(st.booleans(), min_size=60, max_size=60), max_size=9))
def test_the_sum_gives_exactly_the_union_and_its_counts(n: int, holds: list[list[bool]]) -> None:
    universe = tokens(n)
    cells = cells_for(4 * n)
    total = np.zeros(3 * cells, np.uint64)
    expected = np.zeros(n, np.int64)
    for row in holds:
        own = np.array(row[:n], bool)
        total += insert(universe[own], cells)
        expected += own
    union = peel(total)
    assert union is not None
    found = dict(zip(map(bytes, union[0]), union[1].tolist(), strict=True))
    pairs = zip(universe, expected.tolist(), strict=True)
    assert found == {bytes(token): count for token, count in pairs if count}
    assert list(found) == sorted(found)


def test_as_many_clients_as_are_allowed() -> None:
    own = np.full((20, 12), 255, np.uint8)
    own[:, 0] = np.arange(20)
    with np.errstate(over="ignore"):
        union = peel(insert(own, cells_for(20)) * np.uint64(MAX_CLIENTS))
    assert union is not None and union[1].tolist() == [MAX_CLIENTS] * 20
    assert {bytes(token) for token in union[0]} == {bytes(token) for token in own}


def test_too_small_a_table_is_seen_and_the_next_size_is_read() -> None:
    many = tokens(10_000)
    assert peel(insert(many, cells_for(5_000))) is None
    union = peel(insert(many, cells_for(10_000)))
    assert union is not None and len(union[0]) == 10_000


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63))
def test_what_is_no_sum_of_tables_is_not_read(seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 2**64, 12 * 20, np.uint64)
    assert peel(noise) is None


# Slots and pads: the same at all holders, and nobody else's --------------------------------------

A, B, C, D = (np.full((1, 12), byte, np.uint8) for byte in (9, 3, 5, 7))
NONE = np.zeros((0, 12), np.uint8)


def rows(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def named(*pairs: tuple[np.ndarray, int]) -> np.ndarray:
    """Put tokens and keys side by side."""
    return rows(
        *(np.append(token, [number] * 32).astype(np.uint8)[None] for token, number in pairs)
    )


def two_clients() -> SlotTable:
    names = {4: named((A, 1), (B, 2)), 2: named((C, 3), (A, 1), (D, 4))}
    return slot_table(rows(C, A), names, b"g" * 32)


def test_new_shared_tokens_are_appended_and_single_ones_left_out() -> None:
    first = order_tokens(NONE, rows(B, C, A), np.array([1, 2, 3]))
    assert np.array_equal(first, rows(C, A))
    second = order_tokens(first, rows(B, C, D, A), np.array([2, 1, 1, 4]))
    assert np.array_equal(second, rows(C, A, B))


def test_pads_are_shake_of_the_context_and_the_key_wherever_the_holder_is() -> None:
    both = two_clients()
    slots = {client: slots.tolist() for client, slots in both.by_client.items()}
    assert (slots, both.num_slots, both.held.tolist()) == ({4: [1, -1], 2: [0, 1, -1]}, 2, [0, 1])
    context = b"flower-graph/pad/2/\0\0\0\3run\0\0\0\4slot"
    context += (5).to_bytes(8, "big") + (3).to_bytes(8, "big")
    expected = [hashlib.shake_128(context + key * 32).digest(24) for key in (b"\3", b"\1")]
    assert [pad.tobytes() for pad in both.pads(RUN, 5, 3)] == expected
    one = slot_table(rows(C, A), {9: named((B, 2), (A, 1))}, b"g" * 32)
    assert one.held.tolist() == [1]
    assert one.pads(RUN, 5, 3).tobytes() == expected[1]
    common = one.group_pad(RUN, 5, 9)
    assert np.array_equal(common, both.group_pad(RUN, 5, 9))
    for other in (one.group_pad(b"other", 5, 9), one.group_pad(RUN, 6, 9), both.pads(RUN, 5, 9)[1]):
        assert not (other == common).any()
