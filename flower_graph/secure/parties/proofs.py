"""Proofs that points were multiplied by the scalar of a public key: DLEQ, after RFC 9497, 2.2.

A suite of our own, as libsodium's Python bindings have no ristretto255: the group is the subgroup
of prime order of edwards25519, with libsodium's 32-byte points and scalars; the hashes are SHA-512
and SHAKE-256, over parts behind their lengths and a name that begins with ``SUITE``. As in the RFC,
prover and verifier make the same random-looking combination of all points of a block
(*composites*), and the proof says that the combination of the answers is the key's multiple of that
of the inputs. It differs in two ways, which make several proofs about one block cheaper to check:

- All is hashed once: the public key, the context, which says whose block of which alignment it is,
  and all points. Weights, of 128 bits, and the challenge come from that hash.
- A proof consists of the two commitments and the response, not of challenge and response. Then the
  statement to check is linear in the points, and the checks of several key-holders' answers to one
  block can be added up, each times a random number of the verifier's own: the inputs are multiplied
  once for all of them. A verifier is fooled with a chance of 2^-128.

A point of small order, or one beside the subgroup, is refused everywhere: with it a proof would say
less.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from nacl import bindings as sodium
from nacl.exceptions import RuntimeError as SodiumError

from flower_graph.secure.align.blinded import POINT, PROOF, Bytes2D
from flower_graph.secure.channel import framed, pieces

SUITE = b"flower-graph/DLEQ/edwards25519-SHA512/2"
ORDER = 2**252 + 27742317777372353535851937790883648493
WEIGHT = 16  # bytes

_multiply = sodium.crypto_scalarmult_ed25519_noclamp
_multiply_base = sodium.crypto_scalarmult_ed25519_base_noclamp
_add = sodium.crypto_core_ed25519_add
_times = sodium.crypto_core_ed25519_scalar_mul


@dataclass(frozen=True)
class Claim:
    """That ``outputs`` are the inputs times the scalar of ``public``, with a proof of it."""

    public: bytes
    outputs: Bytes2D
    proof: bytes
    context: bytes = b""


def public_of(key: bytes) -> bytes:
    """Return the public key of a scalar."""
    return _multiply_base(key)


def prove(
    key: bytes, public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes = b""
) -> bytes:
    """Prove that ``outputs`` are ``inputs`` times ``key``, whose public key is ``public``.

    ``inputs`` and ``outputs`` are points of the group, [n, 32]; ``context`` is what the proof is
    for. The proof has 96 bytes: commitments to the nonce, over the base point and over the inputs,
    and the response. ``ValueError`` for a point that is not in the group, or blocks of different or
    no length.
    """
    if inputs.shape != outputs.shape or not len(inputs):
        raise ValueError(f"{len(outputs)} answers to {len(inputs)} points; both must be the same")
    statement = _statement(public, inputs, outputs, context)
    # Random, and bound to key and statement in case the source of randomness is a poor one
    nonce = _to_scalar(b"Nonce", key, os.urandom(64), statement)
    try:
        weights = map(_scalar, _weights(statement, len(inputs)))
        combined = reduce(_add, map(_multiply, weights, pieces(inputs)))
        seen = _multiply_base(nonce) + _multiply(nonce, combined)
    except SodiumError as error:
        raise ValueError("an input of the proof is not in the group") from error
    # Key and nonce stay libsodium's, whose time does not depend on them; Python's integers' does.
    secret = _times(_to_scalar(b"Challenge", statement, seen), key)
    return seen + sodium.crypto_core_ed25519_scalar_sub(nonce, secret)


def verify(inputs: Bytes2D, claims: Sequence[Claim]) -> bool:
    """Tell whether all proofs of ``prove`` about the same inputs hold; every point is checked."""
    # Each claim over the base point, and all together over the inputs
    n, of_inputs, terms, seen = len(inputs), [0] * len(inputs), [], []
    if not claims:
        return False
    try:
        for claim in claims:
            proof, public, shape = claim.proof, claim.public, claim.outputs.shape
            response = int.from_bytes(proof[2 * POINT :], "little")
            # Another way to write the same scalar would be another proof.
            if len(proof) != PROOF or inputs.shape != shape or not n or response >= ORDER:
                return False
            statement = _statement(public, inputs, claim.outputs, claim.context)
            wide = _to_scalar(b"Challenge", statement, proof[: 2 * POINT])
            challenge = int.from_bytes(wide, "little")
            # Response times base plus challenge times key is the commitment; so over the inputs.
            base = _add(_multiply_base(_scalar(response)), _multiply(_scalar(challenge), public))
            if base != proof[:POINT]:
                return False
            factor = int.from_bytes(os.urandom(WEIGHT), "little")
            weights = [factor * weight for weight in _weights(statement, n)]
            of_inputs = [s + response * w for s, w in zip(of_inputs, weights, strict=True)]
            points = zip(weights, pieces(claim.outputs), strict=True)
            terms += [(challenge * weight, point) for weight, point in points]
            seen.append(_multiply(_scalar(factor), proof[POINT : 2 * POINT]))
        terms += zip(of_inputs, pieces(inputs), strict=True)
        total = reduce(_add, (_multiply(_scalar(factor), point) for factor, point in terms))
        return total == reduce(_add, seen)
    except SodiumError:  # a point that is not in the group
        return False


def failing(inputs: Bytes2D, claims: Mapping[int, Claim]) -> list[int]:
    """Return the key-holders whose proofs about the same inputs do not hold."""
    if verify(inputs, list(claims.values())):
        return []
    return [holder for holder, claim in claims.items() if not verify(inputs, [claim])]


def _statement(public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes) -> bytes:
    points = inputs.tobytes(), outputs.tobytes()
    return hashlib.sha512(framed(SUITE + b"/Statement", public, context, *points)).digest()


def _weights(statement: bytes, count: int) -> list[int]:
    """Derive the weights of a block's points from the statement, so that nobody can choose them."""
    stream = hashlib.shake_256(framed(SUITE + b"/Composite", statement)).digest(WEIGHT * count)
    places = range(0, len(stream), WEIGHT)
    return [int.from_bytes(stream[start : start + WEIGHT], "little") for start in places]


def _to_scalar(purpose: bytes, *parts: bytes) -> bytes:
    wide = hashlib.sha512(framed(SUITE + b"/" + purpose, *parts)).digest()
    return sodium.crypto_core_ed25519_scalar_reduce(wide)


def _scalar(number: int) -> bytes:
    return (number % ORDER).to_bytes(POINT, "little")
