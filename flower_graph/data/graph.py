"""A graph as plain tensors, what is done to it after reading, and its checks before training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor, pointers

if TYPE_CHECKING:
    from torch_geometric.data import Data

PARTS = ("train_mask", "val_mask", "test_mask")
DENSE_LIMIT = 2_000_000_000  # bytes of a dense feature matrix; above it, say so and stop


@dataclass
class Graph:
    """One graph for node classification, without PyTorch Geometric.

    Parameters
    ----------
    x
        Node features, float32 ``[n, f]``.
    edge_index
        Both directions of every edge, int64 ``[2, E]``.
    y
        Class of each node, int64 ``[n]``.
    num_classes
        Number of classes.
    train_mask, val_mask, test_mask
        Boolean ``[n]``, or ``[n, k]`` before one of k splits is chosen, or None.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_classes: int
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.x.size(0)

    def to_data(self) -> Data:
        """Return the same tensors as a PyG ``Data`` with the attribute ``num_classes``."""
        # Imported here: it takes seconds, and not every process needs it.
        from torch_geometric.data import Data

        return Data(**vars(self))


class WholeGraph(Protocol):
    """What clients are cut out of; ``Graph`` and PyG's ``Data`` have it."""

    x: Tensor
    edge_index: Tensor
    y: Tensor


