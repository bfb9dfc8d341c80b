"""The figures of one run, and of several runs together, as data and as text."""

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from flower_graph import __version__
from flower_graph.config.common import ALL, LAST, NOTHING, OWN
from flower_graph.config.foreign import SUMMARY
from flower_graph.records.rounds import WAYS, RoundReport, figure_text, format_bytes, merit
from flower_graph.storage.files import plain, write_json
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import ACCURACY, MSE, VALUE_SCORES

K = TypeVar("K")  # a seed, or a seed with what else tells runs apart
# The keys of `baselines`, in words
BASELINES = {
    "majority": "commonest class",
    "majority-per-client": "each client's own commonest class",
    "logistic-regression": "logistic regression on features alone",
    "label-propagation": "label propagation",
    "common-neighbours": "common neighbours",
    "adamic-adar": "Adamic-Adar",
    "feature-product": "dot product of features",
    "mean": "mean of the training nodes",
    "linear-regression": "linear regression on features alone",
}
MOST_CHANCE = 0.05  # of a difference between seeds that counts as one
# The settings that the grids of docs/results/own-graph.md vary for every method. Of 130 grids,
# 97 validate best at one of these rates, and 97 with one of these forms of the features
WORTH_TRYING = ("strategy.learning_rate=0.01,0.03", "data.features=as-is,standardise")


def make_result(
    config: Mapping[str, object], reports: Sequence[RoundReport], total: float
) -> dict[str, object]:
    """Compute the result of a run from its rounds."""
    # They take too long to import before a setting is refused.
    from flower_graph.engine.machine import peak_memory
    from flower_graph.records.participation import summarise_participation

    last, metrics = reports[-1], metrics_of(config)
    best = best_round(reports, metrics[0])
    # Only methods that learn graphs or align embeddings have these keys.
    of_some: dict[str, Tree] = {"structure": last.structure, "alignment": last.alignment}
    of_some["participation"] = summarise_participation(one.participation for one in reports)
    scores: dict[str, object] = {}
    for name in dict.fromkeys([ACCURACY, *metrics]):
        scores |= {f"{role}-{name}": last.score(name, role) for role in ("test", "val", "train")}
        scores[f"test-{name}-at-best-val"] = best.score(name, "test") if best else None
        scores[f"best-val-{name}"] = best.score(name, "val") if best else None
    if last.confusion:
        scores["test-confusion"] = last.confusion
        scores["test-confusion-at-best-val"] = best.confusion if best else None
    seconds: Tree = {"total": total, "first-round": reports[0].seconds}
    seconds["per-round-median"] = statistics.median(report.seconds for report in reports)
    return {
        "config": config,
        "seed": config.get("seed"),
        "rounds": len(reports),
        **scores,
        "best-round": best.round if best else None,
        "loss": last.loss,
        **{name: figures for name, figures in of_some.items() if figures},
        "bytes": last.bytes,
        "wire-bytes": last.wire_bytes,
        "seconds": seconds,
        "peak-memory-bytes": int(peak_memory()),
        "rejected": sum(len(report.rejected) for report in reports),
        "skipped": sum(bool(report.skipped) for report in reports),
        "versions": versions(),
    }


def metrics_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics that a run reports, by its settings; the first decides its best round."""
    return config.get("metrics") or [ACCURACY]


def metrics_shown(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics that a run has: those reported and, but of numbers, the accuracy."""
    metrics = metrics_of(config)
    return metrics if {*metrics} & {*VALUE_SCORES} else list(dict.fromkeys([ACCURACY, *metrics]))


def best_round(reports: Sequence[RoundReport], metric: str = ACCURACY) -> RoundReport | None:
    """Return the first round of the best validation by a metric; None if all are NaN."""
    measured = [report for report in reports if math.isfinite(report.score(metric, "val"))]
    return max(measured, key=lambda one: merit(metric, one.score(metric, "val")), default=None)


def versions() -> dict[str, str]:
    """Return the versions of this package, of those that it needs, and of Python."""
    needed = {name: metadata.version(name) for name in ("flwr", "torch", "torch-geometric")}
    return {"flower-graph": __version__, **needed, "python": platform.python_version()}


