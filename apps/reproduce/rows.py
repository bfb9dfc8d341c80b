"""The rows of a table: figures of the runs by seed, with the paper's figures beside."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any, NamedTuple

from flower_graph.apps.parallel import loaded, worker_pool
from flower_graph.apps.reproduce.asked import Asked, Group
from flower_graph.apps.reproduce.experiments import AXES, Curves, Experiment, Runs
from flower_graph.apps.reproduce.templates import Values, fill, function, make, one_of
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.records.rounds import merit
from flower_graph.report.significance import correct, differences, paired
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import SCORES

# Metrics of a row.
TEST, LAST, VALIDATION = "test-accuracy-at-best-val", "test-accuracy-last", "best-val-accuracy"
SECONDS, WHOLE = "seconds-per-round", "run-seconds"
WITHIN, END = "test-accuracy-within", "the end"
PATIENCE = 50  # Rounds without improvement, where a config has none of its own

Row = Tree
BySeed = Mapping[int, Curves]
# A figure of a run, by the keys of its row and the run's config; none where it has none
Figure = Callable[[Curves, Values, object], float | None]


@dataclass(frozen=True)
class Wanted:
    """One metric that a part of a table lists."""

    metric: str  # Name of a figure, or of the rows that are a difference of it
    of: str = ""  # Name of the figure, where the rows are named otherwise
    over: str = ""  # Method that is taken off, seed by seed
    keys: Values | None = None  # More keys of the rows
    each: Values | None = None  # More keys, one row for each of their values
    methods: Sequence[str] | None = None  # Without them all
    paper: str | bool = False  # Name of the paper's figure, or that it has but one
    paper_method: str = ""  # Method whose figure it is; without it a difference has two methods'
    also: Values | None = None  # More of the paper's figures, by the rows' keys
    rounds: int | None = None  # The paper's figure is of so many rounds


def make_rows(asked: Asked, runs: Runs) -> list[Row]:
    """Make the rows of all runs that were done."""
    groups, rows = asked.groups(), dict[str, Row]()
    for group in groups:
        for wanted in wanted_rows([] if group.part.measure else group.part.rows):
            if group.method in (wanted.methods or [group.method]) and group.method != wanted.over:
                for made in _rows(group, wanted, groups, runs):
                    rows.setdefault(str([made[k] for k in made if k not in _FIGURES]), made)
    made_all = [*rows.values()]
    correct(made_all)
    return made_all


_FIGURES = (
    "paper",
    "mean",
    "std",
    "values",
    "settings",
    "rounds",
    "ended",
    "left_out",
    "best_last",
    "p",
    "agree",
)


# Any: what the YAML says; ``make`` refuses what is no ``Wanted``
def wanted_rows(listed: Sequence[Any]) -> Iterator[Wanted]:
    """Read a list of metrics: names, mappings, or lists of these."""
    for one in listed:
        if isinstance(one, list):
            yield from wanted_rows(one)
            continue
        tree: Values = {"metric": one} if isinstance(one, str) else one
        over = tree.get("over", "")
        for method in over if isinstance(over, list) else [over]:
            named = {"over": method, "metric": fill(tree["metric"], {"over": method})}
            keys = tree.get("keys", {})
            named["keys"] = {key: fill(str(one), named) for key, one in keys.items()}
            yield make(Wanted, {**tree, **named}, "rows")


def missing_runs(asked: Asked, runs: Runs) -> list[str]:
    """List the rows that lack runs of some seeds."""
    lines = {}
    for group in asked.groups():
        done, wanted = (len(runs_of(group, runs)), len(group.seeds))
        if done < wanted and group.runs:
            lines[group.words] = f"{group.words}: {done} of {wanted} runs"
    return [*lines.values()]


class Shown(NamedTuple):
    """The runs of one row, as functions of pictures and texts take them."""

    table: str
    data: str
    model: str
    method: str
    centralised: bool
    runs: dict[int, Curves]


def shown_runs(
    tables: Mapping[str, Sequence[str] | None], data: Sequence[str], asked: Asked, runs: Runs
) -> list[Shown]:
    """List the runs of the named methods, or of all methods, in some tables."""
    # Several tables may have the same row
    result: dict[tuple[tuple[int, int, int], tuple[str, ...]], Shown] = {}
    for number, (table, methods) in enumerate(tables.items()):
        order = methods or [*asked.table.methods]
        for group in asked.groups():
            if group.part.table == table and group.data in data and group.method in order:
                order_key = data.index(group.data), number, order.index(group.method)
                one, here = group.experiments[0], runs_of(group, runs)
                made = Shown(table, one.data, group.model, group.shown, one.centralised, here)
                result.setdefault((order_key, made[:4]), made)
    return [result[key] for key in sorted(result, key=lambda key: key[0])]


def measured_rows(asked: Asked) -> list[Row]:
    """Make the rows that are measured directly, while nothing else is running."""
    rows = []
    for group in asked.groups():
        if group.part.measure:
            beside = {wanted.metric: wanted for wanted in wanted_rows(group.part.rows)}
            one, seed = group.experiments[0], group.seeds[0]
            settings = [*one.overrides, f"seed={seed}", f"rounds={group.rounds}"]
            with worker_pool(1) as pool:
                task = pool.submit(_measure, group.part.measure, one.config, settings)
                for keys, figures in task.result():
                    for metric, value in figures.items():
                        wanted = beside.get(metric, Wanted(metric))
                        rows.append(_row(group, wanted, keys, {seed: value}, one, []))
    return rows


def _measure(name: str, config: str, overrides: Sequence[str]) -> Any:
    return function(name)(load_config(config, overrides))


def best_experiment(group: Group, runs: Runs) -> Experiment:
    """Return the experiment with the best mean validation accuracy."""
    by_experiment = {
        one: [
            merit(curves.metric, curves.best_val)
            for seed, curves in runs[one].items()
            if seed in group.choosers
        ]
        for one in group.tried
        if one in runs
    }
    means = {one: fmean(values) for one, values in by_experiment.items() if values}
    finite = [one for one, mean in means.items() if math.isfinite(mean)]
    best = max(finite, key=lambda one: means[one], default=group.tried[0])
    return group.experiments[group.tried.index(best)]


def runs_of(group: Group, runs: Runs) -> dict[int, Curves]:
    """Return a row's runs by seed; there are none if the row is measured directly."""
    result = {} if group.part.measure else runs.get(best_experiment(group, runs), {})
    return {seed: result[seed] for seed in group.seeds if seed in result}


