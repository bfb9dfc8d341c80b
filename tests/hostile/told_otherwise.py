"""A method's requests told otherwise, or an alignment's, or a sum's: what the server then has.

A grid tells one entry of the requests otherwise, to one SuperNode or to all. Each run notes what
every SuperNode put under masks, so that whatever the server gets can be held against it: a sum is
that of its contributors, or words by which nothing of a SuperNode's numbers can be told. What a
SuperNode says besides is compared between two kinds of its data.
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
from itertools import product
from pathlib import Path
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
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import SIGNED
from flower_graph.secure.sum.client import SecureSumClient, SumClient
from flower_graph.secure.sum.server import PartySums, SumResult, SumRound
from flower_graph.server.sums import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.client import Hiding, VectorEncoding
from flower_graph.strategies.ppfl.client import EmbeddingClient, SecureConsensusClient
from flower_graph.strategies.ppfl.strategy import SecureConsensus
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.codec import entries_of
from flower_graph.wire.exchange import Exchange

Words = Any


def entries_in(message: Message) -> dict[str, Any]:
    """Give a request's entries, and its arrays' numbers, by type, record and key."""
    kind = message.metadata.message_type
    return {
        f"{kind} {record}/{key}": decode_array(key, one) if isinstance(one, Array) else one
        for record, entries in message.content.items()
        for key, one in entries.items()
    }


def with_value(message: Message, name: str, value: Any) -> Message:
    """Write a message with another value of an entry."""
    record, _, key = name.partition(" ")[2].partition("/")
    entries: Any = message.content[record]
    value = Array(value) if isinstance(value, np.ndarray) else value
    return like(message, {record: type(entries)({**entries, key: value})})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return type(one) is type(other) and bool(one == other)


def others(value: Any) -> list[Any]:
    """Give other values than an honest one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value // 2), 2 * value + 10]
    if isinstance(value, float):
        return [value / 2, value * 2 + 1]
    if isinstance(value, str):
        return [value[::-1] or "another", ""]
    if isinstance(value, list):
        turned = [1 - one if one in (0, 1) else one + 1 for one in value]
        return [turned, value[:-1], value[::-1]]
    if isinstance(value, bytes):
        return [one for one in other_rows(value) if one != value]
    noise = np.random.default_rng(3).permutation(value.reshape(-1)).reshape(value.shape)
    turned = -value if value.dtype.kind == "f" else value ^ value.dtype.type(1)
    return [one for one in (turned, np.zeros_like(value), noise) if not same(one, value)]


def other_rows(value: bytes) -> list[bytes]:
    """Change one bit, turn rows round, leave out one or repeat one: numbers, keys or shares."""
    width = next((n for n in (64, 32, 8) if len(value) % n == 0 and len(value) > n), 1)
    rows = [value[at : at + width] for at in range(0, len(value), width)]
    if not rows:
        return [np.ones(1, np.int64).tobytes()]
    first = bytes([rows[0][0] ^ 1]) + rows[0][1:]
    changed = [[first, *rows[1:]], rows[::-1], rows[:-1], [*rows, rows[0]]]
    return [b"".join(one) for one in changed]


VICTIM = 0  # its partition
HOW = ("one", "all", "replayed", "round", "run")


class Cell(NamedTuple):
    entry: str
    how: str
    value: int = 0


