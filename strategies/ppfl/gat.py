"""The GAT client of PPFL-GNN: two attention layers, and a pull towards the aligned public means.

The hidden layer is the embedding. The server aligns its public rows, and the aligned means come
back as targets: their cosine distance is added to the cross-entropy (PPFL-GNN, equations 5 to 9).

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.data.description import check_clients
from flower_graph.engine.graph_batch import check_sizes, pack_graphs, turn_of, with_dropout
from flower_graph.ops.adam import adam_rows_
from flower_graph.ops.attention import AttentionGraph, attend, attention_graph
from flower_graph.ops.graph import Adjacency, propagate
from flower_graph.outputs.files import SavedModels, SparseRows
from flower_graph.rng import generator, seeded

if TYPE_CHECKING:
    from flower_graph.data.partition.overlapping import OverlappingGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

MODULE = "flower_graph.strategies.ppfl.modules.GAT"


class Inputs(NamedTuple):
    """The layers' inputs from a client's graph."""

    x: Adjacency  # [n, r] sparse features, a column for each feature that occurs, and the transpose
    turn: Tensor  # For each entry of the transpose, which entry of the matrix it is
    edges: AttentionGraph  # Edges with self-loops


class GATWeights(NamedTuple):
    """The weights of both layers: ``h = d / heads`` numbers a head, ``c`` classes."""

    linear_1: Tensor  # [r, d]
    source_1: Tensor  # [heads, h] halves of the attention vectors
    target_1: Tensor
    bias_1: Tensor  # [d]
    linear_2: Tensor  # [d, c]
    source_2: Tensor  # [1, c]
    target_2: Tensor
    bias_2: Tensor  # [c]


def hidden_layer(weights: GATWeights, inputs: Inputs, dropout: float = 0.0) -> Tensor:
    """Compute the first layer, which is the embedding."""
    x = inputs.x
    if dropout:
        kept = functional.dropout(torch.ones_like(x.matrix.values()), dropout)
        x = with_dropout(x, inputs.turn, kept)
    heads, size = weights.source_1.shape
    z = propagate(x, weights.linear_1).view(-1, heads, size)
    h = attend(z, weights.source_1, weights.target_1, inputs.edges, dropout=dropout)
    return functional.elu(h.reshape(-1, heads * size) + weights.bias_1)


def output_layer(
    weights: GATWeights, hidden: Tensor, inputs: Inputs, dropout: float = 0.0
) -> Tensor:
    """Compute logits ``[n, c]`` from the hidden layer; arguments as in ``hidden_layer``."""
    z = (functional.dropout(hidden, dropout) @ weights.linear_2)[:, None]
    out = attend(z, weights.source_2, weights.target_2, inputs.edges, dropout=dropout)
    return out[:, 0] + weights.bias_2


class PublicGAT(nn.Module):
    """A client's GAT as an embedding model: it learns from labels and from aligned means."""

    # Weights and draws depend on the seed, the client and the round alone. Computes where the
    # graph's features are.

    weight: Tensor  # the state between rounds: weights, Adam's moments, its count of steps
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    def __init__(self, graph: OverlappingGraph, config: PPFLConfig, classes: int) -> None:
        super().__init__()
        check_clients([graph])
        check_sizes(graph, int(graph.x.shape[1]), classes)
        self.settings, self._seed = config.gat, config.seed
        self._client, self._device = graph.client, graph.x.device
        self._train = (graph.train_mask & (graph.train_y >= 0)).nonzero()[:, 0]
        if not self._train.numel():
            raise ValueError(f"client {graph.client}: no training node has a label; 1 is needed")
        self._y = graph.train_y[self._train]
        batch = pack_graphs([graph], self._device)
        x, self._feature = batch.x, batch.feature  # [r] which feature each row of weights is of
        n, self._features = graph.x.shape
        self._inputs = Inputs(x, turn_of(x), attention_graph(graph.edge_index, n))
        d, heads = config.model.dimension, config.gat.heads
        attention = (heads, d // heads)
        output = [(d, classes), (1, classes), (1, classes), (classes,)]
        self._shapes = [(x.matrix.shape[1], d), attention, attention, (d,), *output]
        rng = generator(config.seed, "gat", graph.client)
        weight = _initial(self._features, self._shapes, rng)
        self.register_buffer("weight", weight.to(self._device))
        self.register_buffer("exp_avg", torch.zeros_like(self.weight))
        self.register_buffer("exp_avg_sq", torch.zeros_like(self.weight))
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64))

    def learn(
        self, rows: NDArray[np.int64], targets: NDArray[np.float32] | None, server_round: int
    ) -> float:
        # rows [p], targets [p, d]
        aligned = None
        if targets is not None and len(rows) and self.settings.beta:  # without, the pull is free
            places = torch.as_tensor(rows, device=self._device)
            aligned = places, torch.as_tensor(targets, dtype=torch.float32, device=self._device)
        loss = self.weight.new_zeros(())
        with seeded(self._device, self._seed, "gat-dropout", self._client, server_round):
            for _ in range(self.settings.epochs):
                loss = self._epoch(aligned)
        return float(loss)

    def embed(self) -> NDArray[np.float32]:
        with torch.no_grad():
            return hidden_layer(self._split(self.weight), self._inputs).cpu().numpy()

    def logits(self) -> Tensor:
        with torch.no_grad():
            weights = self._split(self.weight)
            return output_layer(weights, hidden_layer(weights, self._inputs), self._inputs)

    def saved(self) -> SavedModels:
        weights = self._split(self.weight.cpu().clone())
        d, classes = weights.linear_2.shape
        arguments = {"features": self._features, "dimension": d, "classes": classes}
        arguments |= {"heads": self.settings.heads}
        own = {
            "conv1.att_src": weights.source_1[None],
            "conv1.att_dst": weights.target_1[None],
            "conv1.bias": weights.bias_1,
            "conv2.lin.weight": weights.linear_2.T,
            "conv2.att_src": weights.source_2[None],
            "conv2.att_dst": weights.target_2[None],
            "conv2.bias": weights.bias_2,
        }
        # A feature that the client never sees has no weight.
        name, feature = "conv1.lin.weight", self._feature.cpu()
        ptr = torch.tensor([0, feature.numel()])
        return SavedModels(
            MODULE,
            arguments | {"dropout": self.settings.dropout},
            [self._client],
            {name: torch.zeros(d, self._features)},
            {key: value[None] for key, value in own.items()},
            SparseRows(name, weights.linear_1, feature, ptr, transposed=True),
        )

    def _epoch(self, aligned: tuple[Tensor, Tensor] | None) -> Tensor:
        """Take one step of Adam; return the cross-entropy before it."""
        settings = self.settings
        flat = self.weight.detach().requires_grad_()
        weights = self._split(flat)
        hidden = hidden_layer(weights, self._inputs, settings.dropout)
        logits = output_layer(weights, hidden, self._inputs, settings.dropout)
        cross_entropy = functional.cross_entropy(logits.index_select(0, self._train), self._y)
        loss = cross_entropy
        if aligned is not None:
            places, targets = aligned
            cosine = functional.cosine_similarity(hidden.index_select(0, places), targets, dim=1)
            loss = cross_entropy + settings.beta * (1 - cosine.mean())  # equation 9
        (gradient,) = torch.autograd.grad(loss, flat)
        self.step += 1
        adam_rows_(
            self.weight,
            self.exp_avg,
            self.exp_avg_sq,
            gradient,
            self.step,
            [0, len(gradient)],
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        return cross_entropy.detach()

    def _split(self, flat: Tensor) -> GATWeights:
        parts = flat.split([prod(shape) for shape in self._shapes])
        return GATWeights(*(part.view(s) for part, s in zip(parts, self._shapes, strict=True)))


def _initial(features: int, shapes: list[tuple[int, ...]], rng: torch.Generator) -> Tensor:
    """Draw Glorot's uniform weights, as GAT's authors do, into one column; biases are 0."""
    # Only the bound of the first matrix depends on all ``features``: rows of features that the
    # client does not have would not change its output.
    parts = []
    for index, shape in enumerate(shapes):
        ends = (features, shape[1]) if index == 0 else shape
        bound = sqrt(6 / sum(ends)) if len(shape) == 2 else 0.0
        parts.append((2 * torch.rand(shape, generator=rng) - 1).mul_(bound).view(-1))
    return torch.cat(parts)[:, None]
