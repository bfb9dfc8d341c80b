"""Remarks behind a method's name on a page, about how its rows were run."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.apps.reproduce.rows import Row


def marks(rows: Sequence[Row]) -> str:
    """Return all remarks on some rows."""
    return cut_off(rows) + _best_last(rows) + _without(rows)


def _best_last(rows: Sequence[Row]) -> str:
    """Name the seeds whose last round was their best: a longer run might have been better."""
    seeds = sorted({seed for r in rows for seed in r.get("best_last", ())})
    named = ", ".join(map(str, seeds))
    return f", best in the last round with seed {named}" if seeds else ""


def cut_off(rows: Sequence[Row]) -> str:
    """Name the number of rounds if some run had not stopped improving."""
    rounds = [r["settings"]["rounds"] for r in rows if r.get("ended") is False]
    return f", {max(rounds)} rounds" if rounds else ""


def _without(rows: Sequence[Row]) -> str:
    """Name the largest number of clients that some round left out."""
    left_out = max((r.get("left_out", 0) for r in rows), default=0)
    return f", at most {left_out} left out" if left_out else ""


def measure_of(row: Row) -> str:
    """Return the metric that a row is a figure of: `mse` of `test-mse-at-best-val`."""
    return str(row.get("metric", "")).removeprefix("test-").removesuffix("-at-best-val")
