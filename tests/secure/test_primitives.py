"""The parts of a secure sum: rings and their masks, shares, keys and packets, partners."""

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from nacl.bindings import crypto_scalarmult

from flower_graph.errors import MalformedReplyError, OutOfRangeError, RefusedError
from flower_graph.secure import ring, shamir
from flower_graph.secure.channel import (
    LOW_ORDER,
    agree,
    context,
    is_low_order,
    new_key,
    seal,
    unseal,
)
from flower_graph.secure.ring import BLOCK, Ring, add_streams
from flower_graph.secure.shamir import PRIME, combine_shares, split_secrets
from flower_graph.secure.sum.partners import partners, plan


def test_encode_by_hand():
    ring = Ring.fit(2, limit=4, resolution=0.25)
    assert (ring.word, ring.fraction_bits, ring.guard_bits) == (32, 2, 0)
    words = ring.encode(np.array([1.0, -0.25, 0.3]))
    assert words.tolist() == [4, 2**32 - 1, 1]
    assert ring.decode(words).tolist() == [1.0, -0.25, 0.25]


def test_guard_bits_are_zero_and_dropped():
    ring = Ring.fit(5, limit=4, resolution=0.25, guard=True)
    assert ring.guard_bits == 3
    words = ring.encode(np.array([1.0, -0.25]))
    assert words.tolist() == [32, 2**32 - 8]
    assert ring.decode(words).tolist() == [1.0, -0.25]
    with pytest.raises(ValueError, match="lowest 3"):
        ring.decode(words + np.uint32(1))


@given(
    num_clients=st.integers(2, 10_000),
    seed=st.integers(0, 2**31),
    limit=st.floats(0.01, 1e3),  # with 10,000 clients, 24 bits and the guard this fills 62 bits
    bits=st.integers(0, 24),
    guard=st.booleans(),
)
def test_sum_is_exact(num_clients, seed, limit, bits, guard):
    ring = Ring.fit(num_clients, limit, 2.0**-bits, guard=guard)
    draw = np.random.default_rng(seed)
    values = draw.uniform(-limit, limit, (num_clients, 2))
    values[:, 1] = limit  # the largest sum there is
    total = ring.encode(values).sum(0, dtype=ring.dtype)
    exact = [sum(round(x * 2**bits) for x in column) for column in values.T.tolist()]
    assert (ring.decode(total) * 2**bits).tolist() == exact


@pytest.mark.parametrize(
    ("clients", "limit", "bits", "guard", "word"),
    [
        (2, 1, 29, False, 32),  # 2 * 2^29 < 2^31
        (2, 1, 30, False, 64),
        (100, 64, 16, False, 32),  # 100 * 2^22 < 2^31
        (512, 64, 16, False, 64),  # 512 * 2^22 = 2^31
        (100, 64, 16, True, 64),
        (2, 2.0**31, 30, False, 64),
    ],
)
def test_word_is_the_smallest_that_holds_the_sum(clients, limit, bits, guard, word):
    ring = Ring.fit(clients, limit, 2.0**-bits, guard=guard)
    assert ring.word == word


@pytest.mark.parametrize("bad", [64.01, -64.01, np.nan, np.inf, -np.inf])
def test_out_of_range_names_the_value(bad):
    ring = Ring.fit(2, 64, 2.0**-16)
    with pytest.raises(OutOfRangeError, match=rf"value {bad}.*\(1, 0\)"):
        ring.encode(np.array([[1.0], [bad]]))


@pytest.mark.parametrize(
    ("clients", "limit", "step", "why"),
    [
        (2, 0, 1, "limit.*0"),
        (2, 1, np.nan, "resolution.*nan"),
        (2, 2.0**32, 2.0**-30, "64 bits"),
        (10, 1e300, 1e-300, r"1e\+300.*resolution 1e-300"),  # that no float can scale
    ],
)
def test_impossible_rings(clients, limit, step, why):
    with pytest.raises(ValueError, match=why):
        Ring.fit(clients, limit, step)


KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.mark.parametrize(
    ("word", "fraction", "guard", "limit"),
    [
        (64, 58, 0, 64.0),  # 64 x 2^58 is 2^64
        (64, 40, 17, 64.0),
        (32, 25, 0, 64.0),
        (64, -1, 0, 64.0),
        (64, 16, -1, 64.0),
        (64, 16, 64, 2.0**-60),
        (64, 1 << 40, 0, 64.0),
        (64, 16, 0, float("nan")),
        (64, 16, 0, float("inf")),
        (64, 16, 0, -1.0),
        (16, 4, 0, 1.0),
    ],
)
def test_a_ring_in_which_a_large_number_becomes_another_is_refused(word, fraction, guard, limit):
    """By a sum with it and one without a server would tell whose numbers are large."""
    with pytest.raises(MalformedReplyError, match="bits"):
        Ring(word, fraction, guard, limit)
    Ring(64, 55, 0, 64.0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(ring, "WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def stream(key: bytes, dtype: str, length: int) -> np.ndarray:
    """Return the stream that GCM has behind a nonce of zeros, where the data begin at counter 2."""
    start = (2).to_bytes(16, "big")
    cipher = Cipher(algorithms.AES256(key), modes.CTR(start)).encryptor()
    return np.frombuffer(cipher.update(bytes(length * np.dtype(dtype).itemsize)), dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("length", [0, 1, 5, BLOCK // 4, BLOCK // 2 + 3, BLOCK + 7])
def test_is_the_ciphers_stream_in_one_piece(dtype, length):
    total = np.zeros(length, dtype)
    add_streams(total, [(KEY, 1)])
    assert np.array_equal(total, stream(KEY, dtype, length))
    add_streams(total, [(OTHER, -1), (KEY, 1)])
    assert np.array_equal(
        total, stream(KEY, dtype, length) * total.dtype.type(2) - stream(OTHER, dtype, length)
    )


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


def test_shares_that_give_no_secret():
    with pytest.raises(ValueError, match="secret"):
        combine_shares([1], [(2**256 + 5).to_bytes(33, "little")])


RUN = bytes(16)


def test_both_sides_agree_as_in_libsodium():
    (a, public_a), (b, public_b) = new_key(), new_key()
    with_itself, with_b = agree(a, [public_a, public_b])
    assert agree(b, [public_a]) == [with_b] != [with_itself]
    assert with_b == crypto_scalarmult(a, public_b)


def test_keys_of_low_order_are_refused():
    private, _ = new_key()
    assert len(LOW_ORDER) == 7
    for public in LOW_ORDER:
        assert is_low_order(public)
        with pytest.raises(RefusedError, match="order"):
            agree(private, [new_key()[1], public])
        assert is_low_order(public[:31] + bytes([public[31] | 128]))
    honest = new_key()[1]
    assert not is_low_order(honest)
    mixed = [honest, *sorted(LOW_ORDER), honest, bytes([*min(LOW_ORDER)[:31], 128])]
    assert [is_low_order(key) for key in mixed] == [False, *[True] * 7, False, True]


def test_contexts_differ():
    runs = (RUN, bytes(15) + b"\1")
    numbers = ((1, 2), (2, 1), (1,), (1, -2))
    seen = {context(what, run, *n) for what in (b"a", b"b") for run in runs for n in numbers}
    assert len(seen) == 2 * 2 * 4


def test_packet_opens_only_as_it_was_sealed():
    secret, key = bytes(range(32)), new_key()[1]
    what_for = context(b"packet", RUN, 1, 2, 3)
    packet = seal(secret, what_for, key, b"shares")
    assert unseal(secret, what_for, key, packet) == b"shares"
    for other in (context(b"packet", RUN, 2, 2, 3), context(b"packet", RUN, 1, 3, 2)):
        assert unseal(secret, other, key, packet) is None
    assert unseal(secret, what_for, new_key()[1], packet) is None
    assert unseal(bytes(32), what_for, key, packet) is None
    for place in range(len(packet)):
        altered = bytearray(packet)
        altered[place] ^= 1
        assert unseal(secret, what_for, key, bytes(altered)) is None


@given(m=st.integers(2, 60), seed=st.integers(0, 1000), data=st.data())
def test_graph_is_regular_symmetric_and_mirrored(m, seed, data):
    k = data.draw(st.sampled_from([*range(2, m - 1, 2), m - 1]))
    clients = np.arange(m) * 3 + 5
    found = partners(clients, k, seed, 1)
    assert found.shape == (m, k)
    row = {client: index for index, client in enumerate(clients.tolist())}
    for client, own in zip(clients.tolist(), found.tolist(), strict=True):
        assert client not in own and len(set(own)) == k
        for column, partner in enumerate(own):
            assert found[row[partner], k - 1 - column] == client


def test_graph_is_new_in_each_round_and_the_same_for_the_same():
    clients = np.arange(50)
    first, again, second = (partners(clients, 4, 9, t) for t in (1, 1, 2))
    assert (first == again).all() and (first != second).any()


@pytest.mark.parametrize(
    ("m", "dropout", "found"),
    [
        (2, 0.44, (1, 1, 0)),
        (3, 0.3, (2, 2, 0)),
        (10, 0.3, (9, 6, 3)),  # three of nine partners may vanish, one may collude
        # Of four 0.4 is one, but of five two is too many: two of four partners are not above half
        (6, 0.4, (5, 3, 2)),
        (5, 0.4, (4, 3, 1)),
        (4, 0.4, (3, 2, 1)),
        (3, 0.4, (2, 2, 0)),
    ],
)
def test_few_clients_have_all_partners_and_fewer_of_them_may_vanish(m, dropout, found):
    assert plan(m, dropout, 0.1) == found


@pytest.mark.parametrize("corrupt", [0.0, 0.1])
def test_every_number_of_clients_has_a_plan_above_half_of_the_partners(corrupt):
    for m in [*range(2, 150), 300, 1_000, 3_000, 10_000]:
        k, threshold, vanished = plan(m, 0.3, corrupt)
        assert vanished == min(int(0.3 * m), m - 2)
        colluding = int(corrupt * m)
        # In a whole graph any of those who collude are partners, and they give out both secrets.
        assert 2 * threshold > k + (colluding if k == m - 1 else 2 * round(corrupt * k / 2))


@pytest.mark.parametrize(
    ("m", "dropout", "corrupt"),
    [(20, 0.3, 0.1), (100, 0.2, 0.05), (100, 0.3, 0.1), (1_000, 0.3, 0.1), (1_000, 0.3, 0.02)],
)
def test_secrets_survive_in_drawn_graphs(m, dropout, corrupt):
    k, threshold, _ = plan(m, dropout, corrupt)
    draw = np.random.default_rng(0)
    for t in range(200 if m < 1_000 else 10):
        gone = draw.permutation(m)[: int(dropout * m)]
        found = partners(np.arange(m), k, 1, t)
        assert (~np.isin(found, gone)).sum(1).min() >= threshold
        bad = np.isin(found, draw.permutation(m)[: int(corrupt * m)])
        # Honest holders give out one secret each, those who collude both: too few for two.
        assert k + bad.sum(1).max() < 2 * threshold
        # Nor is half of the partners enough, with those who collude in the other half.
        sides = bad[:, : k // 2].sum(1).max(), bad[:, k // 2 :].sum(1).max()
        assert k == m - 1 or k // 2 + max(sides) < threshold


def test_bad_input_of_partners():
    with pytest.raises(ValueError, match=r"corrupt is 0\.5"):
        plan(2, 0.0, 0.5)
    with pytest.raises(ValueError, match=r"dropout.*1"):
        plan(5, 1.0, 0.1)
    for dropout, corrupt in ((0.6, 0.6), (0.5, 0.0), (0.45, 0.1), (0.7, 0.1)):
        with pytest.raises(ValueError, match=f"{dropout}.*{corrupt}"):
            plan(10, dropout, corrupt)
