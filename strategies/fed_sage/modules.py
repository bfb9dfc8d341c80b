"""The networks: NeighGen, the generator of missing neighbours, and a classifier on mended graphs.

An encoder (2-layer GCN) turns a node into ``z``; ``dGen``, a linear map with ReLU, says how many
neighbours are missing; ``fGen``, an MLP on ``z`` with Gaussian noise, their features.

**Smaller than published.** The published ``fGen`` (256, then 2,048 wide, then all features of all
neighbours) has 15 million weights on Cora. Here it gives each neighbour a code of ``CODE``
numbers, and the neighbours share the map from codes to features: 34 thousand weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.ops.graph import Adjacency, gcn_adjacency, propagate
from flower_graph.ops.mending import Slots, mended_edges, slots
from flower_graph.outputs.build import SEED, WIDTH, built_with
from flower_graph.rng import generator

NEIGHBOURS = 5  # the most that a node is given, as published
ENCODER_HIDDEN, LATENT = 32, 64  # published: 32, 128
GENERATOR_HIDDEN, CODE = 64, 16
UNTRAINED = -1  # whose a generator is before it is trained

__all__ = ["SageModel"]

# What the first weights of each layer are drawn for
DRAWN_FOR = {
    "generator.conv1.lin": "encoder-1",
    "generator.conv2.lin": "encoder-2",
    "generator.number": "number",
    "generator.lin1": "generator-1",
    "generator.lin2": "generator-2",
    "generator.lin3": "generator-3",
    "conv1.lin": "classifier-1",
    "conv2.lin": "classifier-2",
    "classifier": "classifier-3",
}


class Convolution(nn.Module):
    """A graph convolution whose parameters are named as in PyG's ``GCNConv``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, graph: Adjacency) -> Tensor:
        return propagate(graph, self.lin(x)) + self.bias


class NeighbourGenerator(nn.Module):
    """NeighGen: predicts how many neighbours each node misses, and their features.

    Parameters
    ----------
    features : int
        Numbers of a node.
    seed : int
        Of the noise, with the number in ``client``.
    """

    client: Tensor

    def __init__(self, features: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.conv1 = Convolution(features, ENCODER_HIDDEN)
        self.conv2 = Convolution(ENCODER_HIDDEN, LATENT)
        self.number = nn.Linear(LATENT, 1)
        self.lin1 = nn.Linear(LATENT, GENERATOR_HIDDEN)
        self.lin2 = nn.Linear(GENERATOR_HIDDEN, NEIGHBOURS * CODE)
        self.lin3 = nn.Linear(CODE, features)
        self.register_buffer("client", torch.tensor(UNTRAINED))

    def encode(self, x: Tensor, graph: Adjacency) -> Tensor:
        """Encode nodes, ``[n, latent]``."""
        z: Tensor = torch.relu(self.conv2(torch.relu(self.conv1(x, graph)), graph))
        return z

    def numbers(self, z: Tensor) -> Tensor:
        """``dGen``: how many neighbours each node misses, ``[n]``, 0 or more."""
        return torch.relu(self.number(z)).squeeze(1)

    def counts(self, numbers: Tensor) -> Tensor:
        """Round predicted numbers, ``[n]`` int64."""
        return (numbers.detach() + 0.5).floor().clamp(0, NEIGHBOURS).long()

    def noise(self, client: int, purpose: str, epoch: int, x: Tensor) -> Tensor:
        """Draw a client's noise on its encoded nodes, ``[n, latent]``."""
        draw = generator(self.seed, "noise", purpose, client, epoch)
        return torch.randn(len(x), LATENT, generator=draw).to(x)

    def forward(self, x: Tensor, graph: Adjacency) -> tuple[Tensor, Tensor]:
        """Return features ``[r, f]`` of new neighbours, and the node each hangs on, ``[r]``."""
        z = self.encode(x, graph)
        slot = slots(self.counts(self.numbers(z)))
        noise = self.noise(int(self.client), "mend", 0, z)
        return features_of(self.feature_weights(), z + noise, slot), slot.parent

    def feature_weights(self) -> list[nn.Parameter]:
        """Return the parameters of ``fGen``, layer by layer, which FedSage+ exchanges."""
        return [p for layer in (self.lin1, self.lin2, self.lin3) for p in layer.parameters()]


def features_of(weights: Sequence[Tensor], z: Tensor, slot: Slots) -> Tensor:
    """Apply ``fGen`` with given weights: features ``[r, f]`` of the neighbours in some slots."""
    # z [n, LATENT] with noise
    codes = torch.relu(functional.linear(z, *weights[:2]))
    codes = torch.relu(functional.linear(codes, *weights[2:4]))
    chosen = codes.view(z.shape[0], NEIGHBOURS, CODE)[slot.parent, slot.slot]
    return torch.tanh(functional.linear(chosen, *weights[4:]))


def split_like(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Split the parameters of an ``fGen`` that travel as one row."""
    parts = flat.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, seed=SEED)
class SageModel(nn.Module):
    """A classifier on the graph that its generator has mended.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of the classifier.
    seed : int
        Of the generator's noise.
    """

    def __init__(self, features: int, hidden: int, classes: int, seed: int) -> None:
        super().__init__()
        sizes = {"features": features, "hidden": hidden, "classes": classes}
        self.arguments: dict[str, object] = {**sizes, "seed": seed}
        self.generator = NeighbourGenerator(features, seed)
        self.conv1 = Convolution(features, hidden)
        self.conv2 = Convolution(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)
        self._mended: tuple[Tensor, Tensor, Adjacency] | None = None  # of the last features

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        if self._mended is None or self._mended[0] is not x:
            self._mended = x, *self.mend(x, edge_index)
        return self.classify(x.shape[0], *self._mended[1:])

    @torch.no_grad()
    def mend(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Adjacency]:
        """Return features of real and generated nodes, and the graph that they make."""
        n = x.shape[0]
        made, parent = self.generator(x, gcn_adjacency(edge_index, n))
        graph = gcn_adjacency(mended_edges(edge_index, n, parent), n + parent.numel())
        return torch.cat([x, made]), graph

    def classify(self, n: int, x: Tensor, graph: Adjacency) -> Tensor:
        """Return logits ``[n, k]`` of the real nodes, which come first."""
        hidden = torch.relu(self.conv2(torch.relu(self.conv1(x, graph)), graph))
        logits: Tensor = self.classifier(hidden[:n])
        return logits

    def freeze_encoder(self) -> None:
        """Freeze the generator but for ``fGen``."""
        for layer in (self.generator.conv1, self.generator.conv2, self.generator.number):
            layer.requires_grad_(False)


def first_model(features: int, hidden: int, classes: int, seed: int) -> SageModel:
    """Draw the model that all clients start from."""
    model = SageModel(features, hidden, classes, seed)
    for name, purpose in DRAWN_FOR.items():
        _draw(model.get_submodule(name), generator(seed, "sage", purpose))
    nn.init.ones_(model.generator.number.bias)
    model.freeze_encoder()
    return model


@torch.no_grad()
def _draw(layer: nn.Module, draw: torch.Generator) -> None:
    assert isinstance(layer, nn.Linear)
    drawn = nn.init.xavier_uniform_(torch.empty(layer.weight.T.shape), generator=draw)
    layer.weight.copy_(drawn.T)
    if layer.bias is not None:
        layer.bias.zero_()
