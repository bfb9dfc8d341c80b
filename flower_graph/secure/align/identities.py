"""Identities under a keyed hash whose key nobody has, on the prime-order group of Ed25519.

Clients want one name for the same identity that tells nobody else what the identity is. A plain
hash would not do: whoever can list the identities can hash them all. So the name of an identity is
``F(id) = SHA-512(id, k · H(id))``, where ``k`` is the sum of the secrets of a few clients, the
*key-holders*. A client learns ``k · H(id)`` without showing the identity: it sends
``r · H(id)`` for a random ``r``, which is a uniformly random point; every key-holder multiplies it
by its own secret; the client divides the sum by ``r``. This is 2HashDH, the oblivious
pseudo-random function of RFC 9497 in its unverified mode, with the key split by addition: it takes
all key-holders together to try out identities.

Group operations are libsodium's, the hashes are ``hashlib``'s. Points and scalars are 32 bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
from nacl import bindings as sodium
from nacl.exceptions import RuntimeError as SodiumError

from flower_graph.secure.align.messages import MIN_BLOCK, POINT, TOKEN, Bytes2D
from flower_graph.secure.channel import framed, pieces, rows_of

KEY = 32  # bytes of a slot's secret
DOMAIN = b"flower-graph/alignment/1/"
# All clients also evaluate this one, which no identity can be: its key is common to the run.
GROUP_IDENTITY = b"g:"


def canonical(identities: Iterable[object], owner: str) -> list[bytes]:
    """Write identities as bytes that are equal exactly if the identities are."""
    given = identities.tolist() if isinstance(identities, np.ndarray) else list(identities)
    texts = [_canonical(identity, number, owner) for number, identity in enumerate(given)]
    # Places, never names: Flower sends the text of a client's error to the server.
    if len({text[:1] for text in texts}) > 1:
        number = next(n for n, text in enumerate(texts) if text[:1] == b"i")
        word = next(n for n, text in enumerate(texts) if text[:1] == b"s")
        raise ValueError(
            f"{owner} has identities of mixed types: number {number} is an integer, number {word} "
            "a string; use integers or strings throughout"
        )
    if len(set(texts)) < len(texts):
        first = {text: number for number, text in reversed(list(enumerate(texts)))}
        twice = next((first[t], n) for n, t in enumerate(texts) if first[t] != n)
        raise ValueError(f"{owner} has identities twice: numbers {twice[0]} and {twice[1]}")
    return texts


def _canonical(identity: object, number: int, owner: str) -> bytes:
    if isinstance(identity, str):
        return b"s:" + identity.encode()
    if isinstance(identity, (int, np.integer)) and not isinstance(identity, bool):
        return b"i:%d" % int(identity)
    raise ValueError(
        f"{owner}: its identity number {number} is of type {type(identity).__name__}; identities "
        "are integers or strings"
    )


def scalar(secret: bytes, purpose: bytes, number: int) -> bytes:
    """Derive a scalar from a secret; independent for every purpose and number."""
    wide = hashlib.blake2b(
        number.to_bytes(16, "little"), key=secret, person=purpose, digest_size=64
    ).digest()
    return sodium.crypto_core_ed25519_scalar_reduce(wide)


def hash_to_group(run_id: bytes, identity: bytes) -> bytes:
    """Map an identity to a point whose logarithm nobody knows, ``H(id)``."""
    # One application of libsodium's map reaches its points unevenly; the sum of two does not, which
    # is what RFC 9380 asks for.
    wide = hashlib.sha512(DOMAIN + framed(run_id, b"hash", identity)).digest()
    return sodium.crypto_core_ed25519_add(
        sodium.crypto_core_ed25519_from_uniform(wide[:32]),
        sodium.crypto_core_ed25519_from_uniform(wide[32:]),
    )


def padded_size(count: int) -> int:
    """Return the size of the block that shows nothing of ``count`` but its power of two."""
    return max(MIN_BLOCK, 1 << (count - 1).bit_length()) if count > 0 else MIN_BLOCK


def blind(points: Sequence[bytes], secret: bytes, epoch: int) -> Bytes2D:
    """Blind points and fill the block up with random ones."""
    block = [
        sodium.crypto_scalarmult_ed25519_noclamp(_blind_scalar(secret, epoch, i), point)
        for i, point in enumerate(points)
    ]
    for _ in range(padded_size(len(points)) - len(points)):
        random = sodium.crypto_core_ed25519_scalar_reduce(os.urandom(64))
        block.append(sodium.crypto_scalarmult_ed25519_base_noclamp(random))
    return rows_of(block, -1, POINT)


def unblind(point: bytes, secret: bytes, epoch: int, number: int) -> bytes:
    """Divide the key-holders' answer by the blind of the ``number``-th point of ``blind``."""
    # Raises ``ValueError`` if the answer is no point of the group.
    inverse = sodium.crypto_core_ed25519_scalar_invert(_blind_scalar(secret, epoch, number))
    try:
        return sodium.crypto_scalarmult_ed25519_noclamp(inverse, point)
    except SodiumError as error:
        raise ValueError(f"answer {number} is not in the group: {point.hex()}") from error


def key_share(secrets: Sequence[bytes], epoch: int) -> bytes:
    """Return the key-holders' shares of the key, added up: several on one machine act as one."""
    shares = [scalar(secret, b"key", epoch) for secret in secrets]
    return reduce(sodium.crypto_core_ed25519_scalar_add, shares)


def multiply(points: Bytes2D, factor: bytes) -> Bytes2D:
    """Multiply all points ``[n, 32]`` by a scalar; ``ValueError`` names one that is no point."""
    products = []
    for number, point in enumerate(pieces(points)):
        try:
            products.append(sodium.crypto_scalarmult_ed25519_noclamp(factor, point))
        except SodiumError as error:
            raise ValueError(f"point {number} is not in the group: {point.hex()}") from error
    return rows_of(products, -1, POINT)


def add(blocks: Sequence[Bytes2D]) -> Bytes2D | None:
    """Add blocks of points ``[n, 32]`` up; None if one of them is off the curve."""
    try:
        total = [
            reduce(sodium.crypto_core_ed25519_add, points)
            for points in zip(*map(pieces, blocks), strict=True)
        ]
    except SodiumError:
        return None
    return rows_of(total, -1, POINT)


def invalid_points(points: Bytes2D) -> list[int]:
    """Return the numbers of those rows that are no points of the group."""
    valid = sodium.crypto_core_ed25519_is_valid_point
    return [number for number, point in enumerate(pieces(points)) if not valid(point)]


def names(run_id: bytes, identity: bytes, point: bytes) -> tuple[bytes, bytes]:
    """Return token and slot key of an identity from ``k · H(id)``."""
    # They are separate parts of one hash: who sees the token learns nothing of the key.
    digest = hashlib.sha512(DOMAIN + framed(run_id, b"name", identity, point)).digest()
    return digest[:TOKEN], digest[-KEY:]


def _blind_scalar(secret: bytes, epoch: int, number: int) -> bytes:
    return scalar(secret, b"blind", epoch << 64 | number)
