"""The model of an ego-network as a PyTorch module, as a run saves it, without Flower.

Imported only when a model is read, since PyTorch Geometric takes seconds.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

from flower_graph.outputs.build import WIDTH, built_with

__all__ = ["EgoGCN"]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, projection=WIDTH)
class EgoGCN(nn.Module):
    """FedSCem's model: a GCN of two layers, a linear classifier and a projection head.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, embedding and output.
    projection : int
        Output width of the projection head, which only training needs.
    """

    def __init__(self, features: int, hidden: int, classes: int, projection: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)
        self.projection = nn.Linear(hidden, projection)

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, h]`` from features ``[n, f]`` and edges ``[2, e]``."""
        hidden = functional.relu(self.conv1(x, edge_index))
        return functional.relu(self.conv2(hidden, edge_index))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        logits: Tensor = self.classifier(self.embed(x, edge_index))
        return logits
