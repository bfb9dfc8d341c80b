"""A mask of any length from a 32-byte key: the key stream of AES-256 in counter mode."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from flower_graph.secure.ring import RingArray

# The stream is made and added in blocks that stay in the processor's second-level cache.
BLOCK = 1 << 17
ZEROS = bytes(BLOCK)
CIPHER_BLOCK = 16  # bytes; the counter counts these


def add_streams(total: RingArray, keys: Sequence[tuple[bytes, int]]) -> None:
    """Add the streams of some keys to an array of ring words, or take them away."""
    # Each of PyTorch's threads takes a part of the array: the cipher and the addition let go of
    # Python's lock.
    # total [L]
    threads = min(torch.get_num_threads(), -(-total.nbytes // BLOCK))
    if threads < 2 or len(keys) < 2:
        _add(total, 0, keys)
        return
    words = CIPHER_BLOCK // total.itemsize
    cuts = [total.size * part // threads // words * words for part in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [
            pool.submit(_add, total[first:last], first * total.itemsize // CIPHER_BLOCK, keys)
            for first, last in pairwise([*cuts, total.size])
        ]
    for part in parts:
        part.result()  # raises what the thread raised


def _add(total: RingArray, counter: int, keys: Sequence[tuple[bytes, int]]) -> None:
    """Add the streams from a place of theirs on."""
    start = modes.CTR(counter.to_bytes(CIPHER_BLOCK, "big"))
    buffer = bytearray(min(BLOCK, total.nbytes))
    words = BLOCK // total.itemsize
    blocks = [total[first : first + words] for first in range(0, total.size, words)]
    streams = [np.frombuffer(buffer, total.dtype, part.size) for part in blocks]
    zeros = [memoryview(ZEROS)[: part.nbytes] for part in blocks]
    for key, sign in keys:
        apply = np.add if sign > 0 else np.subtract
        encryptor = Cipher(algorithms.AES256(key), start).encryptor()
        for part, plain, stream in zip(blocks, zeros, streams, strict=True):
            encryptor.update_into(plain, buffer)
            apply(part, stream, out=part)
