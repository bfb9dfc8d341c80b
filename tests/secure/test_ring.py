from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.errors import OutOfRangeError
from flower_graph.secure import ring
from flower_graph.secure.ring import BLOCK, Ring, add_streams


def test_encode_by_hand():
    ring = Ring.fit(2, limit=4, resolution=0.25)
    assert (ring.word, ring.fraction_bits, ring.guard_bits) == (32, 2, 0)
    words = ring.encode(np.array([1.0, -0.25, 0.3]))
    assert words.tolist() == [4, 2**32 - 1, 1]
    assert ring.decode(words).tolist() == [1.0, -0.25, 0.25]
    with pytest.raises(ValueError, match="uint64"):
        ring.decode(words.astype(np.uint64))


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
        (0, 1, 1, "num_clients.*0"),
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
