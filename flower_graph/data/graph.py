"""Graphs as plain tensors, operations on their edges and rows, and splits of their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from flower_graph.data.features import Columns, Treatment
from flower_graph.errors import DataError
from flower_graph.ops.graph import SortedEdges, csr_tensor, pointers, row_entries, values_at
from flower_graph.wire.keys import ROLES

if TYPE_CHECKING:
    from torch_geometric.data import Data

PARTS = ("train_mask", "val_mask", "test_mask")
DENSE_LIMIT = 2_000_000_000  # most bytes of a dense feature matrix


class Masks(NamedTuple):
    """Which nodes are for training, validation and test: boolean ``[n]`` each."""

    train: Tensor
    val: Tensor
    test: Tensor


class Masked:
    """A graph whose fields ``PARTS`` say which of its nodes train, validate and test."""

    y: Tensor
    train_y: Tensor | None = None

    @property
    def masks(self) -> dict[str, Any]:
        return {part: getattr(self, part) for part in PARTS}

    @property
    def labels(self) -> Tensor:
        """The classes that it trains with, while it is judged by ``y``."""
        return self.y if self.train_y is None else self.train_y

    def with_masks(self, masks: Iterable[Tensor]) -> Self:
        return replace(self, **dict(zip(PARTS, masks, strict=True)))  # type: ignore[type-var]


class Scale(NamedTuple):
    """Mean and deviation of the training nodes' numbers, by which they are standardised."""

    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Scale:
        """Return the scale of several clients' numbers; the deviation is 1 if all are equal."""
        numbers = torch.cat([part.double() for part in parts])
        if not numbers.numel():
            return cls()
        return cls(float(numbers.mean()), float(numbers.std(correction=0)) or 1.0)

    def apply(self, numbers: Tensor) -> Tensor:
        return (numbers - self.mean) / self.deviation

    def undo(self, numbers: Tensor) -> Tensor:
        return numbers * self.deviation + self.mean


@dataclass
class Graph(Masked):
    """One graph whose nodes are classified or valued, without PyTorch Geometric."""

    x: Tensor  #: node features, float32 ``[n, f]``
    edge_index: Tensor  #: both directions of every edge, int64 ``[2, E]``
    #: Class of each node, int64 ``[n]``; -1 for a node without a label, which is in no mask. With
    #: ``targets``, 0 for each node that has one.
    y: Tensor
    num_classes: int
    #: Masks are boolean ``[n]``, or ``[n, k]`` before one of k splits is chosen, or None.
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    classes: tuple[str, ...] | None = None  #: names, by number; None: the numbers are the names
    names: tuple[str, ...] | None = None  #: of the nodes; None: the row numbers are the names
    notes: tuple[str, ...] = ()  #: on changes to the data during reading
    treatment: Treatment | None = None  #: of the features, for other nodes; None: not yet applied
    columns: Columns | None = None  #: of the features, if they have names, as in a table
    targets: Tensor | None = None  #: numbers to learn, float32 ``[n]``, NaN for none; None: classes
    edge_weight: Tensor | None = None  #: float32 ``[E]``, as ``edge_index``; None: all equal

    @property
    def num_nodes(self) -> int:
        return self.x.size(0)

    def to_data(self) -> Data:
        # Imported here, because it takes seconds and not every process needs it.
        from torch_geometric.data import Data

        values = vars(self) | {"notes": None, "treatment": None}
        if self.columns is not None:
            values["columns"] = [*self.columns]
        return Data(**{key: v for key, v in values.items() if v is not None or key in PARTS})


class WholeGraph(Protocol):
    """A graph that is divided among clients: ``Graph`` or PyG's ``Data``."""

    x: Tensor
    edge_index: Tensor
    y: Tensor


