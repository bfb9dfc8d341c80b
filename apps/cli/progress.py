"""Rounds as they come: a bar in a terminal, one line each elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from flower_graph.report.rounds import RoundReport
from flower_graph.report.text import format_round


class RoundPrinter:
    """Shows each round on stderr; call it with the round's report."""

    def __init__(
        self, total: int, *, label: str, clients: str = "clients", quiet: bool = False
    ) -> None:
        self._total, self._label, self._clients, self._quiet = total, label, clients, quiet
        self._bar: Any = None

    def __call__(self, report: RoundReport) -> None:
        """Show one round."""
        if self._quiet:
            return
        if not sys.stderr.isatty():
            print(format_round(report, self._total, self._clients), file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from tqdm import tqdm

            # A resumed run does not start at round 1; its speed counts from where it starts.
            before = report.round - 1
            self._bar = tqdm(total=self._total, initial=before, desc=self._label, unit="round")
        self._bar.set_postfix_str(
            f"loss {report.loss:.4g}, val {report.val_accuracy:.3f}, "
            f"test {report.test_accuracy:.3f}",
            refresh=False,
        )
        self._bar.update(report.round - self._bar.n)

    def close(self) -> None:
        """End the bar's line."""
        if self._bar is not None:
            self._bar.close()
