"""Going on: which run and checkpoint a client is told, and what it says of its own state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from flwr.app import RecordDict

from flower_graph.messages.codec import Message
from flower_graph.messages.fields import ABSENT, Flag, Reading, Whole, Word
from flower_graph.messages.keys import CHECKPOINT, CONFIG, HANDLED, NOT_SAVED, RUN_TOKEN
from flower_graph.messages.text import one_line

GROUP = "checkpoints"  # of the page


@dataclass(frozen=True)
class Said(Word):
    """A peer's own words, cut to a line that a log can have."""

    def decode(self, value: Any, name: str, reading: Reading) -> str:
        """Take anything."""
        return "" if value is None else one_line(str(value))


# Fields of requests and replies. A client that does not say how many messages it has behind it
# cannot be told from one that has lost its state
Saves = Annotated[
    bool, Flag(CHECKPOINT, "whether to save the state after this message", group=GROUP)
]
Token = Annotated[str, Word(RUN_TOKEN, "of the run that the checkpoint is of", group=GROUP)]
HANDLED_FIELD = Whole(
    HANDLED,
    "messages of this run that the SuperNode's clients have behind them; 0 if they have no state. "
    "Optional: with it a lost state is noticed",
    least=0,
    optional=True,
    group=GROUP,
)
Handled = Annotated[int | None, HANDLED_FIELD]
NOT_SAVED_FIELD = Said(
    NOT_SAVED, "why the checkpoint could not be written; left out if it could", group=GROUP
)
NotSaved = Annotated[str, NOT_SAVED_FIELD]


@dataclass(frozen=True)
class Resume(Message, down="query"):
    """What a client must know to go on."""

    run: Annotated[
        str,
        Word(
            RUN_TOKEN,
            "tells one run from another: 32 hexadecimal digits; a client refuses files of another "
            "run",
        ),
    ] = ""
    server_round: Annotated[
        int,
        Whole(
            "resume-round",
            "round whose checkpoint is to be loaded before the answer; 0 in a new run",
            optional=True,
        ),
    ] = 0
    # If a SuperNode is asked again later, under another id, it has gone on since
    attempt: Annotated[
        str,
        Word(
            "resume-attempt",
            "tells one start of the server from the next: a client loads once an attempt and round",
        ),
    ] = ""


def read_handled(config: Mapping[str, Any]) -> int | None:
    """Read how many messages of this run a client has behind it; None if it does not say."""
    handled = HANDLED_FIELD.read("handled", Reading(config, config, []))
    return None if handled is ABSENT else int(handled)


def read_not_saved(content: RecordDict) -> str:
    """Read why a client could not write the checkpoint that it was asked for; empty if it did."""
    config: Mapping[str, Any] = content.config_records.get(CONFIG) or {}
    return str(NOT_SAVED_FIELD.read("not_saved", Reading(config, config, [])))
