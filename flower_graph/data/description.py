"""Turns any object with features, edges, labels and masks into canonical tensors.

Files, folders of clients, constructors and Python all use it. Each change to the data gives a note
for users. Data that cannot be understood raise a ``DataError`` with place, index, value and remedy.
``docs/reference/configuration.md`` has the table of accepted data.

Constructors check their data and convert nothing. Clients are built anew for every message, so
graphs that passed are remembered, as long as they exist and no tensor of them is written into.
"""

from __future__ import annotations

import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from flower_graph.config.common import MEAN, ONE_HOT, REFUSE
from flower_graph.data.features import PLAIN, Columns, ReadOptions, Treatment, align
from flower_graph.data.graph import (
    PARTS,
    ClientGraph,
    Graph,
    Masks,
    Scale,
    check_dense_size,
    to_undirected,
)
from flower_graph.errors import DataError, FractionalLabelsError
from flower_graph.storage.reading import Tree, reading
from flower_graph.wire.keys import MAX_CLASSES

LOG = logging.getLogger("flower_graph.data")
T = TypeVar("T")
WIDE = (torch.float64, torch.int64, torch.int32)  # numbers with more digits than float32
WITHOUT = "without"  # no features are made for a graph that has none, whatever a user may set
DEGREES = 32  # features that stand for degrees: 0, 1, ..., and 31 or more
FRACTION = "a class must be a whole number; task=values learns such numbers"
FINITE = "must be finite, below 3e38; data.missing=mean fills NaN"
_said: set[tuple[str, str]] = set()


class Caution(str):
    """A note that changes the meaning of a run: logged as a warning, even with `--quiet`."""


@dataclass
class NewGraph(Graph):
    """One graph in canonical form, with labels as they were given, or as a run numbers them."""

    edge_index: Any  #: as of a graph; None: not known
    #: Numbers or words, below 0 or None for no label; of a run's new graph int64 ``[n]``, and of
    #: numbers to learn float32, NaN for none.
    y: Any
    num_classes: int = 0  #: not known
    values: Tree = field(default_factory=dict)  #: all that was given, unchecked
    where: str = ""  #: what errors call it: `file x.pt`, or `file x.pt, client 3`

    @property
    def has_masks(self) -> bool:
        return any(mask is not None for mask in self.masks.values())

    @property
    def numbers(self) -> Tensor:
        """Labels that are numbers of classes already, -1 for none; ``DataError`` if words."""
        if isinstance(self.y, Tensor):
            return self.y.clamp(min=-1)
        word = next(one for one in self.y if one is not None)
        raise DataError(f"y has {word!r}: must be numbers of classes, the same at all clients")

    def needed_edges(self) -> Tensor:
        """Return the edges; ``DataError`` if there are none."""
        edges: Tensor | None = self.edge_index
        if edges is None or not edges.numel():
            raise DataError("the graph has no edges, which the run's models need")
        return edges

    @property
    def trains(self) -> Tensor:
        """Which nodes train, bool ``[n]``: those with a label, in ``train_mask`` if it has one."""
        mask, labelled = self.train_mask, torch.as_tensor(self.y >= 0)
        return labelled if mask is None or mask.dim() > 1 else mask & labelled

    def numbered(self, num_classes: int | None = None) -> Graph:
        """Return it with numbers of classes, and untreated features."""
        declared = self.values.get("num_classes") if num_classes is None else num_classes
        named = self.values.get("classes")
        declared, named = (declared, named) if self.targets is None else (1, None)
        labels = number_classes([self.y], declared, named)
        own = {one.name: getattr(self, one.name) for one in fields(Graph)}
        own |= {"y": labels.y[0], "num_classes": labels.num_classes, "classes": labels.classes}
        return Graph(**own | {"notes": (*self.notes, *labels.notes)})

    def as_client(self, client: int, x: Tensor, y: Tensor) -> ClientGraph:
        """Make a client's graph with treated features and numbers of classes."""
        masks = check_masks(self.masks, y, self.names, may_lack=True)
        own = self.names, self.targets, self.edge_weight
        return ClientGraph(client, torch.arange(len(y)), x, y, self.edge_index, None, *masks, *own)


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Add the file, the client or the data set to errors in this block."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{what}: {error}") from error


