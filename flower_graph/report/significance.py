"""Means over seeds, paired tests of differences, and their correction for multiple testing."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from scipy.stats import ttest_1samp

from flower_graph.storage.reading import Tree

MOST_CHANCE = 0.05  # of a difference between seeds that counts as one


def describe(values: Sequence[float]) -> Tree:
    """Return mean, sample deviation (0 of one value) and the values themselves."""
    spread = math.nan
    if all(map(math.isfinite, values)):
        spread = stdev(values) if len(values) > 1 else 0.0
    return {"mean": fmean(values), "std": spread, "values": [*values]}


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Subtract figures seed by seed, for the seeds that both have."""
    return {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}


def paired(differences: Sequence[float]) -> dict[str, float | None]:
    """Test a mean difference against 0 with a t test; count the differences of the same sign."""
    chance, (mean, spread, _) = None, describe(differences).values()
    if len(differences) > 1 and spread > 0:
        chance = float(ttest_1samp(differences, 0).pvalue)
    return {"p": chance, "agree": sum(one * mean > 0 for one in differences)}


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Correct the p values of one family of tests (Holm 1979); None is no test and stays None."""
    # The k-th smallest of m is multiplied by m - k + 1, and is never below a smaller one's result.
    tested = sorted((chance, index) for index, chance in enumerate(chances) if chance is not None)
    result: list[float | None] = [None] * len(chances)
    highest = 0.0
    for passed, (chance, index) in enumerate(tested):
        highest = max(highest, min(1.0, chance * (len(tested) - passed)))
        result[index] = highest
    return result


def correct(rows: Sequence[Tree]) -> None:
    """Add `holm` to each tested row: p, corrected for all tests of its table and metric."""
    # One family: a reader looks for a gain among all data sets and methods of a table.
    families: dict[tuple[str, str], list[Tree]] = {}
    for row in rows:
        if "p" in row:
            families.setdefault((row["table"], row["metric"]), []).append(row)
    for family in families.values():
        for row, chance in zip(family, holm([row["p"] for row in family]), strict=True):
            row["holm"] = chance
