import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.secure.channel import PRIME, combine_shares, split_secret

SECRETS = st.binary(min_size=32, max_size=32)


def test_prime():
    for base in (2, 3, 5, 7, 11, 13):
        assert pow(base, PRIME - 1, PRIME) == 1
    assert PRIME > 2**256


def test_combine_by_hand():
    # f(x) = 7 + 2x + x^2 at x = 1, 3, 4
    shares = [value.to_bytes(33, "little") for value in (10, 22, 31)]
    assert combine_shares([1, 3, 4], shares) == (7).to_bytes(32, "little")


@given(secret=SECRETS, count=st.integers(1, 12), data=st.data())
def test_any_threshold_shares_give_the_secret(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    chosen = data.draw(st.permutations(range(1, count + 1)))[:threshold]
    shares = split_secret(secret, threshold, count)
    assert combine_shares(chosen, [shares[x - 1] for x in chosen]) == secret


def test_every_choice_of_holders():
    secret = bytes(range(32))
    shares = split_secret(secret, 3, 6)
    for holders in itertools.combinations(range(1, 7), 3):
        assert combine_shares(holders, [shares[x - 1] for x in holders]) == secret


@given(secret=SECRETS, other=SECRETS)
def test_fewer_shares_fit_every_secret(secret, other):
    """Two of three shares and any other secret lie on one polynomial, so they tell nothing."""
    shares = split_secret(secret, 3, 3)
    a, b = (int.from_bytes(share, "little") for share in shares[:2])
    s = int.from_bytes(other, "little")
    # The parabola through (0, s), (1, a), (2, b) has at 3: s - 3a + 3b.
    third = ((s - 3 * a + 3 * b) % PRIME).to_bytes(33, "little")
    assert combine_shares([1, 2, 3], [shares[0], shares[1], third]) == other


def test_shares_are_fresh():
    assert split_secret(bytes(32), 2, 3) != split_secret(bytes(32), 2, 3)


def test_bad_input():
    with pytest.raises(ValueError, match="31 bytes"):
        split_secret(bytes(31), 1, 1)
    with pytest.raises(ValueError, match="threshold is 4"):
        split_secret(bytes(32), 4, 3)
    with pytest.raises(ValueError, match="each there once"):
        combine_shares([1, 1], [bytes(33)] * 2)
    with pytest.raises(ValueError, match="no secret"):
        combine_shares([1], [(2**256 + 5).to_bytes(33, "little")])
