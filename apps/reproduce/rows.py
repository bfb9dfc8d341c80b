"""The rows of a paper's tables: figures of the runs by seed, with the paper's figures beside."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from flower_graph.apps.parallel import loaded, worker_pool
from flower_graph.apps.reproduce.runs import AXES, Curves, Store, chosen, runs_of, tried
from flower_graph.apps.reproduce.table import (
    END,
    LAST,
    TEST,
    VALIDATION,
    WITHIN,
    Figure,
    Line,
    function,
)
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.privacy.accountant import spent
from flower_graph.report.significance import correct, differences, paired
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import SCORES

PATIENCE = 50  # Rounds without improvement, where a config has none of its own
STRUCTURE = ("precision", "recall", "homophily", "degree", "true-homophily", "true-degree")
BEST = "best-val-"  # begins the name of a figure, which ends with its metric

Row = Tree
BySeed = Mapping[int, float]


def make_rows(lines: Sequence[Line], store: Store) -> list[Row]:
    """Make the rows of all runs that were done, with p values corrected (Holm)."""
    rows = []
    for line in lines:
        runs = runs_of(line, store)
        for figure in map(as_figure, line.figures if runs else ()):
            made = _row_of(line, figure, runs, lines, store)
            rows += [made] if made else []
    correct(rows)
    return rows


def as_figure(figure: str | Figure) -> Figure:
    """Return a figure that a line names."""
    return Figure(figure) if isinstance(figure, str) else figure


def _row_of(
    line: Line, figure: Figure, runs: Mapping[int, Curves], lines: Sequence[Line], store: Store
) -> Row | None:
    """Make a row of one figure; None where no run has it."""
    keys: Tree = {**line.keys, **figure.keys}
    values, tested = _values(line, figure, runs, keys, store), dict[str, Any]()
    paper = line.paper.get(figure.label)
    if figure.over:
        place = (line.table, line.names[0], line.keys)
        others = [
            other
            for other in lines
            if (other.table, other.names[0], other.keys) == place and other.method == figure.over
        ]
        if not others:
            return None
        other = min(others, key=lambda other: other.model != line.model)
        values = differences(values, _values(other, figure, runs_of(other, store), keys, store))
        ours, theirs = line.paper.get(TEST), other.paper.get(TEST)
        if figure.of == TEST and paper is None and ours is not None and theirs is not None:
            paper = ours - theirs
        tested = paired([*values.values()]) if values else {}
    if not any(map(math.isfinite, values.values())):
        return None
    settings = settings_of_rows(line, store)
    made = row(line, figure.name, values, settings, paper)
    made |= {**keys, **line.also.get(figure.name, {})}
    return made | to_the_end(line, {seed: runs[seed] for seed in values}, settings) | tested


def settings_of_rows(line: Line, store: Store) -> tuple[str, ...]:
    """Return the settings of a line, with those that were chosen."""
    return (*line.settings, *(chosen(line, store) or line.choices[0]))


def _values(
    line: Line, figure: Figure, runs: Mapping[int, Curves], keys: Tree, store: Store
) -> dict[int, float]:
    name = figure.of or figure.name
    if name not in FIGURES:
        raise ConfigError(f"figure: {name!r} is not one of {', '.join(FIGURES)}")
    config = loaded(line.config, settings_of_rows(line, store))
    values = {seed: FIGURES[name](curves, keys, config) for seed, curves in runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def row(
    line: Line,
    metric: str,
    values: BySeed,
    settings: Sequence[str],
    paper: float | None = None,
) -> Row:
    """Make one row; every paper's table has this form."""
    data, model, method = line.names
    finite = all(map(math.isfinite, values.values()))
    return {
        "table": line.table,
        "data": data,
        "model": model,
        "method": method,
        "metric": metric,
        "paper": paper,
        "mean": fmean(values.values()),
        "std": (stdev(values.values()) if len(values) > 1 else 0.0) if finite else math.nan,
        "values": [*values.values()],
        "seeds": [*values],
        "settings": {
            "config": line.config,
            "overrides": [*settings],
            "rounds": line.rounds or loaded(line.config, (*settings,)).rounds,
            "centralised": bool(line.trained),
        },
    }


def to_the_end(line: Line, runs: Mapping[int, Curves], settings: tuple[str, ...]) -> Row:
    """Return the rounds that were run, whether all runs ended, and how many were left out."""
    curves = [*runs.values()]
    if line.trained and all(math.isnan(each.cross_entropy[0]) for each in curves):
        return {}  # nothing is trained
    config = loaded(line.config, settings)
    patience, most = config.patience, line.rounds or config.rounds
    # Of what patience ended, the round that was on its way may be the best by a little.
    ended = all(
        each.ended(patience or PATIENCE) or (patience and len(each.val_accuracy) < most)
        for each in curves
    )
    left_out = max(each.left_out for each in curves)
    last = [s for s, each in runs.items() if ended and not each.ended(patience or PATIENCE)]
    more = {"left_out": left_out, "best_last": last}
    summary = {"rounds": [len(each.val_accuracy) for each in curves], "ended": ended}
    return summary | {key: value for key, value in more.items() if value}


