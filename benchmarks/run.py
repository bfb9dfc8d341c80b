"""Runs the benchmarks; writes ``benchmarks/results.json`` and its page.

``python benchmarks/run.py --only round,scale`` measures some parts anew and keeps the others.
``--against CHECKOUT`` measures that checkout's rounds and starts in turn with this one's.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Table, machine, run_module, say

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "reference" / "performance.md"
# Name of each part and the module that measures it, in a process of its own
PARTS = {
    "round": "rounds",
    "sum": "sums",
    "average": "averages",
    "alignment": "alignment",
    "scale": "scale",
    "deployment": "deployment",
    "start": "start",
}
COMPARED = ("round", "start")  # parts that can measure another checkout in turn
HEAD = """\
# Performance

`make bench` writes this page from `benchmarks/results.json`; do not edit it. `python
benchmarks/run.py --only round,scale` measures some parts anew. Figures that were measured once, of
experiments that are no part of the benchmarks any more, are in
[results/performance](../results/performance/README.md).

Measured on {cores} cores of {cpu} with {memory} of memory, Python {python}, {versions}. Times
are medians, in brackets the fastest and the slowest. What is compared is measured in turns, so that
both sides meet the same state of the machine. *Load* is the system's load average when a part
began: above 0, others used the cores too.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=_names, default=list(PARTS), metavar=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the scripts out")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measured in turn")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    results = _kept(given.results, machine())
    failed = []
    for name in given.only:
        flags = ["--quick"] if given.quick else []
        if given.against and name in COMPARED:
            flags += ["--against", str(given.against.resolve())]
        started, load = time.perf_counter(), os.getloadavg()[0]
        try:
            tables: list[Table] = run_module(PARTS[name], flags)
        except RuntimeError as error:
            say(f"{name}: {error}")
            failed.append(name)
            continue
        results["parts"][name] = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.perf_counter() - started),
            "load": round(load, 1),
            "quick": given.quick,
            "tables": tables,
        }
        given.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        given.page.write_text(page(results), encoding="utf-8")
    say(f"failed: {', '.join(failed)}" if failed else f"done: {', '.join(given.only)}")
    return int(bool(failed))


def page(results: dict[str, Any]) -> str:
    """Write the page: every part's tables in order."""
    here = dict(results["machine"])
    versions = ", ".join(f"{name} {v}" for name, v in here.pop("packages").items() if v)
    parts = (part for name in PARTS if (part := results["parts"].get(name)))
    blocks = [HEAD.format(**here, versions=versions), *(b for part in parts for b in _blocks(part))]
    return "\n".join(blocks)


def _blocks(part: dict[str, Any]) -> Iterator[str]:
    for one in part["tables"]:
        rows = [one["head"], ["---"] * len(one["head"]), *one["rows"]]
        lines = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        yield f"## {one['title']}\n\n{one['about']}\n\n{lines}\n"
    tiny = " **Tiny sizes, to try the scripts out; the figures mean nothing.**"
    took = f"Measured {part['measured']} in {part['seconds']} s, load {part['load']}."
    yield f"<sub>{took}{tiny if part['quick'] else ''}</sub>\n"


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; allowed: {', '.join(PARTS)}")
    return names


def _kept(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    same = found.get("machine") == here
    return {"machine": here, "parts": found["parts"] if same else {}}


if __name__ == "__main__":
    sys.exit(main())