def _rows(group: Group, wanted: Wanted, groups: Sequence[Group], runs: Runs) -> Iterator[Row]:
    here, one = runs_of(group, runs), best_experiment(group, runs)
    beside: list[Group] = []
    if wanted.over:
        beside = [g for g in groups if (g.place, g.method) == (group.place, wanted.over)][:1]
        if not beside:
            return
    each = wanted.each or {}
    for values in product(*([*_values(one, group.rounds)] for one in each.values())):
        keys = {**group.keys, **(wanted.keys or {}), **dict(zip(each, values, strict=True))}
        figures = _figures(wanted, here, keys, group)
        for other in beside:
            figures = differences(figures, _figures(wanted, runs_of(other, runs), keys, other))
        if any(map(math.isfinite, figures.values())):
            end = to_the_end(one, {seed: here[seed] for seed in figures}, group.rounds)
            tested = paired([*figures.values()]) if beside else {}
            yield _row(group, wanted, keys, figures, one, beside) | end | tested


def to_the_end(one: Experiment, runs: BySeed, most: int) -> Row:
    """Return the rounds that were run, whether all runs ended, and how many were left out."""
    curves = [*runs.values()]
    if one.centralised and all(math.isnan(each.cross_entropy[0]) for each in curves):
        return {}  # nothing is trained
    patience = loaded(one.config, one.overrides).patience
    # Of what patience ended, the round that was on its way may be the best by a little.
    ended = all(
        each.ended(patience or PATIENCE) or (patience and len(each.val_accuracy) < most)
        for each in curves
    )
    left_out = max(each.left_out for each in curves)
    summary: Row = {"rounds": [len(each.val_accuracy) for each in curves], "ended": ended}
    last = [s for s, each in runs.items() if ended and not each.ended(patience or PATIENCE)]
    return (
        summary
        | ({"left_out": left_out} if left_out else {})
        | ({"best_last": last} if last else {})
    )


