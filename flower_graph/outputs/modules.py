"""Modules of PyG layers for saved models; a method's own modules are in its folder.

Imported only when a model is read, since it takes seconds.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

from flower_graph.models import PairDecoder
from flower_graph.outputs.build import SHARE, WIDTH, built_with

__all__ = ["GCN", "GCNPairs"]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class GCN(nn.Module):
    """Two-layer GCN (Kipf and Welling, ICLR 2017).

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout : float
        Dropout on the hidden layer; in training mode alone.
    """

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]``, edges ``[2, e]``, weights ``[e]``."""
        x = functional.relu(self.conv1(x, edge_index, edge_weight))
        x = functional.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index, edge_weight)  # type: ignore[no-any-return]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class GCNPairs(GCN):
    """The same with a row for each node; ``decoder(rows, pairs)`` gives logits of pairs."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__(features, hidden, classes, dropout)
        self.decoder = PairDecoder(classes)