def tell(place: str, notes: Iterable[str]) -> None:
    """Log notes about data, once a process."""
    for note in notes:
        if (place, note) not in _said:
            _said.add((place, note))
            level = logging.WARNING if isinstance(note, Caution) else logging.INFO
            LOG.log(level, "%s: %s", place, note)


def by_columns(where: str, x: Tensor, own: Columns | None, common: Columns | None) -> Tensor:
    """Order features ``[n, f]`` by a run's columns; say so if one of both has no names."""
    if own is not None and common is not None:
        return align(x, own, common)
    if (named := own or common) is not None:
        whose, shown = "the run's" if common is None else "its", ", ".join(named.words)
        note = f"{whose} features have no names, and columns are taken in this order: {shown:.200}"
        tell(where, [Caution(note)])
    return x


def as_graph(
    data: object,
    *,
    num_classes: int | None = None,
    no_features: str = "refuse",
    targets: bool = False,
    weights: bool = False,
) -> Graph:
    """Make a graph from anything with ``x``, ``edge_index``, ``y`` and, perhaps, masks.

    The graph is in canonical form, with notes; ``y`` is -1 without a label. ``DataError`` if
    anything is missing or cannot be understood; it names index, value and remedy.

    Parameters
    ----------
    data
        A PyG ``Data``, a ``Graph`` or another object with these attributes, and perhaps with
        ``num_classes``, ``classes`` (their names) and ``names`` (of the nodes).
    num_classes
        Number of classes, where labels are numbers below it and stay as they are.
    no_features
        Features of a graph without any: ``refuse``, ``degree`` or ``one-hot``.
    targets
        Whether ``y`` has numbers to learn instead of classes (``task: values``).
    weights
        Whether ``edge_weight``, or ``edge_attr`` of one column, is kept.
    """
    how = ReadOptions(no_features, targets=targets, weights=weights)
    graph = describe_graph(data, how).numbered(num_classes)
    return replace(graph, x=graph.x.float())


def check_masks(
    masks: Mapping[str, Tensor | None],
    y: Tensor,
    names: Sequence[str] | None = None,
    *,
    may_lack: bool = False,
) -> Masks:
    """Check that masks ``[n]`` have labelled nodes only, and do not overlap.

    Each of the three has a node, or with ``may_lack`` a missing one is empty.
    """
    result = dict[str, Tensor]()
    for part, given in masks.items():
        mask = torch.zeros_like(y, dtype=torch.bool) if given is None and may_lack else given
        if mask is None or mask.dim() != 1:
            kind = "missing" if mask is None else str([*mask.shape])
            raise DataError(f"{part} is {kind}: must be bool [{len(y)}]")
        if not may_lack and not mask.any():
            raise DataError(f"{part}: no node is in it; each needs one, or leave all three out")
        if (nodes := (mask & (y < 0)).nonzero().flatten().tolist()) != []:
            name = f"{nodes[0]} ({names[nodes[0]]})" if names else nodes[0]
            raise DataError(f"{part}: node {name} has no label, as {len(nodes)} of its nodes")
        result[part] = mask
    for (first, left), (second, right) in combinations(result.items(), 2):
        if (nodes := (left & right).nonzero().flatten().tolist()) != []:
            raise DataError(f"{first} and {second} overlap in {len(nodes)} nodes, as {nodes[0]}")
    return Masks(*result.values())


