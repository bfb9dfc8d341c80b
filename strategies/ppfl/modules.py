"""The GAT of PPFL-GNN with PyG's layers, for saved models.

Imported only when a model is read, since it takes seconds.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv

from flower_graph.outputs.build import HEADS, SHARE, WIDTH, built_with

__all__ = ["GAT"]


@built_with(features=WIDTH, dimension=WIDTH, classes=WIDTH, heads=HEADS, dropout=SHARE)
class GAT(nn.Module):
    """Two-layer GAT (Velickovic et al., ICLR 2018) whose hidden layer is the embedding.

    Parameters
    ----------
    features, dimension, classes : int
        Widths of input, hidden layer and output.
    heads : int
        Heads of the hidden layer, which share ``dimension`` equally.
    dropout : float
        Of features, hidden layer and attention; in training mode alone.
    """

    def __init__(
        self, features: int, dimension: int, classes: int, heads: int = 1, dropout: float = 0.6
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = GATConv(features, dimension // heads, heads=heads, dropout=dropout)
        self.conv2 = GATConv(dimension, classes, dropout=dropout)

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, d]`` from features ``[n, f]`` and edges ``[2, e]``."""
        x = functional.dropout(x, self.dropout, self.training)
        return functional.elu(self.conv1(x, edge_index))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        hidden = functional.dropout(self.embed(x, edge_index), self.dropout, self.training)
        return self.conv2(hidden, edge_index)  # type: ignore[no-any-return]
