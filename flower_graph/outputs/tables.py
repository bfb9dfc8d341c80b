"""Joins the tables of a simulation's clients, and measures how clients differ."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flower_graph.config.common import KEEP
from flower_graph.errors import OutputError
from flower_graph.outputs.client import IN_RUN
from flower_graph.outputs.figures import CLIENTS, CURVES, HEAD
from flower_graph.outputs.files import write_lines
from flower_graph.storage.reading import MOST_GRAPH, open_text, read_text, reading
from flower_graph.wire.keys import ROLES


def merge_clients(out: Path) -> dict[str, object]:
    """Join the tables of a simulation's clients; return how clients differ."""
    folders = sorted((out / IN_RUN).glob("*/"))
    for name in (CLIENTS, CURVES):
        tables = [_read(folder / name) for folder in folders if (folder / name).is_file()]
        if tables:
            places = [0, 1] if name == CURVES else [0]
            with reading(out / IN_RUN, OutputError, f"a client's {name} is no such table"):
                lines = [line for table in tables for line in table[1:]]
                lines.sort(key=lambda line: [int(line[column]) for column in places])
                head = tables[0][0]
            write_lines(out / name, head, lines)
    return spread(out / CLIENTS)


def spread(path: Path) -> dict[str, object]:
    """Return how much the clients of a ``clients.csv`` differ in accuracy.

    By ``last`` and ``best`` and by role: ``worst-tenth``, the mean accuracy of the worst tenth of
    the clients that have such nodes, at least one; ``deviation``, the standard deviation.
    ``OutputError`` if the file is no such table.
    """
    if not path.exists():
        return {}
    with reading(path, OutputError):
        return _spread(path)


def _spread(path: Path) -> dict[str, object]:
    columns = [HEAD.index(name) for name in ("at", *(f"{role}-accuracy" for role in ROLES))]
    with open_text(path, MOST_GRAPH) as file:
        lines = file.readlines()[1:]
    if not lines:
        return {}
    # As bytes of a fixed width: reading a million users takes seconds
    cells = np.loadtxt(lines, "S24", delimiter=",", usecols=columns, comments=None, ndmin=2)
    places, *shares = cells.T
    result: dict[str, object] = {}
    for at in KEEP:
        by_role = dict[str, dict[str, float]]()
        for role, share in zip(ROLES, shares, strict=True):
            texts = share[places == at.encode()]
            values = np.sort(texts[texts != b""].astype(float))
            if values.size:
                worst = values[: math.ceil(values.size / 10)].mean()
                entry = {"worst-tenth": float(worst), "deviation": float(values.std())}
                by_role[role] = entry
        if by_role:
            result[at] = by_role
    return result


def _read(path: Path) -> Sequence[list[str]]:
    with reading(path, OutputError):
        return list(csv.reader(io.StringIO(read_text(path, MOST_GRAPH), newline="")))
