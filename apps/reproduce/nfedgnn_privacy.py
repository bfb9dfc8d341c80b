"""nFedGNN under local differential privacy: accuracy against the budget, on Cora."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from flower_graph.apps.run import simulate
from flower_graph.config.load import load_config
from flower_graph.data.cached import cached_data
from flower_graph.privacy.accountant import spent
from flower_graph.report.plots.privacy import Panel, Values, plot_budgets
from flower_graph.report.result import best_round
from flower_graph.storage.files import prepare_folder, write_json, write_text
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig

CONFIG = "nfedgnn/cora"
SEEDS = (0, 1, 2)
# Budgets of a whole run; most are far beyond what protects anybody, to show where it begins to work
EPSILONS = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)
# Tried at every budget with the first seed; validation accuracy chooses, never test accuracy
CLIPPING_NORMS = (0.1, 0.3, 1.0)
REG_WEIGHTS = (1.0, 100.0)
ROUNDS = (50, 200)  # fewer rounds leave each more of the budget
CLEAR, COMMONEST = "nFedGNN, no noise", "the commonest class"

Row = dict[str, Any]


def privacy_curve(
    out: Path,
    *,
    seeds: Sequence[int] = SEEDS,
    epsilons: Sequence[float] = EPSILONS,
    clipping_norms: Sequence[float] = CLIPPING_NORMS,
    reg_weights: Sequence[float] = REG_WEIGHTS,
    rounds: Sequence[int] = ROUNDS,
    overrides: Sequence[str] = (),
) -> list[Row]:
    """Run nFedGNN with and without noise on latent vectors; write table and picture."""
    # What the folder has of the same settings is not run again; it is written after every run.
    file = prepare_folder(out, may_exist=True) / "privacy.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    clear = _row([f"rounds={max(rounds)}", *overrides], kept)
    grid = list(product(clipping_norms, reg_weights, rounds))
    tried = [
        [_row([*_noise(epsilon, *choice), *overrides], kept) for choice in grid]
        for epsilon in epsilons
    ]
    rows = [clear, *(row for group in tried for row in group)]
    for row in rows:
        _run(row, seeds[:1], file, rows)
    chosen = [clear, *(max(group, key=lambda row: row["val"][str(seeds[0])]) for group in tried)]
    for row in rows:
        row["chosen"] = any(row is one for one in chosen)
    for row in chosen:
        _run(row, seeds, file, rows)
    write_json(file, rows)
    commonest = _commonest(overrides)
    write_text(out / "privacy.md", _page(chosen, commonest, seeds))
    _draw(out / "privacy.png", chosen, commonest)
    return rows


def _noise(epsilon: float, norm: float, weight: float, rounds: int) -> list[str]:
    return [
        f"privacy.epsilon={epsilon}",
        f"privacy.clipping_norm={norm}",
        f"strategy.reg_weight={weight}",
        f"rounds={rounds}",
    ]


def _row(overrides: list[str], kept: Sequence[Row]) -> Row:
    """Begin a row, with the runs that there are of the same settings."""
    settings = _load(overrides)
    row: Row = {"config": CONFIG, "overrides": overrides, "rounds": settings.rounds}
    row["reg-weight"] = settings.strategy.reg_weight
    if settings.privacy.is_on:
        row |= spent(settings.privacy, settings.rounds)
    for old in kept:
        if all(old.get(key) == value for key, value in row.items()):
            return {**row, "val": dict(old["val"]), "test": dict(old["test"])}
    return {**row, "val": {}, "test": {}}


def _run(row: Row, seeds: Sequence[int], file: Path, rows: Sequence[Row]) -> None:
    """Run a row for the seeds that it lacks."""
    for seed in (one for one in seeds if str(one) not in row["test"]):
        best = best_round(simulate(_load([*row["overrides"], f"seed={seed}"])))
        assert best is not None  # the data set has validation nodes
        row["val"][str(seed)], row["test"][str(seed)] = best.val_accuracy, best.test_accuracy
        write_json(file, rows)
        epsilon = f"epsilon {row['epsilon']:g}" if "epsilon" in row else "no noise"
        print(f"{epsilon} {row['overrides']} seed {seed}: {best.test_accuracy:.4f}", flush=True)


def _load(overrides: Sequence[str]) -> NFedGNNConfig:
    result = load_config(CONFIG, list(overrides))
    assert isinstance(result, NFedGNNConfig)
    return result


def _commonest(overrides: Sequence[str]) -> float:
    """Work out the test accuracy of always naming the commonest class of the test nodes."""
    data = cached_data(_load(overrides))
    labels = data.y[data.test_mask]
    return int(labels.bincount().max()) / int(labels.numel())


def _page(chosen: Sequence[Mapping[str, Any]], commonest: float, seeds: Sequence[int]) -> str:
    lines = [
        "# nFedGNN on Cora with noise on latent vectors\n",
        f"Seeds {', '.join(map(str, seeds))}; mean ± standard deviation. Test accuracy in percent "
        "in the round with the best validation accuracy; clipping norm, lambda and rounds chosen "
        f"at each budget by that of seed {seeds[0]}. Epsilon is of one user's features over the "
        f"whole run, at delta {chosen[-1]['delta']:g}.\n",
        "| epsilon | of a round | noise / sensitivity | clipping norm | lambda | rounds "
        "| test accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in chosen[1:]:
        lines.append(
            f"| {_figure(row['epsilon'])} | {_figure(row['epsilon-of-a-round'])} "
            f"| {row['noise-multiplier']:.3g} | {row['clipping-norm']:g} | {row['reg-weight']:g} "
            f"| {row['rounds']} | {_percent(row)} |"
        )
    clear = chosen[0]
    end = f"{clear['reg-weight']:g} | {clear['rounds']} | {_percent(clear)} |"
    lines += [f"| no noise | | | | {end}", f"| {COMMONEST} | | | | | | {100 * commonest:.1f} |"]
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(row: Mapping[str, Any]) -> str:
    values = [100 * value for value in row["test"].values()]
    return f"{fmean(values):.1f} ± {pstdev(values):.1f}"


def _draw(path: Path, chosen: Sequence[Mapping[str, Any]], commonest: float) -> None:
    budgets: dict[float, Values] = {
        row["epsilon"]: list(row["test"].values()) for row in chosen[1:]
    }
    levels: dict[str, Values] = {
        CLEAR: list(chosen[0]["test"].values()),
        COMMONEST: [commonest],
    }
    plot_budgets(path, {"Cora, GCN": Panel(budgets, levels)}, noisy="nFedGNN, with noise")
