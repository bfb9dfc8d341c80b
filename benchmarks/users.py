"""A saved graph of 200,000 nodes by ``flower-graph run nfedgnn/own-graph``: by wall clock, in all.

Run alone: ``python -m benchmarks.users [--quick]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import ROOT, part_main, run_part, say
from flower_graph.data import baselines
from flower_graph.data.sources.datasets import load_graph
from flower_graph.data.sources.generators import csbm
from flower_graph.method.load import load_config

CONFIG, ROUNDS, CLASSES = "nfedgnn/own-graph", 20, 7
USERS, QUICK = 200_000, 400
# The form that ships, one layer for all users, and the paper's
FORMS = {"summed": [], "own": ["strategy.share=own", "strategy.reg_weight=1"]}
TARGETS = {"seconds": 25.0, "round": 0.5}


def save(users: int, path: Path) -> None:
    """Save a generated graph as a user would: a dict of tensors, features dense."""
    graph = csbm(users, CLASSES, degree=10.0, features=512, active=32)
    torch.save({"x": graph.x, "edge_index": graph.edge_index, "y": graph.y}, path)


def run(path: str, form: str) -> dict[str, Any]:
    """Run the command once, its start, the reading and all outputs included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [f"data.name={path}", f"rounds={ROUNDS}", "device=cpu", *FORMS[form]]
        command = [sys.executable, "-m", "flower_graph", "run", CONFIG, *settings, "--quiet"]
        started = time.perf_counter()
        subprocess.run([*command, "--out", out], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - started
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {
        "form": form,
        "seconds": seconds,
        "round": result["seconds"]["per-round-median"],
        "peak-bytes": result["peak-memory-bytes"],
        "test": result["test-accuracy-at-best-val"],
        "regression": result["baselines"]["logistic-regression"],
    }


def whole_regression(path: str) -> dict[str, Any]:
    """Fit the regression to all training nodes, however many."""
    graph = load_graph(load_config(CONFIG, [f"data.name={path}"]).data)
    started = time.perf_counter()
    sampled = baselines.graph_baselines(graph)[baselines.REGRESSION]
    between = time.perf_counter()
    with patch.object(baselines, "LARGEST", sys.maxsize):
        whole = baselines.graph_baselines(graph)[baselines.REGRESSION]
    seconds = {"sample": between - started, "whole": time.perf_counter() - between}
    return {"sample": sampled, "whole": whole, "seconds": seconds}


def measure_all(quick: bool) -> dict[str, Any]:
    """Measure both forms, each in a process of its own."""
    load, users = os.getloadavg()[0], QUICK if quick else USERS
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "graph.pt")
        save(users, Path(path))
        entries = []
        for form in FORMS:
            say(f"users: {users:,}, {form}")
            entries.append(run(path, form))
        case = json.dumps(["whole_regression", path])
        regression = run_part("users", ["--case", case])
    sizes = {"users": users, "rounds": ROUNDS, "targets": TARGETS}
    return {"load": load, **sizes, "entries": entries, "regression": regression}


if __name__ == "__main__":
    part_main({"whole_regression": whole_regression}, measure_all)
