"""What a sum is of. It is hashed into every mask and pad: who is told otherwise shares neither.

A server that tells one party a finer resolution, another length or another layout than the rest
gets a total whose masks do not cancel, and not that party's vector.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from flower_graph.errors import RefusedError
from flower_graph.secure.channel import framed
from flower_graph.secure.ring import Ring

__all__ = ["SumTerms"]

DOMAIN, PADS = b"flower-graph sum terms 1", b"flower-graph pads 1"
SECURE_SUM = "secure sum"  # the purpose of `SecureSum`'s


@dataclass(frozen=True)
class SumTerms:
    """What the numbers of a sum are; server and clients state it by themselves.

    Attributes
    ----------
    purpose : str
        Which sum it is, such as ``"FedSCem union"``; no two kinds of sums have the same.
    ring : Ring or None
        How numbers are written as words; None where words are no numbers.
    detail : bytes
        What else says what stands where in a vector, such as a hash of its layout.
    padded : bool
        Whether clients add pads that hide the sum itself, for which a ring has guard bits.
    """

    purpose: str
    ring: Ring | None
    detail: bytes = b""
    padded: bool = False

    def check_guard(self, clients: int) -> None:
        """Refuse a ring with fewer guard bits than pads of so many clients need."""
        needed = (clients - 1).bit_length()
        if self.padded and self.ring is not None and self.ring.guard_bits < needed:
            raise RefusedError(
                f"guard-bits is {self.ring.guard_bits}: {clients} clients or more are in the sum, "
                f"whose pads need {needed}, or lowest bits would be in the clear"
            )

    def digest(self, length: int, word: int, threshold: int, minimum: int) -> bytes:
        """Hash them with what masking itself is told.

        Parameters
        ----------
        length, word : int
            Words of a vector, and bits of a word.
        threshold, minimum : int
            Shares that give a secret back, and contributors without whom nothing is revealed.

        Returns
        -------
        bytes, shape (32,)
            The run and the number of the sum are in the context of each key besides.
        """
        numbers = struct.pack("<qqqq", length, word, threshold, minimum)
        return self._hash(DOMAIN, numbers)

    def pad_context(self, run_id: bytes) -> bytes:
        """Hash them with a run, shape (32,): for pads, which whoever reads the sum makes again."""
        return self._hash(PADS, run_id)

    def _hash(self, domain: bytes, more: bytes) -> bytes:
        ring = b""
        if (one := self.ring) is not None:
            ring = struct.pack("<qqqd", one.word, one.fraction_bits, one.guard_bits, one.limit)
        parts = framed(domain, self.purpose.encode(), more, ring, self.detail)
        return hashlib.sha256(parts).digest()
