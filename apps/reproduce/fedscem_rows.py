"""Rows of FedSCem's ``table.json``: the runs' figures, the paper's beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flower_graph.apps.reproduce.curves import Curves
from flower_graph.apps.reproduce.experiments import Cell, Runs
from flower_graph.apps.reproduce.fedscem_cells import (
    FEDSCEM,
    GLOBAL,
    MASKED,
    METHODS,
    MU,
    PER_CLIENT,
    SELF,
    STRICT,
    STRICT_METHODS,
    TABLE_1_DATA,
    TABLE_1_METHODS,
    TAU,
    Plan,
    paper_of,
)
from flower_graph.apps.reproduce.text import LAST, SECONDS, TEST, VALIDATION, WHOLE, Row, row
from flower_graph.strategies.masked_embedding_averaging.cost import Cost

GAIN, LAST_GAIN = "gain-over-self-training", "gain-over-self-training-last"
MEMORY = "peak-mib"
COST_METRICS = ("nodes", "edges", SECONDS, MEMORY)

Costs = Mapping[str, Sequence[Cost]]


def make_rows(plan: Plan, runs: Runs, costs: Costs) -> list[Row]:
    """Make all rows: Table 3 under both splits, Table 1, the grid of Figure 6a, Figure 8."""
    rows: list[Row] = []
    for data in plan.data:
        for method in (*METHODS, MASKED):
            cell = plan.cell(data, method)
            rows += _method_rows("Table 3", plan, runs, cell, PER_CLIENT)
        for method in STRICT_METHODS if "strict" in plan.tables else ():
            cell = plan.cell(data, method, STRICT)
            rows += _method_rows("Table 3, strict split", plan, runs, cell, STRICT)
        rows += _table_1(plan, runs, data)
        rows += _grid(plan, runs, data)
    return rows + [r for data, result in costs.items() for r in _cost_rows(plan, data, result)]


def _method_rows(table: str, plan: Plan, runs: Runs, cell: Cell, split: str) -> list[Row]:
    """Make the rows of one method on one data set; none if it was not run."""
    if cell not in runs:
        return []
    curves = runs[cell]
    accuracy, std, seconds, percent = paper_of(cell.data, cell.method)
    alone = runs.get(plan.cell(cell.data, SELF, split), {})
    rows = [
        _row(table, plan, cell, TEST, {s: c.test_at_best_val for s, c in curves.items()}, accuracy)
        | {"paper-std": std},
        _row(table, plan, cell, LAST, {s: c.test_accuracy[-1] for s, c in curves.items()}),
        _row(table, plan, cell, VALIDATION, {s: c.best_val for s, c in curves.items()}),
    ]
    if cell.method not in (SELF, MASKED) and alone.keys() >= curves.keys():
        rows += _gains(table, plan, cell, curves, alone)
    if split == PER_CLIENT:
        taken = {s: c.seconds_per_round for s, c in curves.items()}
        rows += [
            _row(table, plan, cell, SECONDS, taken, seconds),
            _row(table, plan, cell, WHOLE, {s: c.run_seconds for s, c in curves.items()}),
            _row(table, plan, cell, MEMORY, {s: c.peak_bytes / 2**20 for s, c in curves.items()})
            | {"paper-gpu-memory-percent": percent},
        ]
    return rows


def _gains(
    table: str, plan: Plan, cell: Cell, curves: Mapping[int, Curves], alone: Mapping[int, Curves]
) -> list[Row]:
    """Make the paired differences to Self-training: same seed, ego-networks and split."""
    ours, theirs = (paper_of(cell.data, name)[0] for name in (cell.method, SELF))
    paper = None if ours is None or theirs is None else ours - theirs
    best = {s: c.test_at_best_val - alone[s].test_at_best_val for s, c in curves.items()}
    last = {s: c.test_accuracy[-1] - alone[s].test_accuracy[-1] for s, c in curves.items()}
    return [
        _row(table, plan, cell, GAIN, best, paper),
        _row(table, plan, cell, LAST_GAIN, last),
    ]


def _table_1(plan: Plan, runs: Runs, data: str) -> list[Row]:
    if "table-1" not in plan.tables or data not in TABLE_1_DATA:
        return []
    rows = []
    for split in (PER_CLIENT, STRICT):
        for method in (*TABLE_1_METHODS, GLOBAL):
            cell = plan.cell(data, method, split)
            if cell in runs:
                values = {s: c.test_at_best_val for s, c in runs[cell].items()}
                accuracy, std, *_ = paper_of(data, method)
                new = _row("Table 1", plan, cell, TEST, values, accuracy)
                rows.append(new | {"paper-std": std, "split": split})
    return rows


def _grid(plan: Plan, runs: Runs, data: str) -> list[Row]:
    if "figure-6a" not in plan.tables or data not in plan.grid_data or FEDSCEM not in plan.methods:
        return []
    rows = []
    for mu in MU:
        for tau in TAU:
            cell = plan.grid_cell(data, mu, tau)
            curves = {seed: runs[cell][seed] for seed in plan.grid_seeds}
            for metric, values in (
                (VALIDATION, {s: c.best_val for s, c in curves.items()}),
                (TEST, {s: c.test_at_best_val for s, c in curves.items()}),
            ):
                new = _row("Figure 6a", plan, cell, metric, values)
                rows.append(new | {"mu": mu, "tau": tau})
    return rows


def _cost_rows(plan: Plan, data: str, costs: Sequence[Cost]) -> list[Row]:
    """Make the rows of Figure 8: one for each group of clients and figure."""
    rows = []
    seed = plan.table_seeds[0]
    for number, cost in enumerate(costs, start=1):
        figures = (cost.nodes, cost.edges, cost.seconds, cost.peak_bytes / 2**20)
        for metric, value in zip(COST_METRICS, figures, strict=True):
            new = _row("Figure 8", plan, plan.cell(data, FEDSCEM), metric, {seed: value})
            rows.append(new | {"group": number, "clients": cost.clients})
    return rows


def _row(
    table: str,
    plan: Plan,
    cell: Cell,
    metric: str,
    values: Mapping[int, float],
    paper: float | None = None,
) -> Row:
    return row(table, cell, metric, values, plan.rounds_of(cell.data, cell.method), paper)
