"""A method's requests told otherwise, or an alignment's, or a sum's: what the server then has.

One entry of the requests is told otherwise, to one SuperNode or to all. Each run notes what
every SuperNode put under masks. A sum that the server can read is then that of its contributors,
who all meant the same one, and no mask of a SuperNode is there twice.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from federation import ALL, Federation, Setup
from flwr.app import Array, Message
from graph_helpers import dealt
from lying_grid import like
from sum_helpers import keys_in, write_keys

from flower_graph import EgoNetworkClient
from flower_graph.apps.run import client_app
from flower_graph.method.registry import method_of
from flower_graph.secure.align import blinded
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.sum.client import SecureSumClient, SumClient
from flower_graph.secure.sum.server import SumResult, SumRound
from flower_graph.server.sums import PartySums, SecureSum
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.fedscem.client import Hiding
from flower_graph.strategies.fedscem.method import METHOD, ego_settings
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


class Otherwise:
    """Tells one entry of requests otherwise, the second time that it travels.

    ``known`` has values of entries in another run, as they came.
    """

    def __init__(self, cell: Cell | None, known: Any) -> None:
        self.cell, self._known = cell, known
        often = len(known.get(cell.entry, ())) if cell else 0
        self._at = min(1, max(0, often - 1))  # the second, so that there is an earlier one
        self.came: dict[str, list[Any]] = {}  # as the victim, or who first gets it, was to have it
        self.lies: list[Message] = []

    def __call__(self, grid: Federation, sent: list[Message]) -> list[Message]:
        seen = [entries_in(one) for one in sent]
        parts = [grid.contexts[m.metadata.dst_node_id].node_config["partition-id"] for m in sent]
        # The requests that have an entry, the victim's first
        having: dict[str, list[int]] = {}
        for place in sorted(range(len(sent)), key=lambda place: parts[place] != VICTIM):
            for name in seen[place]:
                having.setdefault(name, []).append(place)
        for name, places in having.items():
            self.came.setdefault(name, []).append(seen[places[0]][name])
        cell, again = self.cell, list[Message]()
        if cell is None or len(self.came.get(cell.entry, ())) != self._at + 1:
            return sent
        due = having.get(cell.entry, [])
        for place in due if cell.how == "all" else due[:1]:
            honest = seen[place][cell.entry]
            value = self._otherwise(cell, honest)
            if same(value, honest):
                continue
            lie = with_value(sent[place], cell.entry, value)
            if cell.how == "replayed":
                again.append(lie)
            else:
                sent[place].content = lie.content  # the server knows the message by its number
            self.lies.append(again[-1] if again else sent[place])
        return sent + again

    def _otherwise(self, cell: Cell, honest: Any) -> Any:
        """Give the value of an earlier round, of another run, or another one."""
        if cell.how == "round":
            return self.came[cell.entry][self._at - 1] if self._at else honest
        if cell.how == "run":
            return dict(enumerate(self._known.get(cell.entry, []))).get(self._at, honest)
        values = others(honest)
        return values[cell.value % len(values)]


FAILS = (RuntimeError, ValueError, AssertionError, LookupError)  # the server's code: it sends lies


IDENTITY = b"10000000"  # how identities begin, as they are written

# What is noted of a run ---------------------------------------------------------------------------


class Masked(NamedTuple):
    """What a SuperNode put under masks: the terms that it meant, its words, and the masks."""

    clients: tuple[int, ...]
    terms: tuple[object, ...]
    words: Words
    masks: Words


@dataclass
class Had:
    """What the server had of a run, and what it is held against."""

    told: Otherwise
    grid: Federation
    masked: dict[int, list[Masked]] = field(default_factory=dict)  # by number of the sum
    sums: list[tuple[int, SumResult]] = field(default_factory=list)
    blinded: set[bytes] = field(default_factory=set)  # points that clients sent
    multiplied: set[bytes] = field(default_factory=set)  # points that key-holders multiplied


@contextmanager
def noting(had: Had) -> Iterator[None]:
    """Note what is masked, blinded, multiplied and added up; the server takes any signature."""
    end, blind, multiply = SumRound.result, blinded.blind, blinded.multiply
    mask = SumClient.mask

    def masking(self: Any, request: Any, present: Any, total: Any, terms: Any, *state: Any) -> Any:
        reply = mask(self, request, present, total, terms, *state)
        meant = terms, request.length, request.word
        one = Masked(tuple(self.clients), meant, np.array(total), np.array(reply.total) - total)
        had.masked.setdefault(request.server_round, []).append(one)
        return reply

    def ended(self: SumRound) -> Any:
        found = end(self)
        if isinstance(found, SumResult):
            had.sums.append((self.number, replace(found, total=found.total.copy())))
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
            (SumRound, "result", ended),
            (blinded, "blind", blinding),
            (blinded, "multiply", multiplying),
            (SumRound, "_verified", lambda self, row, signature, *_: signature),
            (SumClient, "mask", masking),
            (os, "fsync", lambda _: None),  # journals are written often
            (os, "fdatasync", lambda _: None),
        ):
            stack.enter_context(patch.object(owner, name, new))
        yield


# A method's table ---------------------------------------------------------------------------------

COUNT, REGISTRY = 7, "registry.json"  # SuperNodes of one client each: a sum can do without two
TIMEOUT = 0.2
LENGTH, LIMIT = 4096, 100.0  # of sums of vectors


@dataclass
class World:
    """A method in one setting: how it runs, whose requests are told otherwise."""

    app: Callable[[], Any]
    server: Callable[[Path], Any]  # with a folder of keys
    below: str = "-"  # of entries of the sums beneath it, whose table is their own
    rounds: int = 2

    def open(self, folder: Path) -> World:
        """Run it in an empty folder without a lie, as what others are held against."""
        self._folder = folder
        write_keys(COUNT, folder, each=1)
        self.known: dict[str, list[Any]] = {}
        self.honest = self.run(None)
        self.known = self.honest.told.came
        for number, result in self.honest.sums:
            assert self._parts(self.honest, number, result), "a sum is not its contributors'"
        return self

    @property
    def entries(self) -> list[str]:
        return sorted(name for name in self.known if not re.search(self.below, name))

    def run(self, cell: Cell | None) -> Had:
        """Run it, told otherwise in one place, with keys that no run has used."""
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as name:
            keys = shutil.copytree(self._folder, Path(name) / "keys")
            told, how = Otherwise(cell, self.known), {"node_config": keys_in(keys, COUNT)}
            grid = Federation(
                self.app(), num_supernodes=COUNT, state_dir=IN_PROCESS, tells=told, **how
            )
            had = Had(told, grid)
            with noting(had), suppress(*FAILS):
                self.server(keys).start(grid, num_rounds=self.rounds, timeout=TIMEOUT)
        return had

    def cells(self, name: str) -> list[Cell]:
        values = self.known[name]
        count = len(others(values[min(1, len(values) - 1)]))
        return [
            Cell(name, how, number) for how in HOW for number in range(count if how == "one" else 1)
        ]

    def outcome(self, cell: Cell) -> str:
        """Run a cell, and say what came of it."""
        one = self.run(cell)
        lies = [any(sent is lie for lie in one.told.lies) for sent, _ in one.grid.exchanged]
        if not any(lies):
            return "-"
        if found := self.leaks(one):
            return "told: " + "; ".join(found)
        replies = [reply for _, reply in one.grid.exchanged]
        if all(reply.has_error() for reply, is_lie in zip(replies, lies, strict=True) if is_lie):
            return "refused"
        return "summed" if len(one.sums) == len(self.honest.sums) else "no readable sum"

    def leaks(self, had: Had) -> list[str]:
        """Name what of clients' numbers or identities can be read in what the server has."""
        found = []
        if not had.multiplied <= had.blinded:
            found.append("key-holders multiply points that no client blinded")
        came = [reply.content for _, reply in had.grid.exchanged if reply.has_content()]
        said = [value for content in came for value in entries_of(content).values()]
        texts = [one.encode() if isinstance(one, str) else one for one in said]
        if any(IDENTITY in one for one in texts if isinstance(one, bytes)):
            found.append("identities in the clear")
        for number, result in had.sums:
            parts = self._parts(had, number, result)
            if parts and len({one.terms for one in parts}) > 1:
                found.append(f"sum {number} has numbers that were meant otherwise")
        every = [one for all_ in had.masked.values() for one in all_]
        for one, other in combinations(every, 2):
            is_same = one.clients == other.clients and one.masks.shape == other.masks.shape
            if is_same and (one.masks == other.masks).mean() > 0.01:
                found.append(f"masks of {one.clients} are there twice")
        if any((one.masks == 0).mean() > 0.01 for one in every):
            found.append("numbers without masks")
        return found

    def _parts(self, had: Had, number: int, result: SumResult) -> list[Masked] | None:
        """Find what contributors masked whose sum it is."""
        there = set(result.contributors.tolist())
        each: dict[tuple[int, ...], list[Masked]] = {}
        for one in had.masked.get(number, ()):
            if there & set(one.clients) and one.words.shape == result.total.shape:
                each.setdefault(one.clients, []).append(one)
        for parts in product(*each.values()):
            total = sum((one.words.astype(np.uint64) for one in parts), np.uint64(0))
            if np.array_equal(total.astype(result.total.dtype), result.total):
                return list(parts)
        return None


