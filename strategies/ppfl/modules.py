"""The GAT of PPFL-GNN, as clients train it and as a run saves it.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.ops.attention import AttentionGraph, attend, attention_graph
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

    linear_1: Tensor  # [f, d]
    source_1: Tensor  # [heads, d / heads] halves of the attention vectors
    target_1: Tensor
    bias_1: Tensor  # [d]
    linear_2: Tensor  # [d, k]
    source_2: Tensor  # [1, k]
    target_2: Tensor
    bias_2: Tensor  # [k]

    def __init__(
        self, features: int, dimension: int, classes: int, heads: int = 1, dropout: float = 0.6
    ) -> None:
        super().__init__()
        self.dropout = dropout
        ends = {"1": (features, dimension, heads), "2": (dimension, classes, 1)}
        for layer, (wide, narrow, count) in ends.items():
            half = (count, narrow // count)
            shapes = {"linear": (wide, narrow), "source": half, "target": half, "bias": (narrow,)}
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_{layer}", nn.Parameter(torch.zeros(shape)))

    @property
    def rate(self) -> float:
        """The dropout of the current mode."""
        return self.dropout if self.training else 0.0

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, d]`` from features ``[n, f]`` and edges ``[2, e]``."""
        mapped = functional.dropout(x, self.rate) @ self.linear_1
        return self.hidden_layer(mapped, attention_graph(edge_index, len(x)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        return self.output_layer(self.embed(x, edge_index), attention_graph(edge_index, len(x)))

    def hidden_layer(self, mapped: Tensor, edges: AttentionGraph) -> Tensor:
        """Return embeddings ``[n, d]`` from features that ``linear_1`` has mapped, ``[n, d]``."""
        z = mapped.view(-1, *self.source_1.shape)
        h = attend(z, self.source_1, self.target_1, edges, dropout=self.rate)
        return functional.elu(h.reshape(mapped.shape) + self.bias_1)

    def output_layer(self, hidden: Tensor, edges: AttentionGraph) -> Tensor:
        """Return logits ``[n, k]`` from the hidden layer, ``[n, d]``."""
        z = (functional.dropout(hidden, self.rate) @ self.linear_2)[:, None]
        out = attend(z, self.source_2, self.target_2, edges, dropout=self.rate)
        return out[:, 0] + self.bias_2
