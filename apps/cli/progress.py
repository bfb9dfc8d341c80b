"""The display of rounds: a bar in a terminal, else lines, or JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from flower_graph.apps.cli.say import say
from flower_graph.errors import OutputError, printable
from flower_graph.records.rounds import RoundReport, format_round
from flower_graph.storage.files import plain
from flower_graph.storage.reading import reading
from flower_graph.wire.keys import ACCURACY

# Lines of Flower's engine that say in each run, or in each round, the same
ROUTINE = re.compile(
    r"Since flwr |(configure|aggregate)_(train|evaluate): |[├│└]|Starting logstream"
    r"|Starting Flower Simulation|Federation `|change federation size|flwr federation "
    r"|Created default configuration|Starting local SuperLink|Using SuperLink: local"
    r"|Successfully (started run|installed)|outputs in |^INFO :\s*$"
)
ROUND = re.compile(r"^INFO :\s+round +(\d+)/\d+ ")


@dataclass
class RoundPrinter:
    """Shows rounds: as a bar in a terminal or notebook, else as one line each on stderr."""

    total: int
    _: KW_ONLY
    seed: int
    clients: str = "clients"  # the method's word
    metric: str = ACCURACY
    quiet: bool = False
    log_every: int = 1  # rounds between two lines; the last and rounds with refusals have one
    as_json: bool = False  # an object on stdout for each round, and nothing else for it
    _bar: Any = None

    def __call__(self, report: RoundReport) -> None:
        if self.as_json:
            record = plain({"seed": self.seed, **report.to_record()})
            print(json.dumps(record), flush=True)
        elif self.quiet:
            return
        elif sys.stderr.isatty() or in_notebook():
            self._advance(report)
        elif self._is_due(report):
            say(format_round(report, self.total, self.clients), to=sys.stderr)

    def wait(self, work: str) -> None:
        if self._bar is not None:
            self._bar.write(printable(work), file=sys.stderr)
        elif not self.quiet:
            say(work, to=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _is_due(self, report: RoundReport) -> bool:
        is_unusual = bool(report.skipped or report.rejected)
        every = report.round % self.log_every == 0
        return every or is_unusual or report.round == self.total

    def _advance(self, report: RoundReport) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            # A resumed run does not start at round 1; its speed counts from where it starts.
            before, label = report.round - 1, f"seed {self.seed}"
            self._bar = tqdm(total=self.total, initial=before, desc=label, unit="round")
        named = "" if self.metric == ACCURACY else f"{self.metric} "
        val, test = (report.score(self.metric, role) for role in ("val", "test"))
        figures = f"loss {report.loss:.4g}, {named}val {val:.3f}, test {test:.3f}"
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(report.round - self._bar.n)


class EngineLines:
    """Reads the lines of Flower's engine; shows rounds in the usual way, and new messages."""

    def __init__(self, out: Path, printer: RoundPrinter, on_round: Callable[[RoundReport], None]):
        self._metrics, self._printer, self._on_round = out / "metrics.jsonl", printer, on_round
        self._read = 0  # bytes of the file

    def __call__(self, line: str) -> None:
        if (match := ROUND.match(line)) is not None:
            self._show(int(match[1]))
        elif not ROUTINE.search(line):
            self._printer.wait(line)

    def _show(self, number: int) -> None:
        with reading(self._metrics, OutputError), self._metrics.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read = file.tell()
            reports = (RoundReport.from_record(json.loads(line)) for line in lines)
            # A resumed run's file begins with rounds that were shown before.
            report = next((one for one in reports if one.round == number), None)
        if report is not None:
            self._on_round(report)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: it shows a bar though stderr is no terminal."""
    return "ipykernel" in sys.modules