def _values(values: Sequence[Any], last: int) -> Iterator[object]:
    """List the values of a key; iterations end with the last one."""
    distinct = dict.fromkeys(last if value == "last" else value for value in values)
    return (one for one in distinct if "last" not in values or one <= last)


def _figures(wanted: Wanted, runs: BySeed, keys: Values, group: Group) -> dict[int, float]:
    name = wanted.of or wanted.metric
    one_of("metric", name, [*FIGURES])
    chosen = group.experiments[0]
    config = loaded(chosen.config, chosen.overrides)
    values = {seed: FIGURES[name](curves, keys, config) for seed, curves in runs.items()}
    return {seed: one for seed, one in values.items() if one is not None}


def _row(
    group: Group,
    wanted: Wanted,
    keys: Values,
    figures: Mapping[int, float],
    experiment: Experiment,
    beside: Sequence[Group],
) -> Row:
    paper = None
    if wanted.paper and wanted.rounds in (None, group.rounds):
        paper = paper_of(group, wanted.paper_method or group.method, keys, wanted.paper)
        for other in [] if wanted.paper_method else beside:
            theirs = paper_of(other, other.method, keys, wanted.paper)
            paper = None if paper is None or theirs is None else paper - theirs
    also = {
        key: paper_of(group, group.method, keys, name) for key, name in (wanted.also or {}).items()
    }
    made = row(group.part.table, experiment, wanted.metric, figures, group.rounds, paper)
    return made | {"method": group.shown, **keys, **also}


def paper_of(group: Group, method: str, keys: Values, name: str | bool) -> float | None:
    """Look up the paper's figure: a client's, or the mean over all clients."""
    here = {"data": group.experiments[0].data, "model": group.model, **keys, "method": method}
    result = group.part.paper
    for key in group.part.paper_by:
        result = result.get(here[key]) if isinstance(result, Mapping) else None
    if isinstance(name, str) and isinstance(result, Mapping):
        result = result.get(name)
    if isinstance(result, list):
        result = _client(result, keys)
    return None if result is None else result / group.part.paper_scale


def row(
    table: str,
    experiment: Experiment,
    metric: str,
    values: Mapping[int, float],
    rounds: int,
    paper: float | None = None,
) -> Row:
    """Make one row; every paper's table has this form."""
    return {
        "table": table,
        "data": experiment.data,
        "model": experiment.model,
        "method": experiment.method,
        "metric": metric,
        "paper": paper,
        "mean": fmean(values.values()),
        "std": _deviation([*values.values()]),
        "values": [*values.values()],
        "seeds": [*values],
        "settings": {
            "config": experiment.config,
            "overrides": list(experiment.overrides),
            "rounds": rounds,
            "centralised": experiment.centralised,
        },
    }


def find(rows: Sequence[Row], **wanted: object) -> Row | None:
    """Return the first row with these entries whose mean is a number."""
    for r in rows:
        if all(r.get(key) == value for key, value in wanted.items()) and math.isfinite(r["mean"]):
            return r
    return None


def by_seed(one: Row) -> dict[int, float]:
    """Return a row's figures by seed."""
    return dict(zip(one["seeds"], one["values"], strict=True))


