"""Graphs in tables (CSV), node-link JSON and GraphML: an entry for each node and for each edge.

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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from xml.etree import ElementTree
from xml.parsers import expat

import torch
from torch import Tensor

from flower_graph.config.common import MEAN, ONE_HOT
from flower_graph.data.description import BLANK, advice_of, if_nan, number_of, saying, word_of
from flower_graph.data.features import NO_GAPS, Columns, Gaps, encode_words
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.names import EDGES, NODES, table_in
from flower_graph.errors import DataError
from flower_graph.storage.reading import (
    MOST_GRAPH,
    open_regular,
    open_text,
    parse_json,
    read_bytes,
    reading,
)
from flower_graph.wire.keys import ROLES

LABEL, SPLIT, CLIENT, IDENTITY = OWN = ("label", "split", "client", "identity")
# Columns that name a node; the last is igraph's, of a graph that NetworkX made
NAMES = ("name", "id", "_nx_name")
INDEX = "_igraph_index"  # a number of no meaning
# Columns that are no features, with the names that tables use for them
ELSEWHERE = {"n_id": IDENTITY, "identities": IDENTITY, **dict.fromkeys(PARTS, SPLIT)}
# Programs that draw graphs: columns by which their files are known, and columns of the drawing
_PLACES = {"r", "g", "b", "x", "y", "size"}
GEPHI, YED = "Gephi", "yEd"
DRAWN = (
    (GEPHI, _PLACES, _PLACES | {"z"}),
    (GEPHI, {"viz"}, {"viz"}),  # of its GEXF, as NetworkX reads it
    (GEPHI, {"label", "timeset"}, {"timeset"}),
)
MOST_ROW = 1 << 24  # characters of a row of a table
# Entries of all nodes with what is missing: at most so many, or so many times those that are there
MOST_FILLED, SPARSEST = 1 << 22, 32
ENDS, ENDS_OF_R, WEIGHT = ("source", "target"), ("from", "to"), "weight"
_QUOTED, _INDEX = re.compile(r'"[^"]*"'), re.compile(r"Unnamed: \d+")


class Roles(NamedTuple):
    """What each column of a graph's nodes is."""

    names: list[str]  # columns that name the nodes
    own: list[str | None]  # the column of each of ``OWN``, where there is one
    features: list[str]
    notes: list[str]


def roles_of(
    path: Path, columns: Sequence[str], gaps: Gaps, *, needs_labels: bool, program: str = ""
) -> Roles:
    """Tell what each column is; own ones in any case of letters."""
    lower = {key.lower(): key for key in reversed(columns)}
    own = {key: lower[key] for key in OWN if key in lower}
    out = {INDEX} & {*columns}
    for name, marks, drawn in DRAWN:
        if marks <= {*lower}:
            program = program or name
            out |= {lower[key] for key in drawn if key in lower}
    if program == YED:  # which writes them empty
        out |= {lower[key] for key in ("url", "description") if key in lower}
    if gaps.label is not None:
        chosen = gaps.label if gaps.label in columns else lower.get(gaps.label.lower())
        if chosen is None and needs_labels:
            there = ", ".join(columns)
            raise DataError(f"file {path}: data.label = {gaps.label!r}: must be one of {there}")
        own = {key: one for key, one in own.items() if one != chosen}
        out |= {own.pop(LABEL)} if LABEL in own else set()
        own |= {} if chosen is None else {LABEL: chosen}
    taken = {*own.values()}
    names = [lower[key] for key in NAMES if key in lower and lower[key] not in taken]
    others = [key for key in columns if key not in {*taken, *names, *out}]
    if program and gaps.label is None and needs_labels:
        there = f"data.label names the classes: {', '.join([*others, LABEL])}"
        raise DataError(f"file {path}: was saved by {program}, where {LABEL} is a caption: {there}")
    if elsewhere := [key for key in others if key in ELSEWHERE]:
        key = elsewhere[0]
        raise DataError(f"file {path}: {key} is no feature; name it {ELSEWHERE[key]}")
    left = ", ".join(sorted(out - taken))
    notes = [f"{left} of the nodes left out"] if left else []
    return Roles(names, [own.get(key) for key in OWN], others, notes)


