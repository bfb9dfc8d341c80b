"""Graphs in tables (CSV) and node-link JSON: an entry for each node and for each edge.

All have the same columns for a node: its name, label and split, perhaps its client and its
identity; any other column is a feature, and must hold numbers. No code in such files is executed.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from flower_graph.data.gaps import NO_GAPS, Gaps
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.names import EDGES, NODES, table_in
from flower_graph.data.sources.nodes import (
    CLIENT,
    IDENTITY,
    LABEL,
    NAMES,
    OWN,
    SPLIT,
    SPLITS,
    Nodes,
    roles_of,
)
from flower_graph.data.values import BLANK, advice_of, number_of, word_of
from flower_graph.errors import DataError
from flower_graph.storage.reading import (
    MOST_GRAPH,
    open_text,
    parse_json,
    read_bytes,
    reading,
)

MOST_ROW = 1 << 24  # characters of a row of a table
# Entries of all nodes with what is missing: at most so many, or so many times those that are there
MOST_FILLED, SPARSEST = 1 << 22, 32
ENDS, ENDS_OF_R, WEIGHT = ("source", "target"), ("from", "to"), "weight"
_QUOTED, _INDEX = re.compile(r'"[^"]*"'), re.compile(r"Unnamed: \d+")


class Edges:
    """The edges of a graph, as they are read one after another."""

    def __init__(self, nodes: Nodes, path: Path, unit: str, columns: Sequence[str]) -> None:
        nodes.check()
        self.nodes, self.path, self.unit = nodes, path, unit
        self.ends = (array("q"), array("q"))
        self.weights = array("d")  # of each edge; NaN where it has none
        self.without: int | None = None  # place of the first edge without a weight
        gaps, lower = nodes.gaps, {key.lower(): key for key in reversed(columns)}
        wanted = gaps.weight or WEIGHT
        self.weight = wanted if wanted in columns else lower.get(wanted.lower())
        if gaps.weight is not None and self.weight is None:
            raise DataError(
                f"file {path}: data.weight = {wanted!r}: edges have no such column, but "
                f"{', '.join(columns) or 'no other'}"
            )
        self.unused = [key for key in columns if key != self.weight]

    def add(self, place: int, ends: Sequence[object], weight: object = None) -> None:
        for key, end, found in zip(ENDS, ends, self.ends, strict=True):
            if isinstance(end, str) and end in self.nodes.places:  # as most are written
                found.append(self.nodes.places[end])
                continue
            name = self._word(place, key, end)
            if name is None or name not in self.nodes.places:
                problem = "is empty" if name is None else f"{name!r:.40} is no node"
                raise self._wrong(
                    place,
                    f"{key}: {problem}; it must be one of the {len(self.nodes.places)} names of "
                    "nodes",
                )
            found.append(self.nodes.places[name])
        number = number_of(weight, comma=self.nodes.gaps.has_comma)
        if number is None:
            advice = advice_of(weight, comma=self.nodes.gaps.has_comma)
            advice = advice or "name the column of weights by data.weight, or rename this one"
            raise self._wrong(place, f"{self.weight}: {weight!r:.40} is no number: {advice}")
        if math.isnan(number) and self.without is None:
            self.without = place
        self.weights.append(number)

    def weights_of(self) -> Tensor | None:
        weights = torch.tensor(self.weights)
        if bool(weights.isnan().all()):
            return None
        if self.without is not None:
            raise self._wrong(self.without, f"{self.weight}: is empty, and other edges have one")
        return weights

    def _word(self, place: int, key: str, value: object) -> str | None:
        try:
            return word_of(value, comma=self.nodes.gaps.has_comma)
        except DataError as error:
            raise self._wrong(place, f"{key}: {error}") from error

    def _wrong(self, place: int, why: str) -> DataError:
        return DataError(f"file {self.path}, {self.unit} {place}: {why}")


def graph_of(nodes: Nodes, edges: Edges) -> dict[str, object]:
    """Return nodes and edges as the entries of a saved graph, unchecked."""
    own = nodes.own
    pairs = [torch.tensor(end, dtype=torch.int64) for end in edges.ends]
    x, columns = nodes.x()
    values: dict[str, object] = {"x": x, "edge_index": torch.stack(pairs), "y": own[LABEL]}
    if columns is not None:
        values["columns"] = columns
    if (weight := edges.weights_of()) is not None:
        values["edge_weight"] = weight
    if any(own[SPLIT]):
        for part, split in zip(PARTS, SPLITS, strict=True):
            values[part] = torch.tensor([one == split for one in own[SPLIT]])
    values["names"] = tuple(nodes.places)
    for key in (CLIENT, IDENTITY):
        if any(own[key]):
            values[key] = own[key]
    unused = f"{', '.join(sorted(edges.unused))} of the edges not used"
    if notes := [*nodes.notes, *[unused] * bool(edges.unused)]:
        values["notes"] = tuple(notes)
    return values


def read_tables(folder: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read ``nodes.csv`` and ``edges.csv`` of a folder."""
    path = table_in(folder, NODES)
    with _table(path) as (header, rows):
        _check_twice(path, header)
        roles = roles_of(path, header, gaps, needs_labels=needs_labels)
        if len(roles.names) != 1:
            present = " and ".join(roles.names) or "neither"
            raise DataError(
                f"file {path}: one column must name the nodes, {' or '.join(NAMES[:2])}; {present} "
                f"there among {', '.join(header)}"
            )
        name, *others = (header.index(key) for key in (roles.names[0], *roles.features))
        own = [header.index(roles.own[key]) if key in roles.own else None for key in OWN]
        nodes = Nodes(path, "line", roles.features, needs_labels, gaps, roles.notes)
        for line, row in rows:
            given = [None if column is None else row[column] for column in own]
            nodes.add(line, row[name], given, [row[column] for column in others])
    path = table_in(folder, EDGES)
    if not path.is_file():
        raise DataError(
            f"file {path}: there is no such file; a graph in tables has its edges there, with the "
            f"columns {' and '.join(ENDS)} (of a graph without edges, these alone)"
        )
    with _table(path) as (header, rows):
        lower = [key.lower() for key in header]
        ends = next((pair for pair in (ENDS, ENDS_OF_R) if {*pair} <= {*lower}), ENDS)
        if missing := [key for key in ends if key not in lower]:
            raise DataError(
                f"file {path}, line 1: no column {missing[0]}; there are {', '.join(header)}"
            )
        source, target = (lower.index(key) for key in ends)
        besides = [key for at, key in enumerate(header) if at not in (source, target)]
        edges = Edges(nodes, path, "line", besides)
        weight = None if edges.weight is None else header.index(edges.weight)
        for line, row in rows:
            edges.add(line, (row[source], row[target]), None if weight is None else row[weight])
    return graph_of(nodes, edges)