# Any: what a user gave, which is checked here
@reading("the graph", DataError)
def describe_graph(data: Any, how: ReadOptions = PLAIN, where: str = "") -> NewGraph:
    """Bring features, edges, labels and masks into canonical form, without numbering classes."""
    values = entries_of(data)
    notes = [*(values.get("notes") or ())]
    x, y, edges, names, columns = map(values.get, ("x", "y", "edge_index", "names", "columns"))
    if isinstance(x, Tensor) and x.dim() == 2 and x.size(1) == 0:
        x = None
    if y is None and how.needs_labels:
        raise DataError("the graph has no y: give each node a class, or -1 if it has none")
    if y is None and x is None:
        raise DataError("the graph has no x: give it features [nodes, features] as the run has")
    if edges is None and how.needs_edges:
        raise DataError("the graph has no edge_index: give it pairs of nodes, [2, E]")
    if x is not None:
        # Numbers of a text have no type, which a note could name
        is_text = isinstance(columns, Columns)
        x = read_features(x, [] if is_text else notes, how.missing, (names, columns) * is_text)
    n, targets = None if x is None else len(x), None
    labels: Tensor | list[str | None]
    if how.targets and y is not None:
        targets = read_targets(y, n)
        labels = targets.isnan().long().neg()
    else:
        labels = read_labels(torch.full((n or 0,), -1) if y is None else y, n, notes)
    if (n := len(labels)) == 0:
        raise DataError("the graph has no nodes")
    weight = None
    if edges is not None:
        edges = read_edges(edges, n, notes)
        weight = read_weights(values, edges, n, notes, wanted=how.weights)
    x = made_features(how.no_features, n, edges, notes) if x is None else x
    masks = {part: read_mask(part, values.get(part), n, notes) for part in PARTS}
    if names is not None:
        names = tuple(str(name) for name in listed("names", names))
        if not len(names) == len({*names}) == n:
            name, times = Counter(names or [""]).most_common(1)[0]
            found = f"{len(names)} for {n} nodes, {name!r} {times} times"
            raise DataError(f"names: {found}: must be one a node, all different")
    named = Columns.of(columns, x.size(1))
    own: dict[str, Any] = {"names": names, "columns": named, "targets": targets} | masks
    own |= {"edge_weight": weight, "values": values, "notes": tuple(notes), "where": where}
    return NewGraph(x, edges, labels, **own)


# Any: the names of nodes and the columns of a table
def read_features(
    x: object, notes: list[str], missing: str = REFUSE, named: tuple[Any, ...] = ()
) -> Tensor:
    """Return features as dense float32, from any kind of matrix; add notes.

    Numbers that may have more digits stay float64 until they are treated. ``named`` are the names
    of nodes and columns for errors.
    """
    given = as_tensor("x", x)
    if given.dim() != 2 or given.is_complex():
        raise unfit("x", given, "real numbers [nodes, features]")
    if given.layout != torch.strided:
        advice = "They are sparse, and would be made dense: use fewer of them."
        check_dense_size(given.size(0), given.size(1), advice)
        notes.append(f"{given.layout} features made dense")
        given = given.to_dense()
    if given.dtype != torch.float32:
        notes.append(f"features of {given.dtype} taken as float32")
    result = given.to(torch.float32)
    if not torch.isfinite(result.sum()):  # if it is, every term is, and takes no second matrix
        wrong = torch.isinf(result) if missing == MEAN else ~torch.isfinite(result)
        if wrong.any():
            row, column = place = wrong.nonzero()[0].tolist()
            where = f"node {named[0][row]!r}: {named[1][column][0]}" if named else f"x{place}"
            raise DataError(f"{where} is {given[row, column].item()}: {FINITE}")
    return given.double() if given.dtype in WIDE else result


def read_edges(edge_index: object, num_nodes: int, notes: list[str]) -> Tensor:
    """Return every edge in both directions, once, without self-loops; add notes."""
    edges = as_tensor("edge_index", edge_index)
    is_whole = not (edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool)
    if not (is_whole and edges.layout == torch.strided and edges.dim() == 2 and len(edges) == 2):
        raise unfit("edge_index", edges, "int64 [2, E]")
    outside = (edges < 0) | (edges >= num_nodes)
    refuse_first("edge_index", edges, outside, f"must be below {num_nodes}")
    edges = edges.long()
    result = to_undirected(edges, num_nodes)
    if edges.shape == result.shape and torch.equal(edges, result):
        return result
    source, target = edges[:, edges[0] != edges[1]]
    different = int(torch.unique(source * num_nodes + target).numel())
    one_way = result.size(1) - different
    found = {
        "edges given more than once: taken once": source.numel() - different,
        "self-loops left out": edges.size(1) - source.numel(),
        "edges in one direction: both made": one_way,
    }
    notes += [f"{count} {what}" for what, count in found.items() if count]
    return result


def read_mask(part: str, mask: object, n: int, notes: list[str]) -> Tensor | None:
    """Return a mask as booleans ``[n]`` or ``[n, k]``."""
    if mask is None:
        return None
    given = as_tensor(part, mask)
    is_fit = given.dim() in (1, 2) and given.size(0) == n
    if not is_fit or ((given != 0) & (given != 1)).any():
        raise unfit(part, given, f"bool [{n}], or 0 and 1")
    if given.dtype != torch.bool:
        notes.append(f"{part} of {given.dtype} taken as true and false")
    return given.bool()


