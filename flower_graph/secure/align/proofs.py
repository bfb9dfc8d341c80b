"""Proofs that points were multiplied by the scalar of a public key: DLEQ, after RFC 9497, 2.2.

A suite of our own, as libsodium's Python bindings have no ristretto255: the group is the subgroup
of prime order of edwards25519, with libsodium's 32-byte points and scalars; the hash is SHA-512; a
hash becomes a scalar by reduction of its 64 bytes. ``HashToScalar`` and ``Hash`` take, as the RFC
has it, every part behind its length, here of four bytes, and a name that ends in ``SUITE``; the
context, which says whose block of which alignment it is, is a further part. One proof covers a
whole block: prover and verifier make the same random-looking combination of all its points
(*composites*), and the proof says that the combination of the answers is the key's multiple of that
of the inputs.

A point of small order, or one beside the subgroup, is refused everywhere: with it a proof would say
less.
"""

from __future__ import annotations

import hashlib
import os
from functools import reduce

from nacl import bindings as sodium
from nacl.exceptions import RuntimeError as SodiumError

from flower_graph.secure.align.blinded import POINT, Bytes2D
from flower_graph.secure.channel import framed, pieces

SUITE = b"flower-graph/DLEQ/edwards25519-SHA512/1"
ORDER = 2**252 + 27742317777372353535851937790883648493
PROOF = 2 * POINT  # bytes: challenge and response

_multiply = sodium.crypto_scalarmult_ed25519_noclamp
_multiply_base = sodium.crypto_scalarmult_ed25519_base_noclamp
_add = sodium.crypto_core_ed25519_add


def public_of(key: bytes) -> bytes:
    """Return the public key of a scalar."""
    return _multiply_base(key)


def prove(
    key: bytes, public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes = b""
) -> bytes:
    """Prove that ``outputs`` are ``inputs`` times ``key``, whose public key is ``public``.

    Parameters
    ----------
    key, public : bytes, shape (32,)
        The scalar, and it times the base point.
    inputs, outputs : ndarray, shape (n, 32)
        Points of the group.
    context : bytes
        What the proof is for.

    Returns
    -------
    bytes, shape (64,)
        Challenge and response.

    Raises
    ------
    ValueError
        A point that is not in the group, or blocks of different or no length.
    """
    weights = _weights(public, inputs, outputs, context)
    try:
        combined = _combine(weights, inputs)
        answer = _multiply(key, combined)
        nonce = _to_scalar(b"Nonce", key, os.urandom(64), combined, answer)
        seen = _multiply_base(nonce), _multiply(nonce, combined)
    except SodiumError as error:
        raise ValueError("an input of the proof is not in the group") from error
    challenge = _challenge(public, combined, answer, *seen, context)
    told = sodium.crypto_core_ed25519_scalar_mul(challenge, key)
    return challenge + sodium.crypto_core_ed25519_scalar_sub(nonce, told)


def verify(
    proof: bytes, public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes = b""
) -> bool:
    """Tell whether a proof of ``prove`` holds; every point is looked at, also those of the key."""
    if len(proof) != PROOF or inputs.shape != outputs.shape or not len(inputs):
        return False
    challenge, response = proof[:POINT], proof[POINT:]
    # Another way to write the same scalar would be another proof
    if any(int.from_bytes(part, "little") >= ORDER for part in (challenge, response)):
        return False
    if not sodium.crypto_core_ed25519_is_valid_point(public):
        return False
    weights = _weights(public, inputs, outputs, context)
    try:
        combined, answer = _combine(weights, inputs), _combine(weights, outputs)
        base = _add(_multiply_base(response), _multiply(challenge, public))
        other = _add(_multiply(response, combined), _multiply(challenge, answer))
    except SodiumError:
        return False
    return _challenge(public, combined, answer, base, other, context) == challenge


def _weights(public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes) -> list[bytes]:
    if inputs.shape != outputs.shape or not len(inputs):
        raise ValueError(f"{len(outputs)} answers to {len(inputs)} points; both must be the same")
    seed = hashlib.sha512(framed(public, context, b"Seed-" + SUITE)).digest()
    pairs = zip(pieces(inputs), pieces(outputs), strict=True)
    return [
        _to_scalar(b"Composite", seed, number.to_bytes(4, "big"), *pair)
        for number, pair in enumerate(pairs)
    ]


def _combine(weights: list[bytes], points: Bytes2D) -> bytes:
    """Add up weighted points; libsodium refuses those that are not in the group."""
    return reduce(_add, map(_multiply, weights, pieces(points)))


def _challenge(*parts: bytes) -> bytes:
    return _to_scalar(b"Challenge", *parts)


def _to_scalar(purpose: bytes, *parts: bytes) -> bytes:
    wide = hashlib.sha512(framed(*parts, purpose, b"HashToScalar-" + SUITE)).digest()
    return sodium.crypto_core_ed25519_scalar_reduce(wide)
