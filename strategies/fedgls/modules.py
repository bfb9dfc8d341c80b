"""The PyG modules of saved models of FedGLS and its baselines.

Imported only when a model is read; needs PyTorch and PyTorch Geometric, not Flower.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.rules import Rule, choice
from flower_graph.ops.graph import Adjacency, csr
from flower_graph.ops.graph_learner import (
    attentive_encode,
    distinct_edges,
    entries_of,
    mlp_encode,
    symmetric_pattern,
)
from flower_graph.ops.similarity import Rows, SparseRows, kept_similarity, nearest
from flower_graph.outputs.build import COUNT, FLAG, LAYERS, SHARE, WIDTH, built_with, mapping
from flower_graph.outputs.modules import GCN

__all__ = ["MLP", "GraphLearner", "StructureModel"]

# Allowed arguments of a graph learner, besides the number of features
LEARNER: dict[str, Rule] = {
    "encoder": choice("attentive", "mlp"),
    "layers": LAYERS,
    "width": WIDTH,
    "similarity": choice("cosine", "euclidean", "inner"),
    "neighbours": COUNT,
    "weighted": FLAG,
    "hidden": FLAG,
}


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class MLP(nn.Module):
    """Two-layer MLP, called as a GNN is.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout : float
        Dropout on the hidden layer; in training mode alone.
    """

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.lin1 = nn.Linear(features, hidden)
        self.lin2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]``; edges are not used."""
        x = functional.dropout(functional.relu(self.lin1(x)), self.dropout, self.training)
        return self.lin2(x)  # type: ignore[no-any-return]


@built_with(features=WIDTH, **LEARNER)
class GraphLearner(nn.Module):
    """Makes a graph from features (FedGLS, equations 5 and 13 to 18), without gradients.

    Parameters
    ----------
    features : int
        Numbers of a node.
    encoder, layers, width, similarity, neighbours
        As of ``LearnerSettings``; an ``attentive`` encoder has weights ``[layers, features]``.
    weighted : bool
        Whether edges have the similarities as weights; without, all edges count alike.
    hidden : bool
        Whether ``x`` is the hidden layer of a GNN without edges, instead of the features.
    """

    def __init__(
        self,
        features: int,
        encoder: str = "attentive",
        layers: int = 2,
        width: int = 64,
        similarity: str = "cosine",
        neighbours: int = 15,
        weighted: bool = True,
        hidden: bool = False,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.similarity, self.neighbours, self.weighted = similarity, neighbours, weighted
        self.weight: nn.Parameter | None = None
        self.linears = nn.ModuleList()
        if encoder == "attentive":
            self.weight = nn.Parameter(torch.ones(layers, features)) if layers else None
        else:
            widths = [features] + [width] * layers
            self.linears.extend(nn.Linear(a, width, bias=False) for a in widths[:-1])

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return edges ``[2, e]``, both directions, without self-loops, and weights ``[e]``."""
        e = self._encode(x)
        near = nearest(e, self.neighbours, self.similarity)
        values = kept_similarity(e, near.neighbours, self.similarity, near.products)
        pattern = symmetric_pattern(near.neighbours)
        weight = entries_of(functional.relu(values) / 2, pattern, loops=0)
        if not self.weighted:
            return distinct_edges(pattern.edge_index, weight), None
        apart = pattern.edge_index[0] != pattern.edge_index[1]
        return pattern.edge_index[:, apart], weight[apart]

    def _encode(self, x: Tensor) -> Rows:
        if self.hidden:
            return x
        # Computed from non-zero entries, as in training, so that ties are the same and the same
        # neighbours are kept.
        row, col = x.nonzero(as_tuple=True)
        shape = (x.shape[0], x.shape[1])
        if not len(self.linears):
            rows = SparseRows(row, col, x[row, col], shape)
            return rows if self.weight is None else attentive_encode(rows, self.weight)
        entries = csr(row, col, x[row, col], *shape)
        first, *deeper = [cast("nn.Linear", linear).weight.T for linear in self.linears]
        width = first.shape[1]
        rest = torch.stack(deeper)[None] if deeper else first.new_zeros(1, 0, width, width)
        return mlp_encode(Adjacency(entries, entries), first.contiguous(), rest, [0, shape[0]])


@built_with(
    features=WIDTH,
    hidden=WIDTH,
    classes=WIDTH,
    dropout=SHARE,
    encoder=FLAG,
    learner=mapping(LEARNER, optional=True),
)
class StructureModel(nn.Module):
    """A FedGLS client's model: GNN, feature encoder, and a graph learner if it has no edges.

    Parameters
    ----------
    features, hidden, classes, dropout
        As of ``GCN``.
    encoder : bool
        Whether there is a feature encoder; ``forward`` does not use it.
    learner : dict, optional
        Arguments of the ``GraphLearner`` of a client without edges.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        encoder: bool = True,
        learner: dict[str, Any] | None = None,  # arguments of ``GraphLearner``
    ) -> None:
        super().__init__()
        self.gnn = GCN(features, hidden, classes, dropout)
        self.encoder = MLP(features, hidden, classes, dropout) if encoder else None
        self.learner = None if learner is None else GraphLearner(features, **learner)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]``.

        ``edge_index`` ``[2, e]`` plays no part where there is a graph learner.
        """
        if self.learner is not None:
            rows = x
            if self.learner.hidden:
                rows = functional.relu(self.gnn.conv1.lin(x) + self.gnn.conv1.bias)
            return self.gnn(x, *self.learner(rows))  # type: ignore[no-any-return]
        if edge_index is None:
            raise ValueError("edge_index: this client has no graph learner, so edges are needed")
        return self.gnn(x, edge_index)  # type: ignore[no-any-return]
