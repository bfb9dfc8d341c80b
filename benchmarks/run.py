"""Runs the benchmarks; writes ``benchmarks/results.json`` and the pages made of it.

``python benchmarks/run.py --only round,scale`` measures some parts anew and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine, run_part, say
from benchmarks.page import PAGE, RESULTS, write_pages

FORMAT = 1  # of results.json; figures of another format are measured anew
# Name of each part and the module that measures it
PARTS = {
    "round": "rounds",
    "flwr": "engines",
    "cluster": "cluster",
    "engine-start": "engine_start",
    "scale": "scale",
    "users": "users",
    "population": "population",
    "state": "state",
    "secure": "secure",
    "trust": "secure_clients",
    "sums": "secure_whole",
    "alignment": "alignment",
    "ego": "ego",
    "fedscem": "fedscem",
    "fedgls": "fedgls",
    "ppfl": "ppfl",
    "deployment": "deployment",
    "resident": "resident",
    "waiting": "waiting",
    "soak": "soak",
    "gpu": "gpu",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; the exit code is 1 if one of them failed."""
    given = _parse(arguments)
    here = machine()
    results = _kept(given.results, here)
    failed = []
    for name in given.only:
        started = time.perf_counter()
        try:
            found = run_part(PARTS[name], ["--quick"] if given.quick else [])
        except RuntimeError as error:
            say(f"{name}: {error}")
            failed.append(name)
            continue
        results["parts"][name] = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "took-seconds": time.perf_counter() - started,
            "quick": given.quick,
            **found,
        }
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        write_pages(results, given.page)
    say(f"failed: {', '.join(failed)}" if failed else f"done: {', '.join(given.only)}")
    return int(bool(failed))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=_names, default=list(PARTS), metavar=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the scripts out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; allowed: {', '.join(PARTS)}")
    return names


def _kept(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier results if they are of such a machine, these versions, this format."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    same = found.get("format") == FORMAT and _coarse(found["machine"]) == _coarse(here)
    return {"format": FORMAT, "machine": here, "parts": found["parts"] if same else {}}


def _coarse(machine: dict[str, Any]) -> dict[str, Any]:
    """Give a machine with its memory in GiB: another start of it has some pages more or fewer."""
    return machine | {"memory-bytes": round(machine.get("memory-bytes", 0) / 2**30)}


if __name__ == "__main__":
    sys.exit(main())
