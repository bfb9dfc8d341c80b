"""A method's requests told otherwise, or an alignment's, or a sum's: what the server then has.

Entries come from the messages' declarations, with other values for each. A grid tells one of them
otherwise, to one SuperNode or to all. Each run notes what every SuperNode put under masks, so that
whatever the server gets can be held against it: a sum is that of its contributors, or words by
which nothing of a SuperNode's numbers can be told. What a SuperNode says besides is compared
between two kinds of its data.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from ego_helpers import SETTINGS
from flwr.app import Array, Message, RecordDict
from graph_helpers import dealt
from lying_grid import like
from public_helpers import ToyModel
from sum_helpers import keys_in, write_keys

from flower_graph import EgoNetworkClient, MaskedEmbeddingAveraging
from flower_graph.client.state import forget_run
from flower_graph.data.graph import ClientGraph, to_undirected
from flower_graph.secure.align import blinded
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.ring import SIGNED, Ring
from flower_graph.secure.sum import messages as of_sums
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import RING
from flower_graph.secure.sum.server import PartySums, SumResult, SumRound
from flower_graph.server.sums import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem import client as of_egos
from flower_graph.strategies.fedscem.client import Hiding, VectorEncoding
from flower_graph.strategies.ppfl import client as of_public
from flower_graph.strategies.ppfl.client import EmbeddingClient, SecureConsensusClient
from flower_graph.strategies.ppfl.strategy import SecureConsensus
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.codec import Block, Exact, Field, Flags, Part, entries_of, fields_of
from flower_graph.wire.codec import Message as Declared
from flower_graph.wire.exchange import Exchange
from flower_graph.wire.keys import CONFIG

# What an entry that is left out stands for, by its type
DEFAULTS: Mapping[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False}


class Entry(NamedTuple):
    """An entry of a request, or one of its arrays."""

    message: type[Declared]
    key: str
    field: Field | None  # None of what a message always says, such as its stage
    beside: frozenset[str] = frozenset()  # all keys of the message

    @property
    def default(self) -> Any:
        """What it stands for where it is left out; None if it cannot be."""
        return None if self.field is None else DEFAULTS.get(self.field.type)

    def __str__(self) -> str:
        return f"{self.message.__name__}.{self.key}"


def entries_of_requests(modules: Iterable[ModuleType]) -> dict[str, Entry]:
    """Give all entries that the requests of some modules declare, by their names."""
    found = dict[str, Entry]()
    for module in modules:
        for one in vars(module).values():
            if not isinstance(one, type) or not issubclass(one, Declared) or not one.down:
                continue
            if one.__module__ == module.__name__:
                fields = list(_fields(fields_of(one)))
                beside = frozenset(field.key for field in fields)
                entries = [Entry(one, key, None) for key in one.fixed]
                entries += [Entry(one, field.key, field, beside) for field in fields]
                found |= {str(entry): entry for entry in entries}
    return found


def _fields(parts: Mapping[str, Field]) -> Iterator[Field]:
    """Give the fields of a part, those of parts in it, and those that fields have with them."""
    for part_field in parts.values():
        beside = [one for kind in type(part_field).__mro__ for one in vars(kind).values()]
        beside += [
            *vars(part_field).values(),
            *(size for _, size in getattr(part_field, "sent", ())),
        ]
        yield from (one for one in beside if isinstance(one, Field) and one.key)
        if isinstance(part_field, Part):
            yield from _fields(part_field.parts)
        elif part_field.key:
            yield part_field


class Seen(NamedTuple):
    """A request as it travels: its type, and its entries and arrays by key, or record and name."""

    kind: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, message: Message) -> Seen:
        named = {
            f"{record}/{name}": array
            for record, arrays in message.content.array_records.items()
            for name, array in arrays.items()
        }
        return cls(message.metadata.message_type, named | dict(message.content.get(CONFIG, {})))

    def has(self, entry: Entry) -> bool:
        """Tell whether it has an entry, or could have one that is left out."""
        fixed, values = entry.message.fixed, self.values
        names = {self.kind, self.kind.removeprefix("train.")}  # of a sum's messages the latter
        if names.isdisjoint(entry.message.down) or any(values.get(k) != fixed[k] for k in fixed):
            return False
        if entry.key in values:
            return True
        return entry.default is not None and bool(entry.beside & values.keys())

    def value(self, entry: Entry) -> Any:
        """Return an entry's value on the wire, of an array its numbers."""
        found = self.values.get(entry.key, entry.default)
        is_array = isinstance(found, Array)
        return decode_array(entry.key.partition("/")[2], found) if is_array else found


