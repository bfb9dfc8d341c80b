"""Blinded identities, the union of tokens, pads of slots, and proofs of multiplied points."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings as sodium

from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    MAX_CLIENTS,
    ORDER,
    PROOF,
    Claim,
    _statement,
    _to_scalar,
    _weights,
    cells_for,
    insert,
    order_tokens,
    peel,
    prove,
    public_of,
    verify,
)
from flower_graph.secure.align.client import SlotTable, slot_table
from flower_graph.secure.channel import pieces, rows_of
from flower_graph.secure.ring import CHECKS

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
    with pytest.raises(ValueError, match=order_two.hex()):
        ids.multiply(block, ids.key_share(SECRETS, 1))
    with pytest.raises(ValueError, match="group"):
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
    context = b"flower-graph/pad/3/\0\0\0\3run\0\0\0\4slot"
    context += (5).to_bytes(8, "big") + (3).to_bytes(8, "big")
    expected = [hashlib.shake_128(context + key * 32).digest(24) for key in (b"\3", b"\1")]
    assert [pad.tobytes() for pad in both.pads(RUN, 5, 3)] == expected
    one = slot_table(rows(C, A), {9: named((B, 2), (A, 1))}, b"g" * 32)
    assert one.held.tolist() == [1]
    assert one.pads(RUN, 5, 3).tobytes() == expected[1]
    common = one.common_pad(RUN, 5, 9).words
    assert np.array_equal(common, both.common_pad(RUN, 5, 9).words)
    others = [one.common_pad(*of, 9).words for of in ((b"other", 5), (RUN, 6))]
    checked = one.common_pad(RUN, 5, 9, checked=True)
    assert checked.subsets is not None and checked.words.size == 9 + CHECKS
    for other in (*others, both.pads(RUN, 5, 9)[1], checked.words[:9], checked.subsets):
        assert not (other == common).any()


def a_scalar(number: int = 0) -> bytes:
    """A small number as a scalar, or a random one."""
    return number.to_bytes(32, "little") if number else ids.scalar(os.urandom(32), b"test", 0)


def some_points(*logs: int):
    """Multiples of the base point."""
    return rows_of([public_of(a_scalar(log)) for log in logs], -1, 32)


def holds(proof, public, inputs, outputs, context=b""):
    return verify(inputs, [Claim(public, outputs, proof, context)])


def proved(key, inputs, context=b""):
    outputs = ids.multiply(inputs, key)
    return prove(key, public_of(key), inputs, outputs, context), outputs


@pytest.mark.parametrize("logs", [(1,), (5, 7), (2, 2, 3, 9)])
def test_answers_are_proved(logs):
    key, inputs = a_scalar(11), some_points(*logs)
    proof, outputs = proved(key, inputs)
    assert len(proof) == PROOF
    assert np.array_equal(outputs, some_points(*(11 * log for log in logs)))
    assert holds(proof, public_of(key), inputs, outputs)
    assert proved(key, inputs)[0] != proof  # a fresh nonce each time


def test_no_secret_scalar_becomes_a_python_integer(monkeypatch):
    """Python multiplies integers in a time that depends on them; libsodium does not."""
    seen, nonces, challenge = [], [], ids._to_scalar

    class Watched(int):
        @classmethod
        def from_bytes(cls, data, *order):
            seen.append(bytes(data))
            return int.from_bytes(data, *order)

    def noted(purpose, *parts):
        found = challenge(purpose, *parts)
        nonces.extend([found] if purpose == b"Nonce" else [])
        return found

    monkeypatch.setattr(ids, "int", Watched, raising=False)
    monkeypatch.setattr(ids, "_to_scalar", noted)
    secrets = [os.urandom(32), os.urandom(32)]
    key, inputs = ids.key_share(secrets, 1), some_points(2, 3)
    proof, outputs = proved(key, inputs)
    assert nonces and not {key, *secrets, *nonces}.intersection(seen)
    assert holds(proof, public_of(key), inputs, outputs)
    assert proof[2 * 32 :] in seen  # what is public is an integer at the verifier: the watch works


def number(scalar: bytes) -> int:
    return int.from_bytes(scalar, "little")


def test_what_is_hashed_satisfies_the_equations():
    """With known logarithms everything can be computed in integers."""
    logs, key = (3, 8, 21), 12345
    inputs = some_points(*logs)
    proof, outputs = proved(a_scalar(key), inputs, b"of")
    public, response = public_of(a_scalar(key)), number(proof[64:])
    said = _statement(public, inputs, outputs, b"of")
    challenge = number(_to_scalar(b"Challenge", said, proof[:64]))
    combined = sum(w * log for w, log in zip(_weights(said, 3), logs, strict=True)) % ORDER
    nonce = (response + challenge * key) % ORDER
    assert proof[:32] == public_of(nonce.to_bytes(32, "little"))
    assert proof[32:64] == public_of((nonce * combined % ORDER).to_bytes(32, "little"))


def test_several_proofs_about_one_block_hold_together_or_not_at_all():
    inputs, keys = some_points(4, 6, 10), [a_scalar() for _ in range(3)]
    claims = []
    for key in keys:
        proof, outputs = proved(key, inputs, b"of")
        claims.append(Claim(public_of(key), outputs, proof, b"of"))
    assert verify(inputs, claims) and verify(inputs, claims[:2]) and not verify(inputs, [])
    # What one adds and another takes away is noticed, though the sum is right.
    shift = pieces(some_points(7))[0]
    first, second = (pieces(claim.outputs)[0] for claim in claims[:2])
    wrong = list(claims)
    for place, point, move in (
        (0, first, sodium.crypto_core_ed25519_add),
        (1, second, sodium.crypto_core_ed25519_sub),
    ):
        outputs = rows_of([move(point, shift), *pieces(claims[place].outputs)[1:]], -1, 32)
        proof = prove(keys[place], claims[place].public, inputs, outputs, b"of")
        wrong[place] = Claim(claims[place].public, outputs, proof, b"of")
    assert not verify(inputs, wrong)
    assert not verify(inputs, [replace(claims[0], proof=claims[1].proof), *claims[1:]])


def changed(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_nothing_else_is_proved():
    key, other, inputs = a_scalar(), a_scalar(), some_points(4, 6, 10)
    proof, outputs = proved(key, inputs, b"one")
    public = public_of(key)
    assert holds(proof, public, inputs, outputs, b"one")
    assert not holds(proof, public, inputs, outputs, b"two")
    assert not holds(proof, public_of(other), inputs, outputs, b"one")
    assert not holds(proof, public, outputs, inputs, b"one")
    assert not holds(proof, public, inputs, outputs[[1, 0, 2]], b"one")
    assert not holds(proof, public, inputs[[1, 0, 2]], outputs[[1, 0, 2]], b"one")
    assert not holds(proof, public, inputs, ids.multiply(inputs, other), b"one")
    assert not holds(proof, public, inputs[:2], outputs[:2], b"one")
    one_of_many = np.concatenate([outputs[:2], ids.multiply(inputs[2:], other)])
    assert not holds(prove(key, public, inputs, one_of_many), public, inputs, one_of_many)
    for place in (0, 31, 32, 63, 64, 95):
        assert not holds(changed(proof, place), public, inputs, outputs, b"one")
    assert not holds(proof[:-1], public, inputs, outputs, b"one")
    assert not holds(b"", public, inputs[:0], outputs[:0], b"one")


def test_a_proof_can_be_written_in_one_way():
    key, inputs = a_scalar(), some_points(5)
    proof, outputs = proved(key, inputs)
    other = proof[:64] + (number(proof[64:]) + ORDER).to_bytes(32, "little")
    assert not holds(other, public_of(key), inputs, outputs)


BAD = {
    "order two": bytes.fromhex("ec" + "ff" * 30 + "7f"),
    "neutral": (1).to_bytes(32, "little"),
    "not canonical": (2**255 - 18).to_bytes(32, "little"),
    "off the curve": (2).to_bytes(32, "little"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_points_that_are_not_in_the_group_are_refused(bad):
    key, inputs = a_scalar(), some_points(5, 6)
    proof, outputs = proved(key, inputs)
    first, second = pieces(outputs)
    wrong = rows_of([first, bad], -1, 32)
    assert not holds(proof, public_of(key), inputs, wrong)
    assert not holds(proof, public_of(key), wrong, outputs)
    assert not holds(proof, bad, inputs, outputs)
    with pytest.raises(ValueError, match="group"):
        prove(key, public_of(key), wrong, outputs)
    shifted = sodium.crypto_core_ed25519_add(second, BAD["order two"])  # out of the subgroup
    assert not holds(proof, public_of(key), inputs, rows_of([first, shifted], -1, 32))
