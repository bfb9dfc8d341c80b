"""Seconds a round of the shipped methods, beside a plain loop, and beside another checkout.

    python -m benchmarks.rounds [--quick] [--against CHECKOUT]

A round is measured as a user runs it: by the command line, from ``metrics.jsonl``. So any two
checkouts can be compared, whatever their code. Every case is run in turns: this checkout, the other
checkout, the plain loop, each in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import ROOT, Table, command_of, environment_of, say, spread, table

WARM_UP = 2  # rounds that are not counted: packing, first touch of memory
TURNS, THREADS = 3, (1, 2)


@dataclass(frozen=True)
class Case:
    """A config with settings, and the loop to compare it with."""

    config: str
    settings: tuple[str, ...] = ()
    rounds: int = 12
    loop: str | None = None
    flags: tuple[str, ...] = ()
    threads: tuple[int, ...] = THREADS

    def words(self) -> str:
        return " ".join([self.config, *self.settings, *self.flags])


def clients(count: int) -> tuple[str, ...]:
    """Return the settings for that many communities of a graph, each large enough to split."""
    sizes = (f"partition.clients={count}", f"data.nodes={count * 60}")
    return (*sizes, "data.name=csbm", "partition.resolution=null")


CASES = (
    Case("nfedgnn/cora-linqs", rounds=42, loop="central"),
    Case("nfedgnn/cora-summed", rounds=42, loop="central"),
    Case("quickstart", rounds=42, loop="central"),
    Case("fedscem/cora-linqs", rounds=14, loop="fedscem"),
    Case("fedgls/cora-linqs", rounds=14),
    Case("ppfl/cora-linqs-gat", rounds=8),
    Case("fedgta/cora-linqs"),
    *(
        Case(f"{app}/cora-linqs", clients(count), loop="fedavg" if app == "fedavg" else None)
        for app in ("fedavg", "fedprox", "ditto")
        for count in (10, 100)
    ),
    Case("quickstart", rounds=42, flags=("--engine", "flwr", "--supernodes", "2"), threads=(1,)),
)
QUICK = (
    Case("fedavg/cora-linqs", ("partition.clients=3",), 4, "fedavg", (), (1,)),
    Case(
        "fedscem/cora-linqs", ("partition.clients=4", "strategy.limit=1000"), 4, "fedscem", (), (1,)
    ),
    Case("quickstart", (), 4, "central", (), (1,)),
)


def run_rounds(tree: Path, case: Case, threads: int, bytecode: str) -> list[float]:
    """Run a case by a checkout's command; return the seconds of the rounds that count."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["run", case.config, f"rounds={case.rounds}", *case.settings, *case.flags]
        command = [*command_of(tree), *words, "device=cpu", "--quiet", "--out", str(out)]
        environment = environment_of(tree, threads, bytecode)
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{case.words()} in {tree.name}: {done.stderr[-500:]}")
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # The last round of some methods has work of its own
    return [float(json.loads(line)["seconds"]) for line in lines[WARM_UP:-1]]


def run_loop(case: Case, threads: int, bytecode: str) -> list[float]:
    """Run the loop beside a case."""
    command = [sys.executable, "-m", "benchmarks.loops", str(case.loop), case.config]
    command += [str(case.rounds), *case.settings]
    environment = environment_of(ROOT, threads, bytecode)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [float(one) for one in json.loads(done.stdout.splitlines()[-1])[WARM_UP:-1]]


def measure(case: Case, trees: dict[str, Path], threads: int, turns: int) -> list[str]:
    """Measure a case in turns; return its row."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for _ in range(turns):
            for side, tree in trees.items():
                found.setdefault(side, []).extend(run_rounds(tree, case, threads, bytecode))
            if case.loop:
                found.setdefault("loop", []).extend(run_loop(case, threads, bytecode))
    medians = {side: statistics.median(seconds) for side, seconds in found.items()}
    cells = [f"`{case.words()}`", str(threads), spread(found["now"])]
    for side in ("loop", *[*trees][1:]):
        is_there = side in found
        cells.append(spread(found[side]) if is_there else "")
        cells.append(f"{medians['now'] / medians[side]:.2f}" if is_there else "")
    say("round: " + " | ".join(cells))
    return cells


def main() -> None:
    """Print the tables as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    trees = {"now": ROOT} | ({"before": given.against} if given.against else {})
    cases, turns = (QUICK, 1) if given.quick else (CASES, TURNS)
    head = ["command", "threads", "a round", "plain loop", "in loops"]
    head += ["before", "now in times of before"] * bool(given.against)
    rows = [measure(case, trees, threads, turns) for case in cases for threads in case.threads]
    about = """`flower-graph run` with these words; the loops are those of `benchmarks/loops.py`: an
    epoch of PyG's centralised GCN beside nFedGNN, PyG clients one after the other beside the
    others, without messages and masks."""
    tables: list[Table] = [table("A round", about, head, rows)]
    print(json.dumps(tables))


if __name__ == "__main__":
    main()