def summarise(out: Path, results: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Put the results of several seeds together and write ``summary.json``."""
    summary: dict[str, object] = join([plain(result) for result in results])
    write_json(out / SUMMARY, summary)
    return summary


# Any, here and below: a result is nested as JSON, and a missing figure has no key
def join(values: list[Any]) -> Any:
    """Join the results of several seeds: mean, deviation and values of each number."""
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, Mapping) for value in given):
        keys = dict.fromkeys(key for value in given for key in value)
        return {key: join([(value or {}).get(key) for value in values]) for key in keys}
    if given and all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
        # A figure that one seed lacks (null: it was not finite) has no mean over the seeds.
        whole = len(given) == len(values)
        mean = statistics.mean(given) if whole else None
        spread = (statistics.stdev(given) if len(given) > 1 else 0.0) if whole else None
        return {"mean": mean, "std": spread, "values": values}
    return values[0] if all(value == values[0] for value in values) else values


def describe_result(
    name: str,
    result: Tree,
    out: Path,
    called: tuple[str, str] = ("client", "clients"),
) -> str:
    """Describe in a few lines a run's accuracy, its cost and where its outputs are."""
    # called: the method's words for one client and for several
    clients, (one, several) = _mean(result.get("clients")), called
    seeds = result["seed"]["values"] if isinstance(result["seed"], Mapping) else [result["seed"]]
    seconds, rounds, skipped = result["seconds"], _mean(result["rounds"]), _mean(result["skipped"])
    lines = [
        f"{name}: {clients:.0f} {several}, {rounds:.0f} rounds, seed {', '.join(map(str, seeds))}"
    ]
    for metric in metrics_shown(result["config"]):
        keys = f"test-{metric}-at-best-val", f"best-val-{metric}", f"test-{metric}"
        at_best, best, last = (with_spread(result[key], metric) for key in keys)
        test = f"test {at_best} at the best validation ({best}); test {last} after the last round"
        lines.append(f"  {metric:9} {test}")
    lines += [f"  {name}: {one}" for name, one in evaluated(result.get("evaluated")).items()]
    lines += [f"  baselines {line}" for line in describe_baselines(result)]
    if skipped:
        lines.append(
            f"  skipped   {skipped:g} of {rounds:g} rounds (metrics.jsonl has the reasons)"
        )
    lines += [
        f"  traffic   {_traffic(result['bytes'], 1)} in all, also after the last "
        f"round; {_traffic(result['bytes'], clients)} per {one}",
        f"  time      {_mean(seconds['total']):.1f} s, "
        f"{_mean(seconds['per-round-median']):.3f} s a round (median); "
        f"{format_bytes(_mean(result['peak-memory-bytes']))} of memory at most",
        f"  outputs   {out}",
    ]
    if result["config"].get("save", NOTHING) != NOTHING:
        keep = LAST if result["best-round"] is None else result["config"]["keep"]
        lines.append(f"  saved     the {keep} round, for `flower-graph predict` (keep={keep})")
    return "\n".join(lines)


def evaluated(given: Tree | None) -> dict[str, str]:
    """Describe each model's test accuracy on clients' own nodes, and on all, if it is there."""
    return {
        f"{model.replace('-', ' ')} on {nodes} test nodes": with_spread(one[nodes])
        for model, one in (given or {}).items()
        for nodes in (OWN, ALL)
    }


def tested(result: Tree) -> dict[str, float]:
    """Return the known test accuracies of the baselines, by their keys."""
    given = result.get("baselines") or {}
    means = {key: _mean(given.get(key, {}).get("test")) for key in BASELINES}
    return {key: value for key, value in means.items() if math.isfinite(value)}


def baseline_figures(baselines: Tree) -> list[str]:
    """Describe the baselines' test accuracies, and why one is missing, if known."""
    reached = tested({"baselines": baselines})
    metric = MSE if "mean" in reached else ACCURACY  # an error has a unit of its own
    whys = {name: baselines.get(key, {}).get("skipped") for key, name in BASELINES.items()}
    return [
        *(f"{BASELINES[key]} {figure_text(metric, value)}" for key, value in reached.items()),
        *(f"{name} skipped: {why}" for name, why in whys.items() if why),
    ]


def describe_baselines(result: Tree) -> list[str]:
    """Describe the baselines' accuracies, and say if the method is not better."""
    # A line of figures and perhaps one of words; no line without figures.
    reached = tested(result)
    if not reached:
        return []
    metric = ACCURACY
    if {"common-neighbours", "adamic-adar", "mean"} & reached.keys() and "config" in result:
        metric = metrics_of(result["config"])[0]  # which decides
    # Equal means over clients may differ in their last digits.
    own = merit(metric, _mean(result.get(f"test-{metric}-at-best-val"))) - 1e-9
    worse = [BASELINES[key] for key, value in reached.items() if own <= merit(metric, value)]
    lines = [", ".join(baseline_figures(result["baselines"]))]
    if worse:
        tries = " or ".join(worth_trying(result.get("config", {})))
        lines.append(f"not better than {', '.join(worse)}" + f"; try {tries}" * bool(tries))
    return lines


def worth_trying(config: Mapping[str, Any]) -> list[str]:
    """Name the settings to try first where a method is not better than its baselines."""
    keys = {one: one.partition("=")[0].split(".") for one in WORTH_TRYING}
    return [one for one, (section, name) in keys.items() if name in config.get(section, {})]


def _mean(value: Any) -> float:
    number = value.get("mean") if isinstance(value, Mapping) else value
    return math.nan if number is None else float(number)


def with_spread(value: Any, metric: str = ACCURACY) -> str:
    """Write a figure's mean and, of several seeds, the deviation."""
    mean, is_known = figure_text(metric, _mean(value)), math.isfinite(_mean(value))
    several = isinstance(value, Mapping) and len(value["values"]) > 1 and is_known
    return f"{mean} ± {figure_text(metric, value['std'])}" if several else mean


def _traffic(kinds: Mapping[str, Mapping[str, object]], users: float) -> str:
    sums = {way: sum(_mean(number) for number in kinds.get(way, {}).values()) for way in WAYS}
    return ", ".join(f"{way} {format_bytes(number / users)}" for way, number in sums.items())


# Several seeds, and runs beside each other -------------------------------------------------------


def describe(values: Sequence[float]) -> Tree:
    """Return mean, sample deviation (0 of one value) and the values themselves."""
    spread = math.nan
    if all(map(math.isfinite, values)):
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread, "values": [*values]}


