"""The outcome of a secure sum: the sum and its contributors, or why there is none; blame."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flower_graph.secure.ring import RingArray
from flower_graph.wire.fields import Integers


class Cause(Enum):
    """The kind of a reason."""

    LEFT_OUT = "its own SuperNode left the client out of the sum"
    DISPUTED = "a holder says that the client's packet does not open, which proves nothing"
    AT_ODDS = "most others are at odds with the client: it is excluded"
    PROVEN = "the client has cheated, and the server can prove it"
    SKIPPED = "there is no sum"


@dataclass(frozen=True)
class Reason:
    """Why a client is blamed or left out, or why there is no sum."""

    kind: Cause
    text: str  # One line for a person, without the client and the round
    client: int | None = None  # None if it is about the whole sum
    round: int | None = None  # Number of the sum, or the caller's own; None to leave it out

    def __str__(self) -> str:
        text = f"left out: {self.text}" if self.kind is Cause.LEFT_OUT else self.text
        if self.round is None:
            return text
        skipped = " is skipped" if self.kind is Cause.SKIPPED else ""
        return f"round {self.round}{skipped}: {text}"


@dataclass(frozen=True)
class SumResult:
    """The sum of a round."""

    total: RingArray  # [L] ring words: the sum of the contributors' encoded vectors, without masks
    contributors: Integers  # Numbers of the clients in it, ascending


@dataclass(frozen=True)
class Skipped:
    """A round without a sum; nothing of it was or will be revealed."""

    reason: Reason
