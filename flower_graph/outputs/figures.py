"""Clients' measurements, round by round; the tables made from them, and how clients differ."""

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.config.common import KEEP
from flower_graph.config.foreign import IN_RUN
from flower_graph.errors import OutputError
from flower_graph.outputs.files import write_table
from flower_graph.storage.reading import MOST_GRAPH, MOST_TENSORS, open_regular, read_text, reading
from flower_graph.storage.writing import append, replaced
from flower_graph.wire.keys import ROLES

CLIENTS, CURVES = "clients.csv", "curves.csv"
MOST_COLUMNS = 1000  # of a table that is read
SHARES = [f"{role}-accuracy" for role in ROLES]
MEASURED = ("nodes", "loss", *SHARES)
BYTES = ("bytes-up", "bytes-down")
HEAD = ("client", "at", "round", *MEASURED, "rounds-measured", *BYTES)
ROW = np.dtype(
    [(name, "<i8") for name in ("round", "client", "nodes")]
    + [(name, "<f8") for name in ("loss", *SHARES, *BYTES)]
)
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
        columns = [server_round, clients, nodes, loss, *shares.T, *traffic]
        for name, values in zip(ROW.names or (), columns, strict=True):
            rows[name] = values
        with append(self._path, 0o600) as file:
            os.fchmod(file.fileno(), 0o600)
            rows.tofile(file)

    def read(self, last: int | None = None) -> Rows:
        """Return the rows up to a round, by round and client; ``OutputError`` if it is damaged."""
        if not self._path.exists():
            return np.zeros(0, ROW)
        with reading(self._path, OutputError), open_regular(self._path, MOST_TENSORS) as stream:
            # The process may have died while it wrote a row
            whole = os.fstat(stream.fileno()).st_size // ROW.itemsize
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
    import pandas as pd

    table = pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)
    each = table.groupby("client")
    whole = {name: each[name].transform("sum").round().astype(int) for name in BYTES}
    whole["rounds-measured"] = each["round"].transform("size")
    known = table.assign(**whole)
    ends = pd.concat(known[table["round"] == number].assign(at=name) for name, number in at.items())
    write_table(folder / CLIENTS, ends.sort_values("client", kind="stable")[[*HEAD]])
    if every:
        chosen = (table["round"] % every == 0) | (table["round"] == table["round"].max())
        write_table(folder / CURVES, table.loc[chosen, ["round", "client", *MEASURED]])


def merge_clients(out: Path) -> dict[str, object]:
    """Join the tables of a simulation's clients; return how clients differ."""
    import pandas as pd

    for name, order in ((CLIENTS, ["client"]), (CURVES, ["round", "client"])):
        if files := sorted((out / IN_RUN).glob(f"*/{name}")):
            with reading(out / IN_RUN, OutputError, f"a client's {name} is no such table"):
                table = pd.concat([read_table(file, order) for file in files])
                whole = table.sort_values(order, key=lambda cells: cells.astype(int), kind="stable")
            write_table(out / name, whole)
    return spread(out / CLIENTS)


def read_table(path: Path, columns: Sequence[str]) -> Any:  # a data frame
    """Read a table of clients as text; ``OutputError`` if it lacks a column, or is damaged."""
    import pandas as pd

    with reading(path, OutputError, "no such table"):
        text = read_text(path, MOST_GRAPH)
        # pandas makes objects for each column of the first line, which may be millions
        if (width := text.partition("\n")[0].count(",") + 1) > MOST_COLUMNS:
            raise ValueError(f"{width} columns, at most {MOST_COLUMNS} are read")
        table = pd.read_csv(
            io.StringIO(text), dtype=str, na_filter=False, quoting=csv.QUOTE_NONE
        )  # no cell of such a table is quoted; a quote may hide millions of lines in a cell
        table[[*columns]]
        return table


def spread(path: Path) -> dict[str, object]:
    """Return how much the clients of a ``clients.csv`` differ in accuracy.

    By ``last`` and ``best`` and by role: ``worst-tenth``, the mean accuracy of the worst tenth of
    the clients that have such nodes, at least one; ``deviation``, the standard deviation.
    ``OutputError`` if the file is no such table.
    """
    result = dict[str, dict[str, dict[str, float]]]()
    if not path.exists():
        return {}
    table = read_table(path, ["at", *SHARES])
    for at in KEEP:
        for role, name in zip(ROLES, SHARES, strict=True):
            texts = table.loc[(table["at"] == at) & (table[name] != ""), name]
            with reading(path, OutputError):
                values = np.sort(texts.to_numpy(float))
            if values.size:
                worst = float(values[: math.ceil(values.size / 10)].mean())
                entry = {"worst-tenth": worst, "deviation": float(values.std())}
                result.setdefault(at, {})[role] = entry
    return dict(result)