def differences(ours: Mapping[K, float], theirs: Mapping[K, float]) -> dict[K, float]:
    """Subtract figures seed by seed, for the seeds that both have."""
    return {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}


def paired(differences: Sequence[float]) -> dict[str, float | None]:
    """Test a mean difference against 0 with a t test; count the differences of the same sign."""
    from scipy.stats import ttest_1samp  # it takes longer to import than a short run's result

    chance, (mean, spread, _) = None, describe(differences).values()
    if len(differences) > 1 and spread > 0:
        chance = float(ttest_1samp(differences, 0).pvalue)
    return {"p": chance, "agree": sum(one * mean > 0 for one in differences)}


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Correct the p values of one family of tests (Holm 1979); None is no test and stays None."""
    # The k-th smallest of m is multiplied by m - k + 1, and is never below a smaller one's result.
    tested = sorted((chance, index) for index, chance in enumerate(chances) if chance is not None)
    result: list[float | None] = [None] * len(chances)
    highest = 0.0
    for passed, (chance, index) in enumerate(tested):
        highest = max(highest, min(1.0, chance * (len(tested) - passed)))
        result[index] = highest
    return result


def correct(rows: Sequence[Tree]) -> None:
    """Add `holm` to each tested row: p, corrected for all tests of its table and metric."""
    # One family: a reader looks for a gain among all data sets and methods of a table.
    families: dict[tuple[str, str], list[Tree]] = {}
    for row in rows:
        if "p" in row:
            families.setdefault((row["table"], row["metric"]), []).append(row)
    for family in families.values():
        for row, chance in zip(family, holm([row["p"] for row in family]), strict=True):
            row["holm"] = chance
