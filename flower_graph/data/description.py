"""Turns any object with features, edges, labels and masks into canonical tensors.

Files, folders of clients, constructors and Python all use it. Each change to the data gives a note
for users. Data that cannot be understood raise a ``DataError`` with place, index, value and remedy.
``docs/reference/configuration.md`` has the table of accepted data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

from flower_graph.config.common import MEAN, REFUSE
from flower_graph.data.edge_weights import read_weights, with_edges
from flower_graph.data.gaps import NO_GAPS, Columns, Gaps
from flower_graph.data.graph import PARTS, Graph, check_dense_size, to_undirected
from flower_graph.data.labels import (
    DENSE,
    as_tensor,
    check_entries,
    is_whole,
    kind_of,
    listed,
    number_classes,
    read_labels,
    read_targets,
)
from flower_graph.data.uses import PLAIN, Uses
from flower_graph.errors import DataError

LOG = logging.getLogger("flower_graph.data")
WIDE = (torch.float64, torch.int64, torch.int32)  # numbers with more digits than float32
DEGREES = 32  # features that stand for degrees: 0, 1, ..., and 31 or more
ONE_KIND = (
    "nodes and edges must be of one kind; data.to_homogeneous() makes one graph of it, if all "
    "kinds of nodes have equally many features"
)
_said: set[tuple[str, str]] = set()


class Caution(str):
    """A note that changes the meaning of a run: logged as a warning, even with `--quiet`."""


@dataclass(frozen=True)
class Described:
    """One graph in canonical form, before its classes are numbered."""

    x: Tensor  # features [n, f], dense; float64 if they have more digits than float32
    # Both directions of every edge once, no self-loops, int64 [2, e], sorted
    edge_index: Tensor | None
    labels: Tensor | list[str | None]  # of each node; below 0 or None without one
    masks: dict[str, Tensor | None]  # of each part, boolean [n] or [n, k]
    names: tuple[str, ...] | None = None  # of the nodes
    notes: list[str] = field(default_factory=list)  # what was done to the data
    columns: Columns | None = None  # of the features, where these have names
    targets: Tensor | None = None  # numbers to learn, float32 [n]; labels mark the nodes with one
    edge_weight: Tensor | None = None  # of the edges, float32 [e]


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Add the file, the client or the data set to errors in this block."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{what}: {error}") from error


def tell(place: str, notes: Sequence[str], level: int = logging.INFO) -> None:
    """Log notes about data, once a process."""
    for note in notes:
        if (place, note) not in _said:
            _said.add((place, note))
            LOG.log(logging.WARNING if isinstance(note, Caution) else level, "%s: %s", place, note)


def by_place(columns: Columns, whose: str = "its features") -> str:
    """Return the warning that features without names are taken in the order of others'."""
    shown = ", ".join({}.fromkeys(columns.names))
    return Caution(f"{whose} have no names, and columns are taken in this order: {shown:.200}")


def as_graph(
    data: object,
    *,
    num_classes: int | None = None,
    no_features: str = "refuse",
    targets: bool = False,
    weights: bool = False,
) -> Graph:
    """Make a graph from anything with ``x``, ``edge_index``, ``y`` and, perhaps, masks.

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

    Returns
    -------
    Graph
        In canonical form, with notes; ``y`` is -1 without a label.

    Raises
    ------
    DataError
        If anything is missing or cannot be understood; names index, value and remedy.
    """
    uses = Uses(targets, weights)
    graph = read_graph(data, num_classes=num_classes, gaps=Gaps(no_features), uses=uses)
    return replace(graph, x=graph.x.float())


def read_graph(
    data: object, *, num_classes: int | None = None, gaps: Gaps, uses: Uses = PLAIN
) -> Graph:
    """As :func:`as_graph`, with untreated features: float64 perhaps, NaN where missing."""
    described, targets = describe_graph(data, gaps=gaps, uses=uses), uses.targets
    declared = getattr(data, "num_classes", None) if num_classes is None else num_classes
    named = None if targets else getattr(data, "classes", None)
    labels = number_classes([described.labels], 1 if targets else declared, named)
    assert described.edge_index is not None
    kept = tuple(getattr(data, "notes", ()))
    return Graph(
        x=described.x,
        edge_index=described.edge_index,
        y=labels.y[0],
        num_classes=labels.num_classes,
        train_mask=described.masks["train_mask"],
        val_mask=described.masks["val_mask"],
        test_mask=described.masks["test_mask"],
        classes=labels.classes,
        names=described.names,
        notes=(*kept, *described.notes, *labels.notes),
        columns=described.columns,
        targets=described.targets,
        edge_weight=described.edge_weight,
    )


def trainable(data: object) -> Graph:
    """As :func:`as_graph`; refuse masks with which nothing can be trained."""
    graph = as_graph(data)
    check_masks(graph)
    return graph


def check_data(data: object) -> None:
    """Check that a graph can be trained on. Isolated and unlabelled nodes are allowed.

    ``DataError`` if something is missing or cannot be understood, or if one of the three masks
    ``[n]`` is empty, has a node without a label, or overlaps with another.
    """
    trainable(data)


