"""The paper's polynomials over identities (FedSCem, section 4.3.1). For reproduction only.

**This does not hide identities.** A client's set becomes the coefficients of
``ρ*(γ) = (γ − γ_1) ⋯ (γ − γ_n) · (γ − ξ)  mod β`` (equation 12), and whoever has them finds the
roots in a moment: by evaluating at every candidate, or by factoring, which is easy over a prime
field. The random root ξ adds one more identity and hides none. ``tests/secure`` does both.

Two clients' sum ``ρ*_a + ρ*_b`` vanishes at an identity of *a* exactly if ``ρ*_b`` does. All
identities are below 2^30 and every ξ is a prime above that and below β: so no ξ is ever taken for
an identity, and the probability of a false root is zero. (With ξ from all primes below a 31-bit β,
as the paper's text allows, each of *m* clients adds a false member to one of *n* identities with
probability *n* / 10^8.)
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Residues = NDArray[np.uint64]  # below 2^31, so that products fit

IDENTITY_LIMIT = 1 << 30
PRIME_RANGE = (3 << 29, 1 << 31)


def random_prime(low: int, high: int) -> int:
    """Draw a prime from ``low`` to ``high - 1``, at most 2^31."""
    while True:
        number = low + secrets.randbelow(high - low)
        if is_prime(number):
            return number


def is_prime(number: int) -> bool:
    """Tell whether a number below 3.2 · 10^9 is prime (Miller and Rabin's test, exact there)."""
    bases = (2, 3, 5, 7)
    if number < 2 or any(number % base == 0 for base in bases):
        return number in bases
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        powers = [pow(base, odd << i, number) for i in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def check_identities(client: int, identities: Sequence[object]) -> Residues:
    """Return identities as residues; ``ValueError`` unless they are integers in range."""
    for number, identity in enumerate(identities):
        if not isinstance(identity, (int, np.integer)) or not 0 <= identity < IDENTITY_LIMIT:
            raise ValueError(
                f"client {client}: its identity number {number} is none that polynomials take: "
                f"integers from 0 to {IDENTITY_LIMIT - 1}"
            )
    return np.array(identities, np.uint64)


def polynomial(identities: Residues, prime: int) -> Residues:
    """Return the coefficients of equation 12."""
    # identities [n]
    if not (PRIME_RANGE[0] <= prime < PRIME_RANGE[1] and is_prime(prime)):
        raise ValueError(
            f"the modulus is {prime}; must be a prime from {PRIME_RANGE[0]} to {PRIME_RANGE[1] - 1}"
        )
    modulus = np.uint64(prime)
    coefficients: Residues = np.ones(1, np.uint64)
    for root in (*identities.tolist(), random_prime(IDENTITY_LIMIT, prime)):
        # (γ − root) · Σ c_i γ^i
        lower = np.append(coefficients * np.uint64(prime - root) % modulus, np.uint64(0))
        coefficients = (lower + np.insert(coefficients, 0, np.uint64(0))) % modulus
    return coefficients


def evaluate(polynomials: Residues, points: Residues, prime: int) -> Residues:
    """Evaluate polynomials ``[b, d]`` at points ``[n]``, modulo ``prime``: ``[n, b]``."""
    values = np.zeros((points.size, len(polynomials)), np.uint64)
    for coefficient in polynomials.T[::-1]:
        values = (values * points[:, None] + coefficient) % np.uint64(prime)
    return values


def pair_sums(polynomials: Residues, client: int, prime: int) -> Residues:
    """Add one client's polynomial to those of all others: ``[m, d]`` to ``[m - 1, d]``."""
    others = np.delete(polynomials, client, axis=0)
    sums: Residues = (others + polynomials[client]) % np.uint64(prime)
    return sums


def patterns(identities: Residues, sums: Residues, client: int, prime: int) -> NDArray[np.uint8]:
    """Find who else holds each of a client's identities."""
    # identities [n], sums [m - 1, d]
    shared = evaluate(sums, identities, prime) == 0
    return np.packbits(np.insert(shared, client, True, axis=1), axis=1)


def sections(counts: dict[bytes, int]) -> dict[bytes, int]:
    """Give every pattern of at least two clients its section of the common order."""
    start, first = {}, 0
    for pattern in sorted(counts, reverse=True):
        if sum(byte.bit_count() for byte in pattern) >= 2:
            start[pattern] = first
            first += counts[pattern]
    return start


def slots(
    identities: Residues, own: NDArray[np.uint8], start: dict[bytes, int]
) -> NDArray[np.int64]:
    """Place a client's identities: ascending within the section of their pattern."""
    # identities [n], own [n, ceil(m / 8)]
    result = np.full(identities.size, -1, np.int64)
    following = dict(start)
    for place in np.argsort(identities).tolist():
        pattern = own[place].tobytes()
        if pattern in following:
            result[place] = following[pattern]
            following[pattern] += 1
    return result