def with_value(message: Message, entry: Entry, value: Any) -> Message:
    """Write a message with another value of an entry."""
    record, _, name = entry.key.rpartition("/")
    old = message.content[record or CONFIG]
    changed = {**old, name: Array(value) if record else value}
    return like(message, {record or CONFIG: type(old)(changed)})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return type(one) is type(other) and bool(one == other)


def others(entry: Entry, value: Any) -> list[Any]:
    """Give other values than an honest one, by what the field declares and what travels."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value // 2), 2 * value + 10]
    if isinstance(value, float):
        return [value / 2, value * 2 + 1]
    if isinstance(value, str):  # what the declaration names, and what it does not
        words = re.findall(r"`([\w-]+)`", entry.field.says if entry.field else "")
        return [*words, value[::-1] or "another"]
    if isinstance(value, list):
        turned = [1 - one if one in (0, 1) else one + 1 for one in value]
        return [turned, value[:-1], value[::-1]]
    if not isinstance(value, bytes):
        noise = np.random.default_rng(3).permutation(value.reshape(-1)).reshape(value.shape)
        turned = -value if value.dtype.kind == "f" else value ^ value.dtype.type(1)
        return [one for one in (turned, np.zeros_like(value), noise) if not same(one, value)]
    # One number or bit changed, rows turned round, one fewer, one twice
    declared, width = entry.field, 8 if isinstance(entry.field, Exact) else 1
    if isinstance(declared, Block) and not isinstance(declared, (Exact, Flags)):
        last = declared.shape.split()[-1]
        width = int(last) if last.isdecimal() else 1
    rows = [value[at : at + width] for at in range(0, len(value), width)]
    if not rows:
        return [np.ones(1, np.int64).tobytes() if width == 8 else bytes(width)]
    first = bytes([rows[0][0] ^ 1]) + rows[0][1:]
    changed = [[first, *rows[1:]], rows[::-1], rows[:-1], [*rows, rows[0]]]
    return [other for one in changed if (other := b"".join(one)) != value]


VICTIM = 0  # its partition
HOW = ("one", "all", "replayed", "round", "run")
AGREED = "agreed"  # to all, by a server that means it: it reads the sum by the same terms
RINGS = {one.key: name for name, one in RING.parts.items()}
Words = Any


class Cell(NamedTuple):
    entry: Entry
    how: str
    value: int = 0

    def __str__(self) -> str:
        return f"{self.entry} {self.how} {self.value}"


class TellsOtherwise(InProcessGrid):
    """Tells one entry of requests otherwise, and notes what comes from the victim.

    ``known`` has values of entries in another run, as they came.
    """

    def __init__(
        self,
        app: Any,
        cell: Any,
        known: Mapping[str, list[Any]],
        entries: Mapping[str, Entry],
        **grid: Any,
    ) -> None:
        super().__init__(app, num_supernodes=COUNT, **grid)
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
        here = self.contexts.items()
        self.victim = next(n for n, c in here if c.node_config["partition-id"] == VICTIM)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent, again, lies = list(messages), list[Message](), set[int]()
        seen = [Seen.of(one) for one in sent]
        for one in seen:
            self.keys |= one.values.keys()
        # The requests that have an entry, the victim's first
        turn = sorted(range(len(sent)), key=lambda n: sent[n].metadata.dst_node_id != self.victim)
        having = {
            name: places
            for name, entry in self._entries.items()
            if (places := [place for place in turn if seen[place].has(entry)])
        }
        for name, places in having.items():
            value = seen[places[0]].value(self._entries[name])
            self.came.setdefault(name, []).append(value)
        cell, name = self.cell, str(self.cell and self.cell.entry)
        is_due = len(self.came.get(name, ())) == self._at + 1
        due = having.get(name, []) if is_due and cell and cell.how != AGREED else []
        for place in due if cell and cell.how == "all" else due[:1]:
            value = self._otherwise(cell, honest := seen[place].value(cell.entry))
            if same(value, honest):
                continue
            self.told += 1
            lie = with_value(sent[place], cell.entry, value)
            if cell.how == "replayed":
                again.append(lie)
            else:
                sent[place] = lie
                lies.add(place)
        ids = list(super().push_messages(sent))
        self._later = list(super().push_messages(again)) if again else []
        self._lies |= {ids[place] for place in lies} | set(self._later)
        return ids

    def _otherwise(self, cell: Cell, honest: Any) -> Any:
        """Give the value of an earlier round, of another run, or another one."""
        name = str(cell.entry)
        if cell.how == "round":
            return self.came[name][self._at - 1] if self._at else honest
        if cell.how == "run":
            return dict(enumerate(self._known.get(name, []))).get(self._at, honest)
        values = others(cell.entry, honest)
        return values[cell.value % len(values)]

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

    def _note(self, reply: Message) -> None:
        """Note an answer: whether it is an error, and all that is neither random nor a time."""
        kind = reply.metadata.message_type
        if reply.has_error():
            why = re.sub(r"got b['\"].*|\b[0-9a-f]{8,}\b|\d+", "#", str(reply.error.reason))
            self.said.append((kind, why))
            return
        shown = {
            key: len(value) if isinstance(value, bytes | str) else value
            for key, value in sorted(entries_of(reply.content).items())
            if "seconds" not in key
        }
        self.said.append((kind, [*shown.items()]))
        for record in reply.content.array_records.values():
            numbers = [decode_array(name, array) for name, array in record.items()]
            self.words += [one.copy() for one in numbers if one.dtype.kind == "u"]


FAILS = (RuntimeError, ValueError, AssertionError, LookupError)  # the server's code: it sends lies


SIGMA, IDENTITY = 5.0, b"10000000"  # how identities begin, as they are written
# Pairs of runs of the two kinds of data, and the most where these are too few to tell: where fewer
# pairs would be the same than ENOUGH. By chance none is then, once in e^ENOUGH times.
PAIRS_OF_RUNS, MOST_PAIRS, ENOUGH = 8, 40, 7

# What is noted of a run ---------------------------------------------------------------------------


class Masked(NamedTuple):
    """What a SuperNode put under masks: of which terms, as words, and before its pads."""

    clients: tuple[int, ...]
    terms: tuple[object, ...]
    words: Words
    numbers: Words


@dataclass
class Had:
    """What the server had of a run, and what it is held against."""

    grid: TellsOtherwise = field(default=None)  # type: ignore[assignment]
    masked: dict[int, list[Masked]] = field(default_factory=dict)  # by number of the sum
    sums: list[tuple[int, SumResult]] = field(default_factory=list)
    blinded: set[bytes] = field(default_factory=set)  # points that clients sent
    multiplied: set[bytes] = field(default_factory=set)  # points that key-holders multiplied
    ended: str = ""


@contextmanager
def noting(had: Had, ring: Mapping[str, Any]) -> Iterator[None]:
    """Note what is masked, blinded, multiplied and added up; the server takes any signature."""
    before_pads: list[Words] = []
    fit, add_up, end = Ring.fit, VectorEncoding.add_up, SecureSum.result
    blind, multiply, mask = blinded.blind, blinded.multiply, SumClient.mask

    def fitted(*args: Any, **more: Any) -> Ring:
        return replace(fit(*args, **more), **ring)

    def added(writing: VectorEncoding, *how: Any) -> Any:
        table = replace(writing.table, group_key=b"")
        before_pads[:] = [add_up(replace(writing, table=table), *how)[0]]
        return add_up(writing, *how)

    def masking(self: Any, request: Any, present: Any, total: Any, terms: Any, *state: Any) -> Any:
        reply = mask(self, request, present, total, terms, *state)
        numbers = before_pads.pop() if before_pads else total
        meant = terms, request.length, request.word
        one = Masked(tuple(self.clients), meant, np.array(total), np.array(numbers))
        had.masked.setdefault(request.server_round, []).append(one)
        return reply

    def ended(self: SecureSum) -> Any:
        number, found = self._done.number, end(self)
        if isinstance(found, SumResult):
            had.sums.append((number, replace(found, total=found.total.copy())))
        return found

    def blinding(*args: Any) -> Any:
        points = blind(*args)
        had.blinded.update(point.tobytes() for point in points)
        return points

    def multiplying(points: Any, factor: bytes) -> Any:
        had.multiplied.update(point.tobytes() for point in points)
        return multiply(points, factor)

    with ExitStack() as stack:
        for owner, name, new in (
            (Ring, "fit", fitted),
            (VectorEncoding, "add_up", added),
            (SecureSum, "result", ended),
            (blinded, "blind", blinding),
            (blinded, "multiply", multiplying),
            (SumRound, "_verified", lambda self, row, signature, *_: signature),
            (SumClient, "mask", masking),
            (os, "fsync", lambda _: None),  # journals are written often
            (os, "fdatasync", lambda _: None),
        ):
            stack.enter_context(patch.object(owner, name, new))
        yield


def statistics(words: Any, numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Give figures that are about normal, of variance one, where words tell nothing."""
    bits = 8 * words.itemsize
    unsigned = words.view(f"u{words.itemsize}").astype(np.uint64)
    half = np.uint64(bits // 2)
    low, high = unsigned & np.uint64((1 << bits // 2) - 1), unsigned >> half
    ones = np.unpackbits(words.view(np.uint8)).reshape(words.size, -1).sum(1, dtype=np.int64)
    reads = {
        "whole": words.view(f"i{words.itemsize}").astype(np.float64) / 2.0 ** (bits - 1),
        "low": low.astype(np.float64) / 2.0 ** (bits // 2 - 1) - 1,
        "high": high.astype(np.float64) / 2.0 ** (bits // 2 - 1) - 1,
    }
    root = np.sqrt(words.size)
    yield "ones", float((ones.mean() - bits / 2) / np.sqrt(bits / 4) * root)
    for name, read in reads.items():
        yield f"{name} mean", float(read.mean() * np.sqrt(3) * root)
        yield f"{name} size", float((np.square(read).mean() - 1 / 3) / np.sqrt(4 / 45) * root)
        yield f"{name} next", float((read[1:] * read[:-1]).mean() * 3 * root)
        yield f"{name} equal", float((np.diff(np.sort(read)) == 0).sum() > words.size / 2) * 1e6
        for what, given in numbers.items():
            if given.size == read.size and read.std():
                yield f"{name} with {what}", float(np.corrcoef(read, given)[0, 1] * root)


# A method's table ---------------------------------------------------------------------------------


@dataclass
class World:
    """A method in one setting: how it runs, whose requests are told otherwise."""

    modules: tuple[ModuleType, ...]  # whose requests these are
    app: Callable[[int], Any]  # of a kind of data
    server: Callable[[Path | None], Any]  # with a folder of keys, or without
    never: frozenset[str]  # entries that are never sent here
    without: frozenset[str] = frozenset()  # messages that are never sent
    trusted: bool = False
    rounds: int = 2
    tells_figures: bool = False  # whether SuperNodes say what they measured, by design

    def open(self, folder: Path) -> World:
        """Run it in an empty folder without a lie, as what others are held against."""
        self._folder = folder
        write_keys(COUNT, folder)
        self.entries = self.requests()
        self.known: dict[str, list[Any]] = {}
        self.honest = self.run(None)
        self.known, self.keys = self.honest.grid.came, self.honest.grid.keys
        for number, result in self.honest.sums:
            assert self._parts(self.honest, number, result), "a sum is not its contributors'"
        return self

    @property
    def below(self) -> set[str]:
        """Keys of the sums beneath a method, whose tables are their own."""
        sums = () if of_sums in self.modules else (of_sums,)
        return {one.key for one in entries_of_requests(sums).values()}

    def requests(self) -> dict[str, Entry]:
        below, found = self.below, entries_of_requests(self.modules)
        if not below:
            rings = [Entry(of_sums.MaskRequest, one.key, one) for one in RING.parts.values()]
            found |= {str(entry): entry for entry in rings}
        return {
            name: one
            for name, one in found.items()
            if one.key not in below and one.message.__name__ not in self.without
        }

    def run(self, cell: Cell | None, kind: int = 0) -> Had:
        """Run it, told otherwise in one place, with keys that no run has used."""
        ring = {}  # what the server's own has otherwise
        if cell is not None and cell.how == AGREED:
            values = others(cell.entry, self.known[str(cell.entry)][0])
            ring = {RINGS[cell.entry.key]: values[cell.value]}
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as name:
            keys = None if self.trusted else shutil.copytree(self._folder, Path(name) / "keys")
            told = self.app(kind), cell, self.known, self.entries
            grid = TellsOtherwise(*told, node_config=keys and keys_in(keys, COUNT))
            had = Had(grid)
            with noting(had, ring):
                try:
                    self.server(keys).start(grid, num_rounds=self.rounds, timeout=TIMEOUT)
                except FAILS as error:
                    had.ended = type(error).__name__
                finally:
                    forget_run(grid.run.run_id)
        return had

    def cells(self, name: str) -> list[Cell]:
        entry, values = self.entries[name], self.known[name]
        count = len(others(entry, values[min(1, len(values) - 1)]))
        ways = (*HOW, AGREED) if entry.key in RINGS else HOW
        return [
            Cell(entry, how, number)
            for how in ways
            for number in range(count if how in ("one", AGREED) else 1)
        ]

    def outcome(self, cell: Cell) -> str:
        """Run a cell, and say what came of it."""
        found: list[str] = []
        runs: tuple[list[Had], list[Had]] = [], []
        # What chance sends over the bound, or draws, it does not every time
        for number in range(1, MOST_PAIRS + 1):
            one = self.run(cell, 0)
            if not one.grid.told:
                return "-"
            other = self.run(cell, 1)
            runs[0].append(one)
            runs[1].append(other)
            bits = self._bits(*runs)
            found = [*self.leaks(one), *self.leaks(other), *bits]
            if not found or (
                number >= PAIRS_OF_RUNS and (len(found) > len(bits) or all(bits.values()))
            ):
                break
        if found:
            return "told apart: " + "; ".join(found[:4])
        if one.grid.altered and all(one.grid.altered):
            return "refused"
        return "summed" if len(one.sums) == len(self.honest.sums) else "no readable sum"

    def leaks(self, had: Had) -> list[str]:
        """Name what of the victim's numbers or identities can be read in what the server has."""
        found = []
        if not had.multiplied <= had.blinded:
            found.append("key-holders multiply points that no client blinded")
        said = [value for content in had.grid.replies for value in entries_of(content).values()]
        texts = [one.encode() if isinstance(one, str) else one for one in said]
        if any(IDENTITY in one for one in texts if isinstance(one, bytes)):
            found.append("identities in the clear")
        views = {f"masked {n}": words for n, words in enumerate(had.grid.words)}
        for n, one in enumerate(had.grid.words):
            for m, other in enumerate(had.grid.words[:n]):
                if one.shape == other.shape and one.dtype == other.dtype:
                    views[f"masked {n} - {m}"] = one - other
        for number, result in had.sums:
            if self._parts(had, number, result) is None:
                views[f"sum {number}"] = result.total
        own = [m for all_ in had.masked.values() for m in all_ if VICTIM in m.clients]
        truths = {f"{n}": signed(one.numbers) for n, one in enumerate(own)}
        for name, words in views.items():
            if words.size >= 256 and words.dtype.kind == "u":
                given = {n: t for n, t in truths.items() if t.size == words.size and t.std()}
                found += [
                    f"{name}: {what} {value:.1f}"
                    for what, value in statistics(words, given)
                    if abs(value) > SIGMA
                ]
        return found

    def _parts(self, had: Had, number: int, result: SumResult) -> list[Masked] | None:
        """Find what contributors masked whose sum it is, if all meant the same sum."""
        there = set(result.contributors.tolist())
        each: dict[tuple[int, ...], list[Masked]] = {}
        for one in had.masked.get(number, ()):
            if there & set(one.clients) and one.words.shape == result.total.shape:
                each.setdefault(one.clients, []).append(one)
        for parts in product(*each.values()):
            if len({one.terms for one in parts}) != 1:
                continue
            total = sum((one.words.astype(np.uint64) for one in parts), np.uint64(0))
            if np.array_equal(total.astype(result.total.dtype), result.total):
                return list(parts)
        return None

    def alone(self, had: Had) -> list[Any]:
        """Give of each sum the numbers under no pad that the victim has, and nobody else in it."""
        found = []
        for number, result in had.sums:
            parts = self._parts(had, number, result) or []
            own = [one for one in parts if VICTIM in one.clients]
            if own and (own[0].numbers == own[0].words).any():
                rest = [one.numbers != 0 for one in parts if VICTIM not in one.clients]
                here = (own[0].numbers == own[0].words) & (own[0].numbers != 0)
                here &= ~np.any(rest, axis=0)
                found += [number, own[0].numbers[here].tolist()]
        return found

    def _bits(self, ones: list[Had], others: list[Had]) -> dict[str, bool]:
        """Name what differs between two kinds of the victim's data, besides words.

        What is the same in any pair of runs is no difference: key-holders are drawn by chance, and
        a refusal names what is wrong with those of its run. Chance may also draw other key-holders
        in every run. So for each name it says whether there are runs enough: if the two kinds were
        alike, as many pairs of them would be the same, in proportion, as of runs of one kind.
        """
        views: dict[str, Callable[[Had], Any]] = {
            "answers": self._said,
            "contributors": lambda had: [r.contributors.tolist() for _, r in had.sums],
            "end": lambda had: had.ended,
            "numbers that stand alone": self.alone,
        }
        found = {}
        for name, view in views.items():
            both = [list(map(view, ones)), list(map(view, others))]
            if any(one == other for one, other in product(*both)):
                continue
            within = [one == other for runs in both for one, other in combinations(runs, 2)]
            found[name] = sum(within) * len(ones) * len(others) >= ENOUGH * len(within)
        return found

    def _said(self, had: Had) -> list[Any]:
        """Give the victim's answers, but for those as key-holder, whom chance draws."""
        found = list[Any]()
        for kind, said in had.grid.said:
            keys = {key for key, _ in said} if isinstance(said, list) else set()
            of_holder = "align-points" in keys and "align-clients" not in keys
            if kind != "train.align" or not of_holder:
                is_told = self.tells_figures and not isinstance(said, str)
                found.append((kind, len(said) if is_told else str(said)))
        return found


def signed(words: Words) -> Any:
    return words.view(SIGNED[8 * words.itemsize]).astype(np.float64)


COUNT = 7  # SuperNodes, of one client each: with seven a sum can do without two
PAIRS, HOLDS, HIDDEN = 30, 15, 72  # of identities; the victim has one of each, others some
PUBLIC, DIMENSION = 70, 64
TIMEOUT, REGISTRY = 0.2, "registry.json"
LENGTH, LIMIT = 4096, 100.0  # of sums of vectors


def victims_egos(kind: int) -> list[ClientGraph]:
    """Make clients; of each pair of identities, which all others hold together, the victim has one.

    So its two kinds of data hold as many identities, each of as many holders.
    """
    found, held = list[ClientGraph](), np.zeros((COUNT, PAIRS), np.bool_)
    for place in range(COUNT):  # in turn, so that several hold each
        held[place, (np.arange(HOLDS) + 2 * place * HOLDS // 3) % PAIRS] = True
        nodes = 2 * np.arange(PAIRS) + kind
        if place != VICTIM:
            own = 2 * np.flatnonzero(held[place])
            nodes = np.concatenate([own, own + 1])
        chance = torch.Generator().manual_seed(100 * place + kind * (place == VICTIM))
        count = nodes.size
        x = torch.rand(count, SETTINGS.num_features, generator=chance)
        edge = to_undirected(torch.randint(count, (2, 2 * count), generator=chance), count)
        y, role = torch.arange(count) % SETTINGS.num_classes, torch.arange(count) % 3
        roles = (role == k for k in range(3))
        ids = torch.from_numpy(10**9 + nodes)
        found.append(ClientGraph(2 * place, ids, x, y, edge, None, *roles))
    assert held[1:].sum(0).min() > 1
    return found


def egos_app(kind: int) -> Any:
    def make(context: Any, egos: Any) -> EgoNetworkClient:
        trust = TrustSettings.of(context.node_config, context.run_id)
        settings = replace(SETTINGS, hidden=HIDDEN)
        return EgoNetworkClient(context, egos, settings, trust=trust, hiding=Hiding(True, "psi"))

    return dealt(make, victims_egos(kind))


def egos_server(keys: Path | None) -> MaskedEmbeddingAveraging:
    settings = replace(SETTINGS, hidden=HIDDEN)
    registry = None if keys is None else keys / REGISTRY
    return MaskedEmbeddingAveraging(settings, alignment="psi", registry=registry)


def judge(embeddings: Any, server_round: int, is_last: bool) -> dict[str, float]:
    return {"val": 0.5, "test": float((embeddings > 0).mean())}


def public_app(kind: int, model: Any = ToyModel) -> Any:
    """Make clients all of whose nodes are public."""
    members, nodes = list[EmbeddingClient](), np.arange(PUBLIC)
    for place in range(COUNT):
        chance = np.random.default_rng((place, kind * (place == VICTIM)))
        make = partial(model, chance.normal(size=(PUBLIC, DIMENSION)).astype(np.float32))
        members.append(EmbeddingClient(2 * place, nodes, nodes, DIMENSION, make, judge))

    def client(context: Any, own: Any) -> SecureConsensusClient:
        trust = TrustSettings.of(context.node_config, context.run_id)
        return SecureConsensusClient(context, own, trust=trust)

    return dealt(client, members)


def public_server(keys: Path | None) -> SecureConsensus:
    return SecureConsensus(registry=None if keys is None else keys / REGISTRY, min_nodes=5)


class Summing:
    """The server's half of sums of vectors, as a strategy that can be started."""

    def __init__(self, keys: Path | None) -> None:
        self._server = None if keys is None else PartySums(keys / REGISTRY)

    def start(self, grid: Any, num_rounds: int, timeout: float) -> None:
        exchange = Exchange(grid)
        secure = SecureSum(exchange, limit=LIMIT, server=self._server, guard=True, timeout=20)
        for number in range(1, num_rounds + 1):
            secure.sum(number, LENGTH)


def sums_app(kind: int) -> Any:
    asked = Counter[int]()

    class Vectors(SecureSumClient):
        def vectors(self, config: Any) -> Any:
            """Draw numbers; the victim has two kinds, within the limit."""
            place = self.clients[0] // 2
            asked[place] += 1
            other = kind * (place == VICTIM)
            chance = np.random.default_rng((place, asked[place], other))
            own = chance.normal(size=LENGTH) * (15 if other else 1)
            return dict(zip(self.clients, (own, np.zeros(LENGTH)), strict=True))

    return dealt(Vectors, range(2 * COUNT), [[2 * n, 2 * n + 1] for n in range(COUNT)])


def of(*messages: str) -> frozenset[str]:
    """Name entries: of each message, before a colon, its keys."""
    split = (one.split(": ") for one in messages)
    return frozenset(f"{name}.{key}" for name, keys in split for key in keys.split())


MODELS = "EgoRequest: model/weights"  # that are shared
KNOWN = "PrepareRequest: prepare-partners prepare-channel-keys", "UnmaskRequest: unmask-kinds"
SUMS = World((of_sums,), sums_app, Summing, of("RevealRequest: reveal-declared", *KNOWN))
EGOS = World((of_egos, blinded), egos_app, egos_server, of(MODELS))
CONSENSUS = World((of_public,), public_app, public_server, frozenset(), rounds=3)
# Each where the server may lie, and where it is trusted to keep to the protocol
WORLDS = {
    "sum": SUMS,
    "sum, trusted": replace(
        SUMS,
        trusted=True,
        never=of(
            "MaskRequest: mask-signatures",
            "UnmaskRequest: unmask-columns unmask-signatures",
        ),
        without=frozenset({"RevealRequest", "EpochRequest", "ListRequest"}),
    ),
    "FedSCem": EGOS,
    "FedSCem, trusted": replace(
        EGOS,
        trusted=True,
        never=of(
            MODELS,
            "EgoRequest: sums-checks sums-members",
            "EvaluateRequest: align-blocks align-parties align-sizes align-signatures",
            "UnionRequest: align-holders align-keys align-key-signatures align-proofs",
        ),
    ),
    "PPFL-GNN": CONSENSUS,
    "PPFL-GNN, trusted": replace(
        CONSENSUS,
        trusted=True,
        tells_figures=True,
        never=of("Claims: claim-clients claim-rows claim-nodes claim-signatures claim-means"),
    ),
}