def check_masks(graph: Graph) -> None:
    """Check that the three masks exist, have labelled nodes only, and do not overlap."""
    masks = {part: getattr(graph, part) for part in PARTS}
    for part, mask in masks.items():
        if mask is None or mask.dim() != 1:
            kind = "missing" if mask is None else f"of {mask.size(1)} splits"
            raise DataError(f"{part} is {kind}: must be bool [{graph.num_nodes}]")
        if not mask.any():
            role = part.partition("_")[0]
            raise DataError(
                f"no node is in {role} (`{part}`; in tables, split = {role}): each part needs one, "
                "or leave out all three and they are drawn"
            )
    check_parts(masks, graph.y, graph.names)


def check_parts(masks: Mapping[str, Tensor], y: Tensor, names: Sequence[str] | None = None) -> None:
    """Check that all nodes of masks have a label, and that none is in two masks."""
    for part, mask in masks.items():
        wrong = mask & (y < 0)
        if wrong.any():
            node = int(wrong.nonzero()[0])
            name = f" ({names[node]})" if names else ""
            raise DataError(
                f"{part}: node {node}{name} has no label, as {int(wrong.sum())} of its nodes: "
                f"take them out of it, such as by {part} &= y >= 0"
            )
    for (first, left), (second, right) in combinations(masks.items(), 2):
        both = left & right
        if both.any():
            raise DataError(
                f"{first} and {second} overlap in {int(both.sum())} nodes, "
                f"the first is node {int(both.nonzero()[0])}"
            )


def check_kind(data: object) -> None:
    """Refuse PyG's objects of several kinds of nodes, or of several graphs."""
    if type(data).__name__ == "HeteroData":
        raise DataError(f"is a HeteroData: {ONE_KIND}")
    if hasattr(data, "to_data_list"):
        raise DataError(
            "is a Batch: save each graph of batch.to_data_list() in a folder, which is then a "
            "folder of clients; Data.from_dict(batch.to_dict()) is one graph of them all"
        )


def describe_graph(
    data: object,
    *,
    gaps: Gaps = NO_GAPS,
    needs_edges: bool = True,
    needs_labels: bool = True,
    uses: Uses = PLAIN,
) -> Described:
    """Bring features, edges, labels and masks into canonical form, without numbering classes."""
    notes: list[str] = []
    check_kind(data)
    data = with_edges(data)
    check_entries(data, ("x", "edge_index", "y", *PARTS, "names", "classes"))
    y = getattr(data, "y", None)
    if y is None and needs_labels:
        raise DataError("the graph has no y: give each node a class, or -1 if it has none")
    x = getattr(data, "x", None)
    is_text = isinstance(getattr(data, "columns", None), Columns)  # numbers of no type
    said = [] if is_text else notes
    given = None if _is_missing(x) else read_features(x, said, gaps.missing)
    if y is None and given is None:
        raise DataError("the graph has no x: give it features [nodes, features] as the run has")
    n = None if given is None else given.size(0)
    numbers = read_targets(y, n) if uses.targets and y is not None else None
    y = torch.full((n or 0,), -1) if y is None else y
    labels = read_labels(y, n, notes) if numbers is None else numbers.isnan().long().neg()
    n = len(labels)
    if n == 0:
        raise DataError("the graph has no nodes")
    edges = getattr(data, "edge_index", None)
    if edges is None and needs_edges:
        raise DataError("the graph has no edge_index: give it pairs of nodes, whole numbers [2, E]")
    edges, weight = _with_weights(data, n, notes, uses)
    x = _made_features(gaps.no_features, n, edges, notes) if given is None else given
    masks = {part: read_mask(part, getattr(data, part, None), n, notes) for part in PARTS}
    names = _names(getattr(data, "names", None), n)
    columns = Columns.of(getattr(data, "columns", None), x.size(1))
    return Described(x, edges, labels, masks, names, notes, columns, numbers, weight)


def _with_weights(
    data: object, n: int, notes: list[str], uses: Uses
) -> tuple[Tensor | None, Tensor | None]:
    given = getattr(data, "edge_index", None)
    if given is None:
        return None, None
    edges = read_edges(given, n, notes)
    weight, said, ignored = read_weights(data, edges, n, wanted=uses.weights)
    notes += [*said, *map(Caution, ignored)]
    return edges, weight


def read_features(x: object, notes: list[str], missing: str = REFUSE) -> Tensor:
    """Return features as dense float32, from any kind of matrix; add notes.

    Numbers that may have more digits stay float64 until they are treated.
    """
    given = as_tensor("x", x)
    if given.dim() != 2:
        remedy = "; x.view(-1, 1) has one feature" if given.dim() == 1 else ""
        raise DataError(f"x has shape {list(given.shape)}: must be [nodes, features]{remedy}")
    if given.is_complex():
        raise DataError(f"x has dtype {given.dtype}: must be real numbers")
    if given.layout != torch.strided:
        check_dense_size(given.size(0), given.size(1), DENSE)
        notes.append(f"{str(given.layout).removeprefix('torch.')} features made dense")
        given = given.to_dense()
    if given.dtype != torch.float32:
        notes.append(f"features of {kind_of(given)} taken as float32")
    wide = given.double() if given.dtype in WIDE else None
    result = given.to(torch.float32)
    if torch.isfinite(result.sum()):  # then every term is, and no second matrix is needed
        return result if wide is None else wide
    wrong = torch.isinf(result) if missing == MEAN else ~torch.isfinite(result)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        value = given[row, column].item()
        raise DataError(f"x[{row}, {column}] is {value}: must be finite, below 3e38{if_nan(value)}")
    return result if wide is None else wide


