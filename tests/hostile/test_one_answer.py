"""A relayed sum that was changed is answered alike, whatever the sum is.

Every word of every relayed sum is changed in three ways, before a SuperNode that distrusts the
server gets it, in two runs that differ in what other SuperNodes contributed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Array, Context, Message
from party_helpers import write_keys
from test_summed import Summed, rich_graph
from told_otherwise import COUNT, egos_app, egos_server, trust_in

from flower_graph import EgoNetworkClient
from flower_graph.client.state import forget_run
from flower_graph.client.trust import trust_of
from flower_graph.errors import RefusedError
from flower_graph.secure.relayed import CHECKS, REFUSAL
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import own_records
from flower_graph.wire.keys import CONFIG

RELAYED = {"total", "sums"}  # records of a message with words of a sum
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

    every, home = 1, 1
    said: list[bytes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Try all changes, and then what was sent, which comes too late; then go on as before."""
        sent = list(messages)
        for message in sent:
            config = self.contexts[message.metadata.dst_node_id].node_config
            found = RELAYED & message.content.array_records.keys()
            if found and config["partition-id"] == self.home and not hasattr(self, "said"):
                self.said = []
                self._try(message, *found)
        return super().push_messages(sent)

    def _try(self, message: Message, record: str) -> None:
        context = self.contexts[message.metadata.dst_node_id]
        journal = self.journal(context)
        before = journal.read_bytes()
        for one in self._changed(message, record):
            journal.write_bytes(before)  # so that each is a first trial
            self._note(one)
        self._note(message)
        journal.write_bytes(before)

    def _changed(self, message: Message, record: str) -> Iterator[Message]:
        """Give the message with each word of the sum, and of its checks, changed in each way."""
        for key, array in message.content.array_records[record].items():
            words = array.numpy()
            for place, way in product(range(0, words.size, self.every), WAYS):
                other = copied(message)
                other.content.array_records[record][key] = Array(changed(words, place, way))
                yield other
        checks = message.content.config_records[CONFIG].get("sums-checks")
        for place, way in product(range(0, CHECKS if checks else 0, self.every), WAYS):
            other, words = copied(message), np.frombuffer(checks, "<u8")  # type: ignore[arg-type]
            entries = other.content.config_records[CONFIG]
            entries["sums-checks"] = changed(words, place, way).tobytes()
            yield other

    def journal(self, context: Context) -> Path:
        """Return the SuperNode's journal."""
        return trust_of(context).journal

    def _note(self, message: Message) -> None:
        reply = self._handle(message, self.contexts[message.metadata.dst_node_id])
        words = reply.error.reason if reply.has_error() else "it is answered"
        self.said.append(re.sub(rb" [(].*[)]$", b"", words.encode()))  # the line of a simulation


def copied(message: Message) -> Message:
    """Copy a message, that its content may be changed."""
    result = copy.copy(message)
    result.content = own_records(message.content)
    return result


def said_by_users(kind: int, every: int, folder: Path) -> list[bytes]:
    """Run nFedGNN with one first layer, where one user's features are of two kinds."""
    data = rich_graph()
    if kind:
        data.x[-1] = -3 * data.x[-1] + 1
    grid = type("Some", (Changes,), {"every": max(1, every // 150)})  # its words are few
    run = Summed(data, grid=grid, supernodes=5, is_masked=True, distrusts=True, rounds=3)
    assert len(run.reports) == 3 and not any(report.skipped for report in run.reports)
    assert set(run.grid.said) == {f"RefusedError: {REFUSAL}".encode()}  # type: ignore[attr-defined]
    return run.grid.said  # type: ignore[attr-defined, no-any-return]


class Egos(Changes):
    """FedSCem's clients answer with masked words: noted is what they make these of."""

    keys: Path

    def journal(self, context: Context) -> Path:
        """Return the SuperNode's journal."""
        trust = trust_in(context, self.keys)
        assert trust is not None
        return trust.journal

    def _note(self, message: Message) -> None:
        fuse = EgoNetworkClient._fuse

        def noted(client: Any, chosen: Any, *given: Any) -> Any:
            contrast, is_unread = fuse(client, chosen, *given)
            assert is_unread and bool(contrast.isnan().all()), "it goes on alone"
            self.said.append(chosen.embed().numpy().tobytes())
            raise RefusedError("it is known")  # so that nothing of it is kept

        with patch.object(EgoNetworkClient, "_fuse", noted):
            assert self._handle(message, self.contexts[message.metadata.dst_node_id]).has_error()


def said_by_egos(kind: int, every: int, folder: Path) -> list[bytes]:
    """Run FedSCem, where one client's graph is of two kinds."""
    keys = folder / str(kind)
    keys.mkdir()
    write_keys(COUNT, keys)
    grid = type("Some", (Egos,), {"every": every, "keys": keys})
    app = egos_app(kind, keys)
    made = grid(app, num_supernodes=COUNT)
    try:
        egos_server(keys).start(made, num_rounds=2, timeout=5.0)
    finally:
        forget_run(made.run.run_id)
    return made.said  # type: ignore[no-any-return]


ALL = pytest.param(1, marks=(pytest.mark.slow, pytest.mark.release))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", [600, ALL])
@pytest.mark.parametrize("said", [said_by_users, said_by_egos])
def test_a_changed_sum_is_answered_alike_whatever_it_is(
    said: Any, every: int, tmp_path: Path
) -> None:
    one, other = said(0, every, tmp_path), said(1, every, tmp_path)
    assert one == other and len(one) > 15 and len(set(one)) == 1
