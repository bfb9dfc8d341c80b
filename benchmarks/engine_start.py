"""``flower-graph run … --engine flwr`` from the command to the end of round 1, beside an empty app.

The empty app sends each SuperNode one message and waits for the reply; it imports nothing but
Flower, and is run in the same way. Run alone: ``python -m benchmarks.engine_start [--quick]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, keep_bytecode, say, summary
from flower_graph.apps.cli.launch import clean_up, engine_command, engine_environment

NAME, SUPERNODES, TIMES = "nfedgnn/cora-linqs", 2, 5
TARGET = 1.3  # times the empty app
PYPROJECT = """\
[project]
name = "empty"
version = "0.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "empty"

[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"
"""
SERVER = f"""\
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < {SUPERNODES}:
        time.sleep(0.05)
    asked = [Message(RecordDict(), node, "train") for node in nodes]
    waiting = set(grid.push_messages(asked))
    while waiting:
        time.sleep(0.05)
        waiting -= {{reply.metadata.reply_to_message_id for reply in grid.pull_messages(waiting)}}
    print("the round is over", flush=True)
"""
ANSWER = """\
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def seconds_to(line: str, command: Sequence[str], environment: dict[str, str]) -> float:
    """Start a command; return the seconds until it prints a line, and wait for its end."""
    started, found = time.perf_counter(), 0.0
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for text in process.stdout:
        if line in text and not found:
            found = time.perf_counter() - started
    if process.wait() or not found:
        raise RuntimeError(f"{command[0]} ended with code {process.returncode}")
    return found


def empty() -> float:
    """Run the empty app as ours is run: everything private, in a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="fg-", dir="/tmp"))
    app = home / "app"
    app.mkdir()
    for name, text in {
        "pyproject.toml": PYPROJECT,
        "server.py": SERVER,
        "client.py": ANSWER,
    }.items():
        (app / name).write_text(text, encoding="utf-8")
    environment = engine_environment(home)
    command = engine_command(app, SUPERNODES, environment)
    try:
        return seconds_to("the round is over", command, environment)
    finally:
        clean_up(home)


def ours() -> float:
    """Run the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/run", "--supernodes", str(SUPERNODES)]
        command = [
            sys.executable,
            "-m",
            "flower_graph",
            "run",
            NAME,
            "rounds=2",
            "--engine",
            "flwr",
        ]
        return seconds_to("round 1/2", [*command, *out], dict(os.environ))


def main() -> None:
    """Print the result as JSON; the two take turns."""
    keep_bytecode()
    load, found = os.getloadavg()[0], {"empty": list[float](), "ours": list[float]()}
    for number in range(1 if "--quick" in sys.argv else TIMES):
        for name, measure in (("empty", empty), ("ours", ours)):
            found[name].append(measure())
            say(f"engine-start: {number + 1}, {name}: {found[name][-1]:.1f} s")
    times: dict[str, Any] = {name: summary(seconds) for name, seconds in found.items()}
    ratio = times["ours"]["median"] / times["empty"]["median"]
    sizes = {"config": NAME, "supernodes": SUPERNODES, "target": TARGET}
    print(json.dumps({"load": load, **sizes, **times, "ratio": ratio}))


if __name__ == "__main__":
    main()
