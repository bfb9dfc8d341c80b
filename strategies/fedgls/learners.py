"""The graph learners of graphless clients: from features to a graph.

A learner never leaves its client, which has weights φ of its own. They are stored by active rows,
like the engine's other weights: a first layer has only the rows of the client's features.
``flower_graph.ops`` makes the client's graph from φ; the graphs of all clients are one
block-diagonal graph.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flower_graph.engine.graph_batch import GraphBatch
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights, Tensors, stacked_state
from flower_graph.ops.graph import Adjacency, gcn_adjacency
from flower_graph.ops.graph_learner import (
    Pattern,
    attentive_encode,
    distinct_edges,
    entries_of,
    learned_adjacency,
    mlp_encode,
    symmetric_pattern,
    to_adjacency,
)
from flower_graph.ops.grouped import group_sizes, group_sum
from flower_graph.ops.similarity import Rows, SparseRows, comparable, kept_similarity, nearest
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.config import GraphSection


class Learned(NamedTuple):
    """The graph that given weights make, with its gradient; made only once."""

    first: Tensor  # The weights of the first layers, which get gradients
    pattern: Pattern  # The entries of all clients' graphs
    similarities: Tensor  # [n, k] kept similarities
    entries: Tensor  # [2nk + n] the normalised entries


class GraphLearners(StackedWeights):
    """One graph learner for each of some clients."""

    # φ of an attentive encoder is a first layer alone, whose columns are the encoder's layers.

    def __init__(
        self, batch: GraphBatch, how: GraphSection, seed: int = 0, tensors: Tensors | None = None
    ) -> None:
        first = initial_learner(batch.num_features, how, seed)
        if tensors is None:
            tensors = stacked_state(batch, [first])
        super().__init__(tensors, batch)
        self.start_from(first, replace=False)
        self.how, self._x = how, _sparse_rows(batch.x.matrix)
        starts = torch.tensor(batch.ptr, device=self._x.row.device)
        self._entry_ptr = torch.searchsorted(self._x.row, starts).tolist()
        self._last: Learned | None = None
        self._rows_to_compare: Tensor | None = None

    def compare(self, rows: Tensor) -> None:
        """Compare these rows ``[n, h]`` from now on, instead of encoded features."""
        self._rows_to_compare, self._last = rows, None

    def tensors(self) -> Tensors:
        """Return everything that lasts between rounds; changing a tensor changes the learners."""
        return self._state

    def edges(self) -> tuple[Pattern, Tensor]:
        learned = self._learned()
        return learned.pattern, learned.entries.detach()

    def learn(
        self, loss: Callable[[Pattern, Tensor], Tensor], moves: Tensor | None = None
    ) -> Tensor:
        """Take one Adam step at every client, or at some (FedGLS, equation 9)."""

        def of_weights(first: Tensor, rest: Tensor) -> Tensor:
            learned = self._learned()
            self._last = None  # a gradient can be taken once
            return loss(learned.pattern, learned.entries)

        rate = self.how.learning_rate
        value = self.step(of_weights, learning_rate=rate, weight_decay=0.0, moves=moves)
        first, rest = self.weights()
        sums = group_sum(first.sum(1), self.batch.row_ptr) + rest.sum(1)
        if places := (~sums.isfinite()).nonzero().flatten().tolist():
            self.restart(places, *self._start)
        return value

    def adjacency(self) -> Adjacency:
        """Return the learned graphs; edges of nearest neighbours (``knn``) have no weights."""
        if not self.how.layers:
            return gcn_adjacency(self.neighbours(), self.batch.ptr[-1])
        return to_adjacency(*self.edges())

    def neighbours(self) -> Tensor:
        """Return the edges of the learned graphs, ``[2, e]``: both directions, sorted."""
        learned = self._learned()
        weight = entries_of(learned.similarities.detach(), learned.pattern, loops=0)
        return distinct_edges(learned.pattern.edge_index, weight)

    def _encode(self, first: Tensor, rest: Tensor) -> Rows:
        if self._rows_to_compare is not None:
            return self._rows_to_compare
        # Nodes of two clients are never compared, so columns of different clients share numbers:
        # there are only as many as the client with the most has.
        if self.how.encoder == "mlp":
            w = self.how.width
            rest = rest.view(self.batch.size, self.how.layers - 1, w, w)
            return mlp_encode(self.batch.x, first, rest, self.batch.ptr)
        e = attentive_encode(self._x, first.T)
        counts = torch.tensor(group_sizes(self._entry_ptr), device=e.col.device)
        starts = torch.tensor(self.batch.row_ptr[:-1], device=e.col.device)
        column = e.col - starts.repeat_interleave(counts)
        return e._replace(col=column, shape=(e.shape[0], max(group_sizes(self.batch.row_ptr))))

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def _learned(self) -> Learned:
        first, rest = self.leaves()
        if self._last is None or self._last.first is not first:
            e, k = self._encode(first, rest), self.how.neighbours
            similarity = self.how.similarity
            if similarity == "cosine":  # the inner product of unit vectors, made for all at once
                e, similarity = comparable(e, similarity), "inner"
            near, kept = [], []
            for begin, local in self._pieces(e):
                found = nearest(local, k, similarity)
                near.append(found.neighbours + begin)
                kept.append(kept_similarity(local, found.neighbours, similarity, found.products))
            pattern, similarities = symmetric_pattern(torch.cat(near)), torch.cat(kept)
            entries = learned_adjacency(similarities, pattern)
            self._last = Learned(first, pattern, similarities, entries)
        return self._last

    def _pieces(self, e: Rows) -> list[tuple[int, Rows]]:
        """Split the result of ``_encode`` by clients, each with its first node."""
        nodes = self.batch.ptr
        if not isinstance(e, SparseRows):
            return list(zip(nodes, e.split(group_sizes(nodes)), strict=False))
        counts = group_sizes(self._entry_ptr)
        parts = zip(
            pairwise(nodes), *(one.split(counts) for one in (e.row, e.col, e.value)), strict=True
        )
        return [
            (begin, SparseRows(row - begin, col, value, (end - begin, e.shape[1])))
            for (begin, end), row, col, value in parts
        ]


def initial_learner(features: int, how: GraphSection, seed: int) -> ModelWeights:
    """Draw an encoder for all features: ``[f, w]`` and, of an MLP, ``[(L - 1) w w]``."""
    # An attentive encoder starts with ones: its first graph joins the nodes that are most alike. An
    # MLP's matrices are drawn as a GCN's are, the first one for all features: clients that have
    # the same feature begin with the same row, in any cohort.
    width, deeper = learner_sizes(how)
    if how.encoder == "attentive":
        return ModelWeights(torch.ones(features, width), torch.zeros(deeper))
    rng, w = generator(seed, "graph-learner"), width
    first, rest = torch.empty(features, w), torch.empty(how.layers - 1, w, w)
    for matrix in (first, *rest):
        nn.init.xavier_uniform_(matrix, generator=rng)
    return ModelWeights(first, rest.reshape(-1))


def learner_sizes(how: GraphSection) -> tuple[int, int]:
    """Return the columns of an encoder's first layer, and the number of its other weights."""
    if how.encoder == "attentive":
        return how.layers, 0
    return how.width, (how.layers - 1) * how.width**2


def _sparse_rows(x: Tensor) -> SparseRows:
    row = torch.arange(x.shape[0], device=x.device).repeat_interleave(x.crow_indices().diff())
    return SparseRows(row, x.col_indices().long(), x.values(), (x.shape[0], x.shape[1]))
