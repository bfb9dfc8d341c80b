"""Clients' measurements, round by round; the tables made from them, and how clients differ."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flower_graph.config.common import KEEP
from flower_graph.errors import OutputError
from flower_graph.outputs.files import write_lines
from flower_graph.storage.reading import (
    MOST_GRAPH,
    MOST_TENSORS,
    open_regular,
    open_text,
    read_text,
    reading,
)
from flower_graph.storage.writing import append, replaced
from flower_graph.wire.keys import ROLES

CLIENTS, CURVES = "clients.csv", "curves.csv"
IN_RUN = "clients"  # in a simulation's output folder: the outputs of each SuperNode
FIGURES = ("loss", *ROLES)
ROW = np.dtype(
    [("round", "<i8"), ("client", "<i8"), ("nodes", "<i8")]
    + [(name, "<f8") for name in (*FIGURES, "up", "down")]
)
LOCAL = ("nodes", *FIGURES)
MEASURED = ("nodes", "loss", "train-accuracy", "val-accuracy", "test-accuracy")
HEAD = ("client", "at", "round", *MEASURED, "rounds-measured", "bytes-up", "bytes-down")
Rows = NDArray[np.void]  # of ROW


class FigureLog:
    """A file of clients' rows to which rows are appended; of two rows the later counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self,
        server_round: int,
        clients: object,
        *,
        loss: object,
        accuracy: object,
        nodes: object,
        traffic: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Append a round's figures; ``traffic``: each client's bytes since its last row."""
        shares = np.asarray(accuracy, np.float64)
        rows = np.zeros(len(shares), ROW)
        rows["round"], rows["client"], rows["nodes"] = server_round, clients, nodes
        rows["loss"], rows["up"], rows["down"] = loss, *traffic
        for index, name in enumerate(FIGURES[1:]):
            rows[name] = shares[:, index]
        with append(self._path, 0o600) as file:
            os.fchmod(file.fileno(), 0o600)
            rows.tofile(file)

    def read(self, last: int | None = None) -> Rows:
        """Return the rows up to a round, by round and client; ``OutputError`` if it is damaged."""
        if not self._path.exists():
            return np.zeros(0, ROW)
        with reading(self._path, OutputError), open_regular(self._path, MOST_TENSORS) as stream:
            whole = (
                os.fstat(stream.fileno()).st_size // ROW.itemsize
            )  # the process may have died while it wrote a row
            rows = np.fromfile(stream, ROW, whole)
        rows = rows if last is None else rows[rows["round"] <= last]
        backwards = rows[::-1]
        _, first = np.unique(backwards[["round", "client"]], return_index=True)
        return backwards[first]

    def cut(self, last: int) -> None:
        """Remove the rows after a round: the run resumes there, or starts anew."""
        if self._path.exists():
            rows = self.read(last)
            with replaced(self._path) as stream:
                rows.tofile(stream)


def write_figures(folder: Path, rows: Rows, at: dict[str, int], every: int) -> None:
    """Write ``clients.csv``, and with `every` ``curves.csv``; ``at``: rounds by their names."""
    write_lines(folder / CLIENTS, HEAD, _lines(rows, at))
    if every:
        chosen = rows[(rows["round"] % every == 0) | (rows["round"] == rows["round"].max())]
        # By round and client: columns of one kind are read at once
        columns = (map(_text, chosen[name].tolist()) for name in ("round", "client", *LOCAL))
        write_lines(folder / CURVES, ("round", "client", *MEASURED), zip(*columns, strict=True))


def _lines(rows: Rows, at: dict[str, int]) -> list[list[str]]:
    _, row_of, count = np.unique(rows["client"], return_inverse=True, return_counts=True)
    up, down = (np.bincount(row_of, rows[way]).round().astype(int) for way in ("up", "down"))
    lines = []
    for row in np.flatnonzero(np.isin(rows["round"], list(at.values()))).tolist():
        one, here = rows[row], row_of[row]
        figures = [_text(one[name].item()) for name in LOCAL]
        whole = [str(column[here]) for column in (count, up, down)]
        for name in (name for name, number in at.items() if number == one["round"]):
            ends = str(one["client"]), name, str(one["round"])
            lines.append([*ends, *figures, *whole])
    order = list(at)
    return sorted(lines, key=lambda line: (int(line[0]), order.index(line[1])))


def _text(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return repr(value) if math.isfinite(value) else ""


# A simulation's clients ---------------------------------------------------------------------------


def merge_clients(out: Path) -> dict[str, object]:
    """Join the tables of a simulation's clients; return how clients differ."""
    folders = sorted((out / IN_RUN).glob("*/"))
    for name in (CLIENTS, CURVES):
        places, lines, head = [0, 1] if name == CURVES else [0], list[list[str]](), None
        for path in [folder / name for folder in folders if (folder / name).is_file()]:
            with reading(path, OutputError, f"a client's {name} is no such table"):
                head, *rows = csv.reader(read_text(path, MOST_GRAPH).splitlines())
                lines += rows
        with reading(out / IN_RUN, OutputError, f"a client's {name} is no such table"):
            lines.sort(key=lambda line: [int(line[column]) for column in places])
        if head is not None:
            write_lines(out / name, head, lines)
    return spread(out / CLIENTS)


def spread(path: Path) -> dict[str, object]:
    """Return how much the clients of a ``clients.csv`` differ in accuracy.

    By ``last`` and ``best`` and by role: ``worst-tenth``, the mean accuracy of the worst tenth of
    the clients that have such nodes, at least one; ``deviation``, the standard deviation.
    ``OutputError`` if the file is no such table.
    """
    columns = [HEAD.index(name) for name in ("at", *(f"{role}-accuracy" for role in ROLES))]
    result = dict[str, dict[str, dict[str, float]]]()
    if not path.exists():
        return {}
    with reading(path, OutputError):
        with open_text(path, MOST_GRAPH) as file:
            lines = file.readlines()[1:]
        if not lines:
            return {}
        # As bytes of a fixed width: reading a million users takes seconds
        cells = np.loadtxt(lines, "S24", delimiter=",", usecols=columns, comments=None, ndmin=2)
        places, *shares = cells.T
        for at in KEEP:
            for role, share in zip(ROLES, shares, strict=True):
                texts = share[places == at.encode()]
                values = np.sort(texts[texts != b""].astype(float))
                if values.size:
                    worst = values[: math.ceil(values.size / 10)].mean()
                    entry = {"worst-tenth": float(worst), "deviation": float(values.std())}
                    result.setdefault(at, {})[role] = entry
    return dict(result)
