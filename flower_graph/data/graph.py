"""A graph as plain tensors, and what is done to every graph after reading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor, pointers

if TYPE_CHECKING:
    from torch_geometric.data import Data

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

        return Data(
            x=self.x,
            edge_index=self.edge_index,
            y=self.y,
            train_mask=self.train_mask,
            val_mask=self.val_mask,
            test_mask=self.test_mask,
            num_classes=self.num_classes,
        )


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