@dataclass(frozen=True)
class ClientGraph(Masked):
    """One client's graph, or its nodes alone."""

    client: int  #: number of the client; unique over the run
    nodes: Tensor  #: numbers in the whole graph, int64 ``[n]``; ascending if made here
    x: Tensor  #: features, float ``[n, f]``, dense or sparse CSR as in the whole graph
    y: Tensor  #: int64 ``[n]``; below 0 without a label. With ``targets``, 0 for a node with one
    #: Both directions of every edge, by place in ``nodes``, int64 ``[2, e]``, sorted, no
    #: self-loops; None for a graphless client.
    edge_index: Tensor | None
    #: A graphless client's true edges, in the same form, in a simulation: only Fed-GNN, the upper
    #: bound, trains on them, and learnt graphs are compared with them.
    hidden_edges: Tensor | None
    #: Masks are boolean ``[n]``, disjoint; nodes without a label are in none.
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    called: tuple[str, ...] | None = None  #: the user's names of the nodes; None: they have none
    targets: Tensor | None = None  #: numbers to learn, float32 ``[n]``, NaN for none; None: classes
    edge_weight: Tensor | None = None  #: float32 ``[e]``, as ``edge_index``; None: all equal
    #: Words that identify its nodes across clients (FedSCem); None: ``nodes`` do, if anything.
    names: tuple[str, ...] | None = None
    public: Tensor | None = None  #: nodes whose embeddings it sends (PPFL-GNN), boolean ``[n]``
    #: Classes that it trains with, int64 ``[n]``, some wrong under label noise; None: ``y``.
    train_y: Tensor | None = None
    #: Its edges to other clients' nodes, int64 ``[2, m]``: the place of its own node, and the other
    #: one's number in the whole graph; None where it does not know them.
    cut_edges: Tensor | None = None

    @classmethod
    def bare(
        cls,
        client: int,
        x: Tensor,
        y: Tensor,
        edge_index: Tensor | None,
        nodes: Tensor | None = None,
    ) -> Self:
        """Return a client none of whose nodes has a role; by default they are numbered from 0."""
        nobody = torch.zeros(len(y), dtype=torch.bool)
        nodes = torch.arange(len(y)) if nodes is None else nodes
        return cls(client, nodes, x, y, edge_index, None, nobody, nobody, nobody)

    @property
    def is_graphless(self) -> bool:
        return self.edge_index is None

    @property
    def edges(self) -> Tensor:
        """Its edges ``[2, e]``, none of a graphless client."""
        none = torch.empty(2, 0, dtype=torch.int64)
        return none if self.edge_index is None else self.edge_index

    @property
    def identities(self) -> Sequence[int | str]:
        """Identities, which two clients' common nodes share, in the order of the nodes."""
        return self.nodes.tolist() if self.names is None else self.names


def called(graphs: Sequence[ClientGraph]) -> Tensor | list[str]:
    """Return the users' names of the nodes of some clients' graphs, concatenated.

    Numbers if none of these clients' data have names.
    """
    if all(graph.called is None for graph in graphs):
        return torch.cat([graph.nodes for graph in graphs])
    own = (graph.nodes.tolist() if graph.called is None else graph.called for graph in graphs)
    return [str(name) for names in own for name in names]


def joined_masks(graphs: Sequence[Any]) -> dict[str, Tensor]:
    """Return the masks of all graphs' nodes, concatenated, by role."""
    names = zip(ROLES, PARTS, strict=True)
    return {role: torch.cat([getattr(graph, part) for graph in graphs]) for role, part in names}


def node_numbers(graphs: Sequence[ClientGraph]) -> Tensor:
    """Return a number for each node of clients, one for each identity."""
    numbers: dict[int | str, int] = {}
    every = (name for graph in graphs for name in graph.identities)
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in every])


