from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from flower_graph.secure.ring import BLOCK, add_streams

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def stream(key: bytes, dtype: str, length: int) -> np.ndarray:
    cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
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


def test_adding_and_taking_away_cancel():
    before = np.arange(50_000, dtype="<u8") << np.uint64(50)
    total = before.copy()
    add_streams(total, [(KEY, 1)])
    assert (total != before).all()
    add_streams(total, [(KEY, -1)])
    assert (total == before).all()


@pytest.mark.usefixtures("threads")
def test_a_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="key size"):
        add_streams(np.zeros(BLOCK, "<u8"), [(KEY, 1), (KEY[1:], 1)])
