"""Try the whole corpus of malformed replies and write what became of it.

``python tests/hostile/run_corpus.py --out docs/results/hostile.json`` takes some 20
minutes of two cores; ``--only`` tries some forms of methods anew and keeps what the file has of the
others. The sums go into the table of the page beside it. The tests try a part of it.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[up] / part)
    for up, part in ((1, "strategies"), (1, "."), (2, "."))
]

import flwr
import hypothesis
from corpus import COUNTS, kinds_tried, try_all
from hostile_grid import CORPUS

import flower_graph


@dataclass(frozen=True)
class Part:
    """What is tried of one form of a method.

    ``draws`` attacks are drawn by hypothesis for each type of message, besides those made by hand.
    ``kinds`` are the types of messages, all if empty: another form has the others.
    """

    draws: int
    kinds: tuple[str, ...] = ()


PAPERS: dict[str, dict[str, Part]] = {
    "nFedGNN": {"nfedgnn": Part(50), "nfedgnn, averaged": Part(50, ("train",))},
    "FedSCem": {
        "fedscem": Part(10),
        "fedscem, plain alignment": Part(10, ("train.align",)),
        "fedscem, plain": Part(10, ("train",)),
    },
    "FedGLS": {"fedgls": Part(30)},
    "PPFL-GNN": {"gat": Part(50), "deepwalk, secure": Part(10)},
    "FedGTA": {"fedgta": Part(20)},
    "FED-PUB": {"fedpub": Part(20)},
}
FORMS = [name for forms in PAPERS.values() for name in forms]


def run(name: str, part: int = 1, kinds: Collection[str] = ()) -> dict[str, Any]:
    """Try everything against one form, or one case of so many: verdicts by type of message."""
    logging.disable(logging.INFO)
    how = next(forms[name] for forms in PAPERS.values() if name in forms)
    tried = try_all(CORPUS[name], how.draws, part, kinds or how.kinds)
    return {kind: tally.summary() for kind, tally in tried.items()}


def kinds_of(name: str) -> list[tuple[str, str]]:
    """Give a form with each type of message that is tried of it."""
    how = next(forms[name] for forms in PAPERS.values() if name in forms)
    return [(name, kind) for kind in how.kinds or kinds_tried(CORPUS[name])]


def run_all(forms: Sequence[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Try forms of methods, each type of message by itself."""
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        work = [task for tasks in pool.map(kinds_of, forms) for task in tasks]
        open_ = {pool.submit(run, name, 1, [kind]): (name, kind) for name, kind in work}
        for done in as_completed(open_):
            print(*open_[done], f"{time.perf_counter() - started:.0f} s", flush=True)
            yield open_[done][0], done.result()


def totals(methods: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Add up the counts of all forms of a method, and of all methods."""
    counts = {name: [kind["counts"] for kind in kinds.values()] for name, kinds in methods.items()}
    found = {
        paper: added_up([one for name in forms for one in counts.get(name, ())])
        for paper, forms in PAPERS.items()
    }
    return found | {"all": added_up(list(found.values()))}


def added_up(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in counts) for name in COUNTS}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=FORMS, nargs="+", help="the file keeps all others")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    for name, found in run_all(given.only or FORMS, given.jobs):
        write(given.out, name, found)
    print(json.dumps(json.loads(given.out.read_text("utf-8"))["totals"], indent=2))


def write(out: Path, name: str, found: dict[str, Any]) -> None:
    """Put verdicts on one form into the file, and the sums into the table of the page beside it."""
    known = json.loads(out.read_text("utf-8"))["methods"] if out.exists() else {}
    known[name] = known.get(name, {}) | found
    methods = {one: dict(sorted(known[one].items())) for one in FORMS if one in known}
    versions = {
        "flower-graph": flower_graph.__version__,
        "flwr": flwr.__version__,
        "hypothesis": hypothesis.__version__,
        "python": platform.python_version(),
    }
    written = {"totals": totals(methods), "versions": versions, "methods": methods}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if (page := out.with_suffix(".md")).exists():
        text, rows = page.read_text("utf-8"), table(written["totals"])
        page.write_text(re.sub(r"\| method \|(.+\n)+", lambda _: rows, text), encoding="utf-8")


def table(sums: dict[str, dict[str, int]]) -> str:
    """Write the sums as a table."""
    head = ("method", *COUNTS)
    rows = [[name, *(f"{found[one]:,}" for one in COUNTS)] for name, found in sums.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