def to_undirected(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return every edge in both directions, once, sorted, without self-loops.

    Parameters
    ----------
    edge_index
        int64 ``[2, E]``, every entry in ``[0, num_nodes)``.
    num_nodes
        Number of nodes.

    Returns
    -------
    Tensor
        int64 ``[2, E']``, sorted by source, then by target, as PyG sorts it.
    """
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    keys = torch.cat([source * num_nodes + target, target * num_nodes + source])
    keys = torch.unique(keys)
    return torch.stack([keys // max(num_nodes, 1), keys % max(num_nodes, 1)])


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows of a dense or sparse CSR matrix."""
    # x [n, f]
    if x.layout == torch.strided:
        return x[rows]
    place, entry = row_entries(x.crow_indices().long(), rows)
    columns, values = x.col_indices()[entry], x.values()[entry]
    local = pointers(place, rows.numel()).to(columns.dtype)
    return csr_tensor(local, columns, values, (rows.numel(), x.size(1)))


def row_entries(start: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """List the entries of rows of a CSR matrix: whose they are (a place in ``rows``) and which."""
    counts = start[rows + 1] - start[rows]
    place = torch.repeat_interleave(counts)
    # Counts up within each row, from where its entries begin.
    first = start[rows] - (counts.cumsum(0) - counts)
    return place, torch.arange(place.numel()) + first[place]


class Neighbours(NamedTuple):
    """Every node's neighbours, one after another: those of v are ``other[start[v]:start[v+1]]``."""

    start: Tensor
    other: Tensor

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.start.numel() - 1

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> Neighbours:
        """Read them off edges as ``to_undirected`` gives them."""
        return cls(pointers(edge_index[0], num_nodes).long(), edge_index[1])

    def step(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """List the neighbours of all given nodes: whose they are (a place) and which."""
        place, entry = row_entries(self.start, nodes)
        return place, self.other[entry]

    def among(self, nodes: Tensor) -> Tensor:
        """List the edges among some nodes, ascending, by place: int64 ``[2, e]``, sorted."""
        source, other = self.step(nodes)
        target = torch.searchsorted(nodes, other).clamp_(max=nodes.numel() - 1)
        inside = nodes[target] == other
        return torch.stack([source[inside], target[inside]])


def normalize_rows(x: Tensor) -> Tensor:
    """Divide each row by the sum of its absolute values; a zero row stays zero.

    For non-negative features this is what PyG's ``NormalizeFeatures`` gives, as long
    as some entry is 0 and no row sum lies between 0 and 1 (PyG shifts by the smallest
    entry, and never divides by less than 1). That holds for Cora, CiteSeer and PubMed.

    Parameters
    ----------
    x
        Features, float ``[n, f]``.

    Returns
    -------
    Tensor
        A new tensor of the same shape.
    """
    norm = torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=True)
    return x / torch.where(norm > 0, norm, torch.ones_like(norm))


def prepare_features(x: Tensor, *, presence: bool, normalize: bool) -> Tensor:
    """Do with features what ``data.presence`` and ``data.normalize`` say, in this order."""
    x = (x != 0).to(x.dtype) if presence else x
    return normalize_rows(x) if normalize else x


def check_dense_size(nodes: int, features: int, advice: str) -> None:
    """Raise DataError when a dense float32 ``[nodes, features]`` matrix is too large."""
    size = 4 * nodes * features
    if size > DENSE_LIMIT:
        raise DataError(
            f"{nodes} nodes with {features} dense features would take {size / 1e9:.1f} GB; "
            f"the limit is {DENSE_LIMIT / 1e9:.1f} GB. {advice}"
        )


def dense_features(x: Any, name: str) -> Tensor:
    """Return features as a dense float32 tensor, whatever kind of tensor they were."""
    if isinstance(x, Tensor) and x.layout == torch.strided:
        return x.to(torch.float32)
    if not hasattr(x, "to_dense"):
        raise DataError(f"data set {name!r}: x must be a tensor [n, f], not {type(x).__name__}")
    rows, columns = (int(size) for size in (x.size(0), x.size(1)))
    check_dense_size(rows, columns, f"The data set {name!r} has sparse features of this size.")
    dense: Tensor = x.to_dense()
    return dense.to(torch.float32)


def check_data(data: Any) -> None:
    """Check that a graph can be trained on. Isolated nodes are allowed.

    Parameters
    ----------
    data
        A PyG ``Data`` or a :class:`~flower_graph.data.Graph`: ``x`` float32 ``[n, f]``,
        ``edge_index`` int64 ``[2, E]``, ``y`` int64 ``[n]``, three boolean masks ``[n]``,
        and ``num_classes`` (without it: the largest label plus one).

    Raises
    ------
    DataError
        If something is missing, of the wrong shape or type, NaN, infinite, out of
        range, empty or overlapping.
    """
    for key in ("x", "edge_index", "y", *PARTS):
        check_tensor(data, key)
    check_features(data.x)
    nodes = int(data.x.size(0))
    check_edges(data.edge_index, nodes)
    check_labels(data.y, nodes, getattr(data, "num_classes", None))
    check_masks({key: getattr(data, key) for key in PARTS}, nodes)


def check_client(data: Any) -> None:
    """Check a client's own graph: some labels, all edges and all masks may be missing."""
    for key in ("x", "y"):
        check_tensor(data, key)
    if data.x.layout != torch.strided:
        raise DataError(f"x has the layout {data.x.layout}: must be dense")
    check_features(data.x.float())
    count = int(data.x.shape[0])
    if getattr(data, "edge_index", None) is not None:
        check_tensor(data, "edge_index")
        check_edges(data.edge_index, count)
    if data.y.shape != (count,) or data.y.dtype != torch.int64:
        raise DataError(f"y is {data.y.dtype} {list(data.y.shape)}: must be int64 [{count}]")
    taken = data.y < 0  # a node without a label has no part
    for part in PARTS:
        mask = mask_of(data, part)
        check_mask(part, mask, count)
        if (taken & mask).any():
            node = int((taken & mask).nonzero()[0])
            raise DataError(f"{part}: node {node} has no label or is in another mask too")
        taken = taken | mask


def mask_of(data: Any, part: str) -> Tensor:
    """Give a graph's mask, or one of no nodes where it has none."""
    mask = getattr(data, part, None)
    return torch.zeros(data.y.numel(), dtype=torch.bool) if mask is None else torch.as_tensor(mask)


def check_tensor(data: Any, key: str) -> None:
    """Raise DataError unless the graph has a tensor of this name."""
    if not isinstance(getattr(data, key, None), Tensor):
        raise DataError(f"the graph has no tensor {key!r}")


def check_features(x: Tensor) -> None:
    """Check the feature matrix."""
    if x.dim() != 2 or x.numel() == 0:
        raise DataError(f"x has shape {list(x.shape)}: must be [nodes, features], not empty")
    if x.dtype != torch.float32:
        raise DataError(f"x has dtype {x.dtype}: must be torch.float32")
    if not torch.isfinite(x).all():
        row, column = (~torch.isfinite(x)).nonzero()[0].tolist()
        raise DataError(f"x[{row}, {column}] is {x[row, column].item()}: must be finite")


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Check that edges are pairs of existing nodes."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise DataError(
            f"edge_index is {edge_index.dtype} {list(edge_index.shape)}: must be int64 [2, E]"
        )
    wrong = (edge_index < 0) | (edge_index >= num_nodes)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise DataError(
            f"edge_index[{row}, {column}] is {int(edge_index[row, column])}: "
            f"must be 0 to {num_nodes - 1}"
        )


def check_labels(y: Tensor, num_nodes: int, num_classes: int | None) -> None:
    """Check that every node has one class."""
    if y.shape != (num_nodes,) or y.dtype != torch.int64:
        raise DataError(
            f"y is {y.dtype} {list(y.shape)}: must be int64 [{num_nodes}], one class a node "
            "(several labels a node, and regression, are not supported)"
        )
    wrong = y < 0
    if num_classes is not None:
        wrong = wrong | (y >= num_classes)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        allowed = "at least 0" if num_classes is None else f"0 to {num_classes - 1}"
        raise DataError(f"y[{node}] is {int(y[node])}: labels must be {allowed}")


def check_masks(masks: dict[str, Tensor], num_nodes: int) -> None:
    """Check that the three parts exist, have nodes and share none."""
    for key, mask in masks.items():
        check_mask(key, mask, num_nodes)
        if not mask.any():
            raise DataError(f"{key} is empty: every part needs at least one node")
    for (first, left), (second, right) in combinations(masks.items(), 2):
        both = left & right
        if both.any():
            raise DataError(
                f"{first} and {second} overlap in {int(both.sum())} nodes, "
                f"the first is node {int(both.nonzero()[0])}"
            )


def check_mask(key: str, mask: Tensor, num_nodes: int) -> None:
    """Check that a mask has one bit a node."""
    if mask.shape != (num_nodes,) or mask.dtype != torch.bool:
        raise DataError(f"{key} is {mask.dtype} {list(mask.shape)}: must be bool [{num_nodes}]")
