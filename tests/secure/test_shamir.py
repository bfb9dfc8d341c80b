"""Shamir's shares: by hand, of every choice of holders."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.secure import shamir
from flower_graph.secure.shamir import PRIME, combine_shares, split_secrets


def rows(*values: bytes) -> shamir.Bytes:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    return [share.tobytes() for share in split_secrets(rows(secret), threshold, count)[0]]


SECRETS = st.binary(min_size=32, max_size=32)


def test_prime():
    for base in (2, 3, 5, 7, 11, 13):
        assert pow(base, PRIME - 1, PRIME) == 1
    assert PRIME > 2**256


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
def test_shares_are_the_polynomials_values(
    threshold: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    """For random coefficients, and for the least and the greatest that there are."""
    size = 32 * (threshold - 1)
    for drawn in (os.urandom(size), bytes(size), b"\xff" * size):
        secret = bytes(range(200, 232))
        monkeypatch.setattr(shamir.os, "urandom", lambda n, drawn=drawn: drawn)
        terms = [secret, *(drawn[at : at + 32] for at in range(0, size, 32))]
        numbers = [int.from_bytes(term, "little") for term in terms]
        for x, share in enumerate(split(secret, threshold, count), 1):
            value = sum(number * pow(x, j, PRIME) for j, number in enumerate(numbers))
            assert int.from_bytes(share, "little") == value % PRIME


def test_bad_input():
    with pytest.raises(ValueError, match="31"):
        split_secrets(rows(bytes(31)), 1, 1)
    with pytest.raises(ValueError, match=r"threshold.*4"):
        split_secrets(rows(bytes(32)), 4, 3)
    with pytest.raises(ValueError, match="each"):
        combine_shares([1, 1], [bytes(33)] * 2)
    with pytest.raises(ValueError, match="secret"):
        combine_shares([1], [(2**256 + 5).to_bytes(33, "little")])
