"""The clients of one SuperNode, which share weights, trained in one batched tensor program.

A two-layer MLP is a two-layer GCN on a graph without edges. So FedGLS's GNN, its feature encoder
and the models of its baselines are *networks* of one form, each on a graph of its own. The networks
of all clients are one block-diagonal batch: a cohort takes one forward, one backward and one Adam
step for all of them. Only the weights' means mix clients, so any assignment of clients to cohorts
gives the same result up to the rounding of sums.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.data.partition.client_graphs import ClientGraph, check_neighbours
from flower_graph.engine.graph_batch import (
    DropoutMask,
    GraphBatch,
    Metrics,
    check_classes,
    draw_kept,
    evaluate,
    log_shares,
    pack_graphs,
    turn_of,
    with_dropout,
)
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights, Tensors, stacked_state
from flower_graph.ops.contrast import nt_xent
from flower_graph.ops.graph import Adjacency, leading_block, propagate, replace_block
from flower_graph.ops.graph_learner import Pattern, edge_agreement, weighted_propagate
from flower_graph.ops.grouped import (
    group_sizes,
    group_sum,
    grouped_add,
    grouped_linear,
    one_thread,
)
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.config import KNN, LEARNED, NONE, OWN, TRUE, StructureSettings
from flower_graph.strategies.fedgls.learners import GraphLearners

if TYPE_CHECKING:
    from flower_graph.engine.graph_batch import Graph

GNN, ENCODER = 0, 1  # the models: theta and omega
# Numbers of all hidden layers up to which a round takes two threads 1.3 to 1.5 times as long as one
SMALL_NUMBERS = 2**17
LEARNER = "learner."  # keys of the learners' part of the state
SHARED, SHARED_PARTS = "shared-", ("first", "rest")  # ... and of the models last received


def initial_models(settings: StructureSettings) -> list[ModelWeights]:
    """Draw theta and, if there is one, omega, as PyG's GCN does."""
    check_classes(settings.num_classes)
    models, h, k = [], settings.model.hidden, settings.num_classes
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
    h, k = settings.model.hidden, settings.num_classes
    bias, weight, last = rest.split([h, h * k, k], dim=1)
    return bias, weight.unflatten(1, (h, k)), last


def new_client(x: Tensor, edge_index: Tensor | None = None) -> ClientGraph:
    """Return a client outside the run, whose nodes have no labels."""
    n = len(x)
    unknown, nobody = torch.full((n,), -1), torch.zeros(n, dtype=torch.bool)
    return ClientGraph(-1, torch.arange(n), x, unknown, edge_index, None, nobody, nobody, nobody)


def network_of(graph: ClientGraph, graphs: str) -> Graph:
    """Return a client with the graph on which its network works."""
    if graphs == TRUE and graph.is_graphless:
        if graph.hidden_edges is None:
            raise ValueError(f"client {graph.client}: has no edges, and its true ones are wanted")
        return cast("Graph", replace(graph, edge_index=graph.hidden_edges))
    return without_edges(graph) if graphs == NONE or graph.is_graphless else cast("Graph", graph)


def without_edges(graph: ClientGraph) -> Graph:
    """Return a client as a graph of single nodes."""
    return cast("Graph", replace(graph, edge_index=torch.zeros(2, 0, dtype=torch.long)))


class LocalRound(NamedTuple):
    """The result of a round of local training."""

    # By name, [c] or empty: ``contrast``, the loss L_c of each graphless client before its
    # learner's step; ``distillation``, the divergence of each client's encoder from its GNN at the
    # last step
    losses: dict[str, Tensor]
    diverged: list[int]  # Clients whose weights are no longer finite


