"""Every field of every request of a sum, told otherwise: what the server then has of one SuperNode.

Fields come from the messages' declarations. A cell is a field and how it is told; it is run for two
vectors of the victim, and what the server got of the one is compared with what it got of the other.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from party_helpers import write_keys

from flower_graph.client.adaptor import make_client_app
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties import messages as of_parties
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum import messages as of_sums
from flower_graph.secure.sum.messages import RING
from flower_graph.secure.sum.round import SumResult
from flower_graph.secure.sum.service import ARRAYS, MASKED_SUM, SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.codec import Message as Declared
from flower_graph.wire.codec import Part
from flower_graph.wire.exchange import Exchange
from flower_graph.wire.keys import CONFIG

COUNT, LENGTH, SUMS, LIMIT = 6, 4096, 2, 100.0
HOW = ("one", "all", "replayed", "round", "run")
AGREED = "agreed"  # to all, by a server that means it: it reads the sum by the same terms
RINGS = {one.key: name for name, one in (RING.fields or {}).items()}


class Cell(NamedTuple):
    """A field's entry, how it is told, and which of the other values."""

    key: str
    how: str
    value: int = 0

    def __str__(self) -> str:
        return f"{self.key} {self.how} {self.value}"


def requests(trusted: bool = False) -> dict[str, tuple[Any, str]]:
    """Give every entry that a request of a sum declares: what reads it, and its attribute."""
    found: dict[str, tuple[Any, str]] = {}
    for module in (of_sums,) if trusted else (of_sums, of_parties):
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, Declared) and one.down:
                # A SuperNode with a key of its own is never asked for such keys
                is_sent = trusted or one is not of_sums.KeyRequest
                found |= _entries(one, one.layout) if is_sent else {}
            elif isinstance(one, Part):
                found |= _entries(one, one)
    return found


def _entries(reader: Any, part: Part) -> dict[str, tuple[Any, str]]:
    return {one.key: (reader, name) for name, one in part.parts.items()}


def others(value: Any) -> list[Any]:
    """Give other values than an honest one, by its type."""
    chance = np.random.default_rng(3)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value + 10]
    if isinstance(value, float):
        return [value / 2, value * 2]
    if isinstance(value, bytes):
        return [chance.bytes(len(value))]
    rows = np.array(value)
    if not rows.size:
        return [np.ones((1, *rows.shape[1:]), rows.dtype)]
    one = rows.copy()
    one.flat[0] = not one.flat[0] if rows.dtype == bool else one.flat[0] ^ 1
    found = [one, rows[..., ::-1].copy(), rows[:-1], np.concatenate([rows, rows[:1]])]
    return [each for each in found if not np.array_equal(each, rows)]


def cells(table: Table, key: str) -> list[Cell]:
    """Give all cells of an entry, one for each other value."""
    reader, name = requests(table.trusted)[key]
    value = getattr(reader.from_config(table.honest(key)), name)
    made = range(len(others(value)))
    return [
        Cell(key, how, number)
        for how in ((*HOW, AGREED) if key in RINGS else HOW)
        for number in (made if how in ("one", "all", "replayed", AGREED) else (0,))
    ]


def other_value(key: str, entries: Mapping[str, Any], number: int) -> Any:
    """Write another value of an entry."""
    reader, name = requests(True)[key] if key in requests(True) else requests()[key]
    message = reader.from_config(dict(entries))
    values = others(getattr(message, name))
    changed = values[number % len(values)]
    if isinstance(reader, Part):  # numbers as they are
        return changed
    return replace(message, **{name: changed}).to_config()[key]


# What is done -------------------------------------------------------------------------------------


