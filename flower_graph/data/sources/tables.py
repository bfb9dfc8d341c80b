"""Graphs in tables (CSV), node-link JSON and GraphML: an entry for each node and for each edge.

All have the same columns for a node: its name, label and split, perhaps its client and its
identity; any other column is a feature, and must hold numbers. No code in such files is executed.
"""

import csv
import io
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from xml.etree import ElementTree
from xml.parsers import expat

import torch
from torch import Tensor

from flower_graph.config.common import COMMA, ONE_HOT
from flower_graph.data.description import BLANK, each, number_of, saying, word_of
from flower_graph.data.features import PLAIN, Columns, ReadOptions, encode_words
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.names import EDGES, NODES
from flower_graph.errors import DataError
from flower_graph.storage.reading import (
    MIB,
    MOST_GRAPH,
    open_regular,
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
# Columns by which files of Gephi and yEd are known (also its GEXF and GraphML as NetworkX reads
# them), and columns of the drawing
_PLACES = {"r", "g", "b", "x", "y", "size"}
DRAWN = (
    (_PLACES, _PLACES | {"z"}),
    ({"viz"}, {"viz"}),
    ({"label", "timeset"}, {"timeset"}),
    ({"shape_type"}, {"shape_type", "x", "y", "url", "description"}),
)
# Entries of all nodes with what is missing: at most so many, or so many times those that are there
MOST_FILLED, SPARSEST = 1 << 22, 32
ENDS, ENDS_OF_R, WEIGHT = ("source", "target"), ("from", "to"), "weight"
T = TypeVar("T")
_QUOTED, _INDEX = re.compile(r'"[^"]*"'), re.compile(r"unnamed: \d+")


class Roles(NamedTuple):
    """What each column of a graph's nodes is."""

    names: list[str]  # columns that name the nodes
    own: dict[str, str]  # the column of each of ``OWN`` that there is
    features: list[str]
    notes: list[str]


def roles_of(columns: Sequence[str], how: ReadOptions) -> Roles:
    """Tell what each column is; own ones in any case of letters."""
    lower = {key.lower(): key for key in reversed(columns)}
    own = {key: lower[key] for key in OWN if key in lower}
    drawn = [columns for marks, columns in DRAWN if marks <= {*lower}]
    out = {lower[key] for key in {INDEX}.union(*drawn) if key in lower}
    if how.label is not None:
        chosen = _column("label", how.label, columns, how.needs_labels)
        out |= {own[LABEL]} if LABEL in own else set()
        own = {key: one for key, one in own.items() if key != LABEL and one != chosen}
        own |= {} if chosen is None else {LABEL: chosen}
    taken = {*own.values()}
    names = [lower[key] for key in NAMES if key in lower and lower[key] not in taken]
    others = [key for key in columns if key not in {*taken, *names, *out}]
    if drawn and how.label is None and how.needs_labels:
        there = f"data.label names the classes: {', '.join([*others, LABEL])}"
        raise DataError(f"is of Gephi or yEd, where {LABEL} is a caption: {there}")
    for key in others:
        if key in ELSEWHERE:
            raise DataError(f"{key} is no feature; name it {ELSEWHERE[key]}")
    left = ", ".join(sorted(out - taken))
    return Roles(names, own, others, [f"{left} of the nodes left out"] if left else [])


def _column(setting: str, wanted: str, columns: Sequence[str], is_needed: bool) -> str | None:
    """Find a column in any case of letters; ``DataError`` if it is needed and not there."""
    lower = {key.lower(): key for key in reversed(columns)}
    found = wanted if wanted in columns else lower.get(wanted.lower())
    if found is None and is_needed:
        raise DataError(f"data.{setting} = {wanted!r}: must be one of {', '.join(columns)}")
    return found


class _Entries(NamedTuple):
    """The nodes or the edges of a file: their cells by column, and what errors call them."""

    unit: str  # what errors call one of them, such as `nodes.csv: line` or `node`
    places: Sequence[int]  # of each in the file
    cells: dict[str, list[Any]]  # Any: a value of the file
    how: ReadOptions

    def wrong(self, row: int, key: str, why: object) -> DataError:
        return DataError(f"{self.unit} {self.places[row]}: {key}: {why}")

    def each(self, key: str, given: Sequence[object], read: Callable[..., T]) -> Iterator[T]:
        """Read one cell after the other; errors name its place."""
        read = partial(read, comma=self.how.decimal == COMMA)
        return each(given, read, lambda row: f"{self.unit} {self.places[row]}: {key}")

    def words(self, key: str, given: Sequence[object]) -> list[str | None]:
        return [*self.each(key, given, word_of)]

    def numbers(self, key: str, remedy: str) -> tuple[Tensor, dict[int, str]]:
        """Return numbers, float64 ``[n]``, NaN for a word or nothing, and the words by row."""
        given, words = self.cells[key], dict[int, str]()
        with suppress(TypeError, ValueError, OverflowError):  # all at once, which is fast
            if self.how.decimal != COMMA:
                return torch.tensor([*map(float, given)], dtype=torch.float64), words
        found = [*self.each(key, given, number_of)]
        for row, value in enumerate(given):
            if found[row] is None:
                if remedy or not isinstance(value, str):
                    raise self.wrong(row, key, f"{value!r:.40} is no number: {remedy}")
                words[row], found[row] = word_of(value) or "", math.nan
        return torch.tensor(found, dtype=torch.float64), words


def _graph(
    nodes: _Entries, ids: Sequence[object], roles: Roles, edges: _Entries
) -> dict[str, object]:
    """Return nodes and edges as the entries of a saved graph, unchecked."""
    if not nodes.places:
        raise DataError("has no nodes")
    names, number = nodes.words("name", ids), dict[str | None, int]()
    for row, name in enumerate(names):
        if name is None or number.setdefault(name, row) != row:
            raise nodes.wrong(row, "name", f"{name or ''!r}: every node needs one of its own")
    own = {key: nodes.words(key, nodes.cells[column]) for key, column in roles.own.items()}
    own = {key: words for key, words in own.items() if any(words)}
    if nodes.how.needs_labels and LABEL not in own:
        others = ", ".join(roles.features)
        raise DataError(f"no {LABEL} at any node; data.label names it: {others}")
    values: dict[str, object] = {"y": own.pop(LABEL, [None] * len(names)), "names": (*names,)}
    if (splits := own.pop(SPLIT, None)) is not None:
        for row, split in enumerate(splits):
            if split is not None and split not in ROLES:
                raise nodes.wrong(row, "split", f"{split!r} must be {', '.join(ROLES)} or empty")
        for part, role in zip(PARTS, ROLES, strict=True):
            values[part] = torch.tensor([split == role for split in splits])
    if roles.features:
        values["x"], values["columns"] = _features(nodes, roles.features)
    pairs = list[list[int]]()
    for key in ENDS:
        found = edges.words(key, edges.cells.pop(key))
        for row, name in enumerate(found):
            if name not in number:
                raise edges.wrong(row, key, f"{name or ''!r:.40} is no node")
        pairs.append([number[name] for name in found])
    wanted = edges.how.weight
    weight = _column("weight", wanted or WEIGHT, [*edges.cells], wanted is not None)
    unused, notes = sorted({*edges.cells} - {weight, "key", "id"}), roles.notes
    notes = [*notes, f"{', '.join(unused)} of the edges not used"] if unused else notes
    if weight is not None:
        numbers, _ = edges.numbers(weight, "data.weight names the column")
        if not numbers.isnan().all():
            values["edge_weight"] = numbers.float()
    values |= {"edge_index": torch.tensor(pairs, dtype=torch.int64), **own}
    return values | ({"notes": tuple(notes)} if notes else {})


def _features(nodes: _Entries, keys: Sequence[str]) -> tuple[Tensor, Columns]:
    """Return features, float64 ``[n, f]``, NaN until all nodes are known, and their columns."""
    takes_words, parts = nodes.how.categories == ONE_HOT, list[Tensor]()
    pairs = list[tuple[str, str | None]]()
    for key in keys:
        remedy = f"leave {key} out, or set data.categories={ONE_HOT}, or data.label={key}"
        numbers, words = nodes.numbers(key, "" if takes_words else remedy)
        known: Sequence[str | None] = [None]
        if words:
            if (some := ~numbers.isnan()).any():
                row, (other, word) = int(some.nonzero()[0]), next(iter(words.items()))
                why = f"is a number, but {nodes.places[other]} has {word!r:.40}"
                raise nodes.wrong(row, key, f"{numbers[row]:g} {why}")
            with saying(key):
                numbers, known = encode_words(numbers, words)
        parts.append(numbers.reshape(len(numbers), -1))
        pairs += [(key, word) for word in known]
    return torch.cat(parts, 1), Columns(pairs)


def read_tables(folder: Path, how: ReadOptions) -> dict[str, object]:
    """Read ``nodes.csv`` and ``edges.csv`` of a folder."""
    nodes = _read_table(folder / NODES, how)
    with saying(NODES):
        roles = roles_of([*nodes.cells], how)
        if len(roles.names) != 1:
            wanted, found = " or ".join(NAMES[:2]), " and ".join(roles.names) or "neither"
            raise DataError(f"one column must name the nodes, {wanted}: has {found}")
    path = folder / EDGES
    if not path.is_file():
        raise DataError(f"{EDGES}: there is no such file; its columns are {' and '.join(ENDS)}")
    edges = _read_table(path, how)
    by_name = {key.lower(): key for key in reversed(edges.cells)}
    ends = next((pair for pair in (ENDS, ENDS_OF_R) if {*pair} <= {*by_name}), ENDS)
    if missing := [key for key in ends if key not in by_name]:
        raise DataError(f"{EDGES}: no column {missing[0]}; there are {', '.join(edges.cells)}")
    for key, end in zip(ENDS, ends, strict=True):
        edges.cells[key] = edges.cells.pop(by_name[end])
    return _graph(nodes, nodes.cells[roles.names[0]], roles, edges)


def names_clients(folder: Path) -> bool:
    """Return whether tables have a column for the client, from their header alone."""
    with saying(f"file {folder}"):
        header = _read_table(folder / NODES, PLAIN, lines=1).cells
    return CLIENT in [key.lower() for key in header]


def _read_table(path: Path, how: ReadOptions, lines: int | None = None) -> _Entries:
    """Read a table, or so many lines of it."""
    with (
        reading(path.name, DataError),
        saying(path.name),
        open_regular(path, MOST_GRAPH) as binary,
        io.TextIOWrapper(binary, "utf-8-sig", newline="") as stream,
    ):
        delimiter = max(",;\t", key=_QUOTED.sub("", stream.readline(MIB)).count)
        stream.seek(0)
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            places, rows = list[int](), list[list[str]]()
            for row in islice(reader, lines):
                if any(cell.strip(BLANK) for cell in row):
                    places.append(reader.line_num)
                    rows.append(row)
        except csv.Error as error:
            raise DataError(f"line {reader.line_num}: is damaged ({error})") from error
        header = [key.strip(BLANK) for key in rows.pop(0)] if rows else []
        while header and not header[-1]:  # a comma ends the line
            header.pop()
        if not header:
            raise DataError("is empty; its first line must name the columns")
        for key, times in Counter(map(str.lower, header)).items():
            if not key or _INDEX.fullmatch(key):
                remedy = "save it with index=False (pandas) or row.names = FALSE (R)"
                raise DataError(f"a column is called {key!r}: {remedy}")
            if times > 1:
                raise DataError(f"two columns are called {key!r}")
        for line, row in zip(places[1:], rows, strict=True):
            if len(row) < len(header) or any(row[len(header) :]):  # not commas that end the line
                why = f"{len(row)} cells, line 1 {len(header)}; a comma needs quotes, or R wrote"
                raise DataError(f"line {line}: {why} row.names")
    cells: dict[str, list[Any]] = {key: [row[at] for row in rows] for at, key in enumerate(header)}
    return _Entries(f"{path.name}: line", places[1:], cells, how)


# Node-link JSON and GraphML -----------------------------------------------------------------------


def read_node_link(path: Path, how: ReadOptions) -> dict[str, object]:
    """Read the JSON of NetworkX's ``node_link_data``, whose edges are `links`, or `edges`."""
    content = parse_json(read_bytes(path, MOST_GRAPH))
    given = content if isinstance(content, dict) else {}
    nodes, links = given.get("nodes"), given.get("links") or given.get("edges", given.get("links"))
    if not isinstance(nodes, list) or not isinstance(links, list):
        raise DataError("must be node-link JSON, with lists `nodes` and `links`")
    if given.get("edges") and links != given["edges"]:
        raise DataError("has `links` and `edges`, which differ: leave one out")
    if other := [one for one in (*nodes, *links) if not isinstance(one, dict)]:
        raise DataError(f"must be node-link JSON: {other[0]!r:.40} is no table")
    ids = []
    for entry in nodes:
        key = next((one for one in entry if one.lower() == "id"), None)
        ids.append(entry.get("name") if key is None else entry.pop(key))
    return _of_entries(ids, nodes, links, how)


def read_graphml(path: Path, how: ReadOptions) -> dict[str, object]:
    """Read GraphML, as NetworkX, igraph, Gephi, yEd and others write it."""
    import networkx as nx  # not at the top: it takes a while

    with open_regular(path, MOST_GRAPH) as stream, warnings.catch_warnings(action="ignore"):
        _check_graphml(stream)
        stream.seek(0)
        graph: Any = nx.read_graphml(stream, force_multigraph=True)
    links = [{**own, ENDS[0]: one, ENDS[1]: other} for one, other, own in graph.edges(data=True)]
    return _of_entries([*graph], [*graph.nodes.values()], links, how, graph.graph)


def _check_graphml(stream: BinaryIO) -> None:
    """Refuse what NetworkX's reader leaves out, merges, makes up or expands."""

    def refuse(name: str, *_: object) -> None:
        raise DataError(f"entity {name:.40}: must be written out, none may be declared")

    tree, parser = ElementTree.TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = tree.start, tree.end
    parser.EntityDeclHandler = refuse
    parser.ParseFile(stream)
    found: dict[str, list[ElementTree.Element]] = {}
    for element in tree.close().iter():
        found.setdefault(element.tag.rpartition(":")[2], []).append(element)
    if (graphs := len(found.get("graph", ()))) > 1:
        raise DataError(f"has {graphs} graphs: must be one <graph>, with none in its nodes")
    nodes = Counter(node.get("id") for node in found.get("node", ()))
    for name, times in nodes.items():
        if times > 1:
            raise DataError(f"node {name!r:.40}: id is there {times} times: must be once")
    for number, edge in enumerate(found.get("edge", ())):
        for end in ENDS:
            if edge.get(end) not in nodes:
                raise DataError(f"edge {number}: {end}: {edge.get(end)!r:.40} is no node")
    for key in found.get("key", ()):
        has_default = any(inner.tag.endswith("default") for inner in key)
        if has_default and (said := key.get("for")) not in ("node", "edge", "graph"):
            why = 'a key with a default is for node, edge or graph; write for="node"'
            raise DataError(f"key {key.get('id')!r:.40}: for={said!r:.40}: {why}")


def _of_entries(
    ids: Sequence[object],
    given: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    how: ReadOptions,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, object]:
    """Make a graph from named entries and their attributes, or NetworkX's defaults for these."""
    both = []
    for unit, entries, ends in (("node", given, ()), ("edge", links, ENDS)):
        default = (defaults or {}).get(f"{unit}_default", {})
        keys = dict.fromkeys(chain(*entries, ends, default))
        most = max(MOST_FILLED, SPARSEST * sum(map(len, entries)))
        if len(keys) * len(entries) > most:
            raise DataError(f"{len(keys):,} attributes: more than {most:,} entries")
        cells = {key: [one.get(key, default.get(key)) for one in entries] for key in keys}
        both.append(_Entries(unit, range(len(entries)), cells, how))
    nodes, edges = both
    roles, columns = roles_of([*nodes.cells], how), list[str]()
    for key in roles.features:  # a list of numbers is several features
        values = nodes.cells[key]
        first = next((value for value in values if value is not None), None)
        if not isinstance(first, list):
            columns.append(key)
            continue
        for row, value in enumerate(values):
            if value is not None and (not isinstance(value, list) or len(value) != len(first)):
                raise nodes.wrong(row, key, f"{value!r:.40} must be {len(first)} numbers")
        for place in range(len(first)):
            columns.append(f"{key}[{place}]")
            nodes.cells[columns[-1]] = [None if one is None else one[place] for one in values]
    graph = _graph(nodes, ids, roles._replace(features=columns), edges)
    named = nodes.words("name", nodes.cells[roles.names[0]]) if roles.names else [None]
    # igraph numbers nodes, and has their names besides
    return graph if None in named else graph | {"names": tuple(named)}
