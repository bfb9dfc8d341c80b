"""Shamir's secret sharing of 32-byte secrets, modulo the smallest prime above 2^256.

The secret is the constant term of a random polynomial of degree ``threshold - 1``; holder number
``x`` (from 1) has its value at ``x``. Any ``threshold`` values give the polynomial; fewer leave
every secret equally likely.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
# Coefficients are 48 random bytes modulo the prime: no value is likelier than another by 2^-127.
RANDOM_BYTES = 48


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into shares."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes, must have {SECRET_BYTES}")
    if not 1 <= threshold <= count:
        raise ValueError(f"threshold is {threshold}, must be from 1 to {count}")
    noise = os.urandom(RANDOM_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(noise[start : start + RANDOM_BYTES], "little") % PRIME
        for start in range(0, len(noise), RANDOM_BYTES)
    ]
    coefficients.append(int.from_bytes(secret, "little"))
    return [_evaluate(coefficients, x).to_bytes(SHARE_BYTES, "little") for x in range(1, count + 1)]


def combine(holders: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """Give the secret back from as many shares as the threshold."""
    weights = _weights_at_zero(tuple(holders))
    value = sum(
        weight * int.from_bytes(share, "little")
        for weight, share in zip(weights, shares, strict=True)
    )
    value %= PRIME
    if value >> (8 * SECRET_BYTES):
        raise ValueError("the shares give no secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "little")


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    """Evaluate a polynomial, highest power first; reduced once, as x is small."""
    value = 0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value % PRIME


@lru_cache(maxsize=4096)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights for the value at zero; many secrets have the same holders."""
    if len(set(holders)) != len(holders) or not all(0 < x < PRIME for x in holders):
        raise ValueError(f"holders are {holders}, must be positive and each there once")
    weights = []
    for x in holders:
        above = below = 1
        for other in holders:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
