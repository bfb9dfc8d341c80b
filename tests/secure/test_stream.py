import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from flower_graph.secure.stream import BLOCK, add_stream

KEY = bytes(range(32))


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("length", [0, 1, 5, BLOCK // 4, BLOCK // 2 + 3])
def test_is_the_ciphers_stream_in_one_piece(dtype, length):
    total = np.zeros(length, dtype)
    add_stream(total, KEY, 1)
    cipher = Cipher(algorithms.AES256(KEY), modes.CTR(bytes(16))).encryptor()
    assert total.tobytes() == cipher.update(bytes(total.nbytes))


def test_adding_and_taking_away_cancel():
    before = np.arange(50_000, dtype="<u8") << np.uint64(50)
    total = before.copy()
    add_stream(total, KEY, 1)
    assert (total != before).all()
    add_stream(total, KEY, -1)
    assert (total == before).all()