def names_clients(folder: Path) -> bool:
    """Return whether tables have a column for the client, from their header alone."""
    with _table(table_in(folder, NODES)) as (header, _):
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
    given = [one for key in ("links", "edges") if isinstance(one := listed.get(key), list)]
    links = max(given, key=len, default=None)
    if not isinstance(listed.get("nodes"), list) or links is None:
        raise DataError(
            f"file {path}: must be a table with the lists `nodes` and `links` (or `edges`), as "
            "networkx.node_link_data gives it"
        )
    if all(given) and len(given) > 1 and given[0] != given[1]:
        raise DataError(f"file {path}: has `links` and `edges`, which differ: leave one out")
    for kind, entries in (("node", listed["nodes"]), ("edge", links)):
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise DataError(f"file {path}, {kind} {index}: {entry!r:.40} is no table")
    ids = []
    for entry in listed["nodes"]:
        key = next((one for one in entry if one.lower() == "id"), None)
        ids.append(entry.get("name") if key is None else entry.pop(key))
    return of_entries(path, ids, listed["nodes"], links, needs_labels, gaps)


def of_entries(
    path: Path,
    ids: Sequence[object],
    given: Sequence[Mapping[str, object]],
    links: Sequence[Mapping[str, object]],
    needs_labels: bool,
    gaps: Gaps,
    program: str = "",
) -> dict[str, object]:
    """Make a graph from named entries and their attributes."""
    keys = dict.fromkeys(key for entry in given for key in entry)
    roles = roles_of(path, [*keys], gaps, needs_labels=needs_labels, program=program)
    columns, several = list[str](), dict[str, int]()  # a list of numbers is several features
    for key in roles.features:
        value = next((one for entry in given if (one := entry.get(key)) is not None), None)
        if isinstance(value, list):
            several[key] = len(value)
        columns += [f"{key}[{i}]" for i in range(len(value))] if isinstance(value, list) else [key]
    most = max(MOST_FILLED, SPARSEST * sum(map(len, given)))
    if len(columns) * len(given) > most:
        raise DataError(
            f"file {path}: {len(columns):,} attributes at {len(given):,} nodes, of which few have "
            f"each; with what is missing these are more than {most:,} entries"
        )
    nodes = Nodes(path, "node", columns, needs_labels, gaps, roles.notes)
    own = [roles.own.get(key) for key in OWN]
    for index, (name, entry) in enumerate(zip(ids, given, strict=True)):
        flat = [one for key in roles.features for one in _listed(entry.get(key), several.get(key))]
        nodes.add(index, name, [None if key is None else entry.get(key) for key in own], flat)
    others = dict.fromkeys(key for one in links for key in one if key not in ENDS)
    edges = Edges(nodes, path, "edge", [*others])
    edges.unused = [key for key in edges.unused if key not in ("key", "id")]
    for index, entry in enumerate(links):
        weight = None if edges.weight is None else entry.get(edges.weight)
        edges.add(index, [entry.get(key) for key in ENDS], weight)
    graph = graph_of(nodes, edges)
    for key in roles.names[:1]:  # igraph numbers nodes, and has their names besides
        graph["names"] = tuple(
            _named(nodes, index, key, entry.get(key)) for index, entry in enumerate(given)
        )
    return graph