class DeviatingGrid(InProcessGrid):
    """Tells one entry otherwise; notes what the victim is sent and answers."""

    cell: Cell | None = None
    known: dict[str, list[Any]]  # of another run: values of each entry, as they came
    home: dict[int, int]  # partition of each SuperNode

    def begin(
        self, cell: Cell | None, known: dict[str, list[Any]], often: Mapping[str, int]
    ) -> None:
        """Set what is told, with how often each entry comes in an honest run."""
        self.cell, self.known = cell, known
        self.told = int(cell is not None and cell.how == AGREED)
        self.at = 0 if cell is None else min(1, often.get(cell.key, 1) - 1)
        self.came: dict[int, dict[str, list[Any]]] = {}  # honest values, by SuperNode
        self.answers: list[tuple[str, bool, int]] = []  # the victim's: type, whether an error, size
        self.altered: list[bool] = []  # of what was told otherwise: whether it was refused
        self.masked: list[Any] = []
        self.messages: list[dict[str, Any]] = []  # entries, as the victim was to have them
        self._altered: set[str] = set()  # their ids
        self._changed: list[Message] = []
        self._later: list[str] = []  # what is told again, after an honest message

    @property
    def victim(self) -> int:
        return sorted(self.get_node_ids())[0]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        honest, again = list(messages), []
        for place, message in enumerate(honest):
            changed = self._told_otherwise(message)
            if changed is not None and self.cell is not None and self.cell.how == "replayed":
                again.append(changed)
            elif changed is not None:
                honest[place] = changed
        ids = list(super().push_messages(honest))
        self._later = list(super().push_messages(again)) if again else []
        changed = {id(one) for one in self._changed}
        self._altered |= {n for one, n in zip(honest, ids, strict=True) if id(one) in changed}
        self._altered |= set(self._later)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = list(super().pull_messages(message_ids))
        later = list(super().pull_messages(self._later)) if self._later else []
        self._later = []
        for reply in (*replies, *later):
            if reply.metadata.src_node_id == self.victim:
                self._note(reply)
        return replies

    def _told_otherwise(self, message: Message) -> Message | None:
        entries = dict(message.content.config_records.get(CONFIG, {}))
        node, cell = message.metadata.dst_node_id, self.cell
        came = self.came.setdefault(node, {})
        self.messages += [entries] if node == self.victim else []
        for key, value in entries.items():
            came.setdefault(key, []).append(value)
        if cell is None or len(came.get(cell.key, ())) != self.at + 1 or cell.key not in entries:
            return None
        if cell.how == AGREED or (cell.how != "all" and node != self.victim):
            return None
        if cell.how == "round":
            value = came[cell.key][self.at - 1] if self.at else entries[cell.key]
        elif cell.how == "run":
            value = self.known[cell.key][self.at]
        else:
            value = other_value(cell.key, entries, cell.value)
        if value == entries[cell.key]:
            return None
        self.told += 1
        records = {name: one for name, one in message.content.items() if name != CONFIG}
        content = RecordDict(records | {CONFIG: ConfigRecord(entries | {cell.key: value})})
        about = message.metadata
        changed = Message(content, node, about.message_type, group_id=about.group_id)
        self._changed.append(changed)
        return changed

    def _note(self, reply: Message) -> None:
        refused = reply.has_error()
        size = 0
        if not refused:
            arrays = reply.content.array_records.get(ARRAYS)
            if arrays is not None and MASKED_SUM in arrays:
                self.masked.append(decode_array(MASKED_SUM, arrays[MASKED_SUM]).copy())
            entries = reply.content.config_records.get(CONFIG, {})
            size = sum(len(v) if isinstance(v, bytes | str | list) else 1 for v in entries.values())
        self.answers.append((reply.metadata.message_type, refused, size))
        if reply.metadata.reply_to_message_id in self._altered:
            self.altered.append(refused)


def vector(place: int, number: int, kind: int = 0) -> Any:
    """Draw a SuperNode's numbers in a sum; the victim has two kinds, within the limit."""
    draw = np.random.default_rng((place, number, kind)).normal(size=LENGTH)
    return draw * 15 if kind else draw


