"""Accuracy by privacy budget, as the key ``privacy`` of a table says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev

from flower_graph.apps.parallel import flat, settings_of
from flower_graph.apps.reproduce.experiments import is_same
from flower_graph.apps.reproduce.page import markdown
from flower_graph.apps.reproduce.rows import Row
from flower_graph.apps.reproduce.templates import Values, fill, function, make
from flower_graph.apps.run import simulate
from flower_graph.errors import OutputError
from flower_graph.method.load import load_config
from flower_graph.privacy.accountant import spent
from flower_graph.report.plots.compared import Panel, plot_budgets
from flower_graph.report.result import best_round
from flower_graph.storage.files import prepare_folder, write_json, write_text
from flower_graph.storage.reading import read_json, reading


@dataclass(frozen=True)
class Curve:
    """What is run and drawn."""

    title: str
    text: str
    configs: Mapping[str, Values]  # By title: a config, and what is tried with it alone
    epsilons: tuple[float, ...]  # Budgets of a whole run
    seeds: tuple[int, ...]  # Where no others are asked for
    noisy: str  # Name of the runs with noise
    levels: Mapping[str, Sequence[str]]  # Settings of runs without noise, by name
    # Values of settings, tried at every budget with the first seed
    tried: Mapping[str, Sequence[object]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # Settings that rows show, by their key
    columns: Mapping[str, str] = field(default_factory=dict)  # Keys that the page shows, by name
    constants: Mapping[str, str] = field(default_factory=dict)  # Functions of the config, by name
    measured: tuple[str, ...] = ()  # Settings of how accuracy is measured


def privacy_curve(
    out: Path,
    tree: Values,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
) -> list[Row]:
    """Run without noise and at every budget; write table and picture."""
    # What the folder has of the same settings is not run again; it is written after every run.
    curve = make(Curve, tree, "privacy")
    seeds = seeds or curve.seeds
    file = prepare_folder(out, may_exist=True) / "privacy.json"
    with reading(file, OutputError, "no earlier curve"):
        kept = read_json(file) if file.exists() else []
    panels = {
        title: _groups(curve, one, kept, rounds, overrides) for title, one in curve.configs.items()
    }
    rows = [row for groups in panels.values() for group in groups for row in group]
    for row in rows:
        _run(curve, row, seeds[0], file, rows)
    # Validation accuracy with the first seed chooses, never test accuracy.
    first, best = str(seeds[0]), dict[str, list[Row]]()
    for title, groups in panels.items():
        best[title] = [max(group, key=lambda row: row["val"][first]) for group in groups]
    chosen = [row for group in best.values() for row in group]
    for row in rows:
        row["chosen"] = any(row is one for one in chosen)
    for seed in seeds:
        for row in chosen:
            _run(curve, row, seed, file, rows)
    write_json(file, rows)
    for group in best.values():  # and what it is compared with that is no run
        config = load_config(group[0]["config"], group[0]["overrides"])
        for name, one in curve.constants.items():
            group.append({"method": name, "test": {"": function(one)(config)}})
    write_text(out / "privacy.md", _page(curve, best, seeds))
    _draw(out / "privacy.png", curve, best)
    return rows


def _groups(
    curve: Curve, one: Values, kept: Sequence[Row], rounds: int | None, overrides: Sequence[str]
) -> list[list[Row]]:
    """List the rows of a config in groups: one for each run without noise, and each budget."""
    tried = {**curve.tried, **one.get("tried", {})}
    more = [*overrides]
    if rounds is not None and "rounds" in tried:
        tried["rounds"] = [rounds]
    elif rounds is not None:
        more.append(f"rounds={rounds}")
    longest = [f"rounds={max(tried['rounds'])}"] if "rounds" in tried else []

    def begin(name: str, *settings: str) -> Row:
        return _row(curve, name, one["config"], [*settings, *more], kept)

    levels = [[begin(name, *settings, *longest)] for name, settings in curve.levels.items()]
    choices = [
        [f"{key}={value}" for key, value in zip(tried, values, strict=True)]
        for values in product(*tried.values())
    ]
    return levels + [
        [begin(curve.noisy, f"privacy.epsilon={epsilon}", *choice) for choice in choices]
        for epsilon in curve.epsilons
    ]


def _row(curve: Curve, name: str, config: str, overrides: list[str], kept: Sequence[Row]) -> Row:
    """Make a row, with the results of earlier runs with the same settings."""
    settings = load_config(config, [*overrides, *curve.measured])
    row: Row = {"method": name, "config": config, "overrides": overrides}
    row |= {"settings": settings_of(settings), "rounds": settings.rounds}
    row |= {key: row["settings"][name] for key, name in curve.keys.items()}
    if settings.privacy.is_on:
        row |= spent(settings.privacy, settings.rounds)
    for old in kept:
        # What older versions did not write down does not tell rows apart.
        same = all(old.get(key, row[key]) == row[key] for key in row if key != "settings")
        if same and is_same(flat(old.get("settings", {})), row["settings"]):
            return {**row, "val": dict(old["val"]), "test": dict(old["test"])}
    return {**row, "val": {}, "test": {}}


def _run(curve: Curve, row: Row, seed: int, file: Path, rows: Sequence[Row]) -> None:
    """Run a row with a seed, unless it was done before."""
    if str(seed) in row["test"]:
        return
    overrides = [*row["overrides"], *curve.measured, f"seed={seed}"]
    best = best_round(simulate(load_config(row["config"], overrides)))
    assert best is not None  # the data sets have validation nodes
    row["val"][str(seed)], row["test"][str(seed)] = best.val_accuracy, best.test_accuracy
    write_json(file, rows)
    what = f"{row['config']} {row['method']} {row['overrides']} seed {seed}"
    print(f"{what}: {best.test_accuracy:.4f}", flush=True)


def _page(curve: Curve, best: Mapping[str, Sequence[Row]], seeds: Sequence[int]) -> str:
    delta = next(row["delta"] for rows in best.values() for row in rows if "delta" in row)
    values = {"seeds": ", ".join(map(str, seeds)), "first": seeds[0], "delta": delta}
    parts = [f"# {curve.title}", fill(curve.text, values)]
    heads = ["epsilon", "of a round", "noise / sensitivity", "clipping norm", *curve.columns]
    for title, rows in best.items():
        lines = [_line(curve, row) for row in sorted(rows, key=lambda row: "epsilon" not in row)]
        parts += [f"## {title}"] if len(best) > 1 else []
        parts.append("\n".join(markdown([*heads, "rounds", "test accuracy"], lines)))
    return "\n\n".join(parts) + "\n"


def _line(curve: Curve, row: Row) -> list[str]:
    values = [100 * value for value in row["test"].values()]
    if "config" not in row:
        return [row["method"], *[""] * (len(curve.columns) + 4), f"{values[0]:.1f}"]
    shown = [f"{row[key]:g}" for key in curve.columns.values()]
    end = [*shown, str(row["rounds"]), f"{fmean(values):.1f} ± {pstdev(values):.1f}"]
    if "epsilon" not in row:
        return [row["method"], "", "", "", *end]
    budget = [
        f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        for value in (row["epsilon"], row["epsilon-of-a-round"])
    ]
    return [*budget, f"{row['noise-multiplier']:.3g}", f"{row['clipping-norm']:g}", *end]


def _draw(path: Path, curve: Curve, best: Mapping[str, Sequence[Row]]) -> None:
    panels = {title: Panel({}, {}) for title in best}
    for title, rows in best.items():
        for row in rows:
            values = list(row["test"].values())
            if "epsilon" in row:
                panels[title].budgets[row["epsilon"]] = values
            else:
                panels[title].levels[row["method"]] = values
    plot_budgets(path, panels, noisy=curve.noisy)
