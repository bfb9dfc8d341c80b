"""The figures of a round, as lines of ``metrics.jsonl`` and of the log; the best round of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from flower_graph.errors import OutputError, brief
from flower_graph.storage.reading import StateDict, read_lines, reading
from flower_graph.wire import keys

if TYPE_CHECKING:
    from flower_graph.ops.counts import Counts, Errors

WAYS = ("up", "down")
COUNTED = ("scores", "confusion")  # left out of a line where nothing was counted
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass
class Epoch:
    """Training loss and accuracies after one epoch of training in one place."""

    cross_entropy: float
    val_accuracy: float
    test_accuracy: float


def train_epochs(rounds: int, patience: int, train: Callable[[int], Epoch]) -> list[Epoch]:
    """Train epoch after epoch, at most ``rounds``, and end where a run with ``patience`` would.

    ``train`` gets the number of an epoch, from 1 on. A patience of 0 ends nothing.
    """
    epochs, best, highest = list[Epoch](), 0, -1.0
    while len(epochs) < rounds and not (patience and len(epochs) >= best + patience):
        epochs.append(train(len(epochs) + 1))
        if epochs[-1].val_accuracy > highest:
            best, highest = len(epochs), epochs[-1].val_accuracy
    return epochs


@dataclass
class RoundReport:
    """The figures of one round. Bytes are cumulative over the run, seconds are this round's own."""

    round: int  # from 1
    loss: float  # cross-entropy + reg_weight x regulariser
    cross_entropy: float  # over the training nodes
    regulariser: float  # smoothness term, before its weight
    train_accuracy: float  # 0 to 1
    val_accuracy: float  # 0 to 1
    test_accuracy: float  # 0 to 1
    asked: int  # clients
    answered: int  # clients
    rejected: list[dict[str, object]] = field(default_factory=list)  # {"node": int, "reason": str}
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # payload, up and down by kind
    wire_bytes: dict[str, int] = field(default_factory=dict)  # whole messages, up and down
    seconds: float = 0.0
    skipped: str = ""  # why nothing was aggregated; empty where something was
    structure: dict[str, float] = field(default_factory=dict)  # learnt graphs against true ones
    alignment: dict[str, float] = field(default_factory=dict)  # of embeddings: P@1, P@5, P@10
    participation: dict[str, object] = field(default_factory=dict)  # who: Participation.to_record
    privacy: dict[str, float] = field(default_factory=dict)  # epsilon so far, at delta
    # Only where they are asked for: metrics of all predictions together, by name and role; nodes
    # for test by label and predicted class
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: list[list[int]] = field(default_factory=list)

    def to_record(self) -> dict[str, object]:
        record = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        return {name: value for name, value in record.items() if value or name not in COUNTED}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> RoundReport:
        """Read a line of ``metrics.jsonl`` back; null is a number that was not finite."""
        keys = {n: n.replace("_", "-") for n in KINDS if n not in COUNTED or n in record}
        result = cls(**{n: _taken(record[key], KINDS[n], key) for n, key in keys.items()})
        if result.round < 1:
            raise ValueError(f"round: {result.round} is not at least 1")
        if any(len(row) != len(result.confusion) for row in result.confusion):
            raise ValueError("confusion: has not as many columns as rows")
        return result

    def note_counts(self, counts: Counts | Errors | None, metrics: Sequence[str]) -> None:
        """Compute the metrics that need counts; NaN without counts."""
        for name in metrics:
            if name != keys.ACCURACY:
                places = enumerate(keys.ROLES)
                self.scores[name] = {role: _score(name, counts, at) for at, role in places}
        confusion = getattr(counts, "confusion", None)  # numbers have none
        self.confusion = [] if confusion is None else confusion[-1].tolist()

    def score(self, metric: str, role: str) -> float:
        """Return one metric of the nodes of one role; NaN where it was not measured."""
        if metric == keys.ACCURACY:
            return float(getattr(self, f"{role}_accuracy"))
        return self.scores.get(metric, {}).get(role, math.nan)


KINDS = get_type_hints(RoundReport)


# Any: types of fields, and the values of JSON that fit them
def _taken(value: Any, kind: Any, key: str) -> Any:
    """Return a value of a field's type; ``ValueError`` if it has another, or is beyond bounds."""
    inner = get_args(kind)
    if kind is object:
        return value
    if get_origin(kind) is list and isinstance(value, list):
        return [_taken(one, inner[0], key) for one in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: _taken(one, inner[1], f"{key}.{name}") for name, one in value.items()}
    if kind is float and value is None:
        return math.nan
    is_number = type(value) is int or (kind is float and type(value) is float)
    if kind in (int, float) and is_number and math.isfinite(value):
        return value
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"{brief(key)}: {brief(value)} is unfit")


