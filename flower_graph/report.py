"""What a run reports: one line a round, and at its end a result, curves and weights."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from flower_graph.errors import OutputError
from flower_graph.files import append_line, atomic, plain, prepare_folder, saying, write_json
from flower_graph.folder_lock import FolderLock
from flower_graph.result import make_result, summarise
from flower_graph.text import format_round

LOG = logging.getLogger(__name__)

__all__ = ["RoundReport", "RunWriter", "format_round", "read_reports", "summarise"]


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
        """Read a line of ``metrics.jsonl`` back; null is a number that was not finite.

        Lines of older versions may lack the later fields, which then have their defaults.
        """
        names = {item.name: item.name.replace("_", "-") for item in fields(cls)}
        found = {name: record[key] for name, key in names.items() if key in record}
        known: dict[str, Any] = {n: math.nan if v is None else v for n, v in found.items()}
        return cls(**known)


class RunWriter:
    """The output folder of one run.

    Parameters
    ----------
    out : Path
        The folder; it must be new or empty, unless a run is resumed.
    config : mapping
        The resolved settings.
    resume_round : int, optional
        Last round of the checkpoint that a resumed run goes on from. Lines up to it are kept,
        later ones are dropped: those rounds are run again.

    Raises
    ------
    OutputError
        If the folder cannot take the outputs, another run writes there, or the rounds to resume
        from are not in it.
    """

    def __init__(
        self, out: Path, config: Mapping[str, Any], *, resume_round: int | None = None
    ) -> None:
        self.out = prepare_folder(out, may_exist=resume_round is not None)
        with saying(self.out):
            self._lock = FolderLock(self.out)
        self.config = plain(config)
        self.metrics = self.out / "metrics.jsonl"
        self.reports: list[RoundReport] = []
        self._resumed = resume_round is not None
        try:
            if resume_round is None:
                self._write_config()
            else:
                self.reports = _reports_until(self.metrics, resume_round)
        except OutputError:
            self.close()
            raise
        self._started = time.perf_counter()
        self._seconds_before = sum(report.seconds for report in self.reports)

    def write_round(self, report: RoundReport) -> None:
        """Append one round to ``metrics.jsonl``; give this to a strategy as ``on_round``."""
        if self._resumed:
            # The checkpoint that was taken may be older than the last one.
            self.reports = [one for one in self.reports if one.round < report.round]
            self._seconds_before = sum(one.seconds for one in self.reports)
        assert not self.reports or report.round > self.reports[-1].round
        # Under a privacy budget clients may keep their losses to themselves.
        if not (math.isfinite(report.loss) or report.privacy) and self._all_finite():
            LOG.warning(
                "round %d: the loss is %s; files have null for it", report.round, report.loss
            )
        self._take_over()
        append_line(self.metrics, report.to_record())
        self.reports.append(report)

    def finish(
        self, final: Mapping[str, Any], state: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write ``weights.safetensors``, the pictures and, last, ``result.json``.

        The pictures are ``curves.png`` and, if a round compared graphs, ``structure.png``, if one
        aligned embeddings, ``alignment.png``, if one says who took part, ``participation.png``.

        Parameters
        ----------
        final : mapping
            What the rounds do not say: ``clients`` and ``engine``, and whatever else the method
            reports; a key here goes before one of the same name worked out from the rounds.
        state : mapping, optional
            Final weights by name, NumPy arrays or tensors.

        Returns
        -------
        dict
            What ``result.json`` holds.

        Raises
        ------
        OutputError
            If no round was run, or a file cannot be written.
        """
        if not self.reports:
            raise OutputError(f"{self.out}: no round was run, so there is no result to write")
        total = self._seconds_before + time.perf_counter() - self._started
        self._take_over()
        result: dict[str, Any] = plain({**make_result(self.config, self.reports, total), **final})
        if state:
            _write_weights(self.out / "weights.safetensors", state)
        self._draw()
        write_json(self.out / "result.json", result)
        self.close()
        return result

    def close(self) -> None:
        """Let other runs use the folder."""
        self._lock.release()

    def _draw(self) -> None:
        # Imported here: it takes a second, and a run that stops early has no use for it.
        from flower_graph.plots import save_curves

        title = _title(self.config)
        save_curves(self.out / "curves.png", self.reports, title=title)
        if any(report.structure for report in self.reports):
            from flower_graph.plots_structure import save_structure

            save_structure(self.out / "structure.png", self.reports, title=title)
        if any(report.alignment for report in self.reports):
            from flower_graph.plots_alignment import save_alignment

            save_alignment(self.out / "alignment.png", self.reports, title=title)
        if any(report.participation for report in self.reports):
            from flower_graph.plots_participation import save_participation

            save_participation(self.out / "participation.png", self.reports, title=title)

    def _take_over(self) -> None:
        """Make a resumed run's files say what it goes on from.

        Not before it has something to write: a checkpoint may yet be refused, because it is of
        other settings, and then the run that lies there has to stay as it was.
        """
        if not self._resumed:
            return
        self._resumed = False
        (self.out / "result.json").unlink(missing_ok=True)
        with atomic(self.metrics) as temporary:
            temporary.write_bytes(b"")
            for report in self.reports:
                append_line(temporary, report.to_record())
        self._write_config()

    def _write_config(self) -> None:
        with atomic(self.out / "config.yaml") as temporary:
            temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(self.config)), encoding="utf-8")

    def _all_finite(self) -> bool:
        return all(math.isfinite(report.loss) for report in self.reports)


def read_reports(path: Path) -> list[RoundReport]:
    """Read ``metrics.jsonl``.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    list of RoundReport
        One a round. A last line that a crash cut short is left out.

    Raises
    ------
    OutputError
        If the file is missing or another line than the last is broken.
    """
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


def _reports_until(path: Path, last: int) -> list[RoundReport]:
    # A run that stopped in its first round may have no file yet.
    kept = [report for report in read_reports(path) if report.round <= last] if last else []
    if [report.round for report in kept] != list(range(1, last + 1)):
        raise OutputError(f"{path}: rounds 1 to {last} are needed to resume, and some are missing")
    return kept


def _write_weights(path: Path, state: Mapping[str, Any]) -> None:
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # A tensor may lie on a GPU and want a gradient; an array has neither.
    arrays = {
        name: np.asarray(
            value.detach().cpu().numpy() if hasattr(value, "detach") else value, order="C"
        )
        for name, value in state.items()
    }
    try:
        with atomic(path) as temporary:
            save_file(arrays, temporary)
    except SafetensorError as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _title(config: Mapping[str, Any]) -> str:
    data, model, strategy = (
        config.get(key, {}).get("name") for key in ("data", "model", "strategy")
    )
    # A method has several models or several strategies; what it has one of says nothing.
    named = " · ".join(str(part) for part in (config.get("app"), data, model or strategy) if part)
    return f"{named} · seed {config['seed']}" if "seed" in config else named
