"""FedSCem's comparison: Tables 1 and 3, Figures 5, 6 and 8, under two splits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flower_graph.apps.reproduce.asked import announce, available, choose
from flower_graph.apps.reproduce.experiments import Runs, one_thread, run_jobs
from flower_graph.apps.reproduce.fedscem_cells import (
    ABLATION,
    CONVERGENCE,
    DATA,
    FEDSCEM,
    GLOBAL,
    METHODS,
    MU,
    TABLES,
    TAU,
    Plan,
    estimate,
)
from flower_graph.apps.reproduce.fedscem_page import make_page
from flower_graph.apps.reproduce.fedscem_rows import make_rows
from flower_graph.apps.reproduce.text import TEST, VALIDATION, Row, find
from flower_graph.config.load import load_config
from flower_graph.data.cached import cached_data
from flower_graph.engine.epoch import Epoch
from flower_graph.errors import ConfigError
from flower_graph.report.plots.base import CurveSet, plot_grid
from flower_graph.report.plots.compared import Bar, plot_bars, plot_matrices, plot_points
from flower_graph.storage.files import write_json, write_text
from flower_graph.strategies.masked_embedding_averaging.central import train_whole
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig
from flower_graph.strategies.masked_embedding_averaging.cost import Cost, costs_by_size
from flower_graph.strategies.masked_embedding_averaging.method import METHOD, ego_settings

KNOWN = {"data": DATA, "method": (*METHODS, GLOBAL), "table": TABLES}


def reproduce(
    out: Path,
    *,
    only: Mapping[str, list[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run the comparison on the data that is there."""
    chosen = choose(only, KNOWN)
    there, left_out = available(
        chosen["data"],
        lambda name: cached_data(load_config(f"fedscem/{name.lower()}", list(overrides))),
    )
    plan = Plan(
        tuple(there),
        tuple(chosen["method"]),
        tuple(chosen["table"]),
        tuple(seeds) if seeds else None,
        rounds,
        tuple(overrides),
        # 20 runs a data set: on others than Cora for those who ask for just that.
        tuple(there) if {"data", "table"} <= only.keys() else ("Cora",),
    )
    jobs = plan.jobs()
    if not jobs and "figure-8" not in plan.tables:
        raise ConfigError("--only: no table has such a row or picture")
    announce(jobs, out / "runs", estimate)
    runs = run_jobs(jobs, out / "runs", _train_whole)
    rows = make_rows(plan, runs, _measure_costs(plan))
    pictures = draw(out, plan, runs, rows)
    write_json(out / "table.json", rows)
    write_text(out / "table.md", make_page(plan, runs, rows, left_out, pictures))
    print(f"tables and pictures in {out}")


def _train_whole(config: FedSCemConfig) -> list[Epoch]:
    return train_whole(config, cached_data(config), METHOD.graphs(config), ego_settings(config))


# Figure 8 ----------------------------------------------------------------------------------------


def _measure_costs(plan: Plan) -> dict[str, list[Cost]]:
    """Measure clients by size, one data set after the other, when nothing else is running."""
    if "figure-8" not in plan.tables or FEDSCEM not in plan.methods:
        return {}
    costs = {}
    for data in plan.data:
        cell = plan.cell(data, FEDSCEM)
        settings = [*cell.overrides, f"seed={plan.table_seeds[0]}"]
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=one_thread) as pool:
            result = pool.submit(_costs, cell.config, settings).result()
        costs[data] = [Cost(**cost) for cost in result]
    return costs


def _costs(config: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Measure in a process of its own: some builds of PyTorch's profiler fill the error stream."""
    # What goes wrong comes back as an exception.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    loaded = load_config(config, overrides)
    assert isinstance(loaded, FedSCemConfig)
    return [asdict(cost) for cost in costs_by_size(METHOD.graphs(loaded), ego_settings(loaded))]


# Pictures ----------------------------------------------------------------------------------------


def draw(out: Path, plan: Plan, runs: Runs, rows: Sequence[Row]) -> list[str]:
    """Draw what was asked for and return the pictures' names."""
    pictures = []
    if "figure-5" in plan.tables:
        pictures += _draw_ablation(out, plan, rows)
    if "figure-6a" in plan.tables:
        pictures += _draw_grid(out, plan, rows)
    if "figure-6b" in plan.tables:
        pictures += _draw_convergence(out, plan, runs)
    return pictures + _draw_costs(out, rows)


def _draw_ablation(out: Path, plan: Plan, rows: Sequence[Row]) -> list[str]:
    names = []
    for part, methods in ABLATION.items():
        panels: dict[str, dict[str, Bar]] = {}
        for data in plan.data:
            for method in methods:
                result = find(rows, table="Table 3", data=data, method=method, metric=TEST)
                if result is not None:
                    bar = Bar(result["mean"], result["std"], result["paper"])
                    panels.setdefault(data, {})[method] = bar
        if panels:
            names.append(f"figure-5{part}.png")
            plot_bars(out / names[-1], panels, label="test accuracy")
    return names


def _draw_grid(out: Path, plan: Plan, rows: Sequence[Row]) -> list[str]:
    names = []
    for data in plan.grid_data:
        panels = {}
        for metric, name in ((VALIDATION, "best validation"), (TEST, "test")):
            mean = {
                (r["mu"], r["tau"]): r["mean"]
                for r in rows
                if (r["table"], r["data"], r["metric"]) == ("Figure 6a", data, metric)
            }
            if any(isfinite(value) for value in mean.values()):
                panels[f"{data}, {name}"] = [[mean[mu, tau] for tau in TAU] for mu in MU]
        if panels:
            names.append(f"figure-6a-{data.lower()}.png")
            plot_matrices(out / names[-1], panels, rows=("mu", MU), columns=("tau", TAU))
    return names


def _draw_convergence(out: Path, plan: Plan, runs: Runs) -> list[str]:
    names = []
    for suffix, methods in CONVERGENCE.items():
        panels: dict[str, dict[str, CurveSet]] = {}
        for data in plan.data:
            for method in methods:
                cell = plan.cell(data, method)
                if cell in runs:
                    curves = list(runs[cell].values())
                    panels.setdefault(data, {})[method] = CurveSet(
                        [c.test_accuracy for c in curves], [c.cross_entropy for c in curves]
                    )
        if panels:
            names.append(f"figure-6b{suffix}.png")
            plot_grid(out / names[-1], panels)
    return names


def _draw_costs(out: Path, rows: Sequence[Row]) -> list[str]:
    by_group: dict[tuple[str, int], dict[str, float]] = {}
    for r in rows:
        if r["table"] == "Figure 8":
            by_group.setdefault((r["data"], r["group"]), {})[r["metric"]] = r["mean"]
    if not by_group:
        return []
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for cost, name, scale in (
        ("seconds-per-round", "ms a round", 1000),
        ("peak-mib", "memory, MiB", 1),
    ):
        for size in ("nodes", "edges"):
            lines = panels.setdefault((size, name), {})
            for (data, _), figures in by_group.items():
                lines.setdefault(data, []).append((figures[size], scale * figures[cost]))
    plot_points(out / "figure-8.png", panels)
    return ["figure-8.png"]