def _deviation(values: Sequence[float]) -> float:
    """Return the sample deviation: 0 for one number, NaN if any number is NaN."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values) if len(values) > 1 else 0.0


# Figures of one run ------------------------------------------------------------------------------


def _structure(name: str) -> Figure:
    """Return a property of the graphs that a run learnt."""
    return lambda curves, keys, config: curves.structure.get(name)


def _alignment(name: str) -> Figure:
    """Return how well the embeddings are aligned in an iteration, or in the last one."""
    return lambda curves, keys, config: _at(curves.alignment.get(name, []), keys)


def _last_of(axis: str) -> Figure:
    """Return what a client has spent after the last round."""
    return lambda curves, keys, config: next(iter(curves.spent(axis)[-1:]), None)


def _score(metric: str, role: str) -> Figure:
    """Return a metric other than the accuracy in the best round by validation."""
    return lambda curves, keys, config: curves.score(metric, role, curves.best_round)


def _within(curves: Curves, keys: Values, config: object) -> float | None:
    """Return the test accuracy at the best validation within a budget, such as ``100 rounds``."""
    if keys["within"] == END:
        return curves.test_at_best_val
    number, _, axis = keys["within"].partition(" ")
    one_of("within: unit", axis, AXES)
    try:
        most = float(number)
    except ValueError:
        raise ConfigError(f"within: {keys['within']!r}: write NUMBER {axis}") from None
    reached = bisect_right(curves.spent(axis), most)
    return curves.best_so_far[reached - 1] if reached else None


def _micro_f1(curves: Curves, keys: Values, config: Any) -> float | None:
    """Return the micro-F1 of an iteration, or of a classifier after the last round."""
    if "classifier" not in keys:
        return _at(curves.test_accuracy, keys)
    by_client = curves.judged.get(keys["classifier"], {}).get("test", [])
    return _client(by_client, keys) if len(by_client) == config.partition.clients else None


def _sum_of_micro_f1(curves: Curves, keys: Values, config: Any) -> float | None:
    mean = _micro_f1(curves, keys, config)
    return None if mean is None else mean * config.partition.clients


def _client(values: Sequence[float], keys: Values) -> float | None:
    """Return one client's figure if the keys name a client, else the mean over all clients."""
    chosen = values[keys["client"] - 1 : keys["client"]] if "client" in keys else values
    return fmean(chosen) if chosen else None


def _at(values: Sequence[float], keys: Values) -> float:
    """Return the value of an iteration, or the last value if the run ended before."""
    index = min(keys.get("iteration", 0), len(values)) - 1
    return values[index] if values else math.nan


FIGURES: dict[str, Figure] = {
    TEST: lambda curves, keys, config: curves.test_at_best_val,
    LAST: lambda curves, keys, config: curves.test_accuracy[-1],
    VALIDATION: lambda curves, keys, config: curves.val_accuracy[curves.best_round],
    "val-accuracy-last": lambda curves, keys, config: curves.val_accuracy[-1],
    SECONDS: lambda curves, keys, config: curves.seconds_per_round,
    WHOLE: lambda curves, keys, config: curves.run_seconds,
    "rounds": lambda curves, keys, config: len(curves.test_accuracy),
    WITHIN: _within,
    **{f"{axis}-a-client": _last_of(axis) for axis in AXES[1:]},
    "uplink-mib": lambda curves, keys, config: sum(curves.bytes_up.values()) / 2**20,
    **{f"test-{name}-at-best-val": _score(name, "test") for name in SCORES[1:]},
    **{f"best-val-{name}": _score(name, "val") for name in SCORES[1:]},
    "micro-f1": _micro_f1,
    "sum-of-micro-f1": _sum_of_micro_f1,
    **{f"precision-{k}": _alignment(f"precision-{k}") for k in (1, 5, 10)},
    **{
        name: _structure(name)
        for name in ("precision", "recall", "homophily", "degree", "true-homophily", "true-degree")
    },
}
