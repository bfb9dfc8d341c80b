"""The performance page's sections on whole commands: a large graph file, and Flower's engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, gib, spread, table, verdict

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


def engine_start_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what a run through Flower's engine takes until its first round is over."""
    yield "## Until round 1 of Flower's engine"
    yield (
        f"`flower-graph run {part['config']} --engine flwr --supernodes {part['supernodes']}` from "
        "the command to the end of round 1, in turn with a Flower app that imports nothing but "
        "Flower, asks each of as many SuperNodes for one reply and is over. The command looks at "
        "the data while the engine starts, and the ServerApp imports PyTorch and reads them while "
        "Ray does. What is left is that the ServerApp and each of the workers in which clients "
        "live import PyTorch and this library, in processes of their own on the same cores. "
        "Workers that one process forks, and Ray started by the command while Flower's SuperLink "
        "starts, would lift that."
    )
    ratio, target = part["ratio"], part["target"]
    row = [f(part[name]) for name in ("empty", "ours") for f in (_median, spread)]
    head = ("empty app", "range", "ours", "range", "ratio", "target", "")
    verdict_of = (f"{ratio:.2f}", f"at most {target:g}", verdict(ratio, target))
    yield table(head, [(*row, *verdict_of)])


def _median(times: dict[str, float]) -> str:
    return duration(times["median"])