@dataclass
class Had:
    """What the server had of a run: of each sum the words, and what came of the victim."""

    totals: list[Any]  # words, or None
    contributors: list[Any]
    ended: str  # by which error of its own code the server stopped
    grid: DeviatingGrid = field(repr=False)

    @property
    def views(self) -> dict[str, Any]:
        """Give all arrays of words that may tell of the victim's numbers."""
        masked = self.grid.masked
        found = {f"masked {i}": words for i, words in enumerate(masked)}
        for i, one in enumerate(masked):
            for j, other in enumerate(masked[:i]):
                if one.shape == other.shape and one.dtype == other.dtype:
                    found[f"masked {i} - {j}"] = one - other
        return found | {f"sum {i}": one for i, one in enumerate(self.totals) if one is not None}


class Table:
    """Runs cells, each with keys that have never been used."""

    def __init__(self, folder: Path, trusted: bool = False) -> None:
        self._folder, self.trusted = folder, trusted
        self._pristine = folder / "keys"
        self._pristine.mkdir()
        write_keys(COUNT, self._pristine)
        self.often, self.known = dict[str, int](), dict[str, list[Any]]()
        reference = self.run(None)
        self.sent = reference.grid.came[reference.grid.victim]
        self.often = {key: len(values) for key, values in self.sent.items()}
        self.known, self.messages = self.sent, reference.grid.messages

    def honest(self, key: str) -> dict[str, Any]:
        """Give the entries of an honest message that has this one."""
        return next(entries for entries in self.messages if key in entries)

    def run(self, cell: Cell | None, kind: int = 0) -> Had:
        """Do the sums, told otherwise in one place."""
        with tempfile.TemporaryDirectory(dir=self._folder) as there:
            keys = shutil.copytree(self._pristine, Path(there) / "keys")
            return self._run(keys, cell, kind)

    def _meant(self, cell: Cell | None) -> dict[str, Any]:
        """Return what the server's own ring has otherwise."""
        if cell is None or cell.how != AGREED:
            return {}
        value = RING.from_config(self.honest(cell.key))
        name = RINGS[cell.key]
        return {name: others(getattr(value, name))[cell.value]}

    def _run(self, keys: Path, cell: Cell | None, kind: int) -> Had:
        home: dict[int, int] = {}
        rounds = [0]

        class Vectors(SecureSumClient):
            def vectors(self, config: Any) -> Any:
                (place,) = {client // 2 for client in self.clients}
                whose = kind if self.context.node_id == grid.victim else 0
                numbers = vector(place, rounds[0], whose)
                return {self.clients[0]: numbers, self.clients[1]: np.zeros(LENGTH)}

        def client_fn(context: Any) -> Vectors:
            place = int(context.node_config["partition-id"])
            home[context.node_id] = place
            files = {"identity-key": f"key-{place}", "registry": "registry.json"}
            files = {} if self.trusted else files
            context.node_config |= {key: str(keys / name) for key, name in files.items()}
            return Vectors(context, [2 * place, 2 * place + 1])

        grid = DeviatingGrid(make_client_app(client_fn), num_supernodes=COUNT)
        grid.begin(cell, self.known, self.often)
        server: Any = None
        if not self.trusted:
            server = PartySums(keys / "registry.json")
            # Whoever lies does not mind what is signed for the honest run
            server._verify = lambda *_: None
        fit, meant = Ring.fit, self._meant(cell)

        def fitted(*args: Any, **more: Any) -> Ring:
            return replace(fit(*args, **more), **meant)

        with patch.object(Ring, "fit", fitted):
            secure = SecureSum(Exchange(grid), limit=LIMIT, server=server, guard=True, timeout=20)
        totals: list[Any] = [None] * SUMS
        contributors: list[Any] = [None] * SUMS
        end = secure.result

        def noted() -> Any:
            found = end()
            if isinstance(found, SumResult):
                totals[rounds[0]] = found.total.copy()
                contributors[rounds[0]] = sorted({c // 2 for c in found.contributors.tolist()})
            return found

        secure.result = noted  # type: ignore[method-assign]
        ended = ""
        for number in range(SUMS):
            rounds[0] = number
            try:
                secure.sum(number + 1, LENGTH)
            except (
                RuntimeError,
                ValueError,
                AssertionError,
                LookupError,
            ) as error:  # of its own code: it sends lies
                ended = type(error).__name__
                break
        grid.home = home
        return Had(totals, contributors, ended, grid)