def made_features(how: str, n: int, edges: Tensor | None, notes: list[str]) -> Tensor:
    """Make the features of a graph that has none; ``DataError`` if it must have some."""
    if how == WITHOUT:
        return torch.empty(n, 0)
    if how == ONE_HOT:
        check_dense_size(n, n, "data.no_features=degree takes less.")
        number, width, what = torch.arange(n), n, "number stands for them, one of as many as nodes"
    elif how == "degree":
        ends = torch.empty(0, dtype=torch.int64) if edges is None else edges[0]
        number, width = ends.bincount(minlength=n).clamp(max=DEGREES - 1), DEGREES
        what = f"degree stands for them, 0 to {DEGREES - 1} or more"
    else:
        raise DataError("the graph has no x: set data.no_features=degree or one-hot")
    notes.append(Caution(f"no features: each node's {what}"))
    return torch.nn.functional.one_hot(number, width).float()


# Edges and their weights ------------------------------------------------------------------------

# What a `Data` may say of edges besides their ends; the second is NetworkX's name
WEIGHT, NAMED, ATTRIBUTES = EDGE_VALUES = ("edge_weight", "weight", "edge_attr")
_BESIDES = ("names", "columns", "notes", "num_classes", "classes")
_READ = ("x", "y", "edge_index", "adj_t", *PARTS, *EDGE_VALUES, *_BESIDES)


# Any, here and below: what a user's graph holds
def entries_of(data: Any) -> Tree:
    """Return a graph's entries by name, its edges in ``edge_index``, also in place of ``adj_t``.

    ``DataError`` for PyG's objects of several kinds of nodes, or of several graphs.
    """
    if type(data).__name__ == "HeteroData":
        raise DataError("is a HeteroData: nodes and edges must be of one kind, to_homogeneous()")
    if hasattr(data, "to_data_list"):
        raise DataError("is a Batch: save each graph of to_data_list() in a folder of clients")
    if not isinstance(data, dict):
        held = data.to_dict() if hasattr(data, "to_dict") else getattr(data, "__dict__", {})
        # Attributes may also be slots, fields of a tuple or properties
        data = {key: getattr(data, key, None) for key in _READ} | held
    values = {key: one for key, one in data.items() if key != "adj_t"}
    adjacency: Any = data.get("adj_t")
    if adjacency is None or data.get("edge_index") is not None:
        return values
    if not isinstance(adjacency, Tensor):  # torch_sparse's
        adjacency = adjacency.to_torch_sparse_coo_tensor()
    adjacency = adjacency.to_sparse_coo().coalesce()
    if not bool((adjacency.values() == 1).all()):
        values[WEIGHT] = adjacency.values()
    return values | {"edge_index": adjacency.indices().flip(0)}


def read_weights(
    values: Tree, edges: Tensor, n: int, notes: list[str], *, wanted: bool
) -> Tensor | None:
    """Return the weights of edges, float32 ``[e]``, if there are any; add notes.

    ``values`` have ``edge_index`` ``[2, E]`` and perhaps ``edge_weight`` ``[E]``, or instead
    ``weight`` or ``edge_attr`` of one column; ``edges`` are the same edges, both directions of each
    once; ``wanted``: whether the run uses weights. ``DataError`` if weights are not a number from 0
    on for each edge.
    """
    pairs = as_tensor("edge_index", values["edge_index"]).long()
    given = {key: one for key in EDGE_VALUES if (one := values.get(key)) is not None}
    weights, count = None, pairs.size(1)
    if NAMED in given and len(given[NAMED]) != count:
        del given[NAMED]  # of the nodes
    for key, value in [*given.items()] if wanted else ():
        column = column_of(key, value)
        is_one_each = column.shape == (count,) and not column.is_complex()
        wrong = ~(column.double().isfinite() & (column >= 0)) if is_one_each else torch.ones(1)
        if key == ATTRIBUTES and wrong.any():
            continue  # these may be anything
        if not is_one_each:
            raise unfit(key, column, "a number for each edge")
        refuse_first(key, column, wrong, "must be finite, 0 or more")
        # Each edge's mean over its directions and copies
        keys, place = (pairs.amin(0) * n + pairs.amax(0)).unique(return_inverse=True)
        means = torch.zeros(len(keys), dtype=torch.float64)
        column = column.float()
        means.scatter_reduce_(0, place, column.double(), "mean", include_self=False)
        differ = place[(column - means[place]).abs() > 1e-6 * means[place].abs()].unique()
        weights = means.float()[torch.searchsorted(keys, edges.amin(0) * n + edges.amax(0))]
        if differ.numel():
            notes.append(f"{key}: {differ.numel()} edges have several weights, their mean counts")
        del given[key]
        break
    if given:
        why = "all edges count the same (`flower-graph docs own-data` says where weights count)"
        notes.append(Caution(f"{', '.join(given)} of the edges is ignored: {why}"))
    return weights


