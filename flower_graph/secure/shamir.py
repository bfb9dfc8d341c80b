"""Secrets of 32 bytes in Shamir's shares, modulo the smallest prime above 2^256.

A secret is the constant term of a random polynomial of degree ``threshold - 1``; holder number
``x`` (from 1) has its value at ``x``. Any ``threshold`` values give the polynomial; fewer leave
every secret equally likely.
"""

import math
import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
REDUCED = 32  # steps of Horner's rule between two reductions


def split_secrets(secrets: Bytes, threshold: int, count: int) -> Bytes:
    """Split secrets ``[m, 32]`` into shares ``[m, count, 33]``."""
    # Drawn below 2^256: no polynomial is likelier than another by more than threshold x 2^-247.
    drawn = os.urandom(len(secrets) * (threshold - 1) * SECRET_BYTES)
    higher = np.frombuffer(drawn, np.uint8).reshape(len(secrets), threshold - 1, SECRET_BYTES)
    data = bytearray()
    for secret, others in zip(secrets, higher, strict=True):
        # By Horner's rule; reduced now and then, as ``x`` is small
        terms = [int.from_bytes(row.tobytes(), "little") for row in (*others[::-1], secret)]
        for x in range(1, count + 1):
            value = 0
            for start in range(0, threshold, REDUCED):
                for term in terms[start : start + REDUCED]:
                    value = value * x + term
                value %= PRIME
            data += value.to_bytes(SHARE_BYTES, "little")
    return np.frombuffer(bytes(data), np.uint8).reshape(-1, count, SHARE_BYTES)


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


@lru_cache(maxsize=4096)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    # Were 1 to n all there, they would be binomial coefficients. For each that is missing, a factor
    # is taken out of them: few steps with numbers of any size, for large thresholds too.
    n = max(holders)
    missing = sorted(set(range(1, n + 1)) - set(holders))
    scale, weights = pow(math.prod(missing), -1, PRIME), []
    for x in holders:
        weight = math.comb(n, x) * math.prod([other - x for other in missing])
        weights.append((weight if x % 2 else -weight) * scale % PRIME)
    return tuple(weights)
