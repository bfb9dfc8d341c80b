"""The model of an ego-network as a PyTorch module: what the baselines train and every run saves."""

from torch import Tensor, nn

from flower_graph.models import GCN
from flower_graph.ops.graph import Adjacency
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
        self.arguments: dict[str, object] = {
            "features": features,
            "hidden": hidden,
            "classes": classes,
            "projection": projection,
        }
        self.gnn = GCN(features, hidden, hidden, dropout=0.0)
        self.classifier = nn.Linear(hidden, classes)
        self.projection = nn.Linear(hidden, projection)

    def embed(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, h]`` from features ``[n, f]`` and edges ``[2, e]``."""
        embedding: Tensor = self.gnn(x, edge_index).relu_()
        return embedding

    def forward(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        logits: Tensor = self.classifier(self.embed(x, edge_index))
        return logits
