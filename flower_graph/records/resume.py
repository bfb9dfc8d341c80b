"""Going on: which run and checkpoint a client is told, and what it says of its own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.app import RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.gathering import one_line
from flower_graph.records.keys import (
    CONFIG,
    HANDLED,
    NOT_SAVED,
    RESUME_ATTEMPT,
    RESUME_ROUND,
    RUN_TOKEN,
    without_empty,
)


class Resume(NamedTuple):
    """What a client must know to go on.

    Attributes
    ----------
    run : str
        Token of the run, whose files alone are loaded.
    server_round : int
        Round whose checkpoint the client is to load; 0 for a new run.
    attempt : str
        Tells one start of the server from the next. A client loads once an attempt and round: if
        its SuperNode is asked again later, under another id, it has gone on since.
    """

    run: str = ""
    server_round: int = 0
    attempt: str = ""

    def to_config(self) -> dict[str, Any]:
        """Write the entries."""
        found = {RUN_TOKEN: self.run, RESUME_ROUND: self.server_round}
        return without_empty(found | {RESUME_ATTEMPT: self.attempt})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Resume:
        """Read the entries at the client."""
        return cls(
            str(config.get(RUN_TOKEN, "")),
            int(config.get(RESUME_ROUND, 0)),
            str(config.get(RESUME_ATTEMPT, "")),
        )


def read_handled(config: Mapping[str, Any]) -> int | None:
    """Read how many messages of this run a client has behind it; None if it does not say.

    Raises
    ------
    MalformedReplyError
        If that is no count.
    """
    value = config.get(HANDLED)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise MalformedReplyError(f"{HANDLED}: expected a count, got {value!r:.60}")
    return value


def read_not_saved(content: RecordDict) -> str:
    """Read why a client could not write the checkpoint that it was asked for; empty if it did."""
    config = content.config_records.get(CONFIG)
    return "" if config is None else one_line(str(config.get(NOT_SAVED, "")))
