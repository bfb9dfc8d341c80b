"""The performance page's section on long runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, gib, table, verdict


def soak_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.soak`` measured."""
    yield "## Long runs: memory, descriptors, processes"
    yield (
        "nFedGNN on the bundled Cora, 2,708 users. Memory is what the process alone holds; through "
        "`flwr run`, all processes of the run together, pages that they share counted once. It is "
        "looked at from a tenth of the rounds on, when caches are full; *growth* is the mean of "
        "the last quarter of the samples over that of the first. *Left* are descriptors of the "
        "measuring process and processes that are still there after the run."
    )
    rows = [
        (
            entry["engine"],
            f"{entry['rounds']:,}",
            duration(entry["seconds"]),
            gib(entry["first-bytes"]),
            gib(entry["last-bytes"]),
            f"{100 * entry['growth']:+.1f} %",
            f"at most {100 * entry['target']:.0f} %",
            verdict(entry["growth"], entry["target"]),
            ", ".join(entry["left"]) or "none",
        )
        for entry in part["entries"]
    ]
    head = (
        "engine",
        "rounds",
        "whole run",
        "memory, first",
        "last",
        "growth",
        "target",
        "",
        "left",
    )
    yield table(head, rows)
