"""Rows of PPFL-GNN's ``table.json``: the runs' figures, the paper's beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flower_graph.apps.reproduce.curves import Curves
from flower_graph.apps.reproduce.experiments import Cell, Runs
from flower_graph.apps.reproduce.ppfl_cells import (
    DEGREE,
    FED,
    FIGURES,
    FULL,
    LOC,
    NAMES,
    OWN,
    PAPER,
    PAPER_FULL,
    PAPER_LEVELS,
    Case,
    Plan,
)
from flower_graph.apps.reproduce.text import SECONDS, Row, row
from flower_graph.strategies.procrustes_alignment.evaluation import SVC

# Metrics: micro-F1 after the last round, and FED's less LOC's, both mean over the clients; the sum
# of these differences; one client's micro-F1.
ACCURACY, GAIN, SUM, CLIENT = "micro-f1", "fed-less-loc", "sum-of-fed-less-loc", "micro-f1-client"
ROLES = ("test", "val")
PRECISIONS = ("precision-1", "precision-5", "precision-10")

Bare = Mapping[int, Curves]  # a cell's runs by seed


def make_rows(plan: Plan, runs: Runs) -> list[Row]:
    """Make all rows of what was run; what was not has none."""
    tables = [case for table in plan.tables if table != "figures" for case in plan.cases(table)]
    rows = [made for case in dict.fromkeys(tables) for made in _case_rows(plan, case, runs)]
    return rows + (_figure_rows(plan, runs) if "figures" in plan.tables else [])


def missing_runs(plan: Plan, runs: Runs) -> list[str]:
    """Say of which rows there are fewer runs than seeds."""
    lines = []
    for case in plan.all_cases():
        for method in plan.methods(case):
            there, wanted = len(runs.get(plan.cell(case, method), {})), len(plan.seeds)
            if there < wanted:
                lines.append(f"{case.place}, {method}: {there} of {wanted} runs")
    return lines


def paper_of(case: Case, method: str, classifier: str) -> float | None:
    """Return the mean over the clients that the paper prints; none where it has none."""
    if method == FULL:
        return PAPER_FULL[case.model, case.data][classifier] / 100
    place = {LOC: 0, FED: 1}.get(method)
    if place is None:
        return None
    if case.table == "Table 3":
        # It names no classifier; the SVC is the one that its figures judge by.
        is_there = case.public == DEGREE and classifier == SVC
        return PAPER_LEVELS[case.model][case.share][place] / 100 if is_there else None
    printed = PAPER[case.model, case.data, case.noise][classifier]
    return fmean(printed[place:-1:2]) / 100


def _case_rows(plan: Plan, case: Case, runs: Runs) -> list[Row]:
    """Make the rows of one case: each method's, then what FED has beyond LOC."""
    there = {method: runs.get(plan.cell(case, method), {}) for method in plan.methods(case)}
    rows: list[Row] = []
    for method, result in there.items():
        if result:
            rows += _method_rows(plan, case, method, result)
    for alone in (LOC, OWN):
        if there.get(alone) and there.get(FED):
            rows += _gains(plan, case, alone, there[alone], there[FED])
    return rows


def _method_rows(plan: Plan, case: Case, method: str, found: Bare) -> list[Row]:
    make, rows = _Maker(plan, case, method), []
    for classifier in NAMES:
        for role in ROLES:
            paper = paper_of(case, method, classifier) if role == "test" else None
            values = {s: fmean(each) for s, each in make.judged(found, classifier, role).items()}
            rows += make(ACCURACY, values, paper, classifier=classifier, role=role)
        if case.table != "Table 3" and method in (LOC, FED):
            rows += _client_rows(make, found, classifier)
    for name in PRECISIONS if method == FED else ():
        rows += make(name, {seed: _at(c.alignment.get(name, []), -1) for seed, c in found.items()})
    return rows + make(SECONDS, {seed: c.seconds_per_round for seed, c in found.items()})


