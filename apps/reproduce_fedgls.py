"""FedGLS's comparison: Tables 1 to 3, Figure 3, and how good the learnt graphs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flower_graph.apps.asked import announce, available, choose
from flower_graph.apps.cells import Runs, kept_runs, run_stages
from flower_graph.apps.common import cached_data
from flower_graph.apps.fedgls_cells import (
    CURVES,
    DATA,
    FEDGLS,
    KNN,
    METHODS,
    SEEDS,
    TABLES,
    Plan,
    estimate,
)
from flower_graph.apps.fedgls_page import make_page
from flower_graph.apps.fedgls_rows import make_rows, missing_runs
from flower_graph.apps.tables import Row, find
from flower_graph.config import load_config
from flower_graph.errors import ConfigError
from flower_graph.files import write_json, write_text
from flower_graph.plots import CurveSet, plot_grid
from flower_graph.plots_compared import Bar, plot_bars

KNOWN = {"data": DATA, "method": (*METHODS,), "table": TABLES}


def reproduce(
    out: Path,
    *,
    only: Mapping[str, list[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
    overrides: Sequence[str] = (),
) -> None:
    """Run the comparison on the data that is there.

    The page is written after each seed of a table, so that a run of hours can be read, and
    stopped, at any time.

    Parameters
    ----------
    out, only, seeds, rounds
        As in ``apps.reproduce.main``. Without `seeds` there are five; without `rounds` each data
        set has those of its config.
    overrides : sequence of str
        Settings laid over those of every run, such as ``partition.clients=4``.
    """
    chosen = choose(only, KNOWN)
    there, left_out = available(
        chosen["data"],
        lambda name: cached_data(load_config(f"fedgls/{name.lower()}", list(overrides))),
    )
    plan = Plan(
        tuple(there),
        tuple(chosen["method"]),
        tuple(chosen["table"]),
        tuple(seeds or SEEDS),
        rounds,
        tuple(overrides),
    )
    if not plan.entries():
        raise ConfigError("--only: no table has such a row or picture")
    folder = out / "runs"
    announce(plan.jobs(), folder, estimate)
    run_stages(plan.stages(), folder, lambda: write_page(out, plan, left_out))
    print(f"tables and pictures in {out}")


def write_page(out: Path, plan: Plan, left_out: Sequence[str]) -> None:
    """Write tables and pictures of the runs that the folder has, which may not be all."""
    runs = kept_runs(plan.jobs(), out / "runs")
    rows = make_rows(plan, runs)
    pictures = draw(out, plan, runs, rows)
    write_json(out / "table.json", rows)
    page = make_page(plan, rows, missing_runs(plan, runs), left_out, pictures)
    write_text(out / "table.md", page)


def draw(out: Path, plan: Plan, runs: Runs, rows: Sequence[Row]) -> list[str]:
    """Draw what was run and return the pictures' names."""
    names = _draw_curves(out, plan, runs) if "figure-3" in plan.tables else []
    return names + (_draw_structure(out, plan, rows) if "table-1" in plan.tables else [])


def _draw_curves(out: Path, plan: Plan, runs: Runs) -> list[str]:
    """Draw Figure 3, a picture for each data set."""
    names = []
    for data in plan.data:
        cells = {m: plan.cell(data, m) for m in CURVES if m in plan.methods}
        curves = {
            method: CurveSet(
                [c.test_accuracy for c in runs[cell].values()],
                [c.cross_entropy for c in runs[cell].values()],
            )
            for method, cell in cells.items()
            if cell in runs
        }
        if curves:
            names.append(f"figure-3-{data.lower()}.png")
            plot_grid(out / names[-1], {data: curves})
    return names


def _draw_structure(out: Path, plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Draw how true the edges are that the graphless clients have, a picture for each measure."""
    names = []
    for metric in ("precision", "recall", "homophily"):
        panels = {data: _bars(rows, data, metric) for data in plan.data}
        panels = {data: bars for data, bars in panels.items() if bars}
        if panels:
            names.append(f"structure-{metric}.png")
            plot_bars(out / names[-1], panels, label=f"{metric} of the edges")
    return names


def _bars(rows: Sequence[Row], data: str, metric: str) -> dict[str, Bar]:
    key = {"table": "Table 1", "data": data}
    found = {name: find(rows, method=name, metric=metric, **key) for name in (KNN, FEDGLS)}
    if metric == "homophily":
        found["true edges"] = find(rows, method=FEDGLS, metric="true-homophily", **key)
    return {name: Bar(r["mean"], r["std"], None) for name, r in found.items() if r is not None}
