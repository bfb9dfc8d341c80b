"""The embedding models of PPFL-GNN: a GAT that is pulled towards the public means, and DeepWalk.

*GAT*: the hidden layer is the embedding. The server aligns its public rows and returns the aligned
means; the loss is cross-entropy plus cosine distance to these targets (equations 5 to 9).

*DeepWalk* (Perozzi, Al-Rfou and Skiena, KDD 2014) with negative sampling instead of the
hierarchical softmax (algorithm 1): each round draws new walks, replaces the public nodes' vectors
by the aligned means, and starts skip-gram, gensim's, from there. **Context vectors start each round
at zero.** The paper does not mention word2vec's second matrix. If it is kept from the round before,
it pulls the vectors back to the client's own solution, and validation accuracy falls.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.engine.cohort import (
    Cohort,
    GraphOnDevice,
    Learner,
    Tensors,
    check_sizes,
    placed_on,
)
from flower_graph.errors import DataError
from flower_graph.ops.adam import Adam
from flower_graph.ops.attention import AttentionGraph, attend, attention_graph
from flower_graph.ops.dropout import kept_of, turn_of, with_dropout
from flower_graph.ops.graph import Adjacency, propagate
from flower_graph.ops.grouped import group_sizes, grouped_add, grouped_linear
from flower_graph.outputs.build import HEADS, SHARE, WIDTH, built_with, form_of
from flower_graph.outputs.files import SavedModels
from flower_graph.rng import derive_seed, generator
from flower_graph.strategies.ppfl.algorithm import FloatArray, IntArray, RowsAndMeans, gat_loss

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

FIRST = "hidden.linear"  # of which clients keep the rows of their features


class Batch(NamedTuple):
    """The graph of a group, or of one client, for attention, and the dropout of a step."""

    edges: AttentionGraph
    ptr: list[int]  # c + 1 bounds of the clients' nodes
    edge_ptr: list[int]  # and of their edges, with loops
    entry_ptr: list[int]  # and of the entries of sparse features
    turn: Tensor  # of sparse features (``turn_of``)
    rate: float = 0.0
    # Each client draws its rows from a stream of its own; None: PyTorch's global one
    streams: Sequence[torch.Generator | None] = ()

    @classmethod
    def of(cls, x: Tensor | Adjacency, edge_index: Tensor, ptr: list[int]) -> Batch:
        edges, at = attention_graph(edge_index, ptr[-1]), torch.tensor(ptr).to(edge_index.device)
        edge_ptr = edges.ptr[at].tolist()
        if isinstance(x, Tensor):
            return cls(edges, ptr, edge_ptr, [], at)
        return cls(edges, ptr, edge_ptr, x.matrix.crow_indices()[at].tolist(), turn_of(x))

    def drop(self, x: Tensor, ptr: list[int]) -> Tensor:
        if not self.rate:
            return x
        kept = torch.empty_like(x, dtype=torch.bool)
        for rows, stream in zip(kept.split(group_sizes(ptr)), self.streams, strict=True):
            rows.bernoulli_(1 - self.rate, generator=stream)
        return kept_of(x, kept, self.rate)


class Attention(nn.ParameterDict):
    """A layer of attention, of one client or of a group."""

    __call__ = nn.Module.__call__  # which ``nn.ParameterDict`` refuses

    def __init__(self, wide: int, narrow: int, heads: int) -> None:
        super().__init__()
        self.shape = wide, heads, narrow // heads
        self["linear"] = torch.zeros(wide, narrow)
        self["source"] = torch.zeros(heads, narrow // heads)
        self["target"] = torch.zeros(heads, narrow // heads)
        self["bias"] = torch.zeros(narrow)

    def forward(self, x: Tensor | Adjacency, batch: Batch) -> Tensor:
        wide, heads, half = self.shape
        if isinstance(x, Adjacency):  # of a group: features have a column for each active row
            if batch.rate:
                kept = batch.drop(torch.ones_like(x.matrix.values()), batch.entry_ptr)
                x = with_dropout(x, batch.turn, kept)
            mapped = propagate(x, self["linear"])
        else:
            linear = self["linear"].reshape(-1, wide, heads * half)
            mapped = grouped_linear(batch.drop(x, batch.ptr), linear, None, batch.ptr)
        source, target, bias = (
            self[name].reshape(-1, heads * half) for name in ("source", "target", "bias")
        )
        none = torch.zeros_like(mapped)  # so that each node gets the row of its client
        ends = (grouped_add(none, end, batch.ptr).view(-1, heads, half) for end in (source, target))
        z, drop = mapped.view(-1, heads, half), partial(batch.drop, ptr=batch.edge_ptr)
        found = attend(z, next(ends), next(ends), batch.edges, drop=drop).flatten(1)
        return grouped_add(found, bias, batch.ptr)


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

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return embeddings ``[n, d]`` from features ``[n, f]`` and edges ``[2, e]``."""
        return self.both(x, self._batch(x, edge_index))[0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        return self.both(x, self._batch(x, edge_index))[1]

    def both(self, x: Tensor | Adjacency, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = functional.elu(self.hidden(x, batch))
        return hidden, self.output(hidden, batch)

    def _batch(self, x: Tensor, edge_index: Tensor) -> Batch:
        batch = Batch.of(x, edge_index, [0, len(x)])
        return batch._replace(rate=self.dropout, streams=[None]) if self.training else batch


class GATCohort(Cohort):
    """The GATs of a SuperNode's clients as one group; ``tensors``: what lasts between rounds."""

    # Weights and draws depend on the seed, the client and the round alone.

    def __init__(
        self,
        graphs: Sequence[ClientGraph],
        config: PPFLConfig,
        classes: int,
        tensors: Tensors | None = None,
    ) -> None:
        self.settings, self._seed = config.gat, config.seed
        self._batches = WeakKeyDictionary[nn.Module, Batch]()  # of the groups that are kept
        (features, device), gat, placed = (graphs[0].x.shape[1], graphs[0].x.device), config.gat, []
        for graph in graphs:
            check_sizes(graph, features, classes)
            known = graph.train_mask & (graph.labels >= 0)
            if not known.any():
                raise DataError(f"client {graph.client}: no training node has a label")
            learnt = replace(graph, y=graph.labels, train_mask=known)
            placed.append(placed_on(learnt, device, is_dense=False))
        widths, rate, decay = (config.model.dimension, classes), gat.learning_rate, gat.weight_decay
        self.make = partial(GAT, features, *widths, heads=gat.heads, dropout=gat.dropout)
        super().__init__(
            self.make().eval(),
            placed,
            tensors,
            lambda made: Adam(made.parameters(), lr=rate, weight_decay=decay),
            by_rows=(FIRST,),
        )
        if tensors is None:
            self._draw()

    def train(self, asked: RowsAndMeans, server_round: int) -> dict[int, float]:
        """Train clients for a round; return the cross-entropy before the last step of each."""
        with self.learners([*asked]) as (group,):
            graph, (module, batch) = group.graph, self._ready(group)
            if rate := self.settings.dropout:
                labels = [("gat-dropout", client, server_round) for client in asked]
                streams = [generator(self._seed, *one, device=graph.y.device) for one in labels]
                batch = batch._replace(rate=rate, streams=streams)
            train = graph.masks["train"].nonzero()[:, 0]
            y, parts = graph.y[train], _parts(graph, train)
            rows, targets = _pulled(graph, asked if self.settings.beta else {})
            pull, losses = self.settings.beta * _parts(graph, rows), parts
            for _ in range(self.settings.epochs):
                hidden, logits = module.both(graph.x, batch)
                labelled = logits.index_select(0, train), y, parts
                loss, losses = gat_loss(hidden, *labelled, rows, targets, pull)
                group.optimiser.zero_grad()
                loss.backward()
                group.optimiser.step()
            total = parts.new_zeros(len(asked)).index_add_(0, graph.owner[train], losses.detach())
        return dict(zip(asked, total.tolist(), strict=True))

    def outputs(self, clients: Sequence[int]) -> dict[int, tuple[FloatArray, Tensor]]:
        with torch.no_grad(), self.learners(clients) as (group,):
            module, batch = self._ready(group)
            both = module.both(group.graph.x, batch)
        parts = (one.cpu().split(group_sizes(group.graph.ptr)) for one in both)
        return {c: (z.numpy(), own) for c, z, own in zip(clients, *parts, strict=True)}

    # A cohort of one client is an embedding model

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        (loss,) = self.train({self.clients[0]: (rows, targets)}, server_round).values()
        return loss

    def embed(self) -> FloatArray:
        return self.outputs(self.clients)[self.clients[0]][0]

    def _ready(self, group: Learner) -> tuple[GAT, Batch]:
        """Return a group's module, and its graph for attention, which is made once."""
        module, graph = group.module, group.graph
        assert isinstance(module, GAT)
        if module not in self._batches:
            self._batches[module] = Batch.of(graph.x, graph.edge_index, graph.ptr)
        return module, self._batches[module]

    def saved(self) -> list[SavedModels]:
        forms = [form_of(one.module, self.make, one.graph.client) for one in self]
        return SavedModels.join(forms)

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw the first weights as GAT's authors do; a bias is 0."""
        wholes, ptr = self.module.state_dict(), self.rows.ptr
        for place, client in enumerate(self.clients):
            rng = generator(self._seed, "gat", client)
            for name, whole in wholes.items():
                rows = slice(ptr[place], ptr[place + 1]) if name == FIRST else place
                own = self.tensors[name][rows]
                # Only the bound of the first matrix depends on all features: rows of features that
                # the client does not have would not change its output.
                bound = sqrt(6 / sum(whole.shape)) if own.dim() == 2 else 0.0
                own.copy_((2 * torch.rand(own.shape, generator=rng) - 1).mul_(bound))


def _parts(graph: GraphOnDevice, rows: Tensor) -> Tensor:
    owner = graph.owner[rows]
    return 1 / torch.bincount(owner, minlength=1)[owner]


def _pulled(graph: GraphOnDevice, asked: RowsAndMeans) -> tuple[Tensor, Tensor]:
    each = [(asked[c], start) for c, start in zip(asked, graph.ptr, strict=False)]
    parts = [(rows + start, targets) for (rows, targets), start in each if targets is not None]
    rows, targets = map(np.concatenate, zip(*parts, strict=True)) if parts else np.empty((2, 0))
    device = graph.y.device
    return torch.from_numpy(rows).long().to(device), torch.from_numpy(targets).float().to(device)


# DeepWalk ----------------------------------------------------------------------------------------

LOSS_PAIRS = 10_000  # pairs on which a round's loss is measured
NOISE_POWER = 0.75  # word2vec's: nodes are drawn in proportion to this power of their number


class DeepWalk:
    """One client's DeepWalk model, which keeps one matrix between rounds."""

    def __init__(self, graph: ClientGraph, config: PPFLConfig) -> None:
        self.settings, self._run_seed, self.client = config.deepwalk, config.seed, graph.client
        self.lists = neighbour_lists(graph.edges.numpy(), graph.nodes.numel())
        self.connected = np.flatnonzero(np.diff(self.lists[0]))
        # Small, as word2vec starts.
        shape = graph.nodes.numel(), config.model.dimension
        first = self._rng("vectors", 0).random(shape, dtype=np.float32)
        self.vectors: FloatArray = (first * 2 - 1) / np.float32(config.model.dimension)

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        # rows [p], targets [p, d]
        if targets is not None:
            self.vectors[rows] = targets
        if not len(self.connected):
            return 0.0
        rng = self._rng("walks", server_round)
        # A node without edges would only meet itself.
        passes = np.tile(self.connected, (self.settings.walks, 1))
        starts = rng.permuted(passes, axis=1).ravel()
        walks = random_walks(*self.lists, starts, self.settings.length, rng)
        # Nodes without edges are drawn at times too, since gensim takes no count of zero.
        counts = np.bincount(walks.ravel(), minlength=len(self.vectors)).clip(1)
        context = self._train(walks, counts, server_round)
        rng = self._rng("loss", server_round)
        node, near = sample_pairs(walks, self.settings.window, LOSS_PAIRS, rng)
        noise = np.cumsum(counts**NOISE_POWER)
        drawn = rng.random((LOSS_PAIRS, self.settings.negative)) * noise[-1]
        far = np.searchsorted(noise, drawn, side="right")
        return negative_sampling_loss(self.vectors[node], context[near], context[far])

    def embed(self) -> FloatArray:
        return self.vectors.copy()

    def state_dict(self) -> dict[str, Tensor]:
        return {"vectors": torch.from_numpy(self.embed())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.vectors = np.array(state["vectors"].numpy(), np.float32, order="C")

    def _rng(self, purpose: str, server_round: int) -> np.random.Generator:
        return np.random.default_rng(self._seed(purpose, server_round))

    def _seed(self, purpose: str, server_round: int) -> int:
        return derive_seed(self._run_seed, "deepwalk", purpose, self.client, server_round)

    def _train(self, walks: IntArray, counts: IntArray, server_round: int) -> FloatArray:
        from gensim.models import Word2Vec  # takes a second, which other methods need not wait

        # The numbers of nodes in the walks are known: gensim need not read them all to count. One
        # worker, and a seed of 32 bits, as its generator takes: the same numbers everywhere.
        model = Word2Vec(
            vector_size=self.vectors.shape[1],
            window=self.settings.window,
            negative=self.settings.negative,
            ns_exponent=NOISE_POWER,
            sg=1,
            hs=0,
            min_count=1,
            sorted_vocab=0,
            workers=1,
            seed=self._seed("skip-gram", server_round) & 0xFFFFFFFF,
        )
        model.build_vocab_from_freq(dict(enumerate(counts.tolist())))
        model.wv.vectors = self.vectors  # and contexts of zero
        scale = self.settings.decay ** (server_round - 1)
        model.train(
            walks.tolist(),
            total_examples=len(walks),
            epochs=self.settings.epochs,
            start_alpha=self.settings.learning_rate * scale,
            end_alpha=self.settings.final_learning_rate * scale,
        )
        self.vectors = model.wv.vectors
        context: FloatArray = model.syn1neg
        return context


def negative_sampling_loss(vectors: FloatArray, near: FloatArray, far: FloatArray) -> float:
    """Return ``-log σ(v · c) - Σ log σ(-v · f)``, the mean over some pairs."""
    # vectors, near [p, d], far [p, negative, d]
    product = np.einsum("pd,pd->p", vectors, near, dtype=np.float64)
    products = np.einsum("pd,pnd->pn", vectors, far, dtype=np.float64)
    return float((np.logaddexp(0, -product) + np.logaddexp(0, products).sum(1)).mean())


def neighbour_lists(edge_index: IntArray, num_nodes: int) -> tuple[IntArray, IntArray]:
    """Turn directed edges into lists of neighbours: their bounds ``[n + 1]``, and the nodes."""
    source, target = edge_index[:, np.lexsort(edge_index[::-1])]  # [2, e]
    return np.searchsorted(source, np.arange(num_nodes + 1)), target


def random_walks(
    indptr: IntArray,
    neighbours: IntArray,
    starts: IntArray,
    length: int,
    rng: np.random.Generator,
) -> IntArray:
    """Walk from some nodes, each step to any neighbour with the same probability."""
    # starts [w]
    walks = np.empty((length, len(starts)), np.int64)  # step by step, so that a step is one row
    walks[0] = starts
    degrees = np.diff(indptr)
    # One extra neighbour, which a node without any reads after the last list.
    padded = np.append(neighbours, 0)
    for step in range(1, length):
        here = walks[step - 1]
        degree = degrees[here]
        # A random number is below 1 by 2^-53 or more, and so the product stays below the degree.
        chosen = (rng.random(len(starts)) * degree).astype(np.int64)
        walks[step] = np.where(degree > 0, padded[indptr[here] + chosen], here)
    return np.ascontiguousarray(walks.T)


def sample_pairs(walks: IntArray, window: int, count: int, rng: np.random.Generator) -> IntArray:
    """Draw pairs of nodes as often as skip-gram with shrinking windows meets them."""
    # A window is ``window`` or fewer nodes wide, each width with the same probability; hence a node
    # at distance ``o`` is inside ``window + 1 - o`` times out of ``window``.
    # walks [w, length]
    length = walks.shape[1]
    distances = np.arange(1, min(window, length - 1) + 1)
    often = ((window + 1 - distances) * (length - distances)).astype(float)
    distance = rng.choice(distances, size=count, p=often / often.sum())
    first = (rng.random(count) * (length - distance)).astype(np.int64)
    walk = rng.integers(len(walks), size=count)
    pairs = np.stack([walks[walk, first], walks[walk, first + distance]])
    return np.where(rng.random(count) < 0.5, pairs, pairs[::-1])
