"""What a table keeps of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flower_graph.report.rounds import RoundReport


@dataclass
class Curves:
    """What one run gave, round by round; runs kept by older versions lack the last fields."""

    cross_entropy: list[float]
    val_accuracy: list[float]
    test_accuracy: list[float]
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds_per_round: float = math.nan  # median, so that set-up in the first round is not in it
    run_seconds: float = math.nan  # all rounds and what goes before them
    # Memory of the run's process, libraries and graph included; unknown where runs share one.
    peak_bytes: float = math.nan
    # What the run says of learnt graphs, in the best round by validation and in the last.
    structure: dict[str, float] = field(default_factory=dict)
    structure_last: dict[str, float] = field(default_factory=dict)
    # How near clients' aligned embeddings are, by measure; NaN in rounds that did not measure it.
    alignment: dict[str, list[float]] = field(default_factory=dict)
    # Accuracy after the last round by classifier, role and client.
    judged: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation accuracy; NaN is never best."""
        value = [-1.0 if math.isnan(v) else v for v in self.val_accuracy]
        return value.index(max(value))

    @property
    def best_val(self) -> float:
        """Best validation accuracy."""
        return self.val_accuracy[self.best_round]

    @property
    def test_at_best_val(self) -> float:
        """Test accuracy at the best validation accuracy."""
        return self.test_accuracy[self.best_round]


def plain_curves(reports: Sequence[Any]) -> Curves:
    """Take loss and accuracies alone, from anything that has them."""
    return Curves(
        [report.cross_entropy for report in reports],
        [report.val_accuracy for report in reports],
        [report.test_accuracy for report in reports],
    )


def curves_of(reports: Sequence[RoundReport], final: Mapping[str, Any]) -> Curves:
    """Take what tables need from a run's rounds, at least one, and from its final figures."""
    curves = plain_curves(reports)
    curves.bytes_up = dict(reports[-1].bytes.get("up", {}))
    curves.seconds_per_round = median(report.seconds for report in reports)
    curves.structure = dict(reports[curves.best_round].structure)
    curves.structure_last = dict(reports[-1].structure)
    names = dict.fromkeys(name for report in reports for name in report.alignment)
    curves.alignment = {
        name: [report.alignment.get(name, math.nan) for report in reports] for name in names
    }
    curves.judged = dict(final.get("judged", {}))
    return curves


def read_curves(stored: Mapping[str, Any]) -> Curves:
    """Read a run back; null is a number that was not finite."""

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(item) for item in value]
        if isinstance(value, dict):
            return {key: number(item) for key, item in value.items()}
        return math.nan if value is None else value

    read: dict[str, Any] = {key: number(value) for key, value in stored.items()}
    return Curves(**read)
