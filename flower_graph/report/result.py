"""The figures of one run, and of several runs together."""

from __future__ import annotations

import math
import platform
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_graph import __version__
from flower_graph.server.ledger import summarise_participation
from flower_graph.storage.files import plain, write_json

if TYPE_CHECKING:
    from flower_graph.report.rounds import RoundReport


def make_result(
    config: Mapping[str, Any], reports: Sequence[RoundReport], total: float
) -> dict[str, Any]:
    """Work out what the rounds say about the run as a whole."""
    last = reports[-1]
    best = best_round(reports)
    # Only of methods that make graphs or align embeddings: for others the keys would say nothing.
    of_some: dict[str, dict[str, Any]] = {"structure": last.structure, "alignment": last.alignment}
    of_some["participation"] = summarise_participation(one.participation for one in reports)
    local = {name: figures for name, figures in of_some.items() if figures}
    return {
        "config": config,
        "seed": config.get("seed"),
        "rounds": len(reports),
        "test-accuracy": last.test_accuracy,
        "val-accuracy": last.val_accuracy,
        "train-accuracy": last.train_accuracy,
        "test-accuracy-at-best-val": best.test_accuracy if best else None,
        "best-val-accuracy": best.val_accuracy if best else None,
        "best-round": best.round if best else None,
        "loss": last.loss,
        **local,
        "bytes": last.bytes,
        "wire-bytes": last.wire_bytes,
        "seconds": _seconds(reports, total),
        "peak-memory-bytes": peak_memory_bytes(),
        "rejected": sum(len(report.rejected) for report in reports),
        "skipped": sum(bool(report.skipped) for report in reports),
        "versions": versions(),
    }


def _seconds(reports: Sequence[RoundReport], total: float) -> dict[str, Any]:
    """Work out where the time went; ``parts`` is there if the rounds tell their parts."""
    seconds = [report.seconds for report in reports]
    figures: dict[str, Any] = {
        "total": total,
        "first-round": seconds[0],
        "per-round-median": statistics.median(seconds),
    }
    # A part that a round does not name took no time in it.
    names = dict.fromkeys(name for report in reports for name in report.parts)
    parts = {name: [report.parts.get(name, 0.0) for report in reports] for name in names}
    if parts:
        figures["parts"] = {
            name: {"total": sum(values), "per-round-median": statistics.median(values)}
            for name, values in parts.items()
        }
    return figures


def best_round(reports: Sequence[RoundReport]) -> RoundReport | None:
    """Find the first round of the highest validation accuracy; None where all are NaN."""
    measured = [report for report in reports if math.isfinite(report.val_accuracy)]
    return max(measured, key=lambda report: report.val_accuracy, default=None)


def peak_memory_bytes() -> int:
    """Give the most memory that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str | None]:
    """Give the versions of this package and of what it stands on; None where it is not there."""
    result: dict[str, str | None] = {"flower-graph": __version__}
    for name in ("flwr", "torch", "torch-geometric"):
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return {**result, "python": platform.python_version()}


def summarise(out: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the results of several seeds together and write ``summary.json``."""
    if not results:
        raise ValueError("results: none given; at least one is needed")
    summary: dict[str, Any] = _join([plain(result) for result in results])
    write_json(out / "summary.json", summary)
    return summary


def _join(values: list[Any]) -> Any:
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, Mapping) for value in given):
        keys = dict.fromkeys(key for value in given for key in value)
        return {key: _join([(value or {}).get(key) for value in values]) for key in keys}
    if given and all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
        # A figure that one seed lacks (null: it was not finite) has no mean over the seeds.
        whole = len(given) == len(values)
        mean = statistics.mean(given) if whole else None
        spread = (statistics.stdev(given) if len(given) > 1 else 0.0) if whole else None
        return {"mean": mean, "std": spread, "values": values}
    return values[0] if all(value == values[0] for value in values) else values
