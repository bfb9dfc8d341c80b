"""nFedGNN's comparison (Figures 4 to 9), its ``lambda`` (5, 9) and Table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.apps.reproduce.asked import available, choose
from flower_graph.apps.reproduce.curves import Curves
from flower_graph.apps.reproduce.experiments import Cell, Runs, run_cells
from flower_graph.apps.reproduce.nfedgnn_privacy import ROUNDS as PRIVACY_ROUNDS
from flower_graph.apps.reproduce.nfedgnn_privacy import privacy_curve
from flower_graph.apps.reproduce.text import TEST as ACCURACY
from flower_graph.apps.reproduce.text import VALIDATION, row
from flower_graph.config.load import load_config
from flower_graph.data.cached import cached_data
from flower_graph.engine.epoch import Epoch
from flower_graph.errors import ConfigError
from flower_graph.report.plots.base import CurveSet, plot_grid
from flower_graph.storage.files import write_json, write_text
from flower_graph.strategies.split_gradient_relay.central import train_centralised
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig

SEEDS, ROUNDS = (0, 1, 2), 200
CITATION, WIKIPEDIA = ("Cora", "CiteSeer", "PubMed"), ("Chameleon", "Squirrel", "Wiki-CS")
WEIGHTS = {name: (0.1, 1, 10, 100, 300) for name in CITATION} | {
    name: (1, 10, 100, 500) for name in WIKIPEDIA
}
MODELS = {
    "GCN": (),
    "GAT": ("model.name=gat", "model.dropout=0.6", "strategy.learning_rate=0.01"),
}
# The paper's equation has no bias at the users; that variant is run for the GCN, as an ablation.
NO_BIAS = "nFedGNN, no user bias"
# Not in the paper either: the users' weights averaged every few rounds, tuned for Cora alone.
AVERAGED = "nFedGNN, averaged"
METHODS = ("nFedGNN", "lambda=0", "CNFGNN", "centralised", NO_BIAS, AVERAGED)
FIGURES = {
    ("GCN", CITATION): "Figure 4",
    ("GCN", WIKIPEDIA): "Figure 6",
    ("GAT", CITATION): "Figure 7",
    ("GAT", WIKIPEDIA): "Figure 8",
}
# The accuracies that the paper prints; its other results are curves without numbers.
PAPER_ACCURACY = {("Cora", "GCN", "nFedGNN"): 0.719, ("Cora", "GCN", "centralised"): 0.815}
# Table 1, uplink in MiB: GCN and GAT of nFedGNN, then of CNFGNN. Its 34.06 for nFedGNN with GCN on
# Cora is a slip: n h 4 200 bytes are 33.06 MiB.
PAPER_MIB = {
    "Cora": (34.06, 264.45, 4.74e4, 3.79e5),
    "CiteSeer": (40.61, 324.90, 1.50e5, 1.20e6),
    "PubMed": (240.69, 1.93e3, 1.21e5, 9.64e5),
    "Chameleon": (27.80, 222.36, 6.47e4, 5.17e5),
    "Squirrel": (63.49, 507.91, 1.33e5, 1.06e6),
    "Wiki-CS": (142.83, 1.14e3, 4.31e4, 3.44e5),
}
COMPARISON, PRIVACY = "comparison", "privacy"  # the second is run only if it is asked for
KNOWN = {
    "data": [*CITATION, *WIKIPEDIA],
    "model": list(MODELS),
    "method": list(METHODS),
    "table": [COMPARISON, PRIVACY],
}
REG_WEIGHT = "strategy.reg_weight="
SWEPT = {"nFedGNN": "lambda=", NO_BIAS: "no user bias, lambda="}  # start of a cell's name
UPLINK = "uplink-mib"


def reproduce(
    out: Path,
    *,
    only: Mapping[str, list[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
) -> None:
    """Run the comparison on the data that is there; arguments as in ``apps.reproduce.main``."""
    chosen = choose(only, KNOWN)
    if PRIVACY in only.get("table", []):
        tried = PRIVACY_ROUNDS if rounds is None else (rounds,)
        privacy_curve(out, seeds=tuple(seeds or SEEDS), rounds=tried)
    if COMPARISON not in chosen["table"]:
        return
    seeds, rounds = list(seeds or SEEDS), rounds or ROUNDS
    data, left_out = available(
        chosen["data"], lambda name: cached_data(load_config(f"nfedgnn/{name.lower()}"))
    )
    cells = [
        cell
        for name in data
        for model in chosen["model"]
        for method in chosen["method"]
        for cell in method_cells(name, model, method)
    ]
    if not cells:
        raise ConfigError("--only: no table has such a row")
    runs = run_cells(cells, seeds, rounds, out / "runs", _centralised)
    rows = make_rows(runs, seeds, rounds)
    write_json(out / "table.json", rows)
    write_text(out / "table.md", make_page(rows, left_out, seeds, rounds))
    draw(out, runs)
    print(f"tables and pictures in {out}")


def _centralised(config: NFedGNNConfig) -> list[Epoch]:
    return train_centralised(config, cached_data(config))


def method_cells(data: str, model: str, method: str) -> list[Cell]:
    """Return the cells of one method: for nFedGNN, one for each ``lambda`` of the paper."""
    config = f"nfedgnn/{data.lower()}"
    settings = MODELS[model]
    if method in SWEPT:
        if method == NO_BIAS and model != "GCN":
            return []
        settings += ("model.user_bias=false",) if method == NO_BIAS else ()
        return [
            Cell(data, model, SWEPT[method] + f"{w:g}", config, (*settings, f"{REG_WEIGHT}{w:g}"))
            for w in WEIGHTS[data]
        ]
    if method == AVERAGED:
        tuned = (data, model) == ("Cora", "GCN")
        return [Cell(data, model, method, "nfedgnn/cora-averaged", ())] if tuned else []
    if method == "centralised":
        return [Cell(data, model, method, config, settings, centralised=True)]
    if method == "CNFGNN":
        # Table 1 counts a bias for the GCN's users and none for the GAT's.
        bias = f"model.user_bias={str(model == 'GCN').lower()}"
        settings += ("strategy.average_every=1", "strategy.average_over=all", bias)
    return [Cell(data, model, method, config, (*settings, f"{REG_WEIGHT}0"))]


def sweep_of(cell: Cell) -> str | None:
    """Return the method that a cell is one ``lambda`` of; ``None`` for other cells."""
    if cell.method == "lambda=0":
        return None
    return next((m for m, start in SWEPT.items() if cell.method.startswith(start)), None)


def best_weights(runs: Runs, data: str, model: str) -> dict[Cell, str]:
    """Choose ``lambda`` for each swept method by the mean of the best validation accuracies."""
    chosen: dict[Cell, str] = {}
    for method in SWEPT:
        result = [c for c in runs if (c.data, c.model, sweep_of(c)) == (data, model, method)]
        if result:
            best = max(result, key=lambda c: fmean(run.best_val for run in runs[c].values()))
            chosen[best] = method
    return chosen


def make_rows(runs: Runs, seeds: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Make the rows of ``table.json``: the comparison, the sweep over lambda, Table 1."""
    rows = []
    for (model, group), figure in FIGURES.items():
        for data in group:
            sweep = "Figure 5" if model == "GCN" else "Figure 9"
            best = best_weights(runs, data, model)
            for cell in [c for c in runs if (c.data, c.model) == (data, model)]:
                by_seed = {seed: runs[cell][seed] for seed in seeds}
                test = {seed: run.test_at_best_val for seed, run in by_seed.items()}
                val = {seed: run.best_val for seed, run in by_seed.items()}
                if sweep_of(cell):
                    rows.append(row(sweep, cell, ACCURACY, test, rounds))
                    rows.append(row(sweep, cell, VALIDATION, val, rounds))
                if not sweep_of(cell) or cell in best:
                    named = replace(cell, method=best.get(cell, cell.method))
                    paper = PAPER_ACCURACY.get((data, model, named.method))
                    rows.append(row(figure, named, ACCURACY, test, rounds, paper))
                    rows.append(row(figure, named, VALIDATION, val, rounds))
                    rows += _uplink_rows(named, by_seed, rounds)
    return rows


