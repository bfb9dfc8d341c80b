"""Try the whole corpus of malformed replies and write what became of it.

``python tests/hostile/run_corpus.py --out docs/results/hostile.json`` takes the better part
of an hour on one core. The tests try a part of it.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[up] / part)
    for up, part in ((1, "strategies"), (1, "."), (2, "."))
]

import flwr
import hypothesis
from attacked_runs import CORPUS
from corpus import try_all

import flower_graph

# How many attacks hypothesis draws for each type of message, besides those made by hand
PAPERS: dict[str, dict[str, int]] = {
    "nFedGNN": {"nfedgnn": 70, "nfedgnn, averaged": 50},
    "FedSCem": {"fedscem, plain alignment": 25, "fedscem": 20, "fedscem, plain": 20},
    "FedGLS": {"fedgls": 50},
    "PPFL-GNN": {"gat": 50, "deepwalk, secure": 15},
    "FedGTA": {"fedgta": 20},
    "FED-PUB": {"fedpub": 20},
}


def run_all(part: int = 1, quiet: bool = False) -> dict[str, Any]:
    """Try everything, or one of so many.

    Returns
    -------
    dict
        By method and type of message, and the sums.
    """
    found: dict[str, Any] = {"methods": {}, "totals": {}}
    for paper, methods in PAPERS.items():
        counts: list[dict[str, int]] = []
        for name, count in methods.items():
            started = time.perf_counter()
            tried = try_all(CORPUS[name], count, part)
            counts += [tally.counts for tally in tried.values()]
            found["methods"][name] = {kind: tally.summary() for kind, tally in tried.items()}
            if not quiet:
                print(name, f"{time.perf_counter() - started:.0f} s", flush=True)
        found["totals"][paper] = added_up(counts)
    found["totals"]["all"] = added_up(list(found["totals"].values()))
    return found


def added_up(counts: list[dict[str, int]]) -> dict[str, int]:
    return {key: sum(one[key] for one in counts) for key in counts[0]}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    logging.disable(logging.INFO)
    started = time.time()
    found = run_all()
    found["seconds"] = round(time.time() - started)
    found["versions"] = {
        "flower-graph": flower_graph.__version__,
        "flwr": flwr.__version__,
        "hypothesis": hypothesis.__version__,
        "python": platform.python_version(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found["totals"], indent=2))


if __name__ == "__main__":
    main()
