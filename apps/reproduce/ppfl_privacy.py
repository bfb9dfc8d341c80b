"""PPFL-GNN under local differential privacy: accuracy against the budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.apps.run import simulate_whole
from flower_graph.config.load import load_config
from flower_graph.config.privacy import REPORT
from flower_graph.config.registry import method_of
from flower_graph.privacy.accountant import spent
from flower_graph.report.plots.privacy import Panel, plot_budgets
from flower_graph.storage.files import prepare_folder, write_json
from flower_graph.strategies.procrustes_alignment.config import PPFLConfig
from flower_graph.strategies.procrustes_alignment.evaluation import SVC

# Configs, and the clipping norm that suits each: chosen by validation accuracy, never by test
# accuracy
CLIPPING_NORMS = {"ppfl/cora-deepwalk": 30.0, "ppfl/cora-gat": 10.0}
SEEDS = (0, 1, 2)
LOC, FED, NOISY = "LOC", "FED", "FED, with noise"
# Budgets of a whole run; most are far beyond what protects anybody, to show where it begins to work
EPSILONS = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)

ACCOUNTED = ("epsilon", "epsilon-of-a-round", "delta", "noise-multiplier", "noise")


def privacy_curve(
    out: Path,
    *,
    seeds: Sequence[int] = SEEDS,
    epsilons: Sequence[float] = EPSILONS,
    clipping_norms: Mapping[str, float] = CLIPPING_NORMS,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run clients alone, federated, and federated with noise; write table and picture."""
    # What the folder has of the same settings is not run again; it is written after every run.
    file = prepare_folder(out, may_exist=True) / "privacy.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows = []
    for config, norm in clipping_norms.items():
        _load(config, overrides)  # of another method's config the first complaint is its name
        cases = [(LOC, ["strategy.name=local"]), (FED, [])]
        noise = [[f"privacy.epsilon={e}", f"privacy.clipping_norm={norm}"] for e in epsilons]
        cases += [(NOISY, one) for one in noise]
        rows += [_row(name, config, [*local, *overrides], kept) for name, local in cases]
    for seed in seeds:
        for row in rows:
            if str(seed) not in row["test"]:
                _run(row, seed)
                write_json(file, rows)
    write_json(file, rows)
    _draw(out / "privacy.png", rows)
    return rows


def _draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    panels: dict[str, Panel] = {}
    for row in rows:
        panel = panels.setdefault(row["config"], Panel({}, {}))
        values = list(row["test"].values())
        if "epsilon" in row:
            panel.budgets[row["epsilon"]] = values
        else:
            panel.levels[row["method"]] = values
    plot_budgets(path, panels)


def _row(
    name: str, config: str, overrides: list[str], kept: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Begin a row, with the runs that there are of the same settings."""
    settings = _load(config, overrides)
    row: dict[str, Any] = {"method": name, "config": config, "overrides": overrides}
    row["settings"] = {
        part: asdict(getattr(settings, part)) for part in ("partition", settings.model.name)
    } | {"rounds": settings.rounds}
    if settings.privacy.epsilon is not None:
        result = spent(settings.privacy, settings.rounds)
        row |= {key: result[key] for key in ACCOUNTED}
        row["clipping-norm"] = settings.privacy.clipping_norm
    # As it would be read back: tuples are lists there.
    same = json.loads(json.dumps(row))
    for old in kept:
        if all(old.get(key) == value for key, value in same.items()):
            return {**row, "val": dict(old["val"]), "test": dict(old["test"])}
    return {**row, "val": {}, "test": {}}


def _run(row: dict[str, Any], seed: int) -> None:
    settings = _load(row["config"], [*row["overrides"], f"seed={seed}"])
    # What is drawn is measured without noise, as an experimenter's instrument.
    settings.privacy.measurements = REPORT
    # The clients are judged once, after the last round, and by the SVC alone.
    settings.judge.every, settings.judge.mlp = settings.rounds, False
    clients = method_of(settings).num_clients(settings)
    _, final = simulate_whole(settings, supernodes=clients)
    for role, values in final["judged"][SVC].items():
        row[role][str(seed)] = fmean(values) if values else None
    epsilon = f" epsilon {row['epsilon']:g}" if "epsilon" in row else ""
    print(f"{row['config']} {row['method']}{epsilon} seed {seed}: {row['test'][str(seed)]:.4f}")


def _load(config: str, overrides: Sequence[str]) -> PPFLConfig:
    result = load_config(config, list(overrides))
    if not isinstance(result, PPFLConfig):
        raise ValueError(f"config: {config!r} is of app {result.app!r}, must be of ppfl")
    return result