# Checks of data that constructors are given -------------------------------------------------------

LAYOUTS = (torch.strided, torch.sparse_csr)
# Graphs that passed, and how often their tensors had been written into by then
_fit: WeakKeyDictionary[ClientGraph, list[int]] = WeakKeyDictionary()


def server_graph(data: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a graph's edges ``[2, e]``, labels ``[n]`` and masks ``[n]`` in canonical form.

    Edges go both ways, labels are -1 for none, missing masks are empty.
    """
    given = {key: getattr(data, key, None) for key in ("y", "edge_index", *PARTS)}
    found = describe_graph(given, PLAIN._replace(no_features=WITHOUT))
    y = found.numbers
    check_labels(y)
    masks = check_masks(found.masks, y, may_lack=True)
    tell("data", found.notes)
    return found.edge_index, y, masks._asdict()


def check_clients(graphs: Iterable[ClientGraph]) -> None:
    """Check clients' graphs without converting them; ``DataError`` names the client."""
    for graph in graphs:
        written = [one._version for one in vars(graph).values() if isinstance(one, Tensor)]
        if _fit.get(graph) == written:
            continue
        with saying(f"client {graph.client}"):
            check_rows(graph.x)
            n, notes = len(graph.x), list[str]()
            for name in ("y", *PARTS):
                value, kind = getattr(graph, name), torch.int64 if name == "y" else torch.bool
                if value.dtype != kind or value.shape != (n,):
                    raise unfit(name, value, f"{kind} [{n}]")
            check_labels(graph.y)
            if graph.edge_index is not None:
                read_edges(graph.edge_index, n, notes)
                if notes or graph.edge_index.dtype != torch.int64:
                    raise DataError("edge_index must have every edge once in each direction, int64")
            check_masks(graph.masks, graph.y, may_lack=True)
        _fit[graph] = written


def check_rows(x: Tensor) -> None:
    """Check features of users: a finite float32 matrix, dense or CSR."""
    if x.dim() != 2 or x.dtype != torch.float32 or x.layout not in LAYOUTS:
        raise unfit("x", x, "float32 [n, f], dense or CSR")
    values = x if x.layout == torch.strided else x.values()
    # A finite sum has only finite terms, and takes no memory.
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        dense = x.to_dense()
        refuse_first("x", dense, ~torch.isfinite(dense), FINITE)


# Labels of nodes, and values of cells -------------------------------------------------------------

# A value of a table cell, an attribute or a list entry is a word or a number, by one rule each. A
# word is a label, a name, an identity or a client. Whole numbers that are written as floats are
# whole numbers, missing is missing, and all else stays as written: ``007`` is not ``7``.

MOST_CLASSES = 1000  # with more different labels, they are taken for something else than classes
CAPTIONS = 10  # with more labels than these, all different, they are taken for captions
UNLABELLED = "-1"  # a word that stands for no label


class Labels(NamedTuple):
    """The labels of one graph or of several together, as numbers of classes."""

    y: list[Tensor]  # Of each graph: int64 [n], -1 without a label
    num_classes: int
    classes: tuple[str, ...] | None  # Their names, if these are not the numbers
    notes: list[str]


def number_classes(
    labels: Sequence[Tensor | list[str | None]],
    declared: object = None,
    classes: Sequence[str] | None = None,
    *,
    may_lack: bool = False,
) -> Labels:
    """Turn labels into numbers of classes, for one graph or for all clients together.

    ``declared`` says how many classes there are, if it is known; labels are then numbers below it,
    or names in ``classes``. With ``may_lack`` there may be no label at all.
    """
    if classes is not None:
        classes = tuple(str(name) for name in listed("classes", classes))
        declared = len(classes)
    declared = declared_classes(declared)
    numbers = [one.clamp(min=-1) for one in labels if isinstance(one, Tensor)]
    if are_numbers := len(numbers) == len(labels):
        every = torch.cat(numbers)
        values, labelled = every[every >= 0].unique(), int((every >= 0).sum())
        names = [str(value) for value in values.tolist()]
    else:
        known = [word for one in labels for word in words_of(one) if word is not None]
        names, labelled = sorted({*known}), len(known)
    if not labelled and not may_lack:
        raise DataError("y: no node has a label")
    count = sum(map(len, labels))
    without = [f"{count - labelled} of {count} nodes without a label"]
    notes = without if labelled < count else []
    if declared is None:
        if len(names) > MOST_CLASSES:
            raise DataError(f"y has {len(names)} labels, at most {MOST_CLASSES}; or task=values")
        if len(names) == labelled > CAPTIONS:
            raise DataError(f"y has {len(names)} labels, all different: set data.label")
        if are_numbers and int(values[-1]) == len(values) - 1:
            return Labels(numbers, len(values), None, notes)
    elif are_numbers:
        for one in numbers:
            refuse_first("y", one, one >= declared, f"must be below num_classes = {declared}")
        return Labels(numbers, declared, classes, notes)
    elif other := [name for name in names if name not in (classes or names)]:
        raise DataError(f"y has {other[0]!r}: must be one of {', '.join(classes or ()):.200}")
    elif len(names) > declared:
        raise DataError(f"y has {len(names)} different names, but num_classes is {declared}")
    names = list(classes or names)
    number = {name: index for index, name in enumerate(names)} | {None: -1}
    y = [torch.tensor([number[word] for word in words_of(one)]) for one in labels]
    note = f"labels {', '.join(names):.200} taken as {len(names)} classes"
    return Labels(y, len(names), tuple(names), [note, *notes])


def words_of(labels: Tensor | list[str | None]) -> list[str | None]:
    """Return labels as words, None for none."""
    if isinstance(labels, Tensor):
        return [None if one < 0 else str(one) for one in labels.tolist()]
    return labels


def declared_classes(count: object) -> int | None:
    """Return the number of classes that a graph declares; None if it declares none."""
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    if count is None or (type(count) is int and 1 <= count <= MAX_CLASSES):
        return count
    shown = " ".join(repr(count).split())
    raise DataError(f"num_classes is {shown:.60}: must be a whole number, 1 to {MAX_CLASSES}")


def check_labels(y: Tensor) -> None:
    """Refuse numbers that cannot be classes, before weights are made for so many."""
    refuse_first("y", y, y >= MAX_CLASSES, f"must be below {MAX_CLASSES}, or -1")


def read_labels(y: object, n: int | None, notes: list[str]) -> Tensor | list[str | None]:
    """Return labels as whole numbers (below 0: none) or as words (None: none)."""
    if isinstance(y, Tensor):
        given = column_of("y", y)
        if given.dim() != 1 or given.is_complex() or (n is not None and len(given) != n):
            raise unfit("y", given, "a whole number for each row of x; of one-hot rows y.argmax(1)")
        if not given.is_floating_point():
            return given.long()
        read = given.double().nan_to_num(-1, EXACT, EXACT)  # at once: there may be millions
        if (wrong := (read != read.round()) | (read.abs() >= EXACT)).any():
            node = int(wrong.nonzero()[0])
            raise FractionalLabelsError(f"y[{node}] is {given[node].item()}: {FRACTION}")
        notes.append(f"labels of {given.dtype} taken as whole numbers")
        return read.long()
    every = (int(one) if isinstance(one, bool) else one for one in listed("y", y))
    words = [*each(every, word_of, "y[{}] (of one-hot rows y.argmax(1))".format)]
    words = [None if word == UNLABELLED else word for word in words]
    if n is not None and len(words) != n:
        raise DataError(f"y is {len(words)} words: must be one for each of the {n} rows of x")
    try:
        numbers = [math.nan if word is None else float(word) for word in words]
    except ValueError:
        return words
    if other := [one for one in numbers if not (math.isnan(one) or one.is_integer())]:
        raise FractionalLabelsError(f"y[{numbers.index(other[0])}] is {other[0]}: {FRACTION}")
    whole = [int(word or -1) for word in words if word is None or WHOLE.fullmatch(word)]
    is_whole = len(whole) == len(words) and all(abs(one) < EXACT for one in whole)
    return torch.tensor(whole).long() if is_whole else words


def read_targets(y: object, n: int | None) -> Tensor:
    """Return the numbers that nodes are to learn, float32 ``[n]``; NaN: not known."""

    def number(value: object) -> float:
        if (found := number_of(value)) is None:
            raise DataError(f"{value!r:.40}: with task=values it is a number")
        return found

    if not isinstance(y, Tensor):
        y = [*each(listed("y", y), number, "y[{}]".format)]
    given = column_of("y", y)
    if given.dim() != 1 or given.is_complex() or (n is not None and len(given) != n):
        raise unfit("y", given, "a real number a node")
    result = given.to(torch.float32)
    refuse_first("y", given, result.isinf(), "must be below 3e38, NaN for none")
    return result


def unfit(key: str, value: Tensor, allowed: str) -> DataError:
    """Return the error for a tensor of a type or a shape that is not allowed."""
    return DataError(f"{key} is {value.dtype} {list(value.shape)}: must be {allowed}")


def refuse_first(key: str, values: Tensor, wrong: Tensor, allowed: str) -> None:
    """Raise ``DataError`` with the first entry that is wrong, if there is one."""
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise DataError(f"{key}{place} is {values[*place].item()}: {allowed}")


def each(
    values: Iterable[object], read: Callable[..., T], place: Callable[[int], str]
) -> Iterator[T]:
    """Read one value after the other; errors begin with its place."""
    for number, value in enumerate(values):
        try:
            yield read(value)
        except DataError as error:
            raise DataError(f"{place(number)}: {error}") from error


# Any: what a user gave, which is checked here
def listed(key: str, values: Any) -> list[object]:
    """Return the entries of a list, a tuple, an array or a tensor."""
    with reading(key, DataError, "must be a list, or a tensor"):
        if not isinstance(values, list | tuple | np.ndarray | Tensor):
            raise TypeError(type(values).__name__)
        result = values.tolist() if isinstance(values, np.ndarray | Tensor) else list(values)
        return result if isinstance(result, list) else [result]


# Any: all that `torch.as_tensor` accepts or refuses
def as_tensor(key: str, value: Any) -> Tensor:
    """Turn a tensor, a matrix of SciPy, an array or a list of numbers into a tensor."""
    if isinstance(value, Tensor):
        return value.detach()
    with reading(key, DataError, f"is a {type(value).__name__}, not numbers"):
        if hasattr(value, "tocoo"):
            matrix = value.tocoo()
            places = torch.from_numpy(np.stack([matrix.row, matrix.col]))
            given = torch.from_numpy(matrix.data)
            return torch.sparse_coo_tensor(places, given, matrix.shape, check_invariants=True)
        return torch.as_tensor(value if isinstance(value, np.ndarray) else np.asarray(value))


def column_of(key: str, value: object) -> Tensor:
    """Turn numbers into a tensor as ``as_tensor`` does; one column becomes a vector."""
    result = as_tensor(key, value)
    return result.flatten() if result.dim() == 2 and result.size(1) == 1 else result


# What pandas, R, Excel, databases and Python write for nothing
MISSING = frozenset(
    ("", "nan", "NaN", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null")
)  # fmt: skip
# Around words: blanks, also those of no width, which nobody sees
BLANK = f"{string.whitespace}\u00a0\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
WHOLE = re.compile(r"-?(0|[1-9]\d*)")
_AS_FLOAT = re.compile(r"-?(0|[1-9]\d*)(\.\d*)?([eE]\+\d\d+)?")  # with a power as R and C write it
WITH_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
EXACT = 2**53  # up to here floats have all whole numbers


def word_of(value: object, *, comma: bool = False) -> str | None:
    """Return a value as a word; None if it is missing; ``DataError`` for a list or a table."""
    if isinstance(value, list | tuple | dict | set):
        raise DataError(f"{value!r:.40} must be one word or number, not several")
    text = str(value).lower() if isinstance(value, bool) else str(value).strip(BLANK)
    if text in MISSING:
        return None
    if comma and WITH_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    if _AS_FLOAT.fullmatch(text) and (number := float(text)).is_integer() and abs(number) < EXACT:
        return str(int(number))
    return text


def number_of(value: object, *, comma: bool = False) -> float | None:
    """Return a value as a number, NaN if it is missing; None if it is no number.

    ``DataError`` if it is one with the other decimal sign.
    """
    if isinstance(value, str):
        value = value.strip(BLANK)
        if value in MISSING:
            return math.nan
        if not comma and "," in value and WITH_COMMA.fullmatch(value):
            raise DataError(f"{value!r} has a decimal comma: set data.decimal=comma")
        if "." in value and comma:
            if number_of(value) is None:
                return None
            raise DataError(f"{value!r} has a decimal point, but data.decimal=comma is set")
        value = value.replace(",", ".") if comma else value
    elif value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # which refuses what it cannot read
    except (TypeError, ValueError, OverflowError):
        return None


# New graphs in the form of a run's data ----------------------------------------------------------


class DataForm(NamedTuple):
    """The form of a run's data, which new graphs must have."""

    treatment: Treatment  # the treatment of the features
    num_classes: int
    classes: tuple[str, ...] | None  # the classes' names, if these are not the numbers
    given: ReadOptions = PLAIN  # how the run's own files were read
    scale: Scale | None = None  # that of numbers that are learnt; None where classes are
    weights: bool = False  # whether the run's edges have weights

    @property
    def how(self) -> ReadOptions:
        """How files of new graphs are read: as the run's own, whose words are known."""
        return self.given._replace(
            categories=self.given.categories if self.treatment.columns is None else ONE_HOT,
            missing=REFUSE if self.treatment.fill is None else MEAN,
            targets=self.scale is not None,
            weights=self.weights,
            needs_labels=False,
            needs_edges=False,
        )

    def to_json(self) -> dict[str, object]:
        given = {name: getattr(self.given, name) for name in _GIVEN}
        return self.treatment.to_json() | {
            "num-classes": self.num_classes,
            "classes": self.classes,
            "no-features": self.given.no_features,
            **({} if self.scale is None else {"target-scale": self.scale}),
            **({"edge-weights": True} if self.weights else {}),
            **{name: one for name, one in given.items() if one != getattr(PLAIN, name)},
        }

    @classmethod
    def from_json(cls, record: Tree) -> DataForm:
        classes, scale = record["classes"], record.get("target-scale")
        if scale is not None:
            scale = Scale(*map(float, scale))
            if not (math.isfinite(scale.mean) and 0 < scale.deviation < math.inf):
                raise ValueError(f"target-scale: {[*scale]}: must be finite, the second above 0")
        given: dict[str, Any] = {key: str(record[key]) for key in _GIVEN if key in record}
        return cls(
            Treatment.from_json(record),
            int(record["num-classes"]),
            None if classes is None else tuple(map(str, classes)),
            PLAIN._replace(no_features=str(record["no-features"]), **given),
            scale,
            bool(record.get("edge-weights")),
        )


_GIVEN = ("label", "weight", "decimal")  # settings of a run's files, for new ones


def new_graph(x: object, edge_index: object, of: DataForm, edge_weight: object = None) -> NewGraph:
    """Make a graph from untreated features, and from edges in any direction."""
    given = {"x": x, "edge_index": edge_index, "edge_weight": edge_weight}
    return formed(describe_graph(given, of.how), of)


def formed(found: NewGraph, of: DataForm) -> NewGraph:
    """Give a graph that was read the form of a run's data."""
    y, labels = found.targets, found.y
    if y is None:
        classes: Sequence[str] | None = of.classes
        if isinstance(labels, Tensor) and classes is not None:
            words = words_of(labels)
            # As when labels have gaps, numbers may be names of classes, and not their places
            if {*words} <= {*classes, None} or all(WHOLE.fullmatch(one) for one in classes):
                labels = words
        elif not isinstance(labels, Tensor) and classes is None:
            classes = [*map(str, range(of.num_classes))]
        (y,) = number_classes([labels], of.num_classes, classes, may_lack=True).y
        y = y if of.scale is None else torch.full(y.shape, torch.nan)
    return replace(found, x=of.treatment.apply(found.x), y=y)