class _Builder:
    """The graph of a file's entries, which are added one after another."""

    def __init__(
        self, path: Path, unit: str, columns: Sequence[str], gaps: Gaps, notes: Sequence[str]
    ) -> None:
        # `unit` is the word for an entry of the file: line, node or edge.
        self.path, self.unit, self.gaps = path, unit, gaps
        self.columns, self.notes = list(columns), list(notes)
        self.places: dict[str, int] = {}  # the number of each node, by its name
        self.rows = array("q")  # each node's place in the file
        self.own: dict[str, list[str | None]] = {key: [] for key in OWN}
        self.features = array("d")  # NaN where there is a word, or nothing
        self.words: list[dict[int, str]] = [{} for _ in columns]  # of each column, by row
        self.ends = (array("q"), array("q"))
        self.weights = array("d")  # of each edge; NaN where it has none
        self.without: int | None = None  # place of the first edge without a weight

    def wrong(self, place: int, why: str) -> DataError:
        return DataError(f"file {self.path}, {self.unit} {place}: {why}")

    def word(self, place: int, key: str, value: object) -> str | None:
        try:
            return word_of(value, comma=self.gaps.has_comma)
        except DataError as error:
            raise self.wrong(place, f"{key}: {error}") from error

    # Any: what ``float`` reads, or refuses
    def node(
        self, place: int, name: object, own: Sequence[object], features: Sequence[Any]
    ) -> None:
        """Add a node; `own` in the order of ``OWN``, with None for missing values."""
        name = self.word(place, "name", name)
        if name is None:
            raise self.wrong(place, "name: is empty; every node needs a name of its own")
        if name in self.places:
            first = self.rows[self.places[name]]
            raise self.wrong(place, f"name: {name!r} is there already, {self.unit} {first}")
        self.places[name] = len(self.places)
        self.rows.append(place)
        for key, value in zip(OWN, own, strict=True):
            self.own[key].append(self.word(place, key, value))
        split = self.own[SPLIT][-1]
        if split is not None and split not in ROLES:
            raise self.wrong(place, f"split: {split!r} must be {', '.join(ROLES)} or empty")
        if len(features) != len(self.columns):
            count, wanted = len(features), len(self.columns)
            raise self.wrong(place, f"{count} features, but the first node has {wanted}")
        try:  # all at once, as long as all are numbers by Python's own rule
            if self.gaps.has_comma:
                raise ValueError("a point is no decimal sign here")
            self.features.extend(array("d", map(float, features)))
        except (TypeError, ValueError, OverflowError):
            row = len(self.rows) - 1
            numbers = [self._feature(row, column, one) for column, one in enumerate(features)]
            self.features.extend(numbers)

    def _feature(self, row: int, column: int, given: Any) -> float:
        """Return a feature; NaN for a word or nothing, if these are allowed."""
        key, comma, place = self.columns[column], self.gaps.has_comma, self.rows[row]
        number = number_of(given, comma=comma)
        if number is not None and (not math.isnan(number) or self.gaps.missing == MEAN):
            return number
        if number is not None:
            why = f"is empty; a feature needs numbers, or data.missing={MEAN}"
        elif advice := advice_of(given, comma=comma):
            why = f"{given!r:.40} is no number: {advice}"
        elif isinstance(given, str) and self.gaps.categories == ONE_HOT:
            self.words[column][row] = word_of(given) or ""
            return math.nan
        else:
            remedy = f"leave {key} out, or set data.categories={ONE_HOT}, or data.label={key}"
            why = f"{given!r:.40} is no number: {remedy}"
        raise self.wrong(place, f"{key}: {why}")

    def begin_edges(
        self, path: Path, unit: str, columns: Sequence[str], *, needs_labels: bool
    ) -> str | None:
        """Finish the nodes; return the column of the edges' weights, if there is one."""
        if not self.places:
            raise DataError(f"file {self.path}: has no nodes")
        if needs_labels and not any(self.own[LABEL]):
            others = ", ".join(self.columns)
            raise DataError(
                f"file {self.path}: no {LABEL} at any node; data.label names it: {others}"
            )
        self.x = self._features()
        self.path, self.unit = path, unit
        lower, wanted = {key.lower(): key for key in reversed(columns)}, self.gaps.weight or WEIGHT
        self.weight = wanted if wanted in columns else lower.get(wanted.lower())
        if self.gaps.weight is not None and self.weight is None:
            there = ", ".join(columns)
            raise DataError(f"file {path}: data.weight = {wanted!r}: must be one of {there}")
        if unused := sorted({*columns} - {self.weight, "key", "id"}):
            self.notes.append(f"{', '.join(unused)} of the edges not used")
        return self.weight

    def edge(self, place: int, ends: Sequence[object], weight: object = None) -> None:
        for key, end, found in zip(ENDS, ends, self.ends, strict=True):
            # Most are written as names, before the rule for words
            is_name = isinstance(end, str) and end in self.places
            name = str(end) if is_name else self.word(place, key, end)
            if name is None or name not in self.places:
                raise self.wrong(place, f"{key}: {name or ''!r:.40} is no node")
            found.append(self.places[name])
        number = number_of(weight, comma=self.gaps.has_comma)
        if number is None:
            advice = advice_of(weight, comma=self.gaps.has_comma) or "data.weight names the column"
            raise self.wrong(place, f"{self.weight}: {weight!r:.40} is no number: {advice}")
        if math.isnan(number) and self.without is None:
            self.without = place
        self.weights.append(number)

    def graph(self) -> dict[str, object]:
        """Return nodes and edges as the entries of a saved graph, unchecked."""
        own, (x, columns) = self.own, self.x
        pairs = [torch.tensor(end, dtype=torch.int64) for end in self.ends]
        values: dict[str, object] = {"x": x, "edge_index": torch.stack(pairs), "y": own[LABEL]}
        if columns is not None:
            values["columns"] = columns
        weights = torch.tensor(self.weights)
        if not weights.isnan().all():
            if self.without is not None:
                raise self.wrong(self.without, f"{self.weight}: is empty, and others have one")
            values["edge_weight"] = weights
        if any(own[SPLIT]):
            for part, split in zip(PARTS, ROLES, strict=True):
                values[part] = torch.tensor([one == split for one in own[SPLIT]])
        values["names"] = tuple(self.places)
        values |= {key: own[key] for key in (CLIENT, IDENTITY) if any(own[key])}
        if self.notes:
            values["notes"] = tuple(self.notes)
        return values

    def _features(self) -> tuple[Tensor | None, Columns | None]:
        """Return the features, float64 ``[n, f]``, and their columns; None without any.

        Missing values are NaN until all nodes of a run are known.
        """
        if not self.columns:
            return None, None
        numbers = torch.frombuffer(self.features, dtype=torch.float64)
        numbers = numbers.reshape(-1, len(self.columns))
        self._check_numbers(numbers.float())
        parts, columns = list[Tensor](), list[tuple[str, str | None]]()
        for column, (key, words) in enumerate(zip(self.columns, self.words, strict=True)):
            if words:
                with saying(f"file {self.path}, {key}"):
                    encoded, known = encode_words(numbers[:, column], words)
                columns += [(key, word) for word in known]
            else:
                encoded = numbers[:, column : column + 1]
                columns.append((key, None))
            parts.append(encoded)
        x = torch.cat(parts, 1) if any(self.words) else numbers
        return x, Columns.from_json(columns)

    def _check_numbers(self, x: Tensor) -> None:
        """Refuse numbers that are not finite, and a column with words and numbers."""
        wrong = torch.isinf(x) if self.gaps.missing == MEAN else ~torch.isfinite(x)
        for column, words in enumerate(self.words):
            if words:
                wrong[list(words), column] = False
                if (numbers := ~torch.isnan(x[:, column])).any():
                    row, other = int(numbers.nonzero()[0]), next(iter(words))
                    word = f"{self.unit} {self.rows[other]} has {words[other]!r:.40}"
                    why = f"{self.columns[column]}: {x[row, column]:g} is a number, but {word}"
                    raise self.wrong(self.rows[row], why)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            value, key = self.features[row * x.size(1) + column], self.columns[column]
            raise self.wrong(self.rows[row], f"{key}: {value}: must be below 3e38{if_nan(value)}")


