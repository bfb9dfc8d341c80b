"""What one round gave, and the file that has a line for each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flower_graph.errors import OutputError


@dataclass
class RoundReport:
    """What one round gave. Bytes are cumulative over the run, seconds are this round's own."""

    round: int  # from 1
    loss: float  # cross-entropy + reg_weight x regulariser
    cross_entropy: float  # over the training nodes
    regulariser: float  # smoothness term, before its weight
    train_accuracy: float  # 0 to 1
    val_accuracy: float  # 0 to 1
    test_accuracy: float  # 0 to 1
    asked: int  # clients
    answered: int  # clients
    rejected: list[dict[str, Any]] = field(default_factory=list)  # {"node": int, "reason": str}
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # payload, up and down by kind
    wire_bytes: dict[str, int] = field(default_factory=dict)  # whole messages, up and down
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part of the round
    skipped: str = ""  # why nothing was aggregated; empty where something was
    structure: dict[str, float] = field(default_factory=dict)  # learnt graphs against true ones
    alignment: dict[str, float] = field(default_factory=dict)  # of embeddings: P@1, P@5, P@10
    participation: dict[str, Any] = field(default_factory=dict)  # who: Participation.to_record
    privacy: dict[str, float] = field(default_factory=dict)  # epsilon so far, at delta

    def to_record(self) -> dict[str, Any]:
        """Give the report as a line of ``metrics.jsonl`` has it."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RoundReport:
        """Read a line of ``metrics.jsonl`` back; null is a number that was not finite."""
        # Lines of older versions may lack the later fields, which then have their defaults.
        names = {item.name: item.name.replace("_", "-") for item in fields(cls)}
        result = {name: record[key] for name, key in names.items() if key in record}
        known: dict[str, Any] = {n: math.nan if v is None else v for n, v in result.items()}
        return cls(**known)


def read_reports(path: Path) -> list[RoundReport]:
    """Read ``metrics.jsonl``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from error
    reports = []
    for number, line in enumerate(lines, start=1):
        try:
            reports.append(RoundReport.from_record(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise OutputError(f"{path}: line {number} is not a round's report") from error
    return reports