def _client_rows(make: _Maker, found: Bare, classifier: str) -> list[Row]:
    """Make a row of each client's figure on its own."""
    case, judged = make.case, make.judged(found, classifier, "test")
    printed = PAPER[case.model, case.data, case.noise][classifier][make.method == FED : -1 : 2]
    rows = []
    for client in range(make.clients):
        paper = printed[client] / 100 if client < len(printed) else None
        values = {seed: each[client] for seed, each in judged.items()}
        key = {"classifier": classifier, "role": "test", "client": client + 1}
        rows += make(CLIENT, values, paper, **key)
    return rows


def _gains(plan: Plan, case: Case, alone: str, loc: Bare, fed: Bare) -> list[Row]:
    """Make the paired differences: same seed, hence same nodes, roles and first weights."""
    make, rows = _Maker(plan, case, FED), []
    for classifier in NAMES:
        for role in ROLES:
            ours, theirs = (make.judged(result, classifier, role) for result in (fed, loc))
            sums = {s: sum(ours[s]) - sum(theirs[s]) for s in ours if s in theirs}
            means = {seed: value / make.clients for seed, value in sums.items()}
            has_paper = (alone, role) == (LOC, "test")
            papers = _paper_gain(case, classifier) if has_paper else (None, None)
            key = {"classifier": classifier, "role": role, "over": alone}
            rows += make(GAIN, means, papers[0], **key)
            rows += make(SUM, sums, papers[1], **key) if case.table != "Table 3" else []
    return rows


def _paper_gain(case: Case, classifier: str) -> tuple[float | None, float | None]:
    """Return the mean of the differences that the paper prints, and their sum."""
    fed, loc = (paper_of(case, method, classifier) for method in (FED, LOC))
    if fed is None or loc is None:
        return None, None
    if case.table == "Table 3":
        return PAPER_LEVELS[case.model][case.share][2] / 100, None
    return fed - loc, PAPER[case.model, case.data, case.noise][classifier][-1] / 100


def _figure_rows(plan: Plan, runs: Runs) -> list[Row]:
    """Make rows of the first, the second and the last iteration of Figures 3 to 6."""
    rows = []
    for name, case in FIGURES.items():
        if case not in plan.cases("figures"):
            continue
        for method in (LOC, FED):
            result = runs.get(plan.cell(case, method), {})
            make = _Maker(plan, case, method, name)
            last = plan.rounds_of(case)
            for iteration in sorted({1, min(2, last), last}):
                rows += _iteration_rows(make, result, iteration)
    return rows


def _iteration_rows(make: _Maker, found: Bare, iteration: int) -> list[Row]:
    rows = []
    for name in PRECISIONS if make.method == FED else ():
        values = {s: _at(c.alignment.get(name, []), iteration - 1) for s, c in found.items()}
        rows += make(name, values, iteration=iteration)
    values = {seed: _at(c.test_accuracy, iteration - 1) for seed, c in found.items()}
    return rows + make(ACCURACY, values, classifier=SVC, role="test", iteration=iteration)


class _Maker:
    """Makes rows of one method in one case."""

    def __init__(self, plan: Plan, case: Case, method: str, table: str = "") -> None:
        self.case, self.method, self.table = case, method, table or case.table
        self.cell: Cell = plan.cell(case, method)
        self.rounds = plan.rounds_of(case)
        self.clients = plan.settings(case, method).partition.clients

    def __call__(
        self, metric: str, values: Mapping[int, float], paper: float | None = None, **more: Any
    ) -> list[Row]:
        """Make a row of a figure by seed; none where no seed has it."""
        if not any(map(math.isfinite, values.values())):
            return []
        made = row(self.table, self.cell, metric, values, self.rounds, paper)
        case = self.case
        local = {"public": case.public, "share": case.share} if case.table == "Table 3" else {}
        return [made | local | more]

    def judged(self, found: Bare, classifier: str, role: str) -> dict[int, list[float]]:
        """Give the clients' figures by seed, for those runs that have all clients'."""
        each = {seed: c.judged.get(classifier, {}).get(role, []) for seed, c in found.items()}
        return {seed: values for seed, values in each.items() if len(values) == self.clients}


def _at(values: Sequence[float], place: int) -> float:
    """Return a value of a list; NaN beyond its end."""
    return values[place] if -len(values) <= place < len(values) else math.nan
