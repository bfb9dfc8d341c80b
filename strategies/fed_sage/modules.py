"""The module of PyG layers that saved models of LocalSage+ and FedSage+ are.

Imported when a model is read; that takes PyTorch and PyTorch Geometric, not Flower.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from flower_graph.ops.mending import mended_edges, slots
from flower_graph.outputs.declared import COUNT, SEED, WIDTH, Arguments, Rule, built_with
from flower_graph.rng import generator

__all__ = ["NeighbourGenerator", "SageModel"]

# What a generator may be made with, besides the numbers of a node
GENERATOR: dict[str, Rule] = {
    **dict.fromkeys(("encoder_hidden", "latent", "hidden", "code"), WIDTH),
    "neighbours": COUNT,
    "seed": SEED,
}


class NeighbourGenerator(nn.Module):
    """NeighGen: how many neighbours each node misses, and what they are like.

    Parameters
    ----------
    features : int
        Numbers of a node.
    encoder_hidden, latent, hidden, code, neighbours : int
        Widths of its layers, and the most neighbours that a node is given.
    seed : int
        Of the noise, with the number in ``client``.
    """

    client: Tensor

    def __init__(
        self,
        features: int,
        encoder_hidden: int,
        latent: int,
        hidden: int,
        code: int,
        neighbours: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.neighbours, self.seed = neighbours, seed
        self.conv1 = GCNConv(features, encoder_hidden)
        self.conv2 = GCNConv(encoder_hidden, latent)
        self.number = nn.Linear(latent, 1)
        self.lin1 = nn.Linear(latent, hidden)
        self.lin2 = nn.Linear(hidden, neighbours * code)
        self.lin3 = nn.Linear(code, features)
        self.register_buffer("client", torch.tensor(0))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[r, f]`` of new neighbours, and the node each hangs on, ``[r]``."""
        z = torch.relu(self.conv1(x, edge_index))
        z = torch.relu(self.conv2(z, edge_index))
        count = (torch.relu(self.number(z)) + 0.5).floor().clamp(0, self.neighbours).long()
        slot = slots(count.squeeze(1))
        draw = generator(self.seed, "noise", "mend", int(self.client), 0)
        z = z + torch.randn(z.shape, generator=draw).to(z)
        codes = torch.relu(self.lin2(torch.relu(self.lin1(z))))
        codes = codes.view(x.shape[0], self.neighbours, -1)[slot.parent, slot.slot]
        return torch.tanh(self.lin3(codes)), slot.parent


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, generator=Arguments(GENERATOR))
class SageModel(nn.Module):
    """A classifier on a graph that its generator has mended.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of the classifier.
    generator : dict
        The other arguments of ``NeighbourGenerator``.
    """

    def __init__(self, features: int, hidden: int, classes: int, generator: dict[str, int]) -> None:
        super().__init__()
        self.generator = NeighbourGenerator(features, **generator)
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        n, (made, parent) = x.shape[0], self.generator(x, edge_index)
        mended = mended_edges(edge_index, n, parent)
        hidden = torch.relu(self.conv1(torch.cat([x, made]), mended))
        hidden = torch.relu(self.conv2(hidden, mended))
        return self.classifier(hidden[:n])  # type: ignore[no-any-return]
