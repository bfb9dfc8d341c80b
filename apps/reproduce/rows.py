"""The rows of a paper's tables: figures of the runs by seed, with the paper's figures beside."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from flower_graph.apps.parallel import loaded, worker_pool
from flower_graph.apps.reproduce.runs import (
    AXES,
    Curves,
    Run,
    Store,
    chosen,
    runs_of,
    settings_taken,
    tried,
)
from flower_graph.apps.reproduce.table import (
    END,
    LAST,
    TEST,
    VALIDATION,
    WITHIN,
    Figure,
    Line,
    Settings,
    function,
)
from flower_graph.errors import ConfigError
from flower_graph.privacy.accountant import spent
from flower_graph.report.significance import correct, differences, paired
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import SCORES

PATIENCE = 50  # Rounds without improvement, where a config has none of its own
STRUCTURE = ("precision", "recall", "homophily", "degree", "true-homophily", "true-degree")
BEST = "best-val-"  # begins the name of a figure, which ends with its metric

Row = Tree
Results = dict[Line, list[Row]]


def make_rows(lines: Sequence[Line], store: Store) -> Results:
    """Make the rows of all runs that were done, with p values corrected (Holm)."""
    results: Results = {}
    for line in lines:
        if runs := runs_of(line, store):
            made = [_row_of(line, figure, runs, lines, store) for figure in line.wanted]
            results[line] = [row for row in made if row]
    correct(all_rows(results))
    return results


def all_rows(results: Results) -> list[Row]:
    """List the rows of all lines."""
    return [row for rows in results.values() for row in rows]


def _row_of(
    line: Line, figure: Figure, runs: Mapping[int, Curves], lines: Sequence[Line], store: Store
) -> Row | None:
    """Make a row of one figure; None where no run has it."""
    keys: Tree = {**line.keys, **figure.keys}
    values, tested = _values(line, figure, runs, keys, store), dict[str, Any]()
    paper = line.paper.get(figure.label)
    if figure.over:
        place = (line.table, line.names[0], line.keys, figure.over)
        others = [o for o in lines if (o.table, o.names[0], o.keys, o.method) == place]
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
    made = row(line, figure.name, values, settings_taken(line, store), paper, runs)
    return {**made, **keys, **line.also.get(figure.name, {}), **tested}


def _values(
    line: Line, figure: Figure, runs: Mapping[int, Curves], keys: Tree, store: Store
) -> dict[int, float]:
    name = figure.of or figure.name
    if name not in FIGURES:
        raise ConfigError(f"figure: {name!r} is not one of {', '.join(FIGURES)}")
    config = loaded(line.config, settings_taken(line, store))
    values = {seed: figure_of(name, curves, keys, config) for seed, curves in runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def row(
    line: Line,
    metric: str,
    values: Mapping[int, float],
    settings: Settings,
    paper: float | None = None,
    runs: Mapping[int, Curves] = MappingProxyType({}),
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
        **to_the_end(line, {seed: runs[seed] for seed in values if seed in runs}, (*settings,)),
    }


def to_the_end(line: Line, runs: Mapping[int, Curves], settings: tuple[str, ...]) -> Row:
    """Return the rounds that were run, whether all runs ended, and how many were left out."""
    curves = [*runs.values()]
    if not curves or (line.trained and all(math.isnan(one.cross_entropy[0]) for one in curves)):
        return {}  # measured, or nothing is trained
    config = loaded(line.config, settings)
    patience, most = config.patience, line.rounds or config.rounds
    still = [seed for seed, each in runs.items() if not each.ended(patience or PATIENCE)]
    # Of what patience ended, the round that was on its way may be the best by a little.
    ended = all(patience and len(runs[seed].val_accuracy) < most for seed in still)
    left_out = max(each.left_out for each in curves)
    more = {"left_out": left_out, "best_last": still if ended else []}
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
                made = row(line, metric, best, runs[0].overrides, runs=curves) | {**line.keys}
                only = [one for one in choice if any(one not in c for c in line.choices)]
                made |= {"where": line.words, "tried": only, "taken": choice == taken}
                rows[runs[0].key] = made
    return [*rows.values()]


def measured_rows(lines: Sequence[Line]) -> Results:
    """Make the rows that are measured directly, while nothing else is running."""
    results: Results = {}
    for line in [line for line in lines if line.measure]:
        run = Run(line.config, (*line.settings,), line.seeds[0], line.rounds, line.measure)
        with worker_pool(1) as pool:
            groups = pool.submit(_measure, run).result()
        results[line] = [
            row(line, metric, {run.seed: value}, line.settings, line.paper.get(metric))
            | {**line.keys, **keys, **line.also.get(metric, {})}
            for keys, figures in groups
            for metric, value in figures.items()
        ]
    return results


def _measure(run: Run) -> Any:
    return function(run.trained)(run.settings)


def missing_runs(lines: Sequence[Line], store: Store) -> list[str]:
    """List the lines that lack runs of some seeds."""
    found = {
        line.words: f"{line.words}: {done} of {len(line.seeds)} runs"
        for line in lines
        if not line.measure and (done := len(runs_of(line, store))) < len(line.seeds)
    }
    return [*found.values()]


# Figures of one run ------------------------------------------------------------------------------


def _within(curves: Curves, keys: Tree, config: Any) -> float | None:
    """Return the test accuracy at the best validation within a budget, such as ``100 rounds``."""
    if keys["within"] == END:
        return curves.test_at_best_val
    number, _, axis = keys["within"].partition(" ")
    if axis not in AXES or not number.replace(".", "", 1).isdigit():
        raise ConfigError(f"within: {keys['within']!r}; write NUMBER and one of {', '.join(AXES)}")
    reached = bisect_right(curves.spent(axis), float(number))
    return curves.best_so_far[reached - 1] if reached else None


def _micro_f1(curves: Curves, keys: Tree, config: Any, *, is_sum: bool = False) -> float | None:
    """Return the micro-F1 of an iteration, or of a classifier after the last round."""
    if "classifier" not in keys:
        return _at(curves.test_accuracy, keys)
    clients = config.partition.clients
    values = curves.judged.get(keys["classifier"], {}).get("test", [])
    if len(values) != clients:
        return None
    mean = values[keys["client"] - 1] if "client" in keys else fmean(values)
    return mean * clients if is_sum else mean


def _at(values: Sequence[float], keys: Tree) -> float:
    """Return the value of an iteration, or the last value if the run ended before."""
    index = min(keys.get("iteration", 0), len(values)) - 1
    return values[index] if values else math.nan


def _precision(curves: Curves, keys: Tree, config: Any, *, name: str) -> float:
    return _at(curves.alignment.get(name, []), keys)


def _budget(curves: Curves, keys: Tree, config: Any, *, name: str) -> float:
    return float(str(spent(config.privacy, config.rounds)[name]))


PLAIN: dict[str, Callable[[Curves], float | None]] = {  # figures of the run alone
    TEST: attrgetter("test_at_best_val"),
    LAST: lambda curves: curves.test_accuracy[-1],
    VALIDATION: methodcaller("score", "accuracy", "val"),
    "val-accuracy-last": lambda curves: curves.val_accuracy[-1],
    "seconds-per-round": attrgetter("seconds_per_round"),
    "run-seconds": attrgetter("run_seconds"),
    "rounds": lambda curves: len(curves.test_accuracy),
    "steps-a-client": lambda curves: curves.steps[-1] if curves.steps else None,
    "MiB-a-client": lambda curves: curves.up[-1] / 2**20 if curves.up else None,
    "uplink-mib": lambda curves: sum(curves.bytes_up.values()) / 2**20,
    **{f"test-{one}-at-best-val": methodcaller("score", one, "test") for one in SCORES[1:]},
    **{f"{BEST}{one}": methodcaller("score", one, "val") for one in SCORES[1:]},
}
KEYED: dict[str, Callable[[Curves, Tree, Any], float | None]] = {  # of the row's keys or the config
    WITHIN: _within,
    "micro-f1": _micro_f1,
    "sum-of-micro-f1": partial(_micro_f1, is_sum=True),
    **{f"precision-{k}": partial(_precision, name=f"precision-{k}") for k in (1, 5, 10)},
    **{name: partial(_budget, name=name) for name in ("epsilon-of-a-round", "noise-multiplier")},
}
FIGURES = (*PLAIN, *STRUCTURE, *KEYED)


def figure_of(name: str, curves: Curves, keys: Tree, config: Any) -> float | None:
    """Return a figure of a run by the keys of its row and the run's config; None if it has none."""
    if name in STRUCTURE:
        return curves.structure.get(name)
    return KEYED[name](curves, keys, config) if name in KEYED else PLAIN[name](curves)
