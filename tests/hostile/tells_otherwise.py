"""A grid on which one entry of a method's requests is told otherwise, to one or to all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from declared_entries import Entry, Seen, others, same, set_value
from flwr.app import Message, RecordDict

from flower_graph.secure.sum.messages import RING
from flower_graph.secure.sum.service import entries_of
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import decode_array

VICTIM = 0  # its partition
HOW = ("one", "all", "replayed", "round", "run")
AGREED = "agreed"  # to all, by a server that means it: it reads the sum by the same terms
RINGS = {one.key: name for name, one in (RING.fields or {}).items()}
Words = Any


class Cell(NamedTuple):
    """An entry, how it is told, and which of the other values."""

    entry: Entry
    how: str
    value: int = 0

    def __str__(self) -> str:
        return f"{self.entry} {self.how} {self.value}"


class TellsOtherwise(InProcessGrid):
    """Tells one entry otherwise, and notes what comes from the victim."""

    def begin(self, cell: Cell | None, known: Mapping[str, list[Any]], entries: Any) -> None:
        """Set what is told; ``known``: values of entries in another run, as they came."""
        self.cell, self._known, self._entries = cell, known, entries
        often = len(known.get(str(cell.entry), ())) if cell else 0
        self._at = min(1, max(0, often - 1))  # the second, so that there is an earlier one
        self.came: dict[str, list[Any]] = {}  # as the victim, or who first gets it, was to have it
        self.keys: set[str] = set()  # of all entries of requests
        self.told = int(cell is not None and cell.how == AGREED)
        self.altered: list[bool] = []  # of what was told otherwise: whether it was refused
        self.said: list[tuple[Any, ...]] = []  # the victim's answers, without bytes
        self.words: list[Words] = []  # and their arrays
        self.replies: list[RecordDict] = []
        self._lies: set[str] = set()
        self._later: list[str] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent, again, lies = list(messages), list[Message](), set[int]()
        seen = [Seen.of(one) for one in sent]
        self._note_requests(seen, sent)
        for place in self._due(seen, sent):
            lie = self._lie(sent[place], seen[place])
            if lie is None:
                continue
            self.told += 1
            if self.cell is not None and self.cell.how == "replayed":
                again.append(lie)
            else:
                sent[place] = lie
                lies.add(place)
        ids = list(super().push_messages(sent))
        self._later = list(super().push_messages(again)) if again else []
        self._lies |= {number for place, number in enumerate(ids) if place in lies}
        self._lies |= set(self._later)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = list(super().pull_messages(message_ids))
        later, self._later = list(super().pull_messages(self._later)), []
        for reply in (*replies, *later):
            if reply.metadata.reply_to_message_id in self._lies:
                self.altered.append(reply.has_error())
            if reply.metadata.src_node_id == self.victim:
                self._note(reply)
            if reply.has_content():
                self.replies.append(reply.content)
        return replies

    @property
    def victim(self) -> int:
        return next(n for n, c in self.contexts.items() if c.node_config["partition-id"] == VICTIM)

    def _first(self, entry: Entry, seen: Sequence[Seen], sent: Sequence[Message]) -> int | None:
        """Find whose request counts: the victim's, or that of the first who gets one."""
        having = [place for place, one in enumerate(seen) if one.has(entry)]
        own = [place for place in having if sent[place].metadata.dst_node_id == self.victim]
        return next(iter([*own, *having]), None)

    def _note_requests(self, seen: Sequence[Seen], sent: Sequence[Message]) -> None:
        for name, entry in self._entries.items():
            if (place := self._first(entry, seen, sent)) is not None:
                self.came.setdefault(name, []).append(seen[place].value(entry))
        for one in seen:
            self.keys |= {*one.config, *one.arrays}

    def _due(self, seen: Sequence[Seen], sent: Sequence[Message]) -> list[int]:
        """Return which of the messages are to be others."""
        if self.cell is None or self.cell.how == AGREED:
            return []
        if (first := self._first(self.cell.entry, seen, sent)) is None:
            return []
        if len(self.came[str(self.cell.entry)]) != self._at + 1:
            return []
        if self.cell.how != "all":
            return [first]
        return [place for place, one in enumerate(seen) if one.has(self.cell.entry)]

    def _lie(self, message: Message, seen: Seen) -> Message | None:
        assert self.cell is not None
        entry, how = self.cell.entry, self.cell.how
        honest = seen.value(entry)
        if how == "round":
            value = self.came[str(entry)][self._at - 1] if self._at else honest
        elif how == "run":
            values = self._known.get(str(entry), [])
            value = values[self._at] if self._at < len(values) else honest
        else:
            values = others(entry, honest)
            value = values[self.cell.value % len(values)]
        if same(value, honest):
            return None
        records = dict(message.content.items())
        set_value(entry, records, value)
        about = message.metadata
        return Message(
            RecordDict(records), about.dst_node_id, about.message_type, group_id=about.group_id
        )

    def _note(self, reply: Message) -> None:
        """Note an answer: whether it is an error, and all that is neither random nor a time."""
        kind = reply.metadata.message_type
        if reply.has_error():
            why = re.sub(r"got b['\"].*|\b[0-9a-f]{8,}\b|\d+", "#", str(reply.error.reason))
            self.said.append((kind, why))
            return
        found = entries_of(reply.content)
        shown = {
            key: len(value) if isinstance(value, bytes | str) else value
            for key, value in found.items()
            if "seconds" not in key
        }
        self.said.append((kind, sorted(shown.items(), key=lambda item: item[0])))
        for record in reply.content.array_records.values():
            numbers = [decode_array(name, array) for name, array in record.items()]
            self.words += [one.copy() for one in numbers if one.dtype.kind == "u"]
