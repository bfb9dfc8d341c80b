"""Shamir's shares: by hand, of every choice of holders, and by both ways of evaluating."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.secure import shamir
from flower_graph.secure.shamir import FEW, PRIME, combine_shares, split_secrets


def rows(*values: bytes) -> shamir.Bytes:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    return [share.tobytes() for share in split_secrets(rows(secret), threshold, count)[0]]


SECRETS = st.binary(min_size=32, max_size=32)


def test_prime():
    for base in (2, 3, 5, 7, 11, 13):
        assert pow(base, PRIME - 1, PRIME) == 1
    assert PRIME > 2**256


def test_combine_by_hand():
    # f(x) = 7 + 2x + x^2 at x = 1, 3, 4
    shares = [value.to_bytes(33, "little") for value in (10, 22, 31)]
    assert combine_shares([1, 3, 4], shares) == (7).to_bytes(32, "little")


def test_every_choice_of_as_many_holders_as_the_threshold_gives_the_secret():
    secret = bytes(range(32))
    for threshold in (1, 3, 6):
        shares, again = split(secret, threshold, 6), split(secret, threshold, 6)
        assert shares != again or threshold == 1, "shares are fresh"
        for holders in itertools.permutations(range(1, 7), threshold):
            assert combine_shares(holders, [shares[x - 1] for x in holders]) == secret


@given(secret=SECRETS, other=SECRETS)
def test_fewer_shares_fit_every_secret(secret, other):
    """Two of three shares and any other secret lie on one polynomial, so they tell nothing."""
    shares = split(secret, 3, 3)
    a, b = (int.from_bytes(share, "little") for share in shares[:2])
    s = int.from_bytes(other, "little")
    # The parabola through (0, s), (1, a), (2, b) has at 3: s - 3a + 3b.
    third = ((s - 3 * a + 3 * b) % PRIME).to_bytes(33, "little")
    assert combine_shares([1, 2, 3], [shares[0], shares[1], third]) == other


@pytest.mark.parametrize(("threshold", "count"), [(1, 3), (2, 2), (54, 82), (70, 70)])
def test_a_product_evaluates_as_horners_rule(threshold: int, count: int):
    """For random coefficients, and for the least and the greatest that there are."""
    drawn = rows(*(os.urandom(32 * threshold) for _ in range(5)))
    drawn = np.concatenate([drawn, np.zeros_like(drawn[:1]), np.full_like(drawn[:1], 255)])
    coefficients = drawn.reshape(-1, threshold, 32)
    found = shamir._by_product(coefficients, count)
    assert (found == shamir._by_horner(coefficients, count)).all()
    value = sum(
        int.from_bytes(row.tobytes(), "little") * pow(count, j, PRIME)
        for j, row in enumerate(coefficients[0])
    )
    assert int.from_bytes(found[0, -1].tobytes(), "little") == value % PRIME


def test_values_around_the_prime_are_reduced():
    """Digits that make numbers just below and above a multiple of the prime."""
    numbers = [k * PRIME + d for k in (0, 1, 5, 2**30) for d in (0, 1, 296, 297)]
    numbers += [k * PRIME - d for k in (1, 5, 2**30) for d in (1, 296, 297, 298)]
    digits = np.zeros((1, len(numbers), shamir.DIGITS), np.int64)
    for at, number in enumerate(numbers):
        for digit in range(shamir.DIGITS - 1):
            digits[0, at, digit] = number >> (24 * digit) & (2**24 - 1)
        digits[0, at, -1] = number >> 240
    found = [int.from_bytes(row.tobytes(), "little") for row in shamir._reduce(digits)[0]]
    assert found == [number % PRIME for number in numbers]


def test_the_secrets_of_many_come_back():
    secrets = [os.urandom(32) for _ in range(FEW + 1)] + [bytes(32), b"\xff" * 32]
    shares = split_secrets(rows(*secrets), 4, 9)
    for secret, given_ in zip(secrets, shares, strict=True):
        assert (
            combine_shares([2, 9, 4, 7], [given_[x - 1].tobytes() for x in (2, 9, 4, 7)]) == secret
        )


def test_bad_input():
    with pytest.raises(ValueError, match="31"):
        split_secrets(rows(bytes(31)), 1, 1)
    with pytest.raises(ValueError, match=r"threshold.*4"):
        split_secrets(rows(bytes(32)), 4, 3)
    with pytest.raises(ValueError, match="each"):
        combine_shares([1, 1], [bytes(33)] * 2)
    with pytest.raises(ValueError, match="secret"):
        combine_shares([1], [(2**256 + 5).to_bytes(33, "little")])