class Summing:
    """The server's half of sums of vectors, as a strategy that can be started."""

    def __init__(self, keys: Path) -> None:
        self._server = PartySums(keys / REGISTRY)

    def start(self, grid: Any, num_rounds: int, timeout: float) -> None:
        exchange = Exchange(grid)
        secure = SecureSum(exchange, limit=LIMIT, server=self._server, guard=True, timeout=20)
        for number in range(1, num_rounds + 1):
            secure.sum(number, LENGTH)


def sums_app() -> Any:
    asked = Counter[int]()

    class Vectors(SecureSumClient):
        def vectors(self, config: Any) -> Any:
            (client,) = self.clients
            asked[client] += 1
            return {client: np.random.default_rng((client, asked[client])).normal(size=LENGTH)}

    return dealt(Vectors, range(COUNT))


def parties_of(name: str) -> Setup:
    return ALL[f"{name}, secure, untrusted"].with_(f"partition.clients={COUNT}", supernodes=COUNT)


def app_of(name: str) -> Any:
    config = parties_of(name).load()
    if name != "fedscem":
        return client_app(config, None)
    # Identities that can be told in what the server has
    egos = [replace(one, nodes=10**9 + one.nodes) for one in METHOD.graphs(config)]

    def client(context: Any, own: Any) -> EgoNetworkClient:
        trust = TrustSettings.of(context.node_config, context.run_id)
        hiding = Hiding(True, config.strategy.alignment)
        return EgoNetworkClient(context, own, ego_settings(config), trust=trust, hiding=hiding)

    return dealt(client, egos)


def server_of(name: str, keys: Path) -> Any:
    config = parties_of(name).load(f"strategy.registry={keys / REGISTRY}")
    return method_of(config).build_strategy(config, None)


def world_of(name: str, rounds: int) -> World:
    beneath = r" config/mask-|^train\.sum_"
    return World(partial(app_of, name), partial(server_of, name), beneath, rounds)


WORLDS = {
    "sum": World(sums_app, Summing, below="^$"),
    "FedSCem": world_of("fedscem", 2),
    "PPFL-GNN": world_of("deepwalk", 3),
}
