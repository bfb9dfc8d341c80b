"""A method's requests, an alignment's among them, told otherwise: what the server then has.

Each run notes what every SuperNode put under masks, so that whatever the server gets can be held
against it: a sum is that of its contributors, or words by which nothing of a SuperNode's numbers
can be told. What a SuperNode says besides is compared between two kinds of its data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from declared_entries import Entry, entries_of_requests, others
from tells_otherwise import AGREED, HOW, RINGS, VICTIM, Cell, TellsOtherwise

from flower_graph.secure.align import blinded
from flower_graph.secure.parties import messages as of_parties
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.ring import SIGNED, Ring
from flower_graph.secure.sum import messages as of_sums
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.round import SumResult
from flower_graph.secure.sum.service import SumStages, entries_of
from flower_graph.strategies.fedscem import cohort_client

FAILS = (RuntimeError, ValueError, AssertionError, LookupError)  # the server's code: it sends lies
Words = Any


SIGMA = 5.0

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

    grid: TellsOtherwise
    masked: dict[int, list[Masked]] = field(default_factory=dict)  # by number of the sum
    sums: list[tuple[int, SumResult]] = field(default_factory=list)
    blinded: set[bytes] = field(default_factory=set)  # points that clients sent
    multiplied: set[bytes] = field(default_factory=set)  # points that key-holders multiplied
    ended: str = ""


@contextmanager
def noting(had: Had, ring: Mapping[str, Any]) -> Iterator[None]:
    """Note what is masked, blinded, multiplied and added up; the server takes any signature."""
    before_pads: list[Words] = []
    fit, add_up, end = Ring.fit, cohort_client.add_up, SumStages.result
    blind, multiply = blinded.blind, blinded.multiply

    def fitted(*args: Any, **more: Any) -> Ring:
        return replace(fit(*args, **more), **ring)

    def added(chosen: Any, h: Any, metrics: Any, writing: Any, *more: Any) -> Any:
        table = replace(writing.table, group_key=b"")
        before_pads[:] = [add_up(chosen, h, metrics, replace(writing, table=table), *more)[0]]
        return add_up(chosen, h, metrics, writing, *more)

    def masking(kind: Any) -> Callable[..., Any]:
        mask = kind.mask

        def noted(self: Any, *given: Any) -> Any:
            # A party has received the request before, and is given the state behind the terms
            is_party = isinstance(self, PartyClient)
            request = self._received[0].request if is_party else given[0]
            total, terms = given[:2] if is_party else given[2:]
            reply = mask(self, *given)
            numbers = before_pads.pop() if before_pads else total
            meant = terms, request.length, request.word
            one = Masked(tuple(self.clients), meant, np.array(total), np.array(numbers))
            had.masked.setdefault(request.server_round, []).append(one)
            return reply

        return noted

    def ended(self: SumStages) -> Any:
        number, found = self._unmasked, end(self)
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
            (cohort_client, "add_up", added),
            (SumStages, "result", ended),
            (blinded, "blind", blinding),
            (blinded, "multiply", multiplying),
            (PartySums, "_verify", lambda *_: None),
            (os, "fsync", lambda _: None),  # journals are written often
            (os, "fdatasync", lambda _: None),
        ):
            stack.enter_context(patch.object(owner, name, new))
        for kind in (PartyClient, SumClient):
            stack.enter_context(patch.object(kind, "mask", masking(kind)))
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


class World:
    """A method in one setting: how it runs, whose requests are told otherwise."""

    modules: tuple[ModuleType, ...]  # whose requests these are
    never: frozenset[str] = frozenset()  # entries that are never sent here
    tells_figures = False  # whether SuperNodes say what they measured, by design
    secrets = (b"10000000",)  # what no answer may have in it: identities, as they are written

    def start(self, kind: int, begin: Callable[[TellsOtherwise], None]) -> None:
        """Run it over a grid that ``begin`` is given before the first message."""
        raise NotImplementedError

    def __init__(self) -> None:
        self.below, self.entries = self._below(), self.requests()
        self.known: dict[str, list[Any]] = {}
        honest = self.run(None)
        self.known, self.keys = honest.grid.came, honest.grid.keys
        for number, result in honest.sums:
            assert self._parts(honest, number, result), "a sum is not that of its contributors"
        self.honest = honest

    @staticmethod
    def _below() -> set[str]:
        """Return the entries that a method passes on to its sums: they have their own table."""
        below = entries_of_requests((of_sums, of_parties))
        return {one.key for one in below.values()}

    @classmethod
    def requests(cls) -> dict[str, Entry]:
        """Give the entries whose cells there are."""
        below, declared = cls._below(), entries_of_requests(cls.modules).items()
        return {name: one for name, one in declared if one.key not in below}

    def run(self, cell: Cell | None, kind: int = 0) -> Had:
        """Run it, told otherwise in one place."""
        had: Had | None = None
        ring = self._ring(cell)

        def begin(grid: TellsOtherwise) -> None:
            nonlocal had
            grid.begin(cell, self.known, self.entries)
            had = Had(grid)
            stack.enter_context(noting(had, ring))

        ended = ""
        with ExitStack() as stack:
            try:
                self.start(kind, begin)
            except FAILS as error:
                ended = type(error).__name__
        assert had is not None
        had.ended = ended
        return had

    def _ring(self, cell: Cell | None) -> dict[str, Any]:
        """Return what the server's own ring has otherwise."""
        if cell is None or cell.how != AGREED:
            return {}
        values = others(cell.entry, self.known[str(cell.entry)][0])
        return {RINGS[cell.entry.key]: values[cell.value]}

    def cells(self, name: str) -> list[Cell]:
        """Give all cells of an entry."""
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
        for _ in range(8):  # what chance sends over the bound, or draws, it does not every time
            one = self.run(cell, 0)
            if not one.grid.told:
                return "-"
            other = self.run(cell, 1)
            for had, those in zip((one, other), runs, strict=True):
                those.append(had)
            found = [*self.leaks(one), *self.leaks(other), *self._bits(*runs)]
            if not found:
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
        if any(secret in one for one in texts if isinstance(one, bytes) for secret in self.secrets):
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
        truths = {f"{n}": _signed(one.numbers) for n, one in enumerate(own)}
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

    def _bits(self, ones: list[Had], others: list[Had]) -> list[str]:
        """Name what differs between two kinds of the victim's data, besides words.

        What is the same in any pair of runs is no difference: key-holders are drawn by chance, and
        a refusal names what is wrong with those of its run.
        """
        views: dict[str, Callable[[Had], Any]] = {
            "answers": lambda had: self._said(had.grid),
            "contributors": lambda had: [r.contributors.tolist() for _, r in had.sums],
            "end": lambda had: had.ended,
            "numbers that stand alone": self.alone,
        }
        return [
            name
            for name, view in views.items()
            if not any(one == other for one, other in product(map(view, ones), map(view, others)))
        ]

    def _said(self, grid: TellsOtherwise) -> list[Any]:
        """Give the victim's answers, but for those as key-holder, whom chance draws."""
        found = [one for one in grid.said if "multiplied" not in one and not _of_holder(one)]
        if self.tells_figures:
            return [(kind, said if isinstance(said, str) else len(said)) for kind, said in found]
        return [str(one) for one in found]


def _of_holder(answer: tuple[Any, ...]) -> bool:
    """Tell whether an answer is a key-holder's: points without clients of its own."""
    kind, said = answer
    keys = {key for key, _ in said} if isinstance(said, list) else set()
    return kind == "train.align" and "align-points" in keys and "align-clients" not in keys


def _signed(words: Words) -> Any:
    return words.view(SIGNED[8 * words.itemsize]).astype(np.float64)
