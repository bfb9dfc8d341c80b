"""The GAT of PPFL-GNN, as a run saves it, and its training with a pull towards the public means.

The hidden layer is the embedding. The server aligns its public rows and returns the aligned means;
the loss is cross-entropy plus cosine distance to these targets (PPFL-GNN, equations 5 to 9).

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from flower_graph.engine.cohort import check_sizes, feature_rows
from flower_graph.ops.adam import Rates, adam_rows_
from flower_graph.ops.attention import AttentionGraph, attend, attention_graph
from flower_graph.ops.dropout import turn_of, with_dropout
from flower_graph.ops.graph import propagate
from flower_graph.outputs.build import HEADS, SHARE, WIDTH, built_with, form_of
from flower_graph.outputs.files import SavedModels
from flower_graph.rng import generator, seeded

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

FIRST = "hidden.linear"  # the weights that a client has for the features that it sees


class Attention(nn.Module):
    """A layer of attention; its linear map is applied outside."""

    def __init__(self, wide: int, narrow: int, heads: int) -> None:
        super().__init__()
        half = torch.zeros(heads, narrow // heads)
        self.linear = nn.Parameter(torch.zeros(wide, narrow))
        self.source, self.target = nn.Parameter(half), nn.Parameter(half.clone())
        self.bias = nn.Parameter(torch.zeros(narrow))

    def forward(self, mapped: Tensor, edges: AttentionGraph, dropout: float) -> Tensor:
        z = mapped.view(-1, *self.source.shape)
        return attend(z, self.source, self.target, edges, dropout=dropout).flatten(1) + self.bias


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
        self.hidden = Attention(features, dimension, heads)
        self.output = Attention(dimension, classes, 1)

    @property
    def rate(self) -> float:
        """The dropout of the current mode."""
        return self.dropout if self.training else 0.0

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, d]`` from features ``[n, f]`` and edges ``[2, e]``."""
        mapped = functional.dropout(x, self.rate) @ self.hidden.linear
        return self.embed_mapped(mapped, attention_graph(edge_index, len(x)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        return self.classify(self.embed(x, edge_index), attention_graph(edge_index, len(x)))

    def embed_mapped(self, mapped: Tensor, edges: AttentionGraph) -> Tensor:
        """Return embeddings ``[n, d]`` from features that the linear map was applied to."""
        return functional.elu(self.hidden(mapped, edges, self.rate))

    def classify(self, embeddings: Tensor, edges: AttentionGraph) -> Tensor:
        """Return logits ``[n, k]`` from embeddings ``[n, d]``."""
        mapped = functional.dropout(embeddings, self.rate) @ self.output.linear
        logits: Tensor = self.output(mapped, edges, self.rate)
        return logits


class PublicGAT(nn.Module):
    """A client's GAT as an embedding model: it learns from labels and from aligned means."""

    # Weights and draws depend on the seed, the client and the round alone. Computes where the
    # graph's features are.

    exp_avg: Tensor  # Adam's moments, and its count of steps
    exp_avg_sq: Tensor
    step: Tensor

    def __init__(self, graph: ClientGraph, config: PPFLConfig, classes: int) -> None:
        super().__init__()
        features, dimension = graph.x.shape[1], config.model.dimension
        check_sizes(graph, features, classes)
        self.settings, self._seed = config.gat, config.seed
        self._client, self._device = graph.client, graph.x.device
        self._train = (graph.train_mask & (graph.labels >= 0)).nonzero()[:, 0]
        if not self._train.numel():
            raise ValueError(f"client {graph.client}: no training node has a label; 1 is needed")
        self._y = graph.labels[self._train]
        x, occurring = feature_rows([graph.x.cpu()])
        self._x, self._turn = x.to(self._device), turn_of(x).to(self._device)
        self._feature = occurring.feature.to(
            self._device
        )  # [r] the features that occur: of others it has no weights
        self._edges = attention_graph(graph.edges, len(graph.x))
        more: dict[str, Any] = {"heads": config.gat.heads, "dropout": config.gat.dropout}
        self._whole = partial(GAT, features, dimension, classes, **more)
        self.module = GAT(self._feature.numel(), dimension, classes, **more).eval()
        rng = generator(config.seed, "gat", graph.client)
        named = dict(self.module.named_parameters())
        drawn = [_glorot(*one, features, rng) for one in named.items()]
        # In one column, of which the parameters are parts, so that a step of Adam is one call
        self._weight = torch.cat(drawn)[:, None].to(self._device)
        parts = self._weight.split([one.numel() for one in drawn])
        for (name, like), part in zip(named.items(), parts, strict=True):
            layer, _, own = name.partition(".")
            setattr(self.module.get_submodule(layer), own, nn.Parameter(part.view(like.shape)))
        self.register_buffer("exp_avg", torch.zeros_like(self._weight))
        self.register_buffer("exp_avg_sq", torch.zeros_like(self._weight))
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64))

    def learn(
        self, rows: NDArray[np.int64], targets: NDArray[np.float32] | None, server_round: int
    ) -> float:
        # rows [p], targets [p, d]
        aligned = None
        if targets is not None and len(rows) and self.settings.beta:  # without, the pull is free
            places = torch.as_tensor(rows, device=self._device)
            aligned = places, torch.as_tensor(targets, dtype=torch.float32, device=self._device)
        loss = self._weight.new_zeros(())
        self.module.train()
        with seeded(self._device, self._seed, "gat-dropout", self._client, server_round):
            for _ in range(self.settings.epochs):
                loss = self._epoch(aligned)
        self.module.eval()
        return float(loss)

    def embed(self) -> NDArray[np.float32]:
        with torch.no_grad():
            return self._hidden().cpu().numpy()

    def logits(self) -> Tensor:
        with torch.no_grad():
            return self.module.classify(self._hidden(), self._edges)

    def saved(self) -> SavedModels:
        module, own = self._whole(), {n: one.cpu() for n, one in self.module.state_dict().items()}
        own[FIRST] = module.hidden.linear.detach().index_copy(0, self._feature.cpu(), own[FIRST])
        module.load_state_dict(own)
        return form_of(module, self._whole, self._client)

    def _hidden(self) -> Tensor:
        x = self._x
        if rate := self.module.rate:
            kept = functional.dropout(torch.ones_like(x.matrix.values()), rate)
            x = with_dropout(x, self._turn, kept)
        return self.module.embed_mapped(propagate(x, self.module.hidden.linear), self._edges)

    def _epoch(self, aligned: tuple[Tensor, Tensor] | None) -> Tensor:
        """Take one step of Adam; return the cross-entropy before it."""
        settings, hidden = self.settings, self._hidden()
        logits = self.module.classify(hidden, self._edges)
        cross_entropy = functional.cross_entropy(logits.index_select(0, self._train), self._y)
        loss = cross_entropy
        if aligned is not None:
            places, targets = aligned
            cosine = functional.cosine_similarity(hidden.index_select(0, places), targets, dim=1)
            loss = cross_entropy + settings.beta * (1 - cosine.mean())  # equation 9
        gradients = torch.autograd.grad(loss, [*self.module.parameters()])
        self.step += 1
        adam_rows_(
            self._weight,
            self.exp_avg,
            self.exp_avg_sq,
            parameters_to_vector(gradients)[:, None],
            self.step,
            [0, len(self._weight)],
            Rates(settings.learning_rate, settings.weight_decay),
        )
        return cross_entropy.detach()


def _glorot(name: str, like: Tensor, features: int, rng: torch.Generator) -> Tensor:
    """Draw a parameter as GAT's authors do, in one row; a bias is 0."""
    # Only the bound of the first matrix depends on all ``features``: rows of features that the
    # client does not have would not change its output.
    ends = (features, like.shape[1]) if name == FIRST else like.shape
    bound = sqrt(6 / sum(ends)) if like.dim() == 2 else 0.0
    return (2 * torch.rand(like.shape, generator=rng) - 1).mul_(bound).view(-1)
