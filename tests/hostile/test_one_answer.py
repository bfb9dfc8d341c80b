"""A relayed sum that was changed is answered alike, whatever the sum is.

Every word of every relayed sum is changed in three ways, before a SuperNode that distrusts the
server gets it, in two runs that differ in what other SuperNodes contributed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message
from test_summed import Summed, rich_graph

from flower_graph.client.trust import trust_of
from flower_graph.secure.relayed import REFUSAL
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import own_records

RELAYED = ("total", "sums")  # records of a message with words of a sum
WAYS = ("add one", "top bit", "another")


def changed(words: np.ndarray, place: int, way: str) -> np.ndarray:
    """Change one word of a sum."""
    result = words.copy()
    one, bits = words.dtype.type(1), 8 * words.itemsize
    if way == "add one":
        result[place] += one
    elif way == "top bit":
        result[place] ^= one << words.dtype.type(bits - 1)
    else:
        chance = np.random.default_rng((place, bits))
        result[place] = chance.integers(0, 1 << bits, dtype=words.dtype)
    return result


class Changes(InProcessGrid):
    """Gives one SuperNode the first relayed sum with a word changed, as often as there are ways."""

    every = 1

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Try all changes, and then what was sent, which comes too late; then go on as before."""
        sent = list(messages)
        for message in sent:
            found = [n for n in RELAYED if n in message.content.array_records]
            if found and not hasattr(self, "said"):
                self.said = list[bytes]()
                self._try(message, found[0])
        return super().push_messages(sent)

    def _try(self, message: Message, name: str) -> None:
        context = self.contexts[message.metadata.dst_node_id]
        journal = trust_of(context).journal
        before = journal.read_bytes()
        for key, array in message.content.array_records[name].items():
            words = array.numpy()
            for place, way in product(range(0, words.size, self.every), WAYS):
                journal.write_bytes(before)  # so that each is a first trial
                other = copy.copy(message)
                other.content = own_records(message.content)
                other.content.array_records[name][key] = Array(changed(words, place, way))
                self._note(other)
        self._note(message)
        journal.write_bytes(before)

    def _note(self, message: Message) -> None:
        reply = self._handle(message, self.contexts[message.metadata.dst_node_id])
        words = reply.error.reason if reply.has_error() else "it is answered"
        self.said.append(re.sub(rb" [(].*[)]$", b"", words.encode()))  # the line of a simulation


def said_by_users(kind: int, every: int) -> list[bytes]:
    """Run nFedGNN with one first layer, where one user's features are of two kinds."""
    data = rich_graph()
    if kind:
        data.x[-1] = -3 * data.x[-1] + 1
    grid = type("Some", (Changes,), {"every": every})
    run = Summed(data, grid=grid, supernodes=5, is_masked=True, distrusts=True, rounds=3)
    assert len(run.reports) == 3 and not any(report.skipped for report in run.reports)
    return run.grid.said  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    "every", [9, pytest.param(1, marks=(pytest.mark.slow, pytest.mark.release))]
)
@pytest.mark.parametrize("said", [said_by_users])
def test_a_changed_sum_is_answered_alike_whatever_it_is(said: Any, every: int) -> None:
    one, other = said(0, every), said(1, every)
    assert one == other and len(one) > 30
    assert set(one) == {f"RefusedError: {REFUSAL}".encode()}
