"""What the papers' tables share: rows of ``table.json``, and how ``table.md`` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


# Means with their deviations: scale, and format
SPREADS = {"accuracy": (1, ".3f"), "percent": (100, ".1f"), "points": (100, "+.1f")}
ALONE = ("paper-deviation", "reached", "positive", "above", "setting", "seeds")
FORMATS = (*SPREADS, "mean", "paper", "key", *ALONE)


def formatted(how: str, found: Sequence[Row | None]) -> str:
    """Write figures as a page's YAML says: ``accuracy``, ``mean:.3f``, ``paper:.1f:100``."""
    name, _, detail = how.partition(":")
    if name.endswith("→"):
        return " → ".join(formatted(name[:-1], [r]) for r in found)
    one_of("format", name, FORMATS)
    if name == "seeds":  # one number, or one for each where they differ
        counts = [0 if r is None else len(r["seeds"]) for r in found]
        return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    first = next((r for r in found if r is not None), None)
    return NONE if first is None else _written(name, detail, first)


def _written(name: str, detail: str, r: Row) -> str:
    """Write one row's figure."""
    if name in ("mean", "paper", "key"):
        key, form = (name, detail) if name != "key" else detail.split(":", 1)
        form, _, scale = form.partition(":")
        value = r.get(key)
        if value is None or not isfinite(value):
            return NONE
        return format(float(scale or 1) * value, form)
    if name in SPREADS:
        times, form = SPREADS[name]
        # One seed alone has no deviation.
        spread = f" ± {format(times * r['std'], form.lstrip('+'))}" if len(r["seeds"]) > 1 else ""
        return format(times * r["mean"], form) + spread
    if name == "setting":  # laid over the config
        there = [one for one in r["settings"]["overrides"] if one.startswith(f"{detail}=")]
        return str(there[-1].partition("=")[2]) if there else NONE
    if name == "above":
        return "yes" if r["mean"] > float(detail) else "no"
    if name == "positive":
        return f"{sum(v > 0 for v in r['values'])} of {len(r['values'])}"
    if r["paper"] is None:
        return NONE
    if name == "reached":
        return "yes" if r["mean"] >= r["paper"] else "no"
    return f"{r['paper']:.4f} ± {r['paper-std']:.4f}"


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word of the YAML that is not one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