def _named(nodes: Nodes, index: int, key: str, given: object) -> str:
    if (name := nodes.word(index, key, given)) is None:
        raise nodes.wrong(index, f"{key}: is empty, and other nodes have one")
    return name


def _listed(value: object, several: int | None) -> Sequence[object]:
    """Return the numbers of an entry; if it is empty, as many missing ones as others have."""
    if isinstance(value, list):
        return value
    return [None] * several if value is None and several is not None else [value]


def _check_twice(path: Path, header: Sequence[str]) -> None:
    lower = [key.lower() for key in header]
    if twice := [key for index, key in enumerate(lower) if key in lower[:index]]:
        raise DataError(f"file {path}: two columns are called {twice[0]!r}; rename one")


@contextmanager
def _table(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Open a table: its header, and its rows with their line numbers."""
    with readable(path), open_text(path, MOST_GRAPH, "utf-8-sig") as stream:
        lines = _Lines(stream)
        outside = _QUOTED.sub("", lines.first)
        reader = csv.reader(lines, delimiter=max(",;\t", key=outside.count), strict=True)
        try:
            header = [key.strip(BLANK) for key in next(reader, [])]
            while header and not header[-1]:  # a comma ends the line
                header.pop()
            if not header:
                raise DataError(f"file {path}: is empty; its first line must name the columns")
            for key in header:
                if not key or _INDEX.fullmatch(key):
                    raise DataError(
                        f"file {path}, line 1: a column is called {key!r}, as the row numbers of a "
                        "data frame: save it without them, in pandas by to_csv(…, index=False), in "
                        "R by row.names = FALSE"
                    )
            yield header, _rows(path, lines, reader, len(header))
        except csv.Error as error:
            where = f"file {path}, line {reader.line_num}"
            raise DataError(f"{where}: is cut short or damaged ({error})") from error


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.first = stream.readline(MOST_ROW)
        self.used, self._next = 0, self.first

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line, self._next = self._next, ""
        line = line or self._stream.readline(MOST_ROW)
        self.used += len(line)  # since the row began
        if self.used >= MOST_ROW:
            raise csv.Error(f"a row of more than {MOST_ROW:,} characters")
        if not line:
            raise StopIteration
        return line


def _rows(path: Path, lines: _Lines, reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    for row in reader:
        lines.used = 0
        if not any(cell.strip(BLANK) for cell in row):
            continue
        if not any(row[width:]):  # commas that end the line
            row = row[:width]
        if len(row) != width:
            why = "the line is cut short, or a comma needs quotes"
            if len(row) == width + 1:
                why = "a comma needs quotes, or R has written row.names, which line 1 does not name"
            raise DataError(
                f"file {path}, line {reader.line_num}: {len(row)} cells, but line 1 names {width} "
                f"columns; {why}"
            )
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
