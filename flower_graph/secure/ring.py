"""Fixed-point numbers in the integers modulo 2^32 or 2^64, and masks, which cancel there exactly.

A real number is rounded to a multiple of ``2^-fraction_bits`` and written as an integer; negative
ones wrap round. Sums of such integers are exact as long as they stay inside the signed range of
the word. So the ring is sized before the run from the number of clients and the largest value, and
the client refuses a value that would not fit, before anything is sent.

A mask comes from a 32-byte key that is used once: the key stream of AES-256 in counter mode,
counted as GCM does (NIST SP 800-38D) behind a nonce of zeros. OpenSSL makes that stream two to four
times as fast in GCM as in plain counter mode; the authenticating tag is not asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from flower_graph.errors import (
    CHANGED_SUM,
    MalformedReplyError,
    OutOfRangeError,
    RefusedError,
    UnreadableSumError,
)
from flower_graph.wire.codec import Message, Real, Whole

RingArray = NDArray[np.unsignedinteger]
WORDS: dict[int, np.dtype[np.generic]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
SIGNED: dict[int, np.dtype[np.generic]] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}
MOST_BITS = 1023  # behind the point: the largest power of two that is a float
# The stream is made and added in blocks that stay in the processor's second-level cache.
BLOCK = 1 << 17
ZEROS = bytes(BLOCK)
NONCE = bytes(12)
WORTH_A_THREAD = 1 << 22  # bytes of streams; fewer are made sooner than a thread is started


class Ring(Message, frozen=True):
    """How real numbers are written as words; every party of a sum has the same ring."""

    # A multiple c * pad that hides a sum leaves the lowest bits of the sum in the clear when c is
    # even, as many as c has factors of two; with guard bits these bits are known zeros

    word: Annotated[int, Whole()]  # bits of a word: 32 or 64
    fraction_bits: Annotated[int, Whole()]  # numbers are multiples of 2 to the minus this
    guard_bits: Annotated[int, Whole()]  # zero bits below, for pads
    limit: Annotated[float, Real()]  # largest size of a number

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise MalformedReplyError(f"words have {self.word} bits; must be one of {[*WORDS]}")
        # A number that is too large for its word becomes another one: a server that chose such
        # words could tell the vectors with large numbers from a sum of all.
        has_bits = 0 <= self.fraction_bits <= MOST_BITS and 0 <= self.guard_bits < self.word
        fits = has_bits and 0 < self.limit < math.inf
        if not fits or self._largest(1) >= 1 << (self.word - 1):
            about = f"{self.fraction_bits} fraction and {self.guard_bits} guard bits"
            why = f"numbers up to {self.limit:g} with {about} do not fit into {self.word} bits"
            raise MalformedReplyError(why)

    def _largest(self, count: int) -> int:
        """Return the largest sum of so many numbers, as a whole number."""
        # Exact, whatever the two are: as floats the product may be too large to be one.
        return (
            count * math.ceil(Fraction(self.limit) * (1 << self.fraction_bits)) << self.guard_bits
        )

    @classmethod
    def fit(cls, num_clients: int, limit: float, resolution: float, *, guard: bool = False) -> Ring:
        """Choose the smallest word in which no sum can overflow."""
        for name, value in (("limit", limit), ("resolution", resolution)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}, must be a positive number")
        fraction_bits = max(0, math.ceil(-math.log2(resolution)))
        guard_bits = (num_clients - 1).bit_length() if guard else 0
        for word in WORDS:
            with suppress(MalformedReplyError):
                ring = cls(word, fraction_bits, guard_bits, float(limit))
                if ring._largest(num_clients) < 1 << (word - 1):
                    return ring
        raise ValueError(f"limit {limit:g}, resolution {resolution:g}: a sum has more than 64 bits")

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return WORDS[self.word]

    def packed(self) -> bytes:
        numbers = self.word, self.fraction_bits, self.guard_bits, self.limit
        return struct.pack("<qqqd", *numbers)

    def encode(self, values: NDArray[np.floating]) -> RingArray:
        values = np.asarray(values, dtype=np.float64)
        # Written so that NaN fails too.
        if not (fits := np.abs(values) <= self.limit).all():
            index = np.unravel_index(int(np.argmin(fits)), values.shape)
            at = tuple(map(int, index))
            raise OutOfRangeError(f"value {values[index]} at {at} is above {self.limit:g}")
        steps = np.rint(values * 2.0**self.fraction_bits).astype(SIGNED[64])
        words: RingArray = (steps << self.guard_bits).astype(self.dtype)
        return words

    def decode(self, total: RingArray) -> NDArray[np.float64]:
        signed = total.view(SIGNED[self.word])
        if self.guard_bits and (signed & ((1 << self.guard_bits) - 1)).any():
            raise UnreadableSumError(f"the lowest {self.guard_bits} bits of the sum are not zero")
        numbers: NDArray[np.float64] = (signed >> self.guard_bits) / 2.0**self.fraction_bits
        return numbers

    def check_sums(self, sums: NDArray[np.float64], count: NDArray[np.generic] | int) -> None:
        """Refuse sums larger than numbers within the limit can make them."""
        # A number at the limit may be rounded up by half a step.
        most = np.asarray(count) * (self.limit + 2.0**-self.fraction_bits)
        if (np.abs(sums) > most).any():
            raise UnreadableSumError(f"a sum is larger than numbers of up to {self.limit:g} allow")


def add_streams(total: RingArray, keys: Sequence[tuple[bytes, int]]) -> None:
    """Add the streams of some keys to an array of ring words, or subtract them."""
    # Each of PyTorch's threads takes some of the keys: the cipher and the addition let go of
    # Python's lock.
    # total [L]
    work = total.nbytes * len(keys)
    threads = min(torch.get_num_threads(), len(keys), work // WORTH_A_THREAD)
    if threads < 2:
        _add(total, keys)
        return
    sums = [total, *(np.zeros_like(total) for _ in range(threads - 1))]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_add, sums, (keys[at::threads] for at in range(threads))))
    for one in sums[1:]:
        total += one


def _add(total: RingArray, keys: Sequence[tuple[bytes, int]]) -> None:
    buffer = bytearray(min(BLOCK, total.nbytes))
    words = BLOCK // total.itemsize
    blocks = [total[first : first + words] for first in range(0, total.size, words)]
    streams = [np.frombuffer(buffer, total.dtype, part.size) for part in blocks]
    zeros = [memoryview(ZEROS)[: part.nbytes] for part in blocks]
    for key, sign in keys:
        apply = np.add if sign > 0 else np.subtract
        encryptor = Cipher(algorithms.AES256(key), modes.GCM(NONCE)).encryptor()
        for part, plain, stream in zip(blocks, zeros, streams, strict=True):
            encryptor.update_into(plain, buffer)
            apply(part, stream, out=part)


# Sums that are passed on --------------------------------------------------------------------------

# Sums that a server adds up and passes on without reading them: pads, and checks of changes.
#
# Contributors have a key in common that the server lacks. From it come, for each sum alone, pads
# that hide the words, and a subset of the words for each of 64 checks. A check is the sum of its
# subset, modulo the ring, so that checks add up as words do.
#
# *What a check finds.* A server adds ``d`` to the words and ``e`` to the checks, in the ring. The
# sum passes if ``e_j`` is the sum of ``d`` over subset ``j``, for every ``j``. If ``d`` is not zero
# everywhere, take a word ``i`` with ``d_i != 0``: whatever else is in subset ``j``, only one of
# *with i* and *without i* gives ``e_j``, as the two sums differ by ``d_i``. Both are as likely, so
# each check finds the change with a chance of one half, also that of a word's top bit, and all of
# them together but for 2^-64. If ``d`` is zero and ``e`` is not, the sum does not pass. A count of
# contributors that is not true adds a multiple of the pads, which is such a ``d`` and ``e``.
#
# *What a refusal reveals.* Whether a sum passes depends on ``d``, ``e`` and the subsets; the sum
# itself cancels, as every step is linear in the ring, and nothing is decoded before. So a server
# that tries changes learns nothing of the sum, however often; one trial of a step is taken
# (``Journal.one_trial``), so that the subsets are not learnt either.
#
# *What the checks reveal.* With an even number of contributors the lowest bits of ``contributors *
# pad`` are zeros. Words have guard bits there, which are zeros too, and so have sums of words.

PART = 1 << 14  # words that stay in the processor's cache
CHECKS = 64  # bits of a word of subsets


def checks_of(words: RingArray, subsets: RingArray) -> RingArray:
    """Return the checks of words, ``[CHECKS]``, in their ring."""
    # subsets [L] of 64 bits; bit j of a word's entry: the word is in subset j
    checks = np.zeros(CHECKS, words.dtype)
    for start in range(0, words.size, PART):
        part, chosen = (one[start : start + PART] for one in (words, subsets))
        bits = (chosen >> np.uint64(check) & np.uint64(1) for check in range(CHECKS))
        checks += np.array([np.dot(each.astype(words.dtype), part) for each in bits])
    return checks


@dataclass(frozen=True)
class SumPad:
    """The pad of one sum of ``L`` numbers: it hides the sum from the server and shows changes."""

    words: RingArray  # [L + CHECKS], or [L] without; once for each contributor
    subsets: RingArray | None  # [L]; None where the server is trusted to change nothing

    def added(self, ring: Ring, values: NDArray[np.float64]) -> RingArray:
        result = self.words.copy()
        if self.subsets is not None:
            result[values.size :] += checks_of(ring.encode(values), self.subsets)
        return result

    def put_on(self, words: RingArray, contributors: int) -> RingArray:
        """Return the sum ``[L]`` of so many contributions with its checks, under their pads."""
        # The lowest bits of each word are zeros, as many as ``contributors`` needs.
        checks = words[:0] if self.subsets is None else checks_of(words, self.subsets)
        return np.concatenate([words, checks]) + self._times(contributors, words)

    def take_off(self, words: RingArray, contributors: int) -> RingArray:
        """Return a sum without pads; ``RefusedError`` if it is not the sum of the contributions."""
        total = words - self._times(contributors, words)
        if self.subsets is None:
            return total
        values, checks = total[: self.subsets.size], total[self.subsets.size :]
        if not np.array_equal(checks_of(values, self.subsets), checks):
            raise RefusedError(CHANGED_SUM)
        return values

    def taken(self, ring: Ring, words: RingArray, contributors: int) -> NDArray[np.float64]:
        """Read a sum; ``RefusedError`` if it is not the sum of the contributions."""
        try:
            values = ring.decode(self.take_off(words, contributors))
            ring.check_sums(values, contributors)
        except UnreadableSumError as error:  # a contributor's fault
            raise RefusedError(CHANGED_SUM) from error
        return values

    def _times(self, contributors: int, words: RingArray) -> RingArray:
        return (self.words * np.uint64(contributors)).astype(words.dtype)