def _uplink_rows(cell: Cell, runs: Mapping[int, Curves], rounds: int) -> list[dict[str, Any]]:
    if cell.method not in ("nFedGNN", "CNFGNN"):
        return []
    place = ("nFedGNN", "CNFGNN").index(cell.method) * 2 + ("GCN", "GAT").index(cell.model)
    paper = PAPER_MIB[cell.data][place] if rounds == ROUNDS else None
    mebibytes = {seed: sum(run.bytes_up.values()) / 2**20 for seed, run in runs.items()}
    return [row("Table 1", cell, UPLINK, mebibytes, rounds, paper)]


def make_page(
    rows: Sequence[Mapping[str, Any]], left_out: Sequence[str], seeds: Sequence[int], rounds: int
) -> str:
    """Write ``table.md``: accuracies, Table 1 and the sweep, the paper's figures beside ours."""
    compared = [r for r in rows if r["metric"] == ACCURACY and r["table"] not in _SWEEPS]
    sweep = [r for r in rows if r["metric"] == VALIDATION and r["table"] in _SWEEPS]
    tests = {_key(r): r for r in rows if r["metric"] == ACCURACY and r["table"] in _SWEEPS}
    lines = [
        "# nFedGNN: the paper's comparison\n",
        f"{rounds} rounds, seeds {', '.join(map(str, seeds))}; mean ± sample deviation. "
        "Test accuracy in the round with the best validation accuracy; lambda chosen by the mean "
        "best validation accuracy.\n",
        "## Test accuracy\n",
        "| data | model | method | ours | paper | lambda |",
        "|---|---|---|---|---|---|",
    ]
    for r in compared:
        paper = "" if r["paper"] is None else f"{r['paper']:.3f}"
        lines.append(
            f"| {r['data']} | {r['model']} | {r['method']} | {_accuracy(r)} | {paper} "
            f"| {_weight(r) if r['method'] in SWEPT else ''} |"
        )
    lines += [
        "\n## Table 1: uplink of all users, MiB\n",
        "| data | model | method | ours | paper |",
        "|---|---|---|---|---|",
    ]
    for r in [r for r in rows if r["metric"] == UPLINK]:
        paper = "" if r["paper"] is None else f"{r['paper']:,.2f}"
        lines.append(f"| {r['data']} | {r['model']} | {r['method']} | {r['mean']:,.2f} | {paper} |")
    lines += [
        "\n## Figures 5 and 9: lambda\n",
        "| data | model | method | lambda | best validation | test |",
        "|---|---|---|---|---|---|",
    ]
    for r in sweep:
        test = _accuracy(tests[_key(r)])
        method = "nFedGNN" if r["method"].startswith("lambda=") else NO_BIAS
        lines.append(
            f"| {r['data']} | {r['model']} | {method} | {_weight(r)} | {_accuracy(r)} | {test} |"
        )
    if left_out:
        lines += ["\n## Not run\n", *(f"- {reason}" for reason in left_out)]
    return "\n".join(lines) + "\n"


