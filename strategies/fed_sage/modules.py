"""NeighGen, the generator of missing neighbours, and a classifier on the mended graph.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021: an
encoder (2-layer GCN) turns a node of the impaired graph into ``z``; ``dGen``, a linear map with
ReLU, says how many neighbours are missing; ``fGen``, an MLP on ``z`` with Gaussian noise, their
features.

**Smaller than published.** The published ``fGen`` (256, then 2,048 wide, then all features of all
neighbours) has 15 million weights on Cora. Here it gives each neighbour a code of ``CODE``
numbers, and the neighbours share the map from codes to features: 34 thousand weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.engine.cohort import GraphOnDevice
from flower_graph.ops.graph import Adjacency, csr, csr_tensor, gcn_adjacency, propagate
from flower_graph.ops.mending import (
    Impaired,
    Slots,
    impair,
    mended_edges,
    nearest_hidden,
    nearest_of_each,
    slots,
)
from flower_graph.outputs.build import SEED, WIDTH, built_with
from flower_graph.rng import generator

NEIGHBOURS = 5  # the most that a node is given, as published
ENCODER_HIDDEN, LATENT = 32, 64  # published: 32, 128
GENERATOR_HIDDEN, CODE = 64, 16
HIDDEN_SHARE = 0.25  # of a client's nodes, while its generator learns; published: 3 to 28 %
TABLE = 16_777_216  # numbers in the table of distances that a client fills at a time
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


# NeighGen's training ------------------------------------------------------------------------------


class ImpairedGraph(NamedTuple):
    """A generator's training graph: a client's graph without the nodes that it hides."""

    x: Tensor  # [n, f] features of all nodes
    impaired: Impaired
    rest: Tensor  # [k, f] features of the nodes that are left
    adjacency: Adjacency
    y: Tensor  # [k] their classes
    trains: Tensor  # [k] which of them train

    @classmethod
    def of(cls, graph: GraphOnDevice, seed: int) -> ImpairedGraph:
        """Hide a share of a client's nodes, always the same."""
        x, n = graph.x, len(graph.x)
        order = torch.randperm(n, generator=generator(seed, "hidden", graph.client))
        impaired = impair(graph.edge_index, (order < int(HIDDEN_SHARE * n)).to(x.device))
        kept = impaired.kept
        adjacency = gcn_adjacency(impaired.edge_index, kept.numel())
        train = graph.masks["train"][kept]
        return cls(x, impaired, x[kept], adjacency, graph.y[kept], train)


def generator_loss(model: SageModel, graph: ImpairedGraph, noise: Tensor) -> Tensor:
    """Add up the losses of number, features and classes on an impaired graph."""
    made_by, missing, n = model.generator, graph.impaired.missing, graph.rest.shape[0]
    z = made_by.encode(graph.rest, graph.adjacency)
    numbers = made_by.numbers(z)
    count, true = made_by.counts(numbers), missing.clamp(max=NEIGHBOURS)
    slot = slots(torch.maximum(count, true))
    made = features_of(made_by.feature_weights(), z + noise, slot)
    is_true = slot.slot < true[slot.parent]
    matched = Slots(slot.parent[is_true], slot.slot[is_true])
    nearest = nearest_hidden(made[is_true], matched, graph.impaired, graph.x)
    distance = (made[is_true] - graph.x[nearest]).square().sum()
    parent = slot.parent.where(slot.slot < count[slot.parent], -1)
    edges = mended_edges(graph.impaired.edge_index, n, parent)
    mended = gcn_adjacency(edges, n + parent.numel())
    logits = model.classify(n, torch.cat([graph.rest, made]), mended)
    number_loss = functional.smooth_l1_loss(numbers, missing.to(numbers.dtype))
    return number_loss + distance / n + class_loss(logits, graph.y, graph.trains)


def class_loss(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Average the cross-entropy over the masked nodes; zero without any."""
    total = functional.cross_entropy(logits[mask], y[mask], reduction="sum")
    return total / mask.sum().clamp(min=1)


def distance_gradient(
    generated: Tensor, author: Tensor, x: Tensor, ptr: list[int], clients: Tensor
) -> Tensor:
    """FedSage+'s cross-client term: compare generated neighbours with other clients' nodes."""
    # The term is ``sum_j min_{u in V_j} ||g - x_u||^2`` over the clients ``j`` that are not the
    # author. Its gradient is all that an author needs.
    # generated [r, f], author [r], x [n, f], clients [c]
    gradient = torch.empty_like(generated)
    row, column = x.nonzero(as_tuple=True)
    features = csr(row, column, x[row, column], *x.shape)
    step = max(1, TABLE // max(x.shape[0], 1))
    for first in range(0, generated.shape[0], step):
        part = slice(first, first + step)
        other = (clients[:, None] != author[part]).float()
        nearest = nearest_of_each(generated[part], features, ptr)
        # 2 (g - x_u), summed over the clients: a sparse matrix has the chosen u of every g.
        choice = csr_tensor(
            torch.arange(nearest.shape[1] + 1, device=x.device) * nearest.shape[0],
            nearest.T.ravel(),
            other.T.ravel(),
            (nearest.shape[1], x.shape[0]),
        )
        chosen = (choice @ features).to_dense()
        gradient[part] = 2 * (generated[part] * other.sum(0)[:, None] - chosen)
    return gradient