def choices(lines: Sequence[Line], store: Store) -> list[Row]:
    """List the settings that were tried for the lines, each once, with its validation."""
    rows: dict[str, Row] = {}
    for line in lines:
        taken = chosen(line, store)
        for choice, runs in tried(line).items():
            curves = {run.seed: found for run in runs if (found := store.get(run))}
            if curves and runs[0].key not in rows:
                metric = BEST + next(iter(curves.values())).metric
                best = {seed: found.best_val for seed, found in curves.items()}
                made = row(line, metric, best, runs[0].overrides) | {**line.keys}
                made |= to_the_end(line, curves, runs[0].overrides) | {"where": line.words}
                only = [one for one in choice if any(one not in c for c in line.choices)]
                rows[runs[0].key] = made | {"tried": only, "taken": choice == taken}
    return [*rows.values()]


def measured_rows(lines: Sequence[Line]) -> list[Row]:
    """Make the rows that are measured directly, while nothing else is running."""
    rows = []
    for line in lines:
        if line.measure:
            seed, rounds = line.seeds[0], [f"rounds={line.rounds}"] if line.rounds else []
            settings = [*line.settings, f"seed={seed}", *rounds]
            with worker_pool(1) as pool:
                task = pool.submit(_measure, line.measure, line.config, settings)
                for keys, figures in task.result():
                    for metric, value in figures.items():
                        made = row(line, metric, {seed: value}, line.settings)
                        made |= {"paper": line.paper.get(metric), **line.keys, **keys}
                        rows.append({**made, **line.also.get(metric, {})})
    return rows


def _measure(name: str, config: str, overrides: Sequence[str]) -> Any:
    return function(name)(load_config(config, overrides))


def missing_runs(lines: Sequence[Line], store: Store) -> list[str]:
    """List the lines that lack runs of some seeds."""
    counts = {line.words: (len(runs_of(line, store)), len(line.seeds)) for line in lines}
    measured = {line.words for line in lines if line.measure}
    return [
        f"{words}: {done} of {wanted} runs"
        for words, (done, wanted) in counts.items()
        if done < wanted and words not in measured
    ]


# Figures of one run ------------------------------------------------------------------------------

# By the keys of its row and the run's config; none where the run has none
Kind = Callable[[Curves, Tree, Any], float | None]


def _within(curves: Curves, keys: Tree, config: Any) -> float | None:
    """Return the test accuracy at the best validation within a budget, such as ``100 rounds``."""
    if keys["within"] == END:
        return curves.test_at_best_val
    number, _, axis = keys["within"].partition(" ")
    if axis not in AXES or not number.replace(".", "", 1).isdigit():
        raise ConfigError(f"within: {keys['within']!r}; write NUMBER and one of {', '.join(AXES)}")
    reached = bisect_right(curves.spent(axis), float(number))
    return curves.best_so_far[reached - 1] if reached else None


def _micro_f1(curves: Curves, keys: Tree, config: Any) -> float | None:
    """Return the micro-F1 of an iteration, or of a classifier after the last round."""
    if "classifier" not in keys:
        return _at(curves.test_accuracy, keys)
    values = curves.judged.get(keys["classifier"], {}).get("test", [])
    if len(values) != config.partition.clients:
        return None
    return values[keys["client"] - 1] if "client" in keys else fmean(values)


def _sum_of_micro_f1(curves: Curves, keys: Tree, config: Any) -> float | None:
    mean = _micro_f1(curves, keys, config)
    return None if mean is None else mean * config.partition.clients


def _at(values: Sequence[float], keys: Tree) -> float:
    """Return the value of an iteration, or the last value if the run ended before."""
    index = min(keys.get("iteration", 0), len(values)) - 1
    return values[index] if values else math.nan


def _last_of(axis: str) -> Kind:
    return lambda curves, keys, config: next(iter(curves.spent(axis)[-1:]), None)


def _score(metric: str, role: str) -> Kind:
    return lambda curves, keys, config: curves.score(metric, role)


def _alignment(name: str) -> Kind:
    return lambda curves, keys, config: _at(curves.alignment.get(name, []), keys)


def _structure(name: str) -> Kind:
    return lambda curves, keys, config: curves.structure.get(name)


def _budget(name: str) -> Kind:
    return lambda curves, keys, config: float(str(spent(config.privacy, config.rounds)[name]))


FIGURES: dict[str, Kind] = {
    TEST: lambda curves, keys, config: curves.test_at_best_val,
    LAST: lambda curves, keys, config: curves.test_accuracy[-1],
    VALIDATION: lambda curves, keys, config: curves.val_accuracy[curves.best_round],
    "val-accuracy-last": lambda curves, keys, config: curves.val_accuracy[-1],
    "seconds-per-round": lambda curves, keys, config: curves.seconds_per_round,
    "run-seconds": lambda curves, keys, config: curves.run_seconds,
    "rounds": lambda curves, keys, config: len(curves.test_accuracy),
    WITHIN: _within,
    **{f"{axis}-a-client": _last_of(axis) for axis in AXES[1:]},
    "uplink-mib": lambda curves, keys, config: sum(curves.bytes_up.values()) / 2**20,
    **{f"test-{name}-at-best-val": _score(name, "test") for name in SCORES[1:]},
    **{f"best-val-{name}": _score(name, "val") for name in SCORES[1:]},
    "micro-f1": _micro_f1,
    "sum-of-micro-f1": _sum_of_micro_f1,
    **{f"precision-{k}": _alignment(f"precision-{k}") for k in (1, 5, 10)},
    **{name: _structure(name) for name in STRUCTURE},
    **{name: _budget(name) for name in ("epsilon-of-a-round", "noise-multiplier")},
}
