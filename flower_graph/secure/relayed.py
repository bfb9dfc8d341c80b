"""Sums that a server adds up and passes on without reading them: pads, and checks of changes.

Contributors have a key in common that the server lacks. From it come, for each sum alone, pads that
hide the words, and a subset of the words for each of 64 checks. A check is the sum of its subset,
modulo the ring, so that checks add up as words do.

*What a check finds.* A server adds ``d`` to the words and ``e`` to the checks, in the ring. The sum
passes if ``e_j`` is the sum of ``d`` over subset ``j``, for every ``j``. If ``d`` is not zero
everywhere, take a word ``i`` with ``d_i != 0``: whatever else is in subset ``j``, only one of *with
i* and *without i* gives ``e_j``, as the two sums differ by ``d_i``. Both are as likely, so each
check finds the change with a chance of one half, also that of a word's top bit, and all of them
together but for 2^-64. If ``d`` is zero and ``e`` is not, the sum does not pass. A count of
contributors that is not true adds a multiple of the pads, which is such a ``d`` and ``e``.

*What a refusal reveals.* Whether a sum passes depends on ``d``, ``e`` and the subsets; the sum
itself cancels, as every step is linear in the ring, and nothing is decoded before. So a server that
tries changes learns nothing of the sum, however often; one trial of a step is taken
(``Journal.one_trial``), so that the subsets are not learnt either.

*What the checks reveal.* With an even number of contributors the lowest bits of ``contributors *
pad`` are zeros. Words have guard bits there, which are zeros too, and so have sums of words.
"""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError, UnreadableSumError
from flower_graph.secure.ring import Ring, RingArray

BLOCK = 1 << 14  # words that stay in the processor's cache
CHECKS = 64  # bits of a word of subsets
REFUSAL = (
    "a relayed sum is not what its contributors have sent: this SuperNode takes no step with it"
)


def checks_of(words: RingArray, subsets: RingArray) -> RingArray:
    """Return the checks of words, ``[CHECKS]``, in their ring."""
    # subsets [L] of 64 bits; bit j of a word's entry: the word is in subset j
    checks = np.zeros(CHECKS, words.dtype)
    for start in range(0, words.size, BLOCK):
        part, chosen = (one[start : start + BLOCK] for one in (words, subsets))
        bits = (chosen >> np.uint64(check) & np.uint64(1) for check in range(CHECKS))
        checks += np.array([np.dot(each.astype(words.dtype), part) for each in bits])
    return checks


@dataclass(frozen=True)
class SumPad:
    """The pad of one sum of ``L`` numbers: it hides the sum from the server and shows changes."""

    words: RingArray  # [L + CHECKS], or [L] without; once for each contributor
    subsets: RingArray | None  # [L]; None where the server is trusted to change nothing

    def added(self, ring: Ring, values: NDArray[np.float64]) -> RingArray:
        """Return the words to add to a contributor's values, checks included."""
        result = self.words.copy()
        if self.subsets is not None:
            result[values.size :] += checks_of(ring.encode(values), self.subsets)
        return result

    def taken(self, ring: Ring, words: RingArray, contributors: int) -> NDArray[np.float64]:
        """Take the pads off a sum; ``RefusedError`` if it is not the sum of the contributions."""
        total = words - self.words * np.uint64(contributors)
        with suppress(UnreadableSumError):  # a contributor's fault
            if self.subsets is not None:
                total, checks = np.split(total, [self.subsets.size])
            if self.subsets is None or np.array_equal(checks_of(total, self.subsets), checks):
                values = ring.decode(total)
                ring.check_sums(values, contributors)
                return values
        raise RefusedError(REFUSAL)
