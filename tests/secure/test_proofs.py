"""Proofs of equal logarithms: right ones hold, and nothing else does."""

import os
from dataclasses import replace

import numpy as np
import pytest
from nacl import bindings as sodium

from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    ORDER,
    PROOF,
    Claim,
    _statement,
    _to_scalar,
    _weights,
    prove,
    public_of,
    verify,
)
from flower_graph.secure.channel import pieces, rows_of


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
