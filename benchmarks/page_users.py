"""The performance page's section on a saved graph of many users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, gib, table, verdict

FORMS = {"summed": "one layer for all, which ships", "own": "layers of their own"}


def users_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what a command on a graph file takes in all."""
    targets = part["targets"]
    yield f"## A graph file of {part['users']:,} users"
    yield (
        f"`flower-graph run nfedgnn/own-graph data.name=graph.pt rounds={part['rounds']}` by wall "
        "clock, from the command to its end: start, reading, rounds and all outputs. The graph "
        "is generated: degree 10, 32 of 512 features active, saved dense."
    )
    head = ("users have", "in all", "target", "", "a round", "target", "", "peak memory", "test")
    rows = [
        (
            FORMS[entry["form"]],
            duration(entry["seconds"]),
            f"at most {duration(targets['seconds'])}",
            verdict(entry["seconds"], targets["seconds"]),
            duration(entry["round"]),
            f"at most {duration(targets['round'])}",
            verdict(entry["round"], targets["round"]),
            gib(entry["peak-bytes"]),
            f"{entry['test']:.3f}",
        )
        for entry in part["entries"]
    ]
    yield table(head, rows)
    yield _regression(part["regression"])


def _regression(found: dict[str, Any]) -> str:
    sample, whole = found["sample"], found["whole"]
    if "sample" not in sample:
        return f"Logistic regression beside it tests at {sample['test']:.3f}."
    return (
        f"Logistic regression beside it is fitted to {sample['sample']:,} of "
        f"{sample['training-nodes']:,} training nodes and tests at {sample['test']:.3f}; fitted "
        f"to all of them it tests at {whole['test']:.3f}. All baselines take "
        f"{duration(found['seconds']['sample'])}, or {duration(found['seconds']['whole'])}."
    )
