"""Tries every fault and writes ``docs/results/reliability.json`` and ``reliability.md`` beside it.

``python benchmarks/reliability.py [--only tests/contracts]``. The tests record the outcomes; this
script makes a table of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "results" / "reliability.md"
TESTS = ("tests/contracts", "tests/deployment")
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
METHODS = ("nFedGNN", "FedSCem", "FedGLS", "PPFL-GNN")
Faults = Mapping[str, Mapping[str, Mapping[str, str]]]


def table(faults: Faults) -> str:
    """Write, fault by fault, the outcome for each method, and the test that shows it."""
    blocks = []
    for fault, methods in faults.items():
        alike: dict[tuple[str, str], list[str]] = {}  # methods to which the same happened
        for name in sorted(methods, key=_place):
            one = methods[name]
            alike.setdefault((one["happened"], _short(one["test"])), []).append(name)
        rows = [f"| {'; '.join(who)} | {what} | `{test}` |" for (what, test), who in alike.items()]
        head = ["| methods | what happened | test |", "| --- | --- | --- |"]
        blocks.append("\n".join([f"## {fault[0].upper()}{fault[1:]}", "", *head, *rows]))
    return "\n\n".join(blocks)


def _short(test: str) -> str:
    return test.rpartition("/")[2]


def _place(method: str) -> tuple[int, str]:
    name = method.partition(",")[0]
    return METHODS.index(name) if name in METHODS else len(METHODS), method


def write_page(page: Path, faults: Faults) -> None:
    """Put the table between the marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: the marks {BEGIN} and {END} are missing")
    page.write_text(f"{before}{BEGIN}\n\n{table(faults)}\n\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; the exit code is theirs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(TESTS), metavar="TESTS")
    given = parser.parse_args(arguments)
    environment = {**os.environ, "FLOWER_GRAPH_RELIABILITY": str(RESULTS)}
    command = [sys.executable, "-m", "pytest", "-q", *given.only]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code == 0:
        write_page(PAGE, json.loads(RESULTS.read_text(encoding="utf-8")))
    return code


if __name__ == "__main__":
    sys.exit(main())
