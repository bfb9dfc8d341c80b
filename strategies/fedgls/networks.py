"""The parts of a FedGLS client: networks, each on a graph, and a graph learner.

A network is a model on one graph. Graph learners never leave their client. Each graphless client
has weights φ of its own. They are stored by active rows, like the engine's other weights: a first
layer has only the rows of the client's features. ``flower_graph.ops`` makes the client's graph from
φ; the graphs of all clients are one block-diagonal graph.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.graph_batch import GraphBatch, check_classes
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

if TYPE_CHECKING:
    from flower_graph.engine.graph_batch import Graph

# The graph that a graphless client's network works on; NONE: no client has edges
LEARNED, KNN, TRUE, OWN, NONE = "learned", "knn", "true", "own", "none"
GNN, ENCODER = 0, 1  # the models: theta and omega
TOGETHER_NUMBERS = 262_144  # most nodes times features of clients that are compared together

# Settings ----------------------------------------------------------------------------------------


class LearnerSettings(NamedTuple):
    """Form and training of the graph learners.

    Attributes
    ----------
    encoder : str
        ``attentive`` or ``mlp``.
    layers : int
        Layers of the encoder, ``L``.
    width : int
        Numbers in each layer of an ``mlp``.
    similarity : str
        ``cosine``, ``euclidean`` or ``inner``.
    neighbours : int
        Neighbours that each node keeps, ``k``.
    learning_rate : float
        Adam's step size.
    seed : int
        The run's seed: all clients start from the same weights.
    """

    encoder: str = "attentive"
    layers: int = 2
    width: int = 64
    similarity: str = "cosine"
    neighbours: int = 15
    learning_rate: float = 0.001
    seed: int = 0


class StructureSettings(NamedTuple):
    """Settings that server and clients must share.

    Attributes
    ----------
    num_features, num_classes : int
        Widths of the features and of the output, ``f`` and ``k``.
    graphs : str
        The graph of a graphless client: ``learned`` (FedGLS), ``knn``, the ``true`` graph, or
        ``own``: no edges, and the second model. ``none`` takes the edges of all clients away.
    hidden : int
        Numbers in the hidden layer, ``h``.
    dropout, input_dropout : float
        Dropout on the hidden layer and on the features.
    learning_rate, weight_decay : float
        Adam's, as in ``torch.optim.Adam``, of theta and omega.
    local_epochs : int
        Steps of a round, ``E``.
    keep_optimiser : bool
        Whether a client's Adam lasts from round to round.
    seed : int
        The run's seed.
    learner : LearnerSettings
        The graph learner, and ``k`` of the kNN graphs.
    tau : float
        Temperature of the contrastive loss (equation 8).
    prototype_weight : float
        Weight of FedProto's distance to the prototypes.
    knn_on : str
        What makes a ``knn`` graph: ``features``, or ``encoder``, the hidden layer of the model
        that the server last sent, without edges.
    """

    num_features: int
    num_classes: int
    graphs: str = LEARNED
    hidden: int = 16
    dropout: float = 0.5
    input_dropout: float = 0.0
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    local_epochs: int = 5
    keep_optimiser: bool = True
    seed: int = 0
    learner: LearnerSettings = LearnerSettings()
    tau: float = 0.2
    prototype_weight: float = 1.0
    knn_on: str = "features"

    @property
    def graph_learner(self) -> LearnerSettings:
        """The graph learners' settings; those of ``knn`` have no layers: they compare features."""
        learner = self.learner._replace(seed=self.seed)
        return learner if self.graphs != KNN else learner._replace(encoder="attentive", layers=0)

    @property
    def compares_hidden(self) -> bool:
        return self.graphs == KNN and self.knn_on == "encoder"

    @property
    def num_models(self) -> int:
        """The number of models that the server averages: theta, or theta and omega."""
        return 2 if self.graphs in (LEARNED, OWN) else 1


# Networks ----------------------------------------------------------------------------------------


def initial_models(settings: StructureSettings) -> list[ModelWeights]:
    """Draw theta and, if there is one, omega, as PyG's GCN does."""
    check_classes(settings.num_classes)
    models, h, k = [], settings.hidden, settings.num_classes
    for name in ("gnn", "encoder")[: settings.num_models]:
        rng = generator(settings.seed, "structure", name)
        first, second = torch.empty(settings.num_features, h), torch.empty(h, k)
        for matrix in (first, second):
            nn.init.xavier_uniform_(matrix, generator=rng)
        rest = torch.cat([torch.zeros(h), second.reshape(-1), torch.zeros(k)])
        models.append(ModelWeights(first, rest))
    return models