def read_tables(folder: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read ``nodes.csv`` and ``edges.csv`` of a folder."""
    path = table_in(folder, NODES)
    with _table(path) as (header, rows):
        lower = [key.lower() for key in header]
        if twice := [key for index, key in enumerate(lower) if key in lower[:index]]:
            raise DataError(f"file {path}: two columns are called {twice[0]!r}; rename one")
        roles = roles_of(path, header, gaps, needs_labels=needs_labels)
        if len(roles.names) != 1:
            wanted, found = " or ".join(NAMES[:2]), " and ".join(roles.names) or "neither"
            raise DataError(f"file {path}: one column must name the nodes, {wanted}: has {found}")
        name, *others = (header.index(key) for key in (roles.names[0], *roles.features))
        own = [None if key is None else header.index(key) for key in roles.own]
        graph = _Builder(path, "line", roles.features, gaps, roles.notes)
        for line, row in rows:
            given = [None if column is None else row[column] for column in own]
            graph.node(line, row[name], given, [row[column] for column in others])
    path = table_in(folder, EDGES)
    if not path.is_file():
        raise DataError(f"file {path}: there is no such file; its columns are {' and '.join(ENDS)}")
    with _table(path) as (header, rows):
        lower = [key.lower() for key in header]
        ends = next((pair for pair in (ENDS, ENDS_OF_R) if {*pair} <= {*lower}), ENDS)
        if missing := [key for key in ends if key not in lower]:
            there = ", ".join(header)
            raise DataError(f"file {path}, line 1: no column {missing[0]}; there are {there}")
        source, target = (lower.index(key) for key in ends)
        besides = [key for at, key in enumerate(header) if at not in (source, target)]
        key = graph.begin_edges(path, "line", besides, needs_labels=needs_labels)
        weight = None if key is None else header.index(key)
        for line, row in rows:
            graph.edge(line, (row[source], row[target]), None if weight is None else row[weight])
    return graph.graph()


def names_clients(folder: Path) -> bool:
    """Return whether tables have a column for the client, from their header alone."""
    with _table(table_in(folder, NODES)) as (header, _):
        return CLIENT in [key.lower() for key in header]


def read_node_link(
    path: Path, needs_labels: bool = True, gaps: Gaps = NO_GAPS
) -> dict[str, object]:
    """Read the JSON of NetworkX's ``node_link_data``."""
    content = parse_json(read_bytes(path, MOST_GRAPH))
    listed = content if isinstance(content, dict) else {}
    given = [one for key in ("links", "edges") if isinstance(one := listed.get(key), list)]
    links = max(given, key=len, default=None)
    if not isinstance(listed.get("nodes"), list) or links is None:
        raise DataError(f"file {path}: must be node-link JSON, with lists `nodes` and `links`")
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
    # A list of numbers is several features
    several = dict[str, int]()
    for key in roles.features:
        value = next((entry[key] for entry in given if entry.get(key) is not None), None)
        several |= {key: len(value)} if isinstance(value, list) else {}
    columns = [
        column
        for key in roles.features
        for column in ([f"{key}[{i}]" for i in range(several[key])] if key in several else [key])
    ]
    most = max(MOST_FILLED, SPARSEST * sum(map(len, given)))
    if len(columns) * len(given) > most:
        raise DataError(f"file {path}: {len(columns):,} attributes: more than {most:,} entries")
    graph = _Builder(path, "node", columns, gaps, roles.notes)
    for index, (name, entry) in enumerate(zip(ids, given, strict=True)):
        features = list[object]()
        for key in roles.features:
            value = entry.get(key)
            value = [None] * several[key] if value is None and key in several else value
            features += value if isinstance(value, list) else [value]
        own = [None if key is None else entry.get(key) for key in roles.own]
        graph.node(index, name, own, features)
    named = list[str | None]()
    if roles.names:  # igraph numbers nodes, and has their names besides
        key = roles.names[0]
        named = [graph.word(index, key, entry.get(key)) for index, entry in enumerate(given)]
        if None in named:
            raise graph.wrong(named.index(None), f"{key}: is empty, and other nodes have one")
    others = dict.fromkeys(key for one in links for key in one if key not in ENDS)
    weight = graph.begin_edges(path, "edge", [*others], needs_labels=needs_labels)
    for index, entry in enumerate(links):
        ends = [entry.get(key) for key in ENDS]
        graph.edge(index, ends, None if weight is None else entry.get(weight))
    return graph.graph() | ({"names": tuple(named)} if named else {})


@contextmanager
def _table(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Open a table: its header, and its rows with their line numbers."""
    what = f"file {path}"
    with reading(what, DataError), open_text(path, MOST_GRAPH, "utf-8-sig") as stream:
        used = [0]
        lines = _lines(path, stream, used)
        first = next(lines, "")
        delimiter = max(",;\t", key=_QUOTED.sub("", first).count)
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        try:
            header = [key.strip(BLANK) for key in next(reader, [])]
            while header and not header[-1]:  # a comma ends the line
                header.pop()
            if not header:
                raise DataError(f"file {path}: is empty; its first line must name the columns")
            for key in header:
                if not key or _INDEX.fullmatch(key):
                    remedy = "save it with index=False (pandas) or row.names = FALSE (R)"
                    raise DataError(f"file {path}, line 1: a column is called {key!r}: {remedy}")
            yield header, _rows(path, used, reader, len(header))
        except csv.Error as error:
            raise DataError(f"file {path}, line {reader.line_num}: is damaged ({error})") from error


def _lines(path: Path, stream: TextIO, used: list[int]) -> Iterator[str]:
    """Yield lines, and count the characters of a row; the reader of rows begins anew at 0."""
    number = 0
    while line := stream.readline(MOST_ROW):
        number, used[0] = number + 1, used[0] + len(line)
        if used[0] >= MOST_ROW:
            raise DataError(
                f"file {path}, line {number}: a row of more than {MOST_ROW:,} characters"
            )
        yield line


def _rows(path: Path, used: list[int], reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    for row in reader:
        used[0] = 0
        if not any(cell.strip(BLANK) for cell in row):
            continue
        if not any(row[width:]):  # commas that end the line
            row = row[:width]
        if len(row) != width:
            why = f"{len(row)} cells, line 1 {width}; a comma needs quotes, or R wrote row.names"
            raise DataError(f"file {path}, line {reader.line_num}: {why}")
        yield reader.line_num, row


# GraphML -----------------------------------------------------------------------------------------

Attributes = dict[str, object]


def read_graphml(path: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read GraphML, as NetworkX, igraph, Gephi, yEd and others write it."""
    # NetworkX's own reader makes a node of an end that is none, and knows no defaults for all.
    with open_regular(path, MOST_GRAPH) as stream:
        parser = expat.ParserCreate()
        parser.EntityDeclHandler = _refuse_entity
        parser.ParseFile(stream)
        most = max(MOST_FILLED, stream.tell())
        stream.seek(0)
        root = ElementTree.parse(stream).getroot()
    if root.find(".//{*}hyperedge") is not None:
        raise ValueError("it has a hyperedge, and edges have two ends here")
    program, keys = "", dict[str | None, tuple[str, bool]]()  # its name, and whether it is boolean
    defaults: dict[str, Attributes] = {"node": {}, "edge": {}}
    for key in root.iterfind("{*}key"):
        name = key.get("attr.name") or key.get("id") or ""
        if key.get("yfiles.type") is not None:
            program, name = YED, ""
        keys[key.get("id")] = name, key.get("attr.type") == "boolean"
        if default := (key.findtext("{*}default") or "").strip():
            for domain, own in defaults.items():
                if key.get("for", "all") in (domain, "all"):
                    own[name] = _value(default, keys[key.get("id")][1])

    def said(element: ElementTree.Element, domain: str) -> Attributes:
        result = dict(defaults[domain])
        for data in element.iterfind("{*}data"):
            name, is_boolean = keys.get(given := data.get("key"), (given or "", False))
            result[name] = _value((data.text or "").strip(), is_boolean)
        return {name: value for name, value in result.items() if name}

    ids, nodes, filled = list[str | None](), list[Attributes](), 0
    for element in root.iterfind(".//{*}node"):
        ids.append(element.get("id"))
        nodes.append(said(element, "node"))
        filled += len(nodes[-1])
        if filled > most:
            raise ValueError(f"with defaults its nodes have more than {most:,} entries")
    links = [
        said(element, "edge") | {key: element.get(key) for key in ENDS}
        for element in root.iterfind(".//{*}edge")
    ]
    return of_entries(path, ids, nodes, links, needs_labels, gaps, program)


def _refuse_entity(name: str, *_: object) -> None:
    raise ValueError(f"it declares an entity, {name:.40}, and GraphML needs none")


def _value(text: str, is_boolean: bool) -> object:
    return {"true": True, "false": False}.get(text.lower(), text) if is_boolean else text
