"""Graphs in tables (CSV) and node-link JSON: an entry for each node and for each edge.

All have the same columns for a node: its name, label and split, perhaps its client and its
identity; any other column is a feature, and must hold numbers. Nothing in such
files is executed.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from flower_graph.config.common import MEAN
from flower_graph.data.gaps import NO_GAPS, Gaps
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.names import EDGES, NODES
from flower_graph.data.sources.nodes import (
    CLIENT,
    IDENTITY,
    LABEL,
    NAMES,
    OWN,
    SPLIT,
    SPLITS,
    Nodes,
    text_of,
)
from flower_graph.errors import DataError
from flower_graph.storage.reading import (
    MOST_GRAPH,
    open_text,
    parse_json,
    read_bytes,
    reading,
)

MOST_ROW = 1 << 24  # characters of a row of a table
ENDS, WEIGHT = ("source", "target"), "weight"


class Edges:
    """The edges of a graph, as they are read one after another."""

    def __init__(self, nodes: Nodes, path: Path, unit: str) -> None:
        nodes.check()
        self.nodes, self.path, self.unit = nodes, path, unit
        self.ends = (array("q"), array("q"))
        self.weights: list[object] = []  # of each edge; None where it has none
        self.unused: set[str] = set()

    def add(self, place: int, ends: Sequence[object], weight: object = None) -> None:
        """Add an edge."""
        self.weights.append(weight)
        for key, end, found in zip(ENDS, ends, self.ends, strict=True):
            try:
                found.append(self.nodes.places[text_of(end) or ""])
            except KeyError:
                problem = "is empty" if text_of(end) is None else f"{end!r:.40} is no node"
                where = f"{self.path}, {self.unit} {place}"
                raise DataError(
                    f"file {where}: {key}: {problem}; it must be one of the "
                    f"{len(self.nodes.places)} names of nodes"
                ) from None

    def weight(self) -> Tensor | None:
        """Return the weights ``[e]``, if all edges have a number; else they are not used."""
        try:
            weights = [float(text_of(one) or "none") for one in self.weights]
        except ValueError:
            return None
        self.unused.discard(WEIGHT)
        return torch.tensor(weights) if weights else None


def graph_of(nodes: Nodes, edges: Edges) -> dict[str, object]:
    """Return nodes and edges as the entries of a saved graph, unchecked."""
    own = nodes.own
    pairs = [torch.tensor(end, dtype=torch.int64) for end in edges.ends]
    x, columns = nodes.x()
    values: dict[str, object] = {"x": x, "edge_index": torch.stack(pairs), "y": own[LABEL]}
    if columns is not None:
        values["columns"] = columns
    if (weight := edges.weight()) is not None:
        values["edge_weight"] = weight
    if any(own[SPLIT]):
        for part, split in zip(PARTS, SPLITS, strict=True):
            values[part] = torch.tensor([one == split for one in own[SPLIT]])
    values["names"] = tuple(nodes.places)
    for key in (CLIENT, IDENTITY):
        if any(own[key]):
            values[key] = own[key]
    if edges.unused:
        values["notes"] = (f"{', '.join(sorted(edges.unused))} of the edges not used",)
    return values


def read_tables(folder: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read ``nodes.csv`` and ``edges.csv`` of a folder."""
    path = folder / NODES
    with _table(path) as (header, rows):
        name, own, others = _columns(path, header)
        nodes = Nodes(path, "line", [header[column] for column in others], needs_labels, gaps)
        for line, row in rows:
            given = [None if column is None else row[column] for column in own]
            nodes.add(line, row[name], given, [row[column] for column in others])
    path = folder / EDGES
    if not path.is_file():
        raise DataError(
            f"file {path}: there is no such file; a graph in tables has its edges there, with the "
            f"columns {' and '.join(ENDS)} (of a graph without edges, these alone)"
        )
    with _table(path) as (header, rows):
        lower = [key.lower() for key in header]
        if missing := [key for key in ENDS if key not in lower]:
            raise DataError(
                f"file {path}, line 1: no column {missing[0]}; there are {', '.join(header)}"
            )
        source, target = (lower.index(key) for key in ENDS)
        edges = Edges(nodes, path, "line")
        edges.unused.update(key for key in header if key.lower() not in ENDS)
        weight = header.index(WEIGHT) if WEIGHT in header else None
        for line, row in rows:
            edges.add(line, (row[source], row[target]), None if weight is None else row[weight])
    return graph_of(nodes, edges)


def names_clients(folder: Path) -> bool:
    """Return whether tables have a column for the client, from their header alone."""
    with _table(folder / NODES) as (header, _):
        return CLIENT in [key.lower() for key in header]


def read_node_link(
    path: Path, needs_labels: bool = True, gaps: Gaps = NO_GAPS
) -> dict[str, object]:
    """Read the JSON of NetworkX's ``node_link_data``."""
    with readable(path):
        data = read_bytes(path, MOST_GRAPH)
        with reading(f"file {path}", DataError, "is cut short, damaged or no JSON; save it again"):
            content = parse_json(data)
    listed = content if isinstance(content, dict) else {}
    links = listed.get("links", listed.get("edges"))
    if not isinstance(listed.get("nodes"), list) or not isinstance(links, list):
        raise DataError(
            f"file {path}: must be a table with the lists `nodes` and `links` (or `edges`), as "
            "networkx.node_link_data gives it"
        )
    for kind, entries in (("node", listed["nodes"]), ("edge", links)):
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise DataError(f"file {path}, {kind} {index}: {entry!r:.40} is no table")
    return of_entries(path, listed["nodes"], links, needs_labels, gaps)


