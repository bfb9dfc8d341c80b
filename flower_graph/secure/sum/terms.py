"""The terms of a sum, which are hashed into every mask and pad.

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
    """The meaning of a sum's numbers; server and clients each state it by themselves.

    Attributes
    ----------
    purpose : str
        The kind of sum, such as ``"FedSCem union"``; no two kinds have the same.
    ring : Ring or None
        How numbers are written as words; None where words are no numbers.
    detail : bytes
        Anything else that determines a vector's layout, such as a hash of it.
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
        """Hash the terms with masking's own: words of a vector, bits of a word, and so on.

        ``threshold`` shares give a secret back; with fewer than ``minimum`` contributors nothing is
        revealed. Returns 32 bytes. The context of each key also has the run and the number of the
        sum.
        """
        numbers = struct.pack("<qqqq", length, word, threshold, minimum)
        return self._hash(DOMAIN, numbers)

    def pad_context(self, run_id: bytes) -> bytes:
        """Hash the terms with a run, 32 bytes, for pads: a reader of the sum makes them again."""
        return self._hash(PADS, run_id)

    def _hash(self, domain: bytes, more: bytes) -> bytes:
        ring = b""
        if (one := self.ring) is not None:
            ring = struct.pack("<qqqd", one.word, one.fraction_bits, one.guard_bits, one.limit)
        parts = framed(domain, self.purpose.encode(), more, ring, self.detail)
        return hashlib.sha256(parts).digest()
