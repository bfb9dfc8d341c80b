"""Rows of newcomers' figures, a file a method, and the page that is made from all of them.

``python -m benchmarks.newcomers.common`` writes ``docs/results/newcomers/README.md`` anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.layout import table

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results" / "newcomers"
START = "from the start"  # the setting of rows in which everybody trains together
HEAD = """# Newcomers

A tenth of the users, ego-networks, communities or graphs is held back while the others train; then
they come. Each figure is a mean over seeds, with its deviation. *Others* are those that were there
before; *from the start* is training with everybody, the newcomers too. Bytes are those that
travelled because of the newcomers (there: all). Made by `python -m benchmarks.newcomers.common`
from the files beside it, each of which a script of `benchmarks/newcomers` writes: `python -m
benchmarks.newcomers.nfedgnn`, for example."""


@dataclass(frozen=True)
class Row:
    """One figure of one run."""

    data: str  # such as "Cora"
    seed: int
    held_back: int  # clients that come later
    setting: str  # what newcomers do, or `START`
    rounds: int  # since they came; with `START` those of the run
    newcomers: float  # accuracy over their nodes
    others: float  # ... over those of all others; NaN where there is none
    bytes: int  # that travelled
    more: dict[str, float] = field(default_factory=dict)  # other shares, a column each


def write(method: str, about: str, rows: Iterable[Row], *, folder: Path = FOLDER) -> Path:
    """Write the rows of a method beside those of others, and the page of all.

    Parameters
    ----------
    method : str
        As the page names it; the file's name is the same in small letters.
    about : str
        What was held back, which nodes are judged, and how settings were chosen: Markdown.
    rows : iterable of Row
        All figures; those that the file has already are replaced.

    Returns
    -------
    Path
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{method.lower()}.json"
    found = {"method": method, "about": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(_plain(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(page(folder), encoding="utf-8")
    return path


def page(folder: Path = FOLDER) -> str:
    """Write the page of all files in a folder."""
    files = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join([HEAD, *(part for found in files for part in _section(found))]) + "\n"


def _section(found: dict[str, Any]) -> Iterator[str]:
    yield f"## {found['method']}"
    yield found["about"]
    rows = [Row(**numbers(row)) for row in found["rows"]]
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    head = ("data", "setting", "rounds", "seeds", "newcomers", "others", *more, "bytes")
    yield table(head, [_line(same, more) for same in _alike(rows)])


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Put rows of one data set, setting and number of rounds together, in their first order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.data, row.setting, row.rounds), []).append(row)
    return list(groups.values())


def _line(rows: list[Row], more: Sequence[str]) -> tuple[str, ...]:
    first = rows[0]
    figures = [_percent([row.newcomers for row in rows]), _percent([row.others for row in rows])]
    figures += [_percent([row.more.get(name, math.nan) for row in rows]) for name in more]
    amount = f"{fmean(row.bytes for row in rows):,.0f}"
    return (first.data, first.setting, str(first.rounds), str(len(rows)), *figures, amount)


def _percent(shares: list[float]) -> str:
    """Write a mean in per cent, and the deviation over seeds if there are several."""
    there = [100 * share for share in shares if not math.isnan(share)]
    if not there:
        return "–"
    return f"{fmean(there):.1f}" + (f" ± {stdev(there):.1f}" if len(there) > 1 else "")


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Write NaN as null, which JSON has."""
    rows = [
        {key: None if value != value else value for key, value in row.items()}
        for row in found["rows"]
    ]
    return found | {"rows": rows}


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Read a row's null as NaN."""
    return {key: math.nan if value is None else value for key, value in row.items()}


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
