"""PPFL-GNN's comparison: Tables 1 to 3, and Figures 3 to 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from flower_graph.apps.reproduce.asked import announce, available, choose
from flower_graph.apps.reproduce.curves import Curves
from flower_graph.apps.reproduce.experiments import Runs, kept_runs, run_stages
from flower_graph.apps.reproduce.ppfl_cells import (
    DATA,
    FED,
    FIGURES,
    FULL,
    LOC,
    MODELS,
    SEEDS,
    TABLES,
    Case,
    Plan,
    estimate,
)
from flower_graph.apps.reproduce.ppfl_page import make_page
from flower_graph.apps.reproduce.ppfl_privacy import privacy_curve
from flower_graph.apps.reproduce.ppfl_rows import PRECISIONS, make_rows, missing_runs
from flower_graph.config.load import load_config
from flower_graph.data.cached import cached_data
from flower_graph.errors import ConfigError
from flower_graph.storage.files import write_json, write_text
from flower_graph.strategies.procrustes_alignment.plots import AlignmentCurves, plot_alignment

PRIVACY = "privacy"  # not in the paper: run only if it is asked for
KNOWN = {"data": DATA, "model": MODELS, "table": (*TABLES, PRIVACY)}
PICTURE = "figures-3-to-6.png"


def reproduce(
    out: Path,
    *,
    only: Mapping[str, list[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run the comparison on the data that is there."""
    # The page is written after each seed of a table, so that a run of hours can be read, and
    # stopped, at any time.
    chosen = choose(only, KNOWN)
    if PRIVACY in only.get("table", []):
        more = [] if rounds is None else [f"rounds={rounds}"]
        privacy_curve(out, seeds=tuple(seeds or SEEDS), overrides=[*overrides, *more])
    chosen["table"] = [name for name in chosen["table"] if name != PRIVACY]
    if not chosen["table"]:
        return
    there, left_out = available(
        chosen["data"],
        lambda name: cached_data(load_config(f"ppfl/{name.lower()}-gat", list(overrides))),
    )
    plan = Plan(
        tuple(there),
        tuple(chosen["model"]),
        tuple(chosen["table"]),
        tuple(seeds or SEEDS),
        rounds,
        tuple(overrides),
    )
    if not plan.jobs():
        raise ConfigError("--only: no table has such a row or picture")
    folder = out / "runs"
    announce(plan.jobs(), folder, estimate)
    run_stages(plan.stages(), folder, lambda: write_page(out, plan, left_out))
    print(f"tables and pictures in {out}")


def write_page(out: Path, plan: Plan, left_out: Sequence[str]) -> None:
    """Write tables and pictures of the runs that the folder has, which may not be all."""
    runs = kept_runs(plan.jobs(), out / "runs")
    rows = make_rows(plan, runs)
    pictures = draw(out, plan, runs)
    write_json(out / "table.json", rows)
    page = make_page(plan, rows, missing_runs(plan, runs), left_out, pictures)
    write_text(out / "table.md", page)


def draw(out: Path, plan: Plan, runs: Runs) -> list[str]:
    """Draw Figures 3 to 6 as far as they were run, and return the picture's name."""
    wanted = plan.cases("figures")
    columns = {
        f"{name}: {case.name}, {case.model}": _column(plan, runs, case)
        for name, case in FIGURES.items()
        if case in wanted and plan.cell(case, FED) in runs
    }
    if not columns:
        return []
    plot_alignment(out / PICTURE, columns)
    return [PICTURE]


def _column(plan: Plan, runs: Runs, case: Case) -> AlignmentCurves:
    """Collect the curves of one figure."""
    result = {method: list(runs.get(plan.cell(case, method), {}).values()) for method in (LOC, FED)}
    fed = result[FED]
    precision = {
        f"P@{name.removeprefix('precision-')}": [curves.alignment[name] for curves in fed]
        for name in PRECISIONS
        if all(name in curves.alignment for curves in fed)
    }
    accuracy = {m: [c.test_accuracy for c in curves] for m, curves in result.items() if curves}
    whole = list(runs.get(plan.cell(case, FULL), {}).values())
    return AlignmentCurves(precision, accuracy, _level(whole))


def _level(whole: Sequence[Curves]) -> float | None:
    """Return the last accuracy on the full graph, mean over the seeds."""
    return fmean(curves.test_accuracy[-1] for curves in whole) if whole else None
