"""The performance pages' sections on a Ray cluster of several machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, spread, table, verdict


def cluster_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.cluster`` measured."""
    yield "## A Ray cluster of two machines"
    yield (
        f"`{part['config']}` on two raylets of one core each, which stand for machines that share "
        "no folder, beside one raylet of two cores; all of them share the cores of this machine, "
        "and runs take turns. So what is measured is the price of sending messages between "
        "raylets, and no network. `python -m benchmarks.cluster`."
    )
    rows = [
        (
            str(entry["supernodes"]),
            *(f"{duration(entry[k]['median'])} ({spread(entry[k])})" for k in ("one", "two")),
            f"{entry['ratio']:.2f}",
            f"at most {part['target']:g}",
            verdict(entry["ratio"], part["target"]),
        )
        for entry in part["entries"]
    ]
    yield table(("SuperNodes", "a round, one of two", "two of one", "ratio", "target", ""), rows)


def short_cluster(part: dict[str, Any]) -> Iterable[str]:
    """Write the same for the short page."""
    ratios = ", ".join(f"{e['supernodes']}: {e['ratio']:.2f}" for e in part["entries"])
    yield (
        "**A Ray cluster.** A round on two raylets of one core, in times of that on one of two, by "
        f"SuperNodes: {ratios}."
    )