def of_entries(
    path: Path,
    given: Sequence[Mapping[str, object]],
    links: Sequence[Mapping[str, object]],
    needs_labels: bool,
    gaps: Gaps,
) -> dict[str, object]:
    """Make a graph from named entries and their attributes."""
    given = [_with_own_keys(entry) for entry in given]
    first = given[0] if given else {}
    features = _features_of(given if gaps.missing == MEAN else given[:1])
    columns: list[str] = []
    for key, value in features.items():
        # A list of numbers is several features.
        several = range(len(value)) if isinstance(value, list) else None
        columns += [key] if several is None else [f"{key}[{i}]" for i in several]
    nodes = Nodes(path, "node", columns, needs_labels, gaps)
    for index, entry in enumerate(given):
        if more := sorted(entry.keys() - {*features, *NAMES, *OWN}):
            raise nodes.wrong(index, f"{more[0]}: not all nodes have it, as a feature must be")
        flat = [one for key in features for one in _listed(entry.get(key), features[key])]
        nodes.add(index, entry.get("id"), [entry.get(key) for key in OWN], flat)
    edges = Edges(nodes, path, "edge")
    for index, entry in enumerate(links):
        edges.add(index, [entry.get(key) for key in ENDS], entry.get(WEIGHT))
        edges.unused.update(entry.keys() - {*ENDS, "key", "id"})
    graph = graph_of(nodes, edges)
    if "name" in first:  # igraph numbers nodes, and has their names besides
        graph["names"] = tuple(str(entry.get("name")) for entry in given)
    return graph


def _features_of(entries: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the features that any of these nodes has, each with the first value that is one."""
    features: dict[str, object] = {}
    for entry in entries:
        for key, value in entry.items():
            if key not in (*NAMES, *OWN) and features.get(key) is None:
                features[key] = value
    return features


def _listed(value: object, example: object) -> Sequence[object]:
    """Return the numbers of an entry; as many of nothing as another node has numbers."""
    if isinstance(value, list):
        return value
    return [None] * len(example) if value is None and isinstance(example, list) else [value]


def _with_own_keys(entry: Mapping[str, object]) -> dict[str, object]:
    """Write the keys that are used here in lower case."""
    lower = {str(key): str(key).lower() for key in entry}
    return {
        (lower[key] if lower[key] in (*NAMES, *OWN) else key): value
        for key, value in ((str(key), value) for key, value in entry.items())
    }


def _columns(path: Path, header: Sequence[str]) -> tuple[int, list[int | None], list[int]]:
    """Return the columns of names, of node attributes, and of features."""
    lower = [str(key).lower() for key in header]
    if twice := [key for index, key in enumerate(lower) if key in lower[:index]]:
        raise DataError(f"file {path}: two columns are called {twice[0]!r}; rename one")
    named = [key for key in NAMES if key in lower]
    if len(named) != 1:
        present = " and ".join(named) or "neither"
        raise DataError(
            f"file {path}: one column must name the nodes, {' or '.join(NAMES)}; {present} there "
            f"among {', '.join(map(str, header))}"
        )
    own = [lower.index(key) if key in lower else None for key in OWN]
    taken = {lower.index(named[0]), *own}
    return lower.index(named[0]), own, [at for at in range(len(lower)) if at not in taken]


@contextmanager
def _table(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Open a table: its header, and its rows with their line numbers."""
    with readable(path), open_text(path, MOST_GRAPH, "utf-8-sig") as stream:
        lines = _Lines(stream)
        reader = csv.reader(lines, delimiter=max(",;\t", key=lines.first.count), strict=True)
        try:
            header = [key.strip() for key in next(reader, [])]
            if not any(header):
                raise DataError(f"file {path}: is empty; its first line must name the columns")
            yield header, _rows(path, lines, reader, len(header))
        except csv.Error as error:
            where = f"file {path}, line {reader.line_num}"
            raise DataError(f"{where}: is cut short or damaged ({error})") from error


class _Lines:
    """The lines of a table; ``csv.Error`` for a row that is too long."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.first = stream.readline(MOST_ROW)
        self.used, self._next = 0, self.first

    def __iter__(self) -> _Lines:
        """Return this iterator."""
        return self

    def __next__(self) -> str:
        """Return the next line."""
        line, self._next = self._next, ""
        line = line or self._stream.readline(MOST_ROW)
        self.used += len(line)  # since the row began
        if self.used >= MOST_ROW:
            raise csv.Error(f"a row of more than {MOST_ROW:,} characters")
        if not line:
            raise StopIteration
        return line


def _rows(path: Path, lines: _Lines, reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table that are not empty, each with its line number."""
    for row in reader:
        lines.used = 0
        if row and len(row) != width:
            raise DataError(
                f"file {path}, line {reader.line_num}: {len(row)} cells, but line 1 names {width} "
                "columns; the line is cut short, or a comma needs quotes"
            )
        if row:
            yield reader.line_num, row


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into one that says why, in one line."""
    try:
        if path.is_file() and not path.stat().st_size:
            raise DataError(f"file {path}: is empty: save the graph again")
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"file {path}: is no UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"file {path}: cannot be read ({error.strerror or error})") from error