def joined_edges(
    graphs: Sequence[Graph | ClientGraph], edges: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Return all graphs' edges, or others, with their nodes numbered one after another."""
    start, result = 0, [torch.empty(2, 0, dtype=torch.int64)]
    edges = [graph.edge_index for graph in graphs] if edges is None else edges
    for graph, own in zip(graphs, edges, strict=True):
        result += [] if own is None else [own + start]
        start += graph.y.numel()
    return torch.cat(result, 1)


def to_undirected(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return every edge in both directions, once, without self-loops, sorted as PyG sorts.

    ``edge_index`` is int64 ``[2, E]``, every entry in ``[0, num_nodes)``; the result is ``[2,
    E']``.
    """
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    keys = torch.cat([source * num_nodes + target, target * num_nodes + source])
    keys = torch.unique(keys)
    return torch.stack([keys // max(num_nodes, 1), keys % max(num_nodes, 1)])


def take_rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Take rows of a dense or sparse CSR matrix; of a slice, without a copy of its entries."""
    # x [n, f]
    if x.layout == torch.strided:
        return x[rows]
    if isinstance(rows, slice):
        start = x.crow_indices()[rows.start : rows.stop + 1]
        first, last = int(start[0]), int(start[-1])
        columns, values = x.col_indices()[first:last], x.values()[first:last]
        return csr_tensor(start - first, columns, values, (rows.stop - rows.start, x.size(1)))
    place, entry = row_entries(x.crow_indices(), rows)
    columns, values = x.col_indices()[entry], x.values()[entry]
    local = pointers(place, rows.numel()).to(columns.dtype)
    return csr_tensor(local, columns, values, (rows.numel(), x.size(1)))


def neighbours_of(data: WholeGraph) -> SortedEdges:
    """Return the neighbours in a graph whose edges may be given in any direction."""
    n = int(data.y.numel())
    source, target = to_undirected(data.edge_index, n)
    return SortedEdges(pointers(source, n), target.to(torch.int32))


def cut_out(
    data: WholeGraph,
    parts: Iterable[Tensor],
    neighbours: SortedEdges | None = None,
    *,
    keeps_cut: bool = False,
) -> list[ClientGraph]:
    """Make a client from each part ``[n]`` of node numbers: its nodes and the edges among them.

    Parts are ascending and may overlap. Edges count in both directions; masks are empty. With
    ``keeps_cut`` a client also knows its edges to nodes of others, without anything else of these.
    """
    neighbours, n, graphs = neighbours or neighbours_of(data), data.y.numel(), []
    names, targets, weight = (
        getattr(data, key, None) for key in ("names", "targets", "edge_weight")
    )
    if weight is not None:  # sorted like the neighbours, once for all clients
        weight = values_at(neighbours.edge_index, data.edge_index, weight, n)
    for client, nodes in enumerate(parts):
        source, entry = row_entries(neighbours.ptr, nodes)
        other = neighbours.other[entry].long()
        target = torch.searchsorted(nodes, other).clamp_(max=nodes.numel() - 1)
        inside = nodes[target] == other
        edges = torch.stack([source[inside], target[inside]])
        graph = ClientGraph.bare(client, take_rows(data.x, nodes), data.y[nodes], edges, nodes)
        weights = picked(weight, entry[inside])
        own = {"targets": picked(targets, nodes), "edge_weight": weights}
        if keeps_cut:
            own["cut_edges"] = torch.stack([source[~inside], other[~inside]])
        graphs.append(replace(graph, called=picked(names, nodes), **own))
    return graphs


# Any: what a graph has of each node or edge
def picked(values: Any, rows: Tensor) -> Any:
    """Take some rows of a tensor, a list or a tuple; None stays None."""
    if values is None or isinstance(values, Tensor):
        return values if values is None else values[rows]
    return tuple(values[row] for row in rows.tolist())


def fits_dense(nodes: int, features: int) -> bool:
    """Whether a dense float32 ``[nodes, features]`` matrix is small enough."""
    return 4 * nodes * features <= DENSE_LIMIT


def check_dense_size(nodes: int, features: int, advice: str) -> None:
    """Raise DataError when a dense float32 ``[nodes, features]`` matrix is too large."""
    if not fits_dense(nodes, features):
        size, limit = 4e-9 * nodes * features, DENSE_LIMIT / 1e9
        raise DataError(f"dense features take {size:.1f} GB; the limit is {limit:.1f} GB. {advice}")


# Splits into training, validation and test nodes --------------------------------------------------


def labelled_split(
    y: Tensor, ratios: Sequence[float], *, generator: torch.Generator, may_be_empty: bool = False
) -> Masks:
    """Draw three shares of the nodes with a label, whatever their class: ``round(share * n)`` each.

    Shares are in sum at most 1. ``DataError`` if a share is less than one node, or with
    ``may_be_empty`` at least one node for training.
    """
    labelled = (y >= 0).nonzero().flatten()
    order = labelled[torch.randperm(len(labelled), generator=generator)]
    parts = cut_by_shares(order, ratios, first=int(may_be_empty))
    if not may_be_empty and not all(map(len, parts)):
        raise DataError(f"data.ratios = {[*ratios]} leaves a part of {len(labelled)} nodes empty")
    return masks_from(y.numel(), parts)


def stratified_split(y: Tensor, ratios: Sequence[float], *, generator: torch.Generator) -> Masks:
    """Draw three shares of the nodes of each class; a share may be 0."""
    masks = torch.zeros(3, y.numel(), dtype=torch.bool)
    for label in y[y >= 0].unique().tolist():
        members = (y == label).nonzero().flatten()
        order = members[torch.randperm(members.numel(), generator=generator)]
        for mask, part in zip(masks, cut_by_shares(order, ratios), strict=True):
            mask[part] = True
    return Masks(*masks)


def cut_by_shares(order: Tensor, shares: Sequence[float], *, first: int = 0) -> list[Tensor]:
    """Cut a list of nodes into three shares, the first of at least so many nodes."""
    # Rounding the running sum, so that shares that sum to 1 cover every node.
    count = order.numel()
    ends = [min(count, max(first, round(count * sum(shares[: k + 1])))) for k in range(3)]
    return [order[start:end] for start, end in zip([0, *ends[:2]], ends, strict=True)]


def check_roles(client: int, masks: Iterable[Tensor], ratios: Sequence[float]) -> None:
    """Check that a client has nodes in every role that is to have some."""
    for role, mask, share in zip(ROLES, masks, ratios, strict=True):
        if share > 0 and not mask.any():
            raise DataError(f"client {client}: none of its {mask.numel()} nodes is for {role}")


def masks_from(num_nodes: int, parts: Sequence[Tensor]) -> Masks:
    """Give the masks of three lists of nodes."""
    masks = [torch.zeros(num_nodes, dtype=torch.bool) for _ in parts]
    for mask, members in zip(masks, parts, strict=True):
        mask[members] = True
    return Masks(*masks)