def split_rest(rest: Tensor, settings: StructureSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows ``[c, D]`` into the first bias, the second layer's matrix and its bias."""
    h, k = settings.hidden, settings.num_classes
    bias, weight, last = rest.split([h, h * k, k], dim=1)
    return bias, weight.unflatten(1, (h, k)), last


def new_client(x: Tensor, edge_index: Tensor | None = None) -> ClientGraph:
    """Return a client outside the run, whose nodes have no labels."""
    n = len(x)
    unknown, nobody = torch.full((n,), -1), torch.zeros(n, dtype=torch.bool)
    return ClientGraph(-1, torch.arange(n), x, unknown, edge_index, None, nobody, nobody, nobody)


def network_of(graph: ClientGraph, graphs: str) -> Graph:
    """Return a client with the graph on which one of its networks works."""
    edges = graph.edge_index
    if graph.is_graphless and graphs == TRUE:
        if graph.hidden_edges is None:
            raise ValueError(f"client {graph.client}: has no edges, and its true ones are wanted")
        edges = graph.hidden_edges
    if edges is None or graphs == NONE:
        edges = torch.zeros(2, 0, dtype=torch.long)
    return cast("Graph", replace(graph, edge_index=edges))


# Graph learners ----------------------------------------------------------------------------------


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
        self, batch: GraphBatch, settings: LearnerSettings, tensors: Tensors | None = None
    ) -> None:
        first = initial_learner(batch.num_features, settings)
        if tensors is None:
            tensors = stacked_state(batch, [first])
        super().__init__(tensors, batch)
        self.start_from(first, replace=False)
        self.settings, self._x = settings, _sparse_rows(batch.x.matrix)
        starts = torch.tensor(batch.ptr, device=self._x.row.device)
        self._entry_ptr = torch.searchsorted(self._x.row, starts).tolist()
        self._together = _few_numbers(batch.ptr, batch.row_ptr)
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

    def learn(self, loss: Callable[[Pattern, Tensor], Tensor]) -> Tensor:
        """Take one Adam step at every client (FedGLS, equation 9)."""

        def of_weights(first: Tensor, rest: Tensor) -> Tensor:
            learned = self._learned()
            self._last = None  # a gradient can be taken once
            return loss(learned.pattern, learned.entries)

        how = self.settings
        value = self.step(of_weights, learning_rate=how.learning_rate, weight_decay=0.0)
        first, rest = self.weights()
        sums = group_sum(first.sum(1), self.batch.row_ptr) + rest.sum(1)
        if places := (~sums.isfinite()).nonzero().flatten().tolist():
            self.restart(places, *self._start)
        return value

    def adjacency(self) -> Adjacency:
        """Return the learned graphs; edges of nearest neighbours (``knn``) have no weights."""
        if not self.settings.layers:
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
        if self.settings.encoder == "mlp":
            w = self.settings.width
            rest = rest.view(self.batch.size, self.settings.layers - 1, w, w)
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
            e, k = self._encode(first, rest), self.settings.neighbours
            similarity = self.settings.similarity
            if similarity == "cosine":  # the inner product of unit vectors, made for all at once
                e, similarity = comparable(e, similarity), "inner"
            clients = self._pieces(e, list(range(len(self.batch.ptr))))
            result = [nearest(local, k, similarity) for _, local in clients]
            products = torch.cat([one.products for one in result])
            near = torch.cat(
                [one.neighbours + begin for one, (begin, _) in zip(result, clients, strict=True)]
            )
            parts = []
            for begin, local in self._pieces(e, self._together):
                rows = slice(begin, begin + local.shape[0])
                parts.append(kept_similarity(local, near[rows] - begin, similarity, products[rows]))
            pattern, similarities = symmetric_pattern(near), torch.cat(parts)
            entries = learned_adjacency(similarities, pattern)
            self._last = Learned(first, pattern, similarities, entries)
        return self._last

    def _pieces(self, e: Rows, places: list[int]) -> list[tuple[int, Rows]]:
        """Split the result of ``_encode`` by groups of clients, each with its first node."""
        nodes = [self.batch.ptr[index] for index in places]
        if not isinstance(e, SparseRows):
            return list(zip(nodes, e.split(group_sizes(nodes)), strict=False))
        counts = group_sizes([self._entry_ptr[index] for index in places])
        parts = zip(
            pairwise(nodes), *(one.split(counts) for one in (e.row, e.col, e.value)), strict=True
        )
        return [
            (begin, SparseRows(row - begin, col, value, (end - begin, e.shape[1])))
            for (begin, end), row, col, value in parts
        ]


def initial_learner(features: int, settings: LearnerSettings) -> ModelWeights:
    """Draw an encoder for all features: ``[f, w]`` and, of an MLP, ``[(L - 1) w w]``."""
    # An attentive encoder starts with ones: its first graph joins the nodes that are most alike. An
    # MLP's matrices are drawn as a GCN's are, the first one for all features: clients that have
    # the same feature begin with the same row, in any cohort.
    width, deeper = learner_sizes(settings)
    if settings.encoder == "attentive":
        return ModelWeights(torch.ones(features, width), torch.zeros(deeper))
    rng, w = generator(settings.seed, "graph-learner"), width
    first, rest = torch.empty(features, w), torch.empty(settings.layers - 1, w, w)
    for matrix in (first, *rest):
        nn.init.xavier_uniform_(matrix, generator=rng)
    return ModelWeights(first, rest.reshape(-1))


def learner_sizes(settings: LearnerSettings) -> tuple[int, int]:
    """Return the columns of an encoder's first layer, and the number of its other weights."""
    if settings.encoder == "attentive":
        return settings.layers, 0
    return settings.width, (settings.layers - 1) * settings.width**2


def _few_numbers(ptr: list[int], row_ptr: list[int]) -> list[int]:
    """Choose which clients are compared together: tiny clients that fit into a cache."""
    widest, places = max(group_sizes(row_ptr)), [0]
    for index in range(1, len(ptr) - 1):
        if (ptr[index + 1] - ptr[places[-1]]) * widest > TOGETHER_NUMBERS:
            places.append(index)
    return [*places, len(ptr) - 1]


def _sparse_rows(x: Tensor) -> SparseRows:
    row = torch.arange(x.shape[0], device=x.device).repeat_interleave(x.crow_indices().diff())
    return SparseRows(row, x.col_indices().long(), x.values(), (x.shape[0], x.shape[1]))