def merit(metric: str, value: float) -> float:
    """Return a figure so that more is better: errors change their sign."""
    return -value if metric in keys.VALUE_SCORES else value


@dataclass
class BestRound:
    """The first round of the best validation, and its state for checkpoints."""

    number: int = 0
    accuracy: float = -math.inf  # or the merit by another metric, if that decides
    last: int = 0  # the last round that was reported
    any_used: bool = False  # whether anything was aggregated in any round
    # The best round at each checkpoint that a run may resume from
    protected: list[int] = field(default_factory=list)

    def see(self, server_round: int, accuracy: float) -> bool:
        """Compare a round; return whether it is the best. NaN (not measured) never is."""
        self.last = server_round
        if not accuracy > self.accuracy:
            return False
        self.number, self.accuracy = server_round, accuracy
        return True

    def state_dict(self) -> dict[str, object]:
        """Return the state for the checkpoint that is about to be completed."""
        return {**vars(self), "protected": self._with_this()}

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)

    def saved(self) -> None:
        self.protected = self._with_this()

    def forget(self) -> None:
        """Forget the best round, because clients have joined or left."""
        self.number, self.accuracy, self.protected = 0, -math.inf, []

    def _with_this(self) -> list[int]:
        from flower_graph.storage.checkpoint import KEPT  # not at the top: it loads torch

        held = [one for one in self.protected if one != self.number]
        return [*held, self.number][-KEPT:]


def _score(metric: str, counts: Counts | Errors | None, place: int) -> float:
    if counts is None:
        return math.nan
    from flower_graph.ops.counts import Errors, auc, balanced_accuracy, binned_precision, macro_f1
    from flower_graph.ops.links import hits_of

    if isinstance(counts, Errors):
        return counts.mean(place, squared=metric == keys.MSE)
    if metric in keys.RANKED:
        assert counts.ranks is not None
        return hits_of(counts.ranks[place])[metric]
    if metric in (keys.AUC, keys.AP):
        assert counts.histograms is not None
        return (auc if metric == keys.AUC else binned_precision)(counts.histograms[place])
    score = macro_f1 if metric == keys.MACRO_F1 else balanced_accuracy
    return score(counts.confusion[place])


def read_reports(path: Path) -> list[RoundReport]:
    """Read ``metrics.jsonl``; ``OutputError`` names the entry that no run has written."""
    with reading(path, OutputError):
        records = read_lines(path)
    reports = list[RoundReport]()
    for number, record in enumerate(records, start=1):
        with reading(path, OutputError, f"line {number} is not a round's report"):
            reports.append(RoundReport.from_record(record))
            if number > 1 and reports[-1].round <= reports[-2].round:
                raise ValueError(f"round {reports[-1].round} is not after {reports[-2].round}")
    from flower_graph.records.participation import known_clients  # loads NumPy

    with reading(path, OutputError, "who took part is damaged"):
        known_clients(report.participation for report in reports)
    return reports


def byte_unit(number: float) -> int:
    """Choose the unit to write a number of bytes in: its index in `UNITS`."""
    larger = max(number, 1) * 1.00005  # 1023.95 would be printed as 1024.0
    return min(int(math.log2(larger)) // 10, len(UNITS) - 1)


def format_bytes(number: float) -> str:
    """Write a number of bytes with a binary unit, such as ``2.1 MiB``."""
    power = byte_unit(number)
    return f"{number:.0f} B" if power == 0 else f"{number / 1024**power:.1f} {UNITS[power]}"


def figure_text(metric: str, value: float) -> str:
    """Write a share, or an error in a unit of its own."""
    return f"{value:.4g}" if metric in keys.VALUE_SCORES else f"{value:.3f}"


def format_round(report: RoundReport, total: int, clients: str = "clients") -> str:
    """Write a round as one line; `clients` is the method's word for them."""
    up, down = (format_bytes(sum(report.bytes.get(way, {}).values())) for way in WAYS)
    shares = [f"val {report.val_accuracy:.3f}", f"test {report.test_accuracy:.3f}"]
    parts = [
        f"round {report.round:>{len(str(total))}}/{total}",
        f"loss {report.loss:.4g}" if math.isfinite(report.loss) else f"LOSS {report.loss}",
        *([] if set(report.scores) & set(keys.VALUE_SCORES) else shares),  # numbers are not right
        *(
            f"{n} val {figure_text(n, s['val'])} test {figure_text(n, s['test'])}"
            for n, s in report.scores.items()
        ),
        f"{report.answered}/{report.asked} {clients}",
        f"{report.seconds:.2f} s",
        f"sent so far: up {up}, down {down}",
    ]
    if report.skipped:
        parts.append(f"skipped: {report.skipped}")
    if report.rejected:
        parts.append(f"{len(report.rejected)} rejected: {report.rejected[0].get('reason', '?')}")
    return "  ".join(parts)
