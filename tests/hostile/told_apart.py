"""What a server had of a run is held against what a SuperNode sent: what tells anything of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from deviations import SUMS, Cell, Had, Table, vector

from flower_graph.secure.ring import SIGNED

SIGMA = 5.0


def explained(had: Had, number: int, kind: int) -> tuple[bool, bool]:
    """Say whether a sum is that of its contributors or of all others, and has the victim in it."""
    total, who = had.totals[number], had.contributors[number]
    victim = had.grid.home[had.grid.victim]
    words = total.view(SIGNED[8 * total.itemsize]).astype(np.float64)
    every = [p for p in who if p != victim]
    for places in ([*every, victim], every):
        whole = sum(vector(p, number, kind if p == victim else 0) for p in places)
        if whole.shape == words.shape and np.corrcoef(whole, words)[0, 1] > 0.99999:
            return True, victim in places
    return False, False


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


def told_apart(one: Had, other: Had) -> list[str]:
    """Name what tells the one vector of the victim from the other: figures, and whether it came."""
    bits = {
        "answers": [had.grid.answers for had in (one, other)],
        "contributors": [had.contributors for had in (one, other)],
        "end": [had.ended for had in (one, other)],
        "views": [sorted(had.views) for had in (one, other)],
    }
    found = [name for name, (a, b) in bits.items() if a != b]
    place = one.grid.home[one.grid.victim]
    numbers = {}
    for n in range(SUMS):
        pair = vector(place, n), vector(place, n, 1)
        numbers |= {f"{n}a": pair[0], f"{n}b": pair[1], f"{n}|b|": np.abs(pair[1])}
    theirs = other.views
    for name, words in one.views.items():
        if name.startswith("sum") and sum_known(one, other, int(name[4:])):
            continue
        if name not in theirs or theirs[name].shape != words.shape:
            continue
        pairs = zip(statistics(words, numbers), statistics(theirs[name], numbers), strict=False)
        for (what, a), (_, b) in pairs:
            if abs(a - b) > SIGMA * np.sqrt(2):
                found.append(f"{name}: {what} {a:.1f}, {b:.1f}")
    return found


def sum_known(one: Had, other: Had, number: int) -> bool:
    """Whether a sum is just that of whoever is in it."""
    pair = [(had, kind) for kind, had in enumerate((one, other)) if had.totals[number] is not None]
    return all(explained(had, number, kind)[0] for had, kind in pair)


def outcome(table: Table, cell: Cell) -> str:
    """Run a cell and say what came of it: ``-`` where the value cannot be another."""
    found: list[str] = []
    for _ in range(8):  # what chance sends over the bound, or draws, it does not every time
        one, other = table.run(cell, 0), table.run(cell, 1)
        if not one.grid.told:
            return "-"
        found = told_apart(one, other)
        if not found:
            break
    if found:
        return "told apart: " + "; ".join(found[:4])
    if one.grid.altered and all(one.grid.altered):
        return "refused"
    at = [n for n in range(SUMS) if one.totals[n] is not None and explained(one, n, 0)[1]]
    return "summed" if len(at) == SUMS else "no readable sum"
