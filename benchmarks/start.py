"""The cost of starting: commands beside an unavoidable import, and Flower's engine.

    python -m benchmarks.start [--quick] [--against CHECKOUT]

Each turn runs every command once, with the other checkout's in between. Bytecode is kept from a
turn that does not count, as an installed package has it. Flower's engine is measured from the
command to the end of round 1, beside an app that imports only Flower, asks each SuperNode for one
reply and ends.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import ROOT, command_of, environment_of, say, spread, table
from flower_graph.apps.cli.launch import engine_command, engine_environment, guarded, write_app

TIMES, SUPERNODES = 7, 2
# What each is compared with, and what is run
BASES = {"torch, flwr": ["-c", "import torch, flwr"], "numpy": ["-c", "import numpy"]}
COMMANDS = {
    "run quickstart rounds=1": ("torch, flwr", ["run", "quickstart", "rounds=1", "--out", "run"]),
    "run quickstart rounds=2": ("torch, flwr", ["run", "quickstart", "rounds=2", "--out", "run"]),
    "--help": ("numpy", ["--help"]),
    "list": ("numpy", ["list"]),
    "show quickstart": ("numpy", ["show", "quickstart"]),
    "a refused key": ("numpy", ["run", "quickstart", "strategy.reg_wieght=1"]),
}
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


def seconds_of(tree: Path, words: Sequence[str], bytecode: str) -> tuple[float, float]:
    """Run Python once in an empty folder; return wall-clock and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        child = subprocess.Popen(
            words,
            cwd=folder,
            env=environment_of(tree, 1, bytecode),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, _, usage = os.wait4(child.pid, 0)
        child.returncode = 0  # it is over: nobody else waits for it
        return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def command_rows(trees: dict[str, Path], times: int) -> list[list[str]]:
    """Measure every command in turns, by checkout."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for number in range(times + 1):
            for side, tree in trees.items():
                every = {name: [sys.executable, *words] for name, words in BASES.items()}
                every |= {name: [*command_of(tree), *w] for name, (_, w) in COMMANDS.items()}
                for name, words in every.items():
                    seconds = seconds_of(tree, words, bytecode)
                    if number:  # the first turn compiles the library
                        found.setdefault((side, name), []).append(seconds)
    rows = []
    for name, (base, _) in COMMANDS.items():
        for side in trees:
            columns = []
            for mine, theirs in zip(
                zip(*found[side, name], strict=True),
                zip(*found[side, base], strict=True),
                strict=True,
            ):
                ratio = statistics.median(mine) / statistics.median(theirs)
                columns.append(f"{statistics.median(mine):.2f} s, {ratio:.2f} times")
            rows.append([f"`{name}`", side, f"`import {base}`", *columns])
    return rows


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


def empty_app() -> float:
    """Run the empty app as ours is run: everything private, in a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="fg-"))
    app = write_app(home / "app", {}, "server:app", "client:app")
    (app / "server.py").write_text(SERVER, encoding="utf-8")
    (app / "client.py").write_text(ANSWER, encoding="utf-8")
    with guarded("FLWR_HOME", str(home), home):
        environment = engine_environment(home)
        command = engine_command(app, SUPERNODES, environment)
        return seconds_to("the round is over", command, environment)


def quickstart() -> float:
    """Run the command."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "quickstart", "rounds=2", "--engine", "flwr", "--out", f"{folder}/run"]
        command = [*command_of(ROOT), *words, "--supernodes", str(SUPERNODES)]
        return seconds_to("round 1/2", command, dict(os.environ))


def main() -> None:
    """Print the tables as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    trees = {"now": ROOT} | ({"before": given.against} if given.against else {})
    about = """Seconds of commands that compute little, by the clock and of the CPU, and the same
        in times of the import beside it. From two rounds on a run draws its pictures."""
    head = ["command", "checkout", "beside", "clock", "CPU"]
    rows = command_rows(trees, 1 if given.quick else TIMES)
    tables = [table("Starting", about, head, rows)]
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    found: dict[str, list[float]] = {"empty": [], "ours": []}
    for number in range(1 if given.quick else 3):
        for name, measure in (("empty", empty_app), ("ours", quickstart)):
            found[name].append(measure())
            say(f"start: {number + 1}, {name}: {found[name][-1]:.1f} s")
    ratio = statistics.median(found["ours"]) / statistics.median(found["empty"])
    row = [spread(found["empty"]), spread(found["ours"]), f"{ratio:.2f}"]
    about = f"""`flower-graph run quickstart --engine flwr --supernodes {SUPERNODES}` until the end
        of round 1, in turn with a Flower app that does nothing."""
    tables.append(
        table("Until round 1 of Flower's engine", about, ["empty app", "ours", "ratio"], [row])
    )
    print(json.dumps(tables))


if __name__ == "__main__":
    main()
