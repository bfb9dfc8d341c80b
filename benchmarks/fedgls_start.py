"""How long a new process takes to the end of its first round, and how much memory it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import ROOT, say, summary

ROUNDS = 5  # after which the memory is read
# What a process does up to its first round; nothing of this folder is imported.
FIRST = """
import json, sys, tempfile, time
from pathlib import Path
from flower_graph.apps.run import run
from flower_graph.method.load import load_config
from flower_graph.engine.machine import peak_memory

times = []
config = load_config(sys.argv[1], sys.argv[2:])
with tempfile.TemporaryDirectory() as folder:
    run(config, Path(folder) / "run", progress=lambda report: times.append(time.monotonic()))
print(json.dumps([times[0], peak_memory()]))
"""


def measure_start(settings: list[str], repeats: int) -> dict[str, Any]:
    """Time new processes from their start to the end of the first round, on one thread."""
    say("fedgls: from the start of a process")
    command = [sys.executable, "-c", FIRST, *settings, f"rounds={ROUNDS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    seconds, peaks = [], []
    for _ in range(1 + repeats):
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        ended, peak = json.loads(done.stdout.strip().splitlines()[-1])
        seconds.append(ended - started)
        peaks.append(peak)
    return {"seconds": summary(seconds[1:]), "peak-bytes": max(peaks)}
