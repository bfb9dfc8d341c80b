"""Counts of predictions, exact and in one row for all clients, if a run asks for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_graph.errors import MalformedReplyError
from flower_graph.ops.counts import ERROR_SUMS, Counts, Errors, count, count_size
from flower_graph.wire.arrays import IntArray, unpack_integers
from flower_graph.wire.codec import Exact, Reading, Word, Writing, entries_of
from flower_graph.wire.keys import COUNTED, COUNTING, ERRORS, HISTOGRAMS, RANKS, ROLES

GROUP = "metrics"  # of the page
PARTS = {"": 0, HISTOGRAMS: 2, RANKS: 3}  # of ``Counts`` that a run asks for; else one
K = TypeVar("K", bound=Counts | Errors)
COUNTINGS = "`confusion`, with `histograms`, with `ranks` too; or `errors`, of numbers"
Counting = Annotated[str, Word(COUNTING, COUNTINGS, group=GROUP)]


@dataclass(frozen=True)
class CountsField(Exact):
    """Counts of a SuperNode's clients, if they were asked for."""

    def write(self, value: Any, to: Writing) -> None:  # Any: not of an Exact, but counts
        # Sums of errors are float64, of as many bytes
        if value is not None:
            super().write(value.flat().numpy().view(np.int64), to)

    def read(self, name: str, reading: Reading) -> Counts | Errors | None:
        if not (what := reading.known.get("counting", "")):
            return None
        row = unpack_integers(reading.config.get(self.key, b""), self.key)
        return as_counts(row, reading.known.get("classes", 0), what)


COUNTS = (
    "nodes by role, label and prediction; then by role, class, whether it is their label, and bin "
    "of its probability. `errors`, as float64: by role nodes, absolute and squared errors"
)
COUNTED_FIELD = CountsField(COUNTED, COUNTS, shape="m", optional=True, group=GROUP)
Counted = Annotated[Counts | Errors | None, COUNTED_FIELD]


def read_counts(content: RecordDict, classes: int, counting: str) -> Counts | Errors | None:
    """Read the clients' counts; ``MalformedReplyError`` if they are not as asked."""
    known = {"classes": classes, "counting": counting}
    return COUNTED_FIELD.read("counts", Reading(entries_of(content), known=known))


def as_counts(row: IntArray, classes: int, counting: str) -> Counts | Errors:
    """Read counts off one row; ``MalformedReplyError`` if they are not as asked."""
    try:
        if counting == ERRORS:
            return Errors.of_flat(torch.from_numpy(row.view(np.float64)))
        return Counts.of_flat(torch.from_numpy(row), classes, PARTS.get(counting, 1))
    except ValueError as error:
        raise MalformedReplyError(str(error)) from error


def counts_size(classes: int, counting: str) -> int:
    """Return how many numbers the counts of clients have; 0 if nothing is asked for."""
    if counting == ERRORS:
        return len(ROLES) * ERROR_SUMS
    return count_size(classes, PARTS.get(counting, 1))


def counted(logits: Tensor, y: Tensor, masks: Mapping[str, Tensor], counting: str) -> Counts | None:
    """Count the predictions of logits ``[n, k]``, as far as asked for."""
    return count(logits, y, masks, PARTS.get(counting, 1)) if counting else None


def added(parts: Iterable[K | None]) -> K | None:
    """Add up counts; None without any."""
    given = [one for one in parts if one is not None]
    return reduce(add, given) if given else None
