"""Rows of FedGLS's ``table.json``: the runs' figures, the paper's beside them."""

from __future__ import annotations

from collections.abc import Mapping

from flower_graph.apps.cells import Runs
from flower_graph.apps.curves import Curves
from flower_graph.apps.fedgls_cells import FEDGLS, RIVALS, Entry, Plan
from flower_graph.apps.tables import LAST, SECONDS, TEST, VALIDATION, Row, row

# What a run says of the graphs that it made, in the best round by validation.
STRUCTURE = ("precision", "recall", "homophily", "true-homophily", "degree", "true-degree")


def gain(rival: str, metric: str = TEST) -> str:
    """Name the metric of FedGLS's paired differences to another method."""
    return f"gain-over-{rival.lower()}" + ("-last" if metric == LAST else "")


def make_rows(plan: Plan, runs: Runs) -> list[Row]:
    """Make all rows of what was run; an entry that was not has none.

    Parameters
    ----------
    plan : Plan
        What was asked for.
    runs : dict
        Curves by cell and seed; both may be missing.
    """
    entries = [entry for entry in plan.entries() if entry.table != "Figure 3"]
    rows: list[Row] = []
    for entry in (e for e in entries if e.cell in runs):
        rows += _accuracies(plan, entry, runs[entry.cell])
        if entry.table == "Table 1":
            seconds = {seed: c.seconds_per_round for seed, c in runs[entry.cell].items()}
            rows.append(_row(plan, entry, SECONDS, seconds))
            rows += _structure(plan, entry, runs[entry.cell])
        if entry.method == FEDGLS:
            beside = [e for e in entries if e.place == entry.place and e.method in RIVALS]
            rows += [r for rival in beside for r in _gains(plan, entry, rival, runs)]
    return rows


def missing_runs(plan: Plan, runs: Runs) -> list[str]:
    """Say of which entries there are fewer runs than seeds."""
    lines = []
    for entry in plan.entries():
        there, all_of_them = len(runs.get(entry.cell, {})), len(plan.seeds)
        if there < all_of_them:
            name = ", ".join(filter(None, (*entry.place, entry.method)))
            lines.append(f"{name}: {there} of {all_of_them} runs")
    return lines


def _accuracies(plan: Plan, entry: Entry, curves: Mapping[int, Curves]) -> list[Row]:
    test = {seed: c.test_at_best_val for seed, c in curves.items()}
    last = {seed: c.test_accuracy[-1] for seed, c in curves.items()}
    val = {seed: c.best_val for seed, c in curves.items()}
    return [
        _row(plan, entry, TEST, test, entry.paper),
        _row(plan, entry, LAST, last),
        _row(plan, entry, VALIDATION, val),
    ]


def _structure(plan: Plan, entry: Entry, curves: Mapping[int, Curves]) -> list[Row]:
    rows = []
    for key in STRUCTURE:
        best = {s: c.structure[key] for s, c in curves.items() if key in c.structure}
        last = {s: c.structure_last[key] for s, c in curves.items() if key in c.structure_last}
        if best:
            rows += [_row(plan, entry, key, best), _row(plan, entry, f"{key}-last", last)]
    return rows


def _gains(plan: Plan, entry: Entry, rival: Entry, runs: Runs) -> list[Row]:
    """Make the paired differences: same seed, hence same clients, splits and first weights."""
    ours, theirs = runs[entry.cell], runs.get(rival.cell, {})
    both = [seed for seed in ours if seed in theirs]
    if not both:
        return []
    paper = None
    if entry.paper is not None and rival.paper is not None:
        paper = entry.paper - rival.paper
    best = {s: ours[s].test_at_best_val - theirs[s].test_at_best_val for s in both}
    last = {s: ours[s].test_accuracy[-1] - theirs[s].test_accuracy[-1] for s in both}
    return [
        _row(plan, entry, gain(rival.method), best, paper),
        _row(plan, entry, gain(rival.method, LAST), last),
    ]


def _row(
    plan: Plan,
    entry: Entry,
    metric: str,
    values: Mapping[int, float],
    paper: float | None = None,
) -> Row:
    made = row(entry.table, entry.cell, metric, values, plan.rounds_of(entry.data), paper)
    return made | {"method": entry.method, "varied": entry.varied}
