"""DeepWalk for a client that shares public nodes: random walks, and skip-gram by gensim.

Perozzi, Al-Rfou and Skiena, "DeepWalk", KDD 2014, with negative sampling instead of the
hierarchical softmax, as in Zhang, Cai and Seo, "Privacy-Preserving Federated Graph Neural Network
Learning on Non-IID Graph Data", 2023, algorithm 1: each round draws new walks, replaces the public
nodes' vectors by the aligned means, and starts skip-gram from there.

**Context vectors start each round at zero.** The paper does not mention word2vec's second matrix.
If it is kept from the round before, it pulls the vectors back to the client's own solution, and
validation accuracy falls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.rng import derive_seed

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

LOSS_PAIRS = 10_000  # pairs on which a round's loss is measured
NOISE_POWER = 0.75  # word2vec's: nodes are drawn in proportion to this power of their number


class DeepWalk:
    """One client's DeepWalk model: an embedding model for ``PublicNodeClient``."""

    # It keeps one matrix between rounds; a model that is built from it goes on with the same
    # numbers.

    def __init__(self, graph: ClientGraph, config: PPFLConfig, classes: int = 0) -> None:
        self.settings, self._run_seed, self.client = config.deepwalk, config.seed, graph.client
        self.lists = neighbour_lists(graph.edges.numpy(), graph.nodes.numel())
        self.connected = np.flatnonzero(np.diff(self.lists[0]))
        # Small, as word2vec starts.
        shape = graph.nodes.numel(), config.model.dimension
        first = self._rng("vectors", 0).random(shape, dtype=np.float32)
        self.vectors: Floats = (first * 2 - 1) / np.float32(config.model.dimension)

    def learn(self, rows: Integers, targets: Floats | None, server_round: int) -> float:
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

    def embed(self) -> Floats:
        return self.vectors.copy()

    def state_dict(self) -> dict[str, Tensor]:
        return {"vectors": torch.from_numpy(self.embed())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.vectors = np.array(state["vectors"].numpy(), np.float32, order="C")

    def _rng(self, purpose: str, server_round: int) -> np.random.Generator:
        return np.random.default_rng(self._seed(purpose, server_round))

    def _seed(self, purpose: str, server_round: int) -> int:
        return derive_seed(self._run_seed, "deepwalk", purpose, self.client, server_round)

    def _train(self, walks: Integers, counts: Integers, server_round: int) -> Floats:
        """Train the vectors by skip-gram on some walks; return the context vectors, ``[n, d]``."""
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
        context: Floats = model.syn1neg
        return context


def negative_sampling_loss(vectors: Floats, near: Floats, far: Floats) -> float:
    """Return ``-log σ(v · c) - Σ log σ(-v · f)``, the mean over some pairs."""
    # vectors, near [p, d], far [p, negative, d]
    product = np.einsum("pd,pd->p", vectors, near, dtype=np.float64)
    products = np.einsum("pd,pnd->pn", vectors, far, dtype=np.float64)
    return float((np.logaddexp(0, -product) + np.logaddexp(0, products).sum(1)).mean())


def neighbour_lists(edge_index: Integers, num_nodes: int) -> tuple[Integers, Integers]:
    """Turn directed edges into lists of neighbours: their bounds ``[n + 1]``, and the nodes."""
    # edge_index [2, e]
    degrees = np.bincount(edge_index[0], minlength=num_nodes)
    order = np.lexsort((edge_index[1], edge_index[0]))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, edge_index[1][order].astype(np.int64)


def random_walks(
    indptr: Integers,
    neighbours: Integers,
    starts: Integers,
    length: int,
    rng: np.random.Generator,
) -> Integers:
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


def sample_pairs(walks: Integers, window: int, count: int, rng: np.random.Generator) -> Integers:
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
