"""Secrets of 32 bytes in Shamir's shares, modulo the smallest prime above 2^256.

A secret is the constant term of a random polynomial of degree ``threshold - 1``; holder number
``x`` (from 1) has its value at ``x``. Any ``threshold`` values give the polynomial; fewer leave
every secret equally likely.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
MOST_HOLDERS = 1 << 15
REDUCED = 32  # steps of Horner's rule between two reductions
# A value is 11 digits to base 2^24, a coefficient 16 digits to base 2^16: in float64 their products
# add up exactly over 2^13 digits, those of 512 coefficients.
DIGITS, DIGIT_BITS, HALVES, HALF_BITS = 11, 24, 16, 16
MOST_TERMS = 1 << 9
MOST_NUMBERS = 1 << 22  # of a matrix of powers: 32 MB
FEW = 8  # secrets, for which Horner's rule is faster


def split_secrets(secrets: Bytes, threshold: int, count: int) -> Bytes:
    """Split secrets ``[m, 32]`` into shares ``[m, count, 33]``."""
    if secrets.shape[1:] != (SECRET_BYTES,):
        raise ValueError(f"secrets have shape {secrets.shape}, must have [m, {SECRET_BYTES}]")
    if not 1 <= threshold <= count <= MOST_HOLDERS:
        raise ValueError(
            f"threshold is {threshold} of {count}, must be from 1 to as many as there are, at most "
            f"{MOST_HOLDERS}"
        )
    # Drawn below 2^256: no polynomial is likelier than another by more than threshold x 2^-247.
    drawn = os.urandom(len(secrets) * (threshold - 1) * SECRET_BYTES)
    higher = np.frombuffer(drawn, np.uint8).reshape(len(secrets), threshold - 1, SECRET_BYTES)
    coefficients = np.concatenate([secrets[:, None], higher], 1)
    size = threshold * HALVES * count * DIGITS
    if len(secrets) > FEW and threshold <= MOST_TERMS and size <= MOST_NUMBERS:
        return _by_product(coefficients, count)
    return _by_horner(coefficients, count)


def combine_shares(holders: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """Reconstruct the secret from as many shares as the threshold."""
    weights = _weights_at_zero(tuple(holders))
    value = sum(
        weight * int.from_bytes(share, "little")
        for weight, share in zip(weights, shares, strict=True)
    )
    value %= PRIME
    if value >> (8 * SECRET_BYTES):
        raise ValueError("the shares give no secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "little")


def _by_product(coefficients: Bytes, count: int) -> Bytes:
    """Evaluate polynomials ``[m, t, 32]``, constant term first, at 1 to ``count`` by one matrix."""
    m, t, _ = coefficients.shape
    halves = np.ascontiguousarray(coefficients).view("<u2").reshape(m, t * HALVES)
    # PyTorch's product shares its threads with what runs beside it, NumPy's has its own.
    sums = torch.from_numpy(halves.astype(np.float64)) @ _powers(t, count)
    return _reduce(sums.numpy().astype(np.int64).reshape(m, count, DIGITS))


def _by_horner(coefficients: Bytes, count: int) -> Bytes:
    """Evaluate the same polynomials one by one; reduced now and then, as ``x`` is small."""
    data = bytearray()
    for rows in coefficients[:, ::-1]:
        terms = [int.from_bytes(row.tobytes(), "little") for row in rows]
        for x in range(1, count + 1):
            value = 0
            for start in range(0, len(terms), REDUCED):
                for term in terms[start : start + REDUCED]:
                    value = value * x + term
                value %= PRIME
            data += value.to_bytes(SHARE_BYTES, "little")
    return np.frombuffer(bytes(data), np.uint8).reshape(-1, count, SHARE_BYTES)


@lru_cache(maxsize=4)
def _powers(t: int, count: int) -> Tensor:
    """Return the digits of x^j 2^(16 i) modulo the prime, ``[t * 16, count * 11]``."""
    data = bytearray()
    for j in range(t):
        values = [pow(x, j, PRIME) for x in range(1, count + 1)]
        for _ in range(HALVES):
            data += b"".join(value.to_bytes(SHARE_BYTES, "little") for value in values)
            values = [(value << HALF_BITS) % PRIME for value in values]
    triples = np.frombuffer(bytes(data), np.uint8).reshape(t * HALVES, count * DIGITS, 3)
    return torch.from_numpy(triples @ np.array([1.0, 2.0**8, 2.0**16]))


def _reduce(digits: NDArray[np.int64]) -> Bytes:
    """Return numbers ``[m, n, 11]``, with digits of up to 53 bits, modulo the prime, in bytes."""
    # 2^256 is -297: what lies above bit 256, bit 16 of the last digit, is taken away 297 times.
    rows = np.ascontiguousarray(np.moveaxis(digits, -1, 0))
    _carry(rows)
    over = rows[-1] >> 16
    rows[-1] -= over << 16
    rows[0] -= 297 * over
    _carry(rows)
    is_negative = rows[-1] < 0  # by less than the prime
    rows[-1] += is_negative * (1 << 16)
    rows[0] += is_negative * 297
    _carry(rows)
    parts = np.stack([np.moveaxis(rows, 0, -1) >> shift for shift in (0, 8, 16)], -1)
    return parts.astype(np.uint8).reshape(*digits.shape[:-1], SHARE_BYTES)


def _carry(rows: NDArray[np.int64]) -> None:
    """Bring all digits ``[11, m, n]`` but the last into their range; the last takes the sign."""
    for digit, following in itertools.pairwise(rows):
        following += digit >> DIGIT_BITS
        digit &= (1 << DIGIT_BITS) - 1


@lru_cache(maxsize=4096)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights for the value at zero; many secrets have the same holders."""
    if len(set(holders)) != len(holders) or not all(0 < x <= MOST_HOLDERS for x in holders):
        raise ValueError(
            f"holders are {holders}, must be from 1 to {MOST_HOLDERS} and each there once"
        )
    # Were 1 to n all there, they would be binomial coefficients. For each that is missing, a factor
    # is taken out of them: few steps with numbers of any size, for large thresholds too.
    n = max(holders)
    missing = sorted(set(range(1, n + 1)) - set(holders))
    scale, weights = pow(math.prod(missing), -1, PRIME), []
    for x in holders:
        weight = math.comb(n, x) * math.prod([other - x for other in missing])
        weights.append((weight if x % 2 else -weight) * scale % PRIME)
    return tuple(weights)