def if_nan(value: float) -> str:
    """Return the remedy for a number that is missing, to follow an error."""
    return f"; data.missing={MEAN} fills what is missing" if value != value else ""


def read_edges(edge_index: object, num_nodes: int, notes: list[str]) -> Tensor:
    """Return every edge in both directions, once, without self-loops; add notes."""
    edges = as_tensor("edge_index", edge_index)
    check_edges(edges, num_nodes)
    edges = edges.long()
    result = to_undirected(edges, num_nodes)
    loops = int((edges[0] == edges[1]).sum())
    count, pairs = edges.size(1) - loops, result.size(1)
    if loops == 0 and count == pairs and bool((edges == result).all()):
        return result
    source, target = edges[:, edges[0] != edges[1]]
    different = int(torch.unique(source * num_nodes + target).numel())
    if count > different:
        notes.append(f"{count - different} edges given more than once: taken once")
    if loops:
        notes.append(f"{loops} self-loops left out")
    if different < pairs:
        one_way = "edges" if 2 * different == pairs else f"{pairs - different} edges"
        notes.append(f"{one_way} in one direction: both made")
    return result


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Check that edges are pairs of existing nodes."""
    shape = list(edge_index.shape)
    if edge_index.layout != torch.strided:
        raise DataError(f"edge_index is {edge_index.layout}: must be pairs of nodes [2, E]")
    if edge_index.dim() != 2 or shape[0] != 2 or not is_whole(edge_index):
        remedy = "; use edge_index.t()" if len(shape) == 2 and shape[1] == 2 else ""
        remedy = remedy if is_whole(edge_index) else "; use edge_index.long()"
        raise DataError(f"edge_index is {edge_index.dtype} {shape}: must be int64 [2, E]{remedy}")
    if edge_index.numel() == 0:
        return
    low, high = (int(one) for one in torch.aminmax(edge_index))
    if low < 0 or high >= num_nodes:
        row, column = ((edge_index < 0) | (edge_index >= num_nodes)).nonzero()[0].tolist()
        raise DataError(
            f"edge_index[{row}, {column}] is {int(edge_index[row, column])}: "
            f"must be 0 to {num_nodes - 1}"
        )


def read_mask(part: str, mask: object, n: int, notes: list[str]) -> Tensor | None:
    """Return a mask as booleans ``[n]`` or ``[n, k]``."""
    if mask is None:
        return None
    given = as_tensor(part, mask)
    if given.dim() not in (1, 2) or given.size(0) != n or given.is_floating_point():
        remedy = f"; of numbers of nodes, mask = torch.zeros({n}, dtype=bool), mask[numbers] = True"
        remedy = remedy if is_whole(given) and given.dim() == 1 else ""
        raise DataError(f"{part} is {given.dtype} {list(given.shape)}: must be bool [{n}]{remedy}")
    if given.dtype == torch.bool:
        return given
    if (wrong := (given != 0) & (given != 1)).any():
        raise DataError(f"{part} has {int(given[wrong][0])}: must be bool [{n}], or 0 and 1")
    notes.append(f"{part} of {kind_of(given)} taken as true and false")
    return given.bool()


def _made_features(how: str, n: int, edges: Tensor | None, notes: list[str]) -> Tensor:
    if how == "degree":
        degrees = (
            torch.zeros(n, dtype=torch.int64) if edges is None else edges[0].bincount(minlength=n)
        )
        note = f"no features: each node's degree stands for them, 0 to {DEGREES - 1} or more"
        notes.append(Caution(note))
        return torch.nn.functional.one_hot(degrees.clamp(max=DEGREES - 1), DEGREES).float()
    if how == "one-hot":
        check_dense_size(n, n, "data.no_features=degree takes less.")
        note = "no features: each node's number stands for them, one of as many as nodes"
        notes.append(Caution(note))
        return torch.eye(n)
    raise DataError(
        "the graph has no x: set data.no_features=degree or one-hot (as_graph's no_features), or "
        "give it features [nodes, features]"
    )


def _names(names: object, n: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    result = tuple(str(name) for name in listed("names", names))
    if len(result) != n:
        raise DataError(f"{len(result)} names for {n} nodes: must be one a node")
    if len(set(result)) < n:
        index = {name: row for row, name in enumerate(result)}
        row, name = next((row, name) for row, name in enumerate(result) if index[name] != row)
        raise DataError(f"the name {name!r} is there twice: nodes {row} and {index[name]}")
    return result


def _is_missing(x: object) -> bool:
    return x is None or (isinstance(x, Tensor) and x.dim() == 2 and x.size(1) == 0)