class TellsOtherwise(InProcessGrid):
    """Tells one entry of requests otherwise, and notes what comes from the victim.

    ``known`` has values of entries in another run, as they came.
    """

    def __init__(self, app: Any, cell: Cell | None, known: Any, **grid: Any) -> None:
        super().__init__(app, num_supernodes=COUNT, **grid)
        self.cell, self._known = cell, known
        often = len(known.get(cell.entry, ())) if cell else 0
        self._at = min(1, max(0, often - 1))  # the second, so that there is an earlier one
        self.came: dict[str, list[Any]] = {}  # as the victim, or who first gets it, was to have it
        self.told = 0
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
        seen = [entries_in(one) for one in sent]
        # The requests that have an entry, the victim's first
        turn = sorted(range(len(sent)), key=lambda n: sent[n].metadata.dst_node_id != self.victim)
        having: dict[str, list[int]] = {}
        for place in turn:
            for name in seen[place]:
                having.setdefault(name, []).append(place)
        for name, places in having.items():
            self.came.setdefault(name, []).append(seen[places[0]][name])
        cell, due = self.cell, list[int]()
        if cell and len(self.came.get(cell.entry, ())) == self._at + 1:
            due = having.get(cell.entry, [])
        for place in due if cell and cell.how == "all" else due[:1]:
            assert cell is not None
            value = self._otherwise(cell, honest := seen[place][cell.entry])
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
        if cell.how == "round":
            return self.came[cell.entry][self._at - 1] if self._at else honest
        if cell.how == "run":
            return dict(enumerate(self._known.get(cell.entry, []))).get(self._at, honest)
        values = others(honest)
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
PAIRS = 8  # of runs of the two kinds of data that must differ each time

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
def noting(had: Had) -> Iterator[None]:
    """Note what is masked, blinded, multiplied and added up; the server takes any signature."""
    before_pads: list[Words] = []
    add_up, end = VectorEncoding.add_up, SecureSum.result
    blind, multiply, mask = blinded.blind, blinded.multiply, SumClient.mask

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

    app: Callable[[int], Any]  # of a kind of data
    server: Callable[[Path | None], Any]  # with a folder of keys, or without
    below: str = "-"  # of entries of the sums beneath it, whose table is their own
    rounds: int = 2

    def open(self, folder: Path) -> World:
        """Run it in an empty folder without a lie, as what others are held against."""
        self._folder = folder
        write_keys(COUNT, folder)
        self.known: dict[str, list[Any]] = {}
        self.honest = self.run(None)
        self.known = self.honest.grid.came
        for number, result in self.honest.sums:
            assert self._parts(self.honest, number, result), "a sum is not its contributors'"
        return self

    @property
    def entries(self) -> list[str]:
        return sorted(name for name in self.known if not re.search(self.below, name))

    def run(self, cell: Cell | None, kind: int = 0) -> Had:
        """Run it, told otherwise in one place, with keys that no run has used."""
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as name:
            keys = shutil.copytree(self._folder, Path(name) / "keys")
            grid = TellsOtherwise(
                self.app(kind), cell, self.known, node_config=keys_in(keys, COUNT)
            )
            had = Had(grid)
            with noting(had):
                try:
                    self.server(keys).start(grid, num_rounds=self.rounds, timeout=TIMEOUT)
                except FAILS as error:
                    had.ended = type(error).__name__
                finally:
                    forget_run(grid.run.run_id)
        return had

    def cells(self, name: str) -> list[Cell]:
        values = self.known[name]
        count = len(others(values[min(1, len(values) - 1)]))
        return [
            Cell(name, how, number) for how in HOW for number in range(count if how == "one" else 1)
        ]

    def outcome(self, cell: Cell) -> str:
        """Run a cell, and say what came of it."""
        runs: tuple[list[Had], list[Had]] = [], []
        for _ in range(PAIRS):  # what chance sends over the bound, or draws, it does not every time
            one = self.run(cell, 0)
            if not one.grid.told:
                return "-"
            other = self.run(cell, 1)
            runs[0].append(one)
            runs[1].append(other)
            if not (found := [*self.leaks(one), *self.leaks(other), *self.bits(*runs)]):
                break
        else:
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

    def bits(self, ones: list[Had], others: list[Had]) -> list[str]:
        """Name what differs between two kinds of the victim's data, besides words.

        What is the same in any pair of runs is no difference: key-holders are drawn by chance, and
        a refusal names what is wrong with those of its run.
        """
        views: dict[str, Callable[[Had], Any]] = {
            "answers": self._said,
            "contributors": lambda had: [r.contributors.tolist() for _, r in had.sums],
            "end": lambda had: had.ended,
            "numbers that stand alone": self.alone,
        }
        return [
            name
            for name, view in views.items()
            if all(view(one) != view(other) for one, other in product(ones, others))
        ]

    def _said(self, had: Had) -> list[Any]:
        """Give the victim's answers, but for those as key-holder, whom chance draws."""
        found = list[Any]()
        for kind, said in had.grid.said:
            keys = {key for key, _ in said} if isinstance(said, list) else set()
            of_holder = "align-points" in keys and "align-clients" not in keys
            if kind != "train.align" or not of_holder:
                found.append((kind, str(said)))
        return found


def signed(words: Words) -> Any:
    return words.view(SIGNED[8 * words.itemsize]).astype(np.float64)


COUNT = 7  # SuperNodes, of one client each: with seven a sum can do without two
TOGETHER, HOLDS, HIDDEN = 30, 15, 72  # of identities; the victim has one of each, others some
PUBLIC, DIMENSION = 70, 64
TIMEOUT, REGISTRY = 0.2, "registry.json"
LENGTH, LIMIT = 4096, 100.0  # of sums of vectors


def victims_egos(kind: int) -> list[ClientGraph]:
    """Make clients; of each pair of identities, which all others hold together, the victim has one.

    So its two kinds of data hold as many identities, each of as many holders.
    """
    found, held = list[ClientGraph](), np.zeros((COUNT, TOGETHER), np.bool_)
    for place in range(COUNT):  # in turn, so that several hold each
        held[place, (np.arange(HOLDS) + 2 * place * HOLDS // 3) % TOGETHER] = True
        nodes = 2 * np.arange(TOGETHER) + kind
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


BENEATH = r" config/mask-|^train\.sum_"
WORLDS = {
    "sum": World(sums_app, Summing, below="^$"),
    "FedSCem": World(egos_app, egos_server, BENEATH),
    "PPFL-GNN": World(public_app, public_server, BENEATH, rounds=3),
}