_SWEEPS = ("Figure 5", "Figure 9")


def _key(r: Mapping[str, Any]) -> tuple[str, str, str]:
    return r["data"], r["model"], r["method"]


def _weight(r: Mapping[str, Any]) -> str:
    return str(r["settings"]["overrides"][-1]).removeprefix(REG_WEIGHT)


def _accuracy(r: Mapping[str, Any]) -> str:
    return f"{r['mean']:.3f} ± {r['std']:.3f}"


def draw(out: Path, runs: Runs) -> None:
    """Draw the comparison and the sweep, a picture for each model and group of data sets."""
    for (model, group), figure in FIGURES.items():
        sweep = "figure-5" if model == "GCN" else "figure-9"
        compared: dict[str, dict[str, CurveSet]] = {}
        weights: dict[str, dict[str, CurveSet]] = {}
        grey: dict[str, float] = {}
        for data in group:
            here = {c: _curve_set(runs[c]) for c in runs if (c.data, c.model) == (data, model)}
            best = best_weights(runs, data, model)
            for cell, curves in here.items():
                if cell.centralised:
                    grey[data] = fmean(r.test_at_best_val for r in runs[cell].values())
                elif sweep_of(cell) == "nFedGNN":
                    weights.setdefault(data, {})[cell.method] = curves
                if cell in best or not (sweep_of(cell) or cell.centralised):
                    compared.setdefault(data, {})[best.get(cell, cell.method)] = curves
        if compared:
            plot_grid(out / f"{figure.lower().replace(' ', '-')}.png", compared, grey)
        if weights and group == CITATION:
            plot_grid(out / f"{sweep}.png", weights, grey)


def _curve_set(by_seed: Mapping[int, Any]) -> CurveSet:
    runs = list(by_seed.values())
    return CurveSet([r.test_accuracy for r in runs], [r.cross_entropy for r in runs])
