"""The project's modules that one round in process enters, in the order in which it enters them.

    python -m benchmarks.trace_round [--write]

prints a Markdown table for each method, or writes them into ``docs/reference/rounds.md``; a module
is described where it first comes. A small run of the method is made, and its second round traced,
from the end of the first report to its own: what happens once, before the first round, is not in
it, nor is the building of the clients, which the in-process engine repeats for every message.

A module is entered once any function of it runs. The round goes *through* those that call another
one, which are what a reader follows, and they are numbered. It *ends* in those that call nothing of
the project but formulas; they stand below without a number, as the formulas do.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context

from flower_graph.client.adaptor import make_client_app
from flower_graph.flower_compat import NumPyClient
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "rounds.md"
MARKED = re.compile(r"(<!-- trace: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SMALL = (
    "data.name=csbm",
    "data.nodes=120",
    "data.classes=3",
    "data.degree=5",
    "data.num_features=24",
    "data.active=6",
    "device=cpu",
    "rounds=2",
)
# Title of a table; config; settings under which a run is small; SuperNodes
METHODS: dict[str, tuple[str, str, tuple[str, ...], int]] = {
    "nfedgnn": (
        "nFedGNN",
        "nfedgnn/cora",
        ("data.split=random", "data.train_per_class=8", "data.num_val=20", "data.num_test=30"),
        2,
    ),
    "nfedgnn-summed": (
        "nFedGNN with one layer for all",
        "nfedgnn/cora-summed",
        ("data.split=random", "data.train_per_class=8", "data.num_val=20", "data.num_test=30"),
        2,
    ),
    "fedscem": (
        "FedSCem",
        "fedscem/cora-linqs",
        ("partition.clients=6", "partition.min_nodes=5", "partition.hops=1"),
        2,
    ),
    "fedgls": ("FedGLS", "fedgls/cora-linqs", ("partition.clients=4", "graph.neighbours=4"), 2),
    "ppfl": (
        "PPFL-GNN",
        "ppfl/cora-linqs-deepwalk",
        (
            "partition.clients=3",
            "partition.ratios=[0.3,0.3,0.4]",
            "model.dimension=6",
            "deepwalk.walks=2",
            "deepwalk.length=8",
            "judge.mlp=false",
        ),
        3,
    ),
}
TRACED = 2  # the round
FORMULAS = "flower_graph/ops/"
COUNTED = ("apps/", "strategies/", "flower_graph/")


class Trace:
    """Notes files of the project when their functions are entered, while it is on."""

    def __init__(self) -> None:
        self.calls: dict[str, set[str]] = {}  # by file, in the order in which they are entered
        self._is_on = False
        self._names: dict[Any, str] = {}

    def on_round(self, report: RoundReport) -> None:
        """Begin when the round before has been reported; end with the round's own report."""
        self._is_on = report.round == TRACED - 1
        self.listen()

    def listen(self, *, pause: bool = False) -> None:
        """Note what is entered from now on, or nothing."""
        sys.setprofile(self._enter if self._is_on and not pause else None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (name := self._name(frame)):
            return
        self.calls.setdefault(name, set())
        caller = frame.f_back
        while caller is not None and not self._name(caller):
            caller = caller.f_back
        if caller is not None:
            self.calls.setdefault(self._name(caller), set()).add(name)

    def _name(self, frame: FrameType) -> str:
        """Give the project's file that a frame is of; empty if it is not the project's."""
        code = frame.f_code
        if code not in self._names:
            path = Path(code.co_filename)
            inside = path.is_absolute() and path.resolve().is_relative_to(ROOT)
            name = path.resolve().relative_to(ROOT).as_posix() if inside else ""
            self._names[code] = name if name.startswith(COUNTED) else ""
        return self._names[code]


def entered(method: str) -> dict[str, set[str]]:
    """Run a method; give the files of its traced round, each with those that it calls."""
    _, config, settings, supernodes = METHODS[method]
    found = load_config(config, (*SMALL, *settings))
    chosen, trace = method_of(found), Trace()

    def client_fn(context: Context) -> NumPyClient:
        trace.listen(pause=True)
        client = chosen.build_client(found, context, None)
        trace.listen()
        return client

    app = make_client_app(client_fn)
    grid = InProcessGrid(app, num_supernodes=supernodes, seed=found.seed)
    strategy = chosen.build_strategy(found, None)
    try:
        strategy.start(grid, num_rounds=found.rounds, on_round=trace.on_round)
    finally:
        sys.setprofile(None)
    return trace.calls


def table(method: str, described: set[str]) -> str:
    """Write a method's table; what is in ``described`` was in a table before."""
    found = entered(method)
    files = [name for name in found if not name.startswith(FORMULAS)]
    formulas = [name.removeprefix(FORMULAS) for name in found if name.startswith(FORMULAS)]
    ends = [n for n in files if not any(c != n and not c.startswith(FORMULAS) for c in found[n])]
    through = [name for name in files if name not in ends]
    lines = [
        f"A round of {METHODS[method][0]} enters {len(files)} modules. It goes through "
        f"{len(through)}, in this order, and ends in {len(ends)}, which call no other:",
        "",
        *("||module|what it is|", "|---|---|---|"),
    ]
    for number, name in enumerate([*through, *ends], 1):
        says = "" if name in described else _summary(ROOT / name)
        lines.append(f"|{number if number <= len(through) else ''}|`{name}`|{says}|")
    described.update(files)
    if formulas:
        named = ", ".join(f"`{name}`" for name in formulas)
        lines.append(f"||`{FORMULAS}`|the formulas: {named}|")
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, for a table."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"\.(?= |$)", line)[0].replace("|", "\\|")


def main(words: list[str]) -> None:
    """Print the tables, or write them between their marks."""
    described: set[str] = set()
    tables = {method: table(method, described) for method in METHODS}
    if words != ["--write"]:
        print("\n".join(tables.values()))
        return
    text = PAGE.read_text(encoding="utf-8")
    text = MARKED.sub(lambda mark: f"{mark[1]}{tables[mark[2]]}{mark[3]}", text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