class StructureCohort:
    """Clients with a community each; some have no edges."""

    # Clients with edges come first, in any order of the input; networks are the clients' own in
    # that order, then for FedGLS their feature encoders.

    def __init__(
        self,
        graphs: Sequence[ClientGraph],
        settings: StructureSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, self.device = settings, torch.device(device)
        self.graphs = sorted(graphs, key=lambda graph: graph.is_graphless)
        self.with_edges = sum(not graph.is_graphless for graph in graphs)
        local = [network_of(graph, settings.graphs) for graph in self.graphs]
        kinds = [self._kind(graph) for graph in self.graphs]
        if settings.graphs == LEARNED:
            local += [without_edges(graph) for graph in self.graphs]
            kinds += [ENCODER] * len(self.graphs)
        self.batch = pack_graphs(local, device)
        self.kinds = torch.tensor(kinds)
        self.learners = self._learners(local[self.with_edges : self.size], tensors)
        if tensors is None:
            models = initial_models(settings)
            tensors = stacked_state(self.batch, models, kinds)
            for number, model in enumerate(models):
                for part in SHARED_PARTS:
                    tensors[f"{SHARED}{number}.{part}"] = getattr(model, part).to(device)
            if self.learners is not None:
                tensors |= {LEARNER + name: t for name, t in self.learners.tensors().items()}
        self.weights, self._state = StackedWeights(tensors, self.batch, kinds=kinds), tensors
        self.weights.start_from(*self.shared_models(), replace=False)
        self._graph: Adjacency | None = None
        self._compare_hidden()
        self._turn = turn_of(self.batch.x)
        learned = settings.graphs == LEARNED
        # Without encoders
        self.own = pack_graphs(local[: self.size], device) if learned else self.batch
        sizes = torch.tensor(group_sizes(self.own.ptr), device=device)
        y, share = self.own.y.clamp(min=0), self.own.train_share
        # [k, n] targets of the cross-entropy: a training node's weight in its client's mean
        self._targets = share.new_zeros(settings.num_classes, len(y))
        self._targets[y, torch.arange(len(y), device=device)] = share
        self._each = (1 / sizes).repeat_interleave(
            sizes
        )  # [n] a node's weight in its client's mean
        self._last: tuple[Tensor, Tensor]  # H and Z in the last step

    @property
    def size(self) -> int:
        return len(self.graphs)

    @property
    def clients(self) -> tuple[int, ...]:
        return self.batch.clients[: self.size]

    @property
    def nodes(self) -> Tensor:
        """Number of nodes of each client, ``[c]``."""
        return torch.tensor(self.batch.ptr).diff()[: self.size]

    def tensors(self) -> Tensors:
        """Return everything that lasts between rounds; changing a tensor changes the cohort."""
        return self._state

    # What strategies call

    def train(self, server_round: int, clients: Collection[int] | None = None) -> LocalRound:
        """Train clients: first the graph learners, once, then all networks, ``E`` steps."""
        how, moves = self.settings.strategy, None
        if clients is not None and len(clients) < self.size:
            moves = torch.tensor([client in clients for client in self.clients])
            moves = moves.repeat(self.kinds.numel() // self.size).to(self.device)
        if how.optimiser == "reset":
            self.weights.forget_moments()
        with one_thread(self._is_small):
            contrast, kept = self.learn_structure(moves), self._dropout(server_round)
            for epoch in range(how.local_epochs):
                left = DropoutMask(*(None if part is None else part[epoch] for part in kept))
                self.weights.step(
                    partial(self._loss, left),
                    learning_rate=how.learning_rate,
                    weight_decay=how.weight_decay,
                    moves=moves,
                )
        losses = {"contrast": contrast, "distillation": self._divergence()}
        if moves is not None:
            idle = ~moves[: self.size]
            losses = {
                name: values.masked_fill(idle.to(values.device), torch.nan)
                for name, values in losses.items()
                if len(values)
            }
        return LocalRound(losses, self._diverged())

    def learn_structure(self, moves: Tensor | None = None) -> Tensor:
        """Step phi on ``L_c`` (equations 8 and 9), with theta and omega as the server gave them."""
        if self.learners is None or self.settings.graphs != LEARNED:
            return torch.zeros(0)
        first, rest = self.weights.weights()
        with torch.no_grad():
            lifted = propagate(self.batch.x, first)
        places = self._graphless
        encoders = slice(self.size + places.start, self.size + places.stop)
        ptr, gnn = self._bounds(places), split_rest(rest[places], self.settings)
        local = split_rest(rest[encoders], self.settings)
        features = F.relu(grouped_add(lifted[self._nodes(encoders)], local[0], ptr))
        z = grouped_linear(features, local[1], local[2], ptr).detach()
        x, sizes = lifted[self._nodes(places)], torch.tensor(ptr, device=self.device).diff()
        result: list[Tensor] = []

        def loss(pattern: Pattern, weight: Tensor) -> Tensor:
            hidden = F.relu(grouped_add(weighted_propagate(pattern, weight, x), gnn[0], ptr))
            around = weighted_propagate(pattern, weight, hidden)
            h = grouped_linear(around, gnn[1], gnn[2], ptr)
            every = torch.arange(ptr[-1], device=self.device)
            result.append(nt_xent(h, z, every, ptr, ptr, self.settings.graph.tau) / sizes)
            return result[0].sum()

        self.learners.learn(loss, None if moves is None else moves[places])
        self._graph = None
        none = torch.full((self.with_edges,), torch.nan)
        return torch.cat([none, result[0].detach().cpu()])

    def start_from(self, models: Sequence[ModelWeights]) -> None:
        """Replace the networks' weights by the server's models; Adam's moments stay."""
        # The whole models too: networks keep only the rows of their own features, and a later user
        # of a model may have others.
        for held, model in zip(self.shared_models(), models, strict=True):
            for part in SHARED_PARTS:
                getattr(held, part).copy_(getattr(model, part))
        self.weights.start_from(*self.shared_models())
        self._compare_hidden()

    @torch.no_grad()
    def _compare_hidden(self) -> None:
        if self.learners is None or not self.settings.compares_hidden:
            return
        # From each node alone, since its neighbours are not known yet
        model, nodes = self.shared_models()[GNN], self._nodes(self._graphless)
        bias = split_rest(model.rest[None], self.settings)[0]
        hidden = F.relu(propagate(self.batch.x, model.first[self.batch.feature]) + bias)
        self.learners.compare(hidden[nodes])
        self._graph = None

    def shared_models(self) -> list[ModelWeights]:
        """Return the models with which the networks last began: the server's, else the first."""
        return [
            ModelWeights(*(self._state[f"{SHARED}{number}.{part}"] for part in SHARED_PARTS))
            for number in range(self.settings.num_models)
        ]

    def mean_models(self, clients: Collection[int]) -> tuple[list[ModelWeights], list[float], int]:
        """Average some clients' models, weighted by nodes (equation 12)."""
        # Besides, each model's share of the weight, and the weight
        weight = self.nodes * torch.tensor([client in clients for client in self.clients])
        nodes = int(weight.sum())
        share = (weight.double() / nodes).repeat(self.kinds.numel() // self.size)
        models = self.weights.weighted_sums(share)
        return models, [float(share[self.kinds == k].sum()) for k in range(len(models))], nodes

    @torch.no_grad()
    def evaluate(self, logits: Tensor | None = None) -> Metrics:
        logits = self.logits() if logits is None else logits
        # Both are NaN if the loss is, since the largest logit is then meaningless.
        accuracy, loss = evaluate(self.own, logits)
        none = ~self.sound(loss)
        return Metrics(
            accuracy.masked_fill(none[:, None], torch.nan), loss.masked_fill(none, torch.nan)
        )

    def sound(self, loss: Tensor) -> Tensor:
        """Return which clients have a finite loss, or no training node, ``[c]``."""
        trains = torch.tensor([bool(graph.train_mask.any()) for graph in self.graphs])
        return loss.isfinite() | ~trains

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return all nodes' logits by the networks that clients classify with, ``[n, k]``."""
        first, rest = self.weights.weights()
        first, rest = first[: self.own.row_ptr[-1]], rest[: self.size]
        with one_thread(self._is_small):
            graph = leading_block(self._adjacency(), self.own.ptr[-1])
            hidden = self._hidden(self.own.x, graph, first, rest)
            return self._logits(graph, hidden, rest)

    def structure(self) -> dict[str, Tensor] | None:
        graphless = self.graphs[self.with_edges :]
        hidden = [graph.hidden_edges for graph in graphless]
        true = [edges for edges in hidden if edges is not None]
        if self.learners is None or not graphless or len(true) < len(hidden):
            return None
        ptr = self._bounds(self._graphless)
        shifted = [edges + start for edges, start in zip(true, ptr, strict=False)]
        y = self.batch.y[self._nodes(self._graphless)]
        return edge_agreement(self.learners.neighbours(), torch.cat(shifted, 1), y, ptr)

    # Which networks, and where

    @property
    def _is_small(self) -> bool:
        """Whether threads would take longer to wake than they save."""
        return self.batch.ptr[-1] * self.settings.model.hidden <= SMALL_NUMBERS

    @property
    def _graphless(self) -> slice:
        return slice(self.with_edges, self.size)

    def _nodes(self, places: slice) -> slice:
        return slice(self.batch.ptr[places.start], self.batch.ptr[places.stop])

    def _bounds(self, places: slice) -> list[int]:
        first = self.batch.ptr[places.start]
        return [start - first for start in self.batch.ptr[places.start : places.stop + 1]]

    def _kind(self, graph: ClientGraph) -> int:
        return ENCODER if self.settings.graphs == OWN and graph.is_graphless else GNN

    def _learners(
        self, graphless: Sequence[Graph], tensors: Tensors | None
    ) -> GraphLearners | None:
        if self.settings.graphs not in (LEARNED, KNN) or self.with_edges == self.size:
            return None
        check_neighbours(self.graphs, self.settings.graph.neighbours)
        held = None
        if tensors is not None:
            own = [key for key in tensors if key.startswith(LEARNER)]
            held = {key.removeprefix(LEARNER): tensors[key] for key in own}
        return learners_of(pack_graphs(graphless, self.device), self.settings, held)

    # How it is computed

    def _loss(self, left: DropoutMask, first: Tensor, rest: Tensor) -> Tensor:
        x, graph = self.batch.x, self._adjacency()
        if left.inputs is not None:
            x = with_dropout(x, self._turn, left.inputs)
        hidden = self._hidden(x, graph, first, rest)
        inner = hidden if left.hidden is None else hidden * left.hidden
        shares = log_shares(self._logits(graph, inner, rest))  # [k, n], with encoders [k, 2 n]
        own, student = shares.split([self._each.numel(), shares.shape[1] - self._each.numel()], 1)
        total: Tensor = -(own * self._targets).sum()
        if student.numel():  # the divergence's other term depends on H alone
            self._last = own.detach(), student.detach()
            total = total - (self._last[0].exp() * self._each * student).sum()
        return total

    def _divergence(self) -> Tensor:
        """Return ``KL(softmax(H) || softmax(Z))`` of each client in the last step, ``[c]``."""
        if self.settings.graphs != LEARNED:
            return torch.zeros(0)
        teacher, student = self._last
        apart = (teacher.exp() * (teacher - student)).sum(0) * self._each
        return group_sum(apart, self.own.ptr)

    def _adjacency(self) -> Adjacency:
        if self.learners is None:
            return self.batch.graph
        if self._graph is None:
            start = self._nodes(self._graphless).start
            self._graph = replace_block(self.batch.graph, start, self.learners.adjacency())
        return self._graph

    def _hidden(self, x: Adjacency, graph: Adjacency, first: Tensor, rest: Tensor) -> Tensor:
        """Compute the first layer of the first networks, or of all, ``[n, h]``."""
        lifted, bias = propagate(graph, propagate(x, first)), split_rest(rest, self.settings)[0]
        return F.relu_(grouped_add(lifted, bias, self.batch.ptr[: len(rest) + 1]))

    def _logits(self, graph: Adjacency, hidden: Tensor, rest: Tensor) -> Tensor:
        """Second layer, ``H`` and ``Z``, ``[n, k]``."""
        _, weight, bias = split_rest(rest, self.settings)
        # Multiplying by the weights after the neighbours' sum gives the same, and includes the
        # bias.
        ptr = self.batch.ptr[: len(rest) + 1]
        return grouped_linear(propagate(graph, hidden), weight, bias, ptr)

    def _dropout(self, server_round: int) -> DropoutMask:
        """Draw a round's dropout, which depends on client, model and round alone."""
        settings = self.settings
        chances = [
            generator(settings.seed, "dropout", client, index >= self.size, server_round)
            for index, client in enumerate(self.batch.clients)
        ]
        return draw_kept(
            self.batch,
            chances,
            steps=settings.strategy.local_epochs,
            hidden=settings.model.hidden,
            input_rate=settings.model.input_dropout,
            hidden_rate=settings.model.dropout,
        )

    def _diverged(self) -> list[int]:
        """Return the clients whose weights are not finite, and reset these clients."""
        places: list[int] = (~self.weights.largest().isfinite()).nonzero().flatten().tolist()
        if places:
            self.weights.restart(places, *initial_models(self.settings))
        return sorted({self.batch.clients[index] for index in places})


def learners_of(
    batch: GraphBatch, settings: StructureSettings, tensors: Tensors | None = None
) -> GraphLearners:
    """Make graph learners; those of ``knn`` have no layers: they compare features."""
    how = settings.graph
    if settings.graphs == KNN:
        how = replace(how, encoder="attentive", layers=0)
    return GraphLearners(batch, how, settings.seed, tensors)
