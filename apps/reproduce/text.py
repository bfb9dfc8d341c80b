"""What the papers' tables share: rows of ``table.json``, and how ``table.md`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from statistics import fmean, stdev
from typing import Any

from flower_graph.apps.reproduce.experiments import Experiment
from flower_graph.errors import ConfigError

# Metrics of a row.
TEST, LAST, VALIDATION = "test-accuracy-at-best-val", "test-accuracy-last", "best-val-accuracy"
SECONDS, WHOLE = "seconds-per-round", "run-seconds"
NONE = "–"  # stands for a figure that is not there

Row = dict[str, Any]


def row(
    table: str,
    experiment: Experiment,
    metric: str,
    values: Mapping[int, float],
    rounds: int,
    paper: float | None = None,
) -> Row:
    """Make one row of ``table.json``; every paper's table has this form."""
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


def find(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """Return the first row with these entries whose mean is a number."""
    for r in rows:
        if all(r.get(key) == value for key, value in wanted.items()) and isfinite(r["mean"]):
            return r
    return None


def _deviation(values: Sequence[float]) -> float:
    """Return the sample deviation: 0 for one number, NaN with a NaN among them, as the mean."""
    if not all(map(isfinite, values)):
        return nan
    return stdev(values) if len(values) > 1 else 0.0


# Text --------------------------------------------------------------------------------------------


def mean_of(r: Row | None) -> float | None:
    """Return a row's mean; none without a row."""
    return None if r is None else r["mean"]


def number(value: float | None, how: str) -> str:
    """Write a number in a format such as ``.3f``."""
    return NONE if value is None or not isfinite(value) else format(value, how)


def accuracy(r: Row | None) -> str:
    """Write a row's accuracy, ``0.812 ± 0.010``."""
    return NONE if r is None else f"{r['mean']:.3f}" + _spread(r, 1, ".3f")


def percent(r: Row | None) -> str:
    """Write a row's share in percent, ``81.2 ± 1.0``."""
    return NONE if r is None else f"{100 * r['mean']:.1f}" + _spread(r, 100, ".1f")


def paper_percent(r: Row | None) -> str:
    """Write the paper's share in percent."""
    return NONE if r is None or r["paper"] is None else f"{100 * r['paper']:.1f}"


def points(r: Row | None) -> str:
    """Write a row's difference of two accuracies in points, ``+1.2 ± 0.4``."""
    return NONE if r is None else f"{100 * r['mean']:+.1f}" + _spread(r, 100, ".1f")


def paper_points(r: Row | None) -> str:
    """Write the paper's difference of two accuracies in points."""
    return NONE if r is None or r["paper"] is None else f"{100 * r['paper']:+.1f}"


def count_seeds(found: Iterable[Row | None]) -> str:
    """Say how many seeds some figures have: one number, or one for each where they differ."""
    counts = [0 if r is None else len(r["seeds"]) for r in found]
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Write a Markdown table, line by line."""
    head = [columns, ["---"] * len(columns)]
    return ["| " + " | ".join(cells) + " |" for cells in [*head, *lines]]


def show_pictures(names: Sequence[str]) -> list[str]:
    """Write the section with the pictures; nothing without any."""
    shown = [
        f"![{name.removesuffix('.png').replace('-', ' ').capitalize()}]({name})" for name in names
    ]
    return ["## Pictures", *shown] if shown else []


def formatted(how: str, found: Sequence[Row | None]) -> str:
    """Write figures as a page's YAML says: ``accuracy``, ``mean:.3f``, ``paper:.1f:100``."""
    name, _, detail = how.partition(":")
    if name == "seeds":
        return count_seeds(found)
    if name.endswith("→"):
        return " → ".join(formatted(name[:-1], [r]) for r in found)
    first = next((r for r in found if r is not None), None)
    if name in ("mean", "paper", "key"):
        key, detail = (name, detail) if name != "key" else detail.split(":", 1)
        form, _, scale = detail.partition(":")
        value = None if first is None else first.get(key)
        return number(None if value is None else float(scale or 1) * value, form)
    if name == "setting":
        return NONE if first is None else _setting(first, detail)
    if name == "above":
        return NONE if first is None else "yes" if first["mean"] > float(detail) else "no"
    one_of("format", name, [*FORMATS, "mean", "paper", "key", "seeds", "setting", "above"])
    return FORMATS[name](first)


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word of the YAML that is not one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")


def _setting(r: Row, key: str) -> str:
    """Find what a row's runs have a setting laid over their config as."""
    there = [one for one in r["settings"]["overrides"] if one.startswith(f"{key}=")]
    return str(there[-1].partition("=")[2]) if there else NONE


def _paper_deviation(r: Row | None) -> str:
    """Write the paper's accuracy and its deviation, ``0.8006 ± 0.0028``."""
    if r is None or r["paper"] is None:
        return NONE
    return f"{r['paper']:.4f} ± {r['paper-std']:.4f}"


def _reached(r: Row | None) -> str:
    """Say whether ours is at least the paper's figure."""
    if r is None or r["paper"] is None:
        return NONE
    return "yes" if r["mean"] >= r["paper"] else "no"


def _positive(r: Row | None) -> str:
    """Say how many seeds are above zero."""
    return NONE if r is None else f"{sum(v > 0 for v in r['values'])} of {len(r['values'])}"


def _spread(r: Row, scale: float, how: str) -> str:
    """Write the deviation; one seed alone has none."""
    return f" ± {format(scale * r['std'], how)}" if len(r["seeds"]) > 1 else ""


FORMATS: dict[str, Callable[[Row | None], str]] = {
    "accuracy": accuracy,
    "percent": percent,
    "points": points,
    "paper-percent": paper_percent,
    "paper-points": paper_points,
    "paper-deviation": _paper_deviation,
    "reached": _reached,
    "positive": _positive,
}
