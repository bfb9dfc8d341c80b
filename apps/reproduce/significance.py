"""Tests of differences between seeds, and their correction for being many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtr

MOST_CHANCE = 0.05  # of a difference between seeds that counts as one


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Test a mean difference against 0 by a paired t test; count those that have its sign."""
    mean, count = fmean(differences), len(differences)
    spread = stdev(differences) if count > 1 and all(map(math.isfinite, differences)) else 0.0
    result = None
    if spread > 0:
        result = 2 * float(stdtr(count - 1, -abs(mean) / (spread / math.sqrt(count))))
    return {"p": result, "agree": sum(one * mean > 0 for one in differences)}


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Correct the p values of one family of tests (Holm 1979); None is no test and stays None."""
    # The k-th smallest of m is multiplied by m - k + 1, and is never below a smaller one's result.
    known = sorted((chance, place) for place, chance in enumerate(chances) if chance is not None)
    result: list[float | None] = [None] * len(chances)
    highest = 0.0
    for passed, (chance, place) in enumerate(known):
        highest = max(highest, min(1.0, chance * (len(known) - passed)))
        result[place] = highest
    return result


def correct(rows: Sequence[dict[str, Any]]) -> None:
    """Give each tested row `holm`, its p corrected for all tests of its table and metric."""
    # One family: whoever looks for a gain in a table looks at all its data sets and methods.
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "p" in row:
            families.setdefault((row["table"], row["metric"]), []).append(row)
    for family in families.values():
        for row, chance in zip(family, holm([row["p"] for row in family]), strict=True):
            row["holm"] = chance
