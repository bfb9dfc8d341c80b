"""The union of many sets, with multiplicities, from one sum of vectors.

Every client writes its tokens into a table, an invertible Bloom lookup table; the secure sum adds
the tables up; from the total alone the tokens of all clients can be read, each with the number of
clients that have it, and nothing about who has what.

A token is added to one cell in each of four parts of the table. A cell has three 64-bit words, all
of them sums over what was added: a *marker* (1 in the lower 16 bits, a hash of the token above) and
the token's two halves. Where a cell holds one token only, *c* times, the lower bits of the marker
are *c*, dividing the halves by *c* gives the token, and the hash says that it is so. Taking that
token out of its other cells lays bare the next ones. All words are sums modulo 2^64, so cells that
overflow on the way come right again once they have been emptied.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from flower_graph.secure.align.messages import TOKEN, Bytes2D
from flower_graph.secure.channel import pieces, rows_of

Words = NDArray[np.uint64]

WORDS, PARTS = 3, 4
HALF = TOKEN // 2  # bytes: 48 bits, so that 2^14 equal halves add up to less than 2^64
MAX_CLIENTS = 1 << 14
COUNT_MASK = np.uint64(0xFFFF)
# With four parts a table can be read up to 0.77 tokens a cell (Goodrich and Mitzenmacher 2011);
# the further cells make small tables as sure: for 16 tokens it fails once in some 10,000 times.
CELLS_PER_TOKEN, FURTHER_CELLS = 1.45, 128


def cells_for(distinct: int) -> int:
    """Return how many cells a table for that many distinct tokens needs."""
    if distinct < 0:
        raise ValueError(f"{distinct} tokens: must be 0 or more")
    return PARTS * math.ceil((CELLS_PER_TOKEN * distinct + FURTHER_CELLS) / PARTS)


def insert(tokens: Bytes2D, cells: int) -> Words:
    """Write tokens into an empty table."""
    # tokens [n, 12]
    if cells < PARTS or cells % PARTS:
        raise ValueError(f"a table has a multiple of {PARTS} cells, got {cells}")
    table = np.zeros((WORDS, cells), np.uint64)
    places, marker = _hash(tokens, cells)
    _add(table, places, np.concatenate([marker[None], _halves(tokens)]))
    return table.reshape(-1)


def peel(total: Words) -> tuple[Bytes2D, NDArray[np.int64]] | None:
    """Read the tokens from the sum of tables."""
    # total [3 · cells]
    if total.ndim != 1 or total.size == 0 or total.size % (WORDS * PARTS):
        raise ValueError(f"a table has a multiple of {WORDS * PARTS} words, got {total.shape}")
    table = total.astype(np.uint64).reshape(WORDS, -1)
    result: dict[bytes, int] = {}
    while True:
        tokens, counts = _single(table)
        if not len(tokens):
            break
        fresh = dict(zip(pieces(tokens), counts.tolist(), strict=True))
        if fresh.keys() & result.keys():
            return None  # a token that comes back was never in such a sum
        result |= fresh
        places, marker = _hash(tokens, table.shape[1])
        content = np.concatenate([marker[None], _halves(tokens)]) * counts
        _add(table, places, np.uint64(0) - content)
    if table.any():
        return None
    ordered = sorted(result)
    counted = np.array([result[token] for token in ordered], np.int64)
    return rows_of(ordered, -1, TOKEN), counted


def _single(table: Words) -> tuple[Bytes2D, Words]:
    """Return the distinct tokens ``[t, 12]`` that are alone in some cell, and their counts."""
    counts = table[0] & COUNT_MASK
    cells = np.flatnonzero((counts > 0) & (counts <= MAX_CLIENTS))
    counts = counts[cells]
    halves, rest = np.divmod(table[1:, cells], counts)
    good = (rest == 0).all(axis=0) & (halves < 1 << 8 * HALF).all(axis=0)
    cells, counts, halves = cells[good], counts[good], halves[:, good]
    half_bytes = np.ascontiguousarray(halves, "<u8").view(np.uint8).reshape(2, -1, 8)[:, :, :HALF]
    tokens = np.ascontiguousarray(half_bytes.transpose(1, 0, 2)).reshape(-1, TOKEN)
    places, marker = _hash(tokens, table.shape[1])
    sure = (marker * counts == table[0, cells]) & (places == cells[:, None]).any(axis=1)
    tokens, counts = tokens[sure], counts[sure]
    _, first = np.unique(tokens, axis=0, return_index=True)
    return tokens[first], counts[first]


def _hash(tokens: Bytes2D, cells: int) -> tuple[NDArray[np.int64], Words]:
    """Return each token's cells ``[n, 4]`` and its marker ``[n]``."""
    # The table's size goes into the hash: if one cannot be read, twice the size is a fresh attempt.
    salt = cells.to_bytes(16, "little")
    digests = (
        hashlib.blake2b(token, digest_size=8 * (PARTS + 1), salt=salt, person=b"sketch").digest()
        for token in pieces(tokens)
    )
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, PARTS + 1)
    part = cells // PARTS
    places = (words[:, :PARTS] % np.uint64(part)).astype(np.int64) + part * np.arange(PARTS)
    return places, (words[:, PARTS] & ~COUNT_MASK) | np.uint64(1)


def _halves(tokens: Bytes2D) -> Words:
    """Return the tokens' halves as integers, ``[2, n]``."""
    wide = np.zeros((2, len(tokens), 8), np.uint8)
    wide[:, :, :HALF] = tokens.reshape(-1, 2, HALF).transpose(1, 0, 2)
    return wide.view("<u8")[:, :, 0].astype(np.uint64)


def _add(table: Words, places: NDArray[np.int64], content: Words) -> None:
    """Add content ``[3, n]`` to the table's cells ``[n, 4]``."""
    for row, words in zip(table, content, strict=True):
        np.add.at(row, places, words[:, None])
