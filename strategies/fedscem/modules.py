"""FedSCem's model (section 5.1.4), alike at all clients."""

import torch
from torch import Tensor, nn

from flower_graph.engine.cohort import check_classes
from flower_graph.models import GCN
from flower_graph.ops.graph import Adjacency
from flower_graph.outputs.build import WIDTH, built_with
from flower_graph.rng import generator, seeded
from flower_graph.strategies.fedscem.config import EgoSettings


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
        self.arguments = {"features": features, "hidden": hidden, "classes": classes}
        self.arguments["projection"] = projection
        self.gnn = GCN(features, hidden, hidden, dropout=0.0)
        self.classifier = nn.Linear(hidden, classes)
        self.projection = nn.Linear(hidden, projection)

    def embed(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, h]`` (equation 1)."""
        embedding: Tensor = self.gnn(x, edge_index).relu_()
        return embedding

    def forward(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` (equation 2) from features ``[n, f]`` and edges ``[2, e]``."""
        logits: Tensor = self.classifier(self.embed(x, edge_index))
        return logits


@torch.no_grad()
def first_model(settings: EgoSettings) -> EgoGCN:
    """Draw the model that every client starts from, as PyG's GCN and PyTorch's Linear do."""
    check_classes(settings.num_classes)
    widths = settings.num_features, settings.hidden, settings.num_classes, settings.projection
    with seeded(torch.device("cpu"), settings.seed, "module"):
        model = EgoGCN(*widths)
    chance, bound = generator(settings.seed, "ego-model"), settings.hidden**-0.5
    for layer in (model.gnn.first, model.gnn.second):
        drawn = torch.empty(layer.in_features, layer.out_features)
        layer.weight.copy_(nn.init.xavier_uniform_(drawn, generator=chance).T)
    for head in (model.classifier, model.projection):
        drawn = torch.empty(head.in_features, head.out_features)
        head.weight.copy_(drawn.uniform_(-bound, bound, generator=chance).T)
        head.bias.uniform_(-bound, bound, generator=chance)
    return model
