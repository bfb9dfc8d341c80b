"""A mask of any length from a 32-byte key: the key stream of AES-256 in counter mode."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from flower_graph.secure.ring import RingArray

# The stream is made and added in blocks that stay in the processor's second-level cache.
BLOCK = 1 << 17
ZEROS = bytes(BLOCK)


def add_stream(total: RingArray, key: bytes, sign: int) -> None:
    """Add a key's stream to an array of ring words, or take it away.

    Parameters
    ----------
    total : ndarray
        ``[L]`` words of 4 or 8 bytes, contiguous, changed in place.
    key : bytes
        32 bytes that are used for this mask and nothing else: the counter starts at zero.
    sign : int
        1 adds, -1 subtracts.
    """
    apply = np.add if sign > 0 else np.subtract
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(min(BLOCK, total.nbytes))
    words = BLOCK // total.itemsize
    for start in range(0, total.size, words):
        part = total[start : start + words]
        encryptor.update_into(memoryview(ZEROS)[: part.nbytes], buffer)
        apply(part, np.frombuffer(buffer, total.dtype, part.size), out=part)
