"""PPFL-GNN: public nodes of overlapping graphs, aligned by Procrustes and averaged.

Zhang, Cai and Seo, "Privacy-Preserving Federated Graph Neural Network Learning on Non-IID Graph
Data", Wireless Communications and Mobile Computing 2023. Every client embeds its own graph; some
nodes, the *public* ones, are in several clients' graphs. The embeddings of two clients differ
at least by a rotation, so their plain mean would be noise: the server first rotates one client's
embeddings into the other's space.

Iteration ``t`` (Algorithms 1 and 2), one exchange:

1. server -> client ``i``: ``X'_i``, means for its public nodes; nothing in the first iteration;
2. client: takes ``X'_i`` (DeepWalk: they replace its vectors; GAT: its hidden layer is pulled
   towards them, equation 9), trains on its own graph, and embeds it (``train_and_embed``);
3. client -> server: ``X_i``, the embeddings of its public nodes (GAT: its hidden layer), and its
   measurements;
4. server: for each ordered pair ``W_ji``, the orthogonal matrix with the least
   ``||X_j W_ji - X_i||_F``, from the SVD of ``X_j^T X_i`` (equation 4);
5. server: ``X'_i = 1/h (X_i + sum_{j != i} X_j W_ji)``, for each node over the ``h`` clients that
   hold it (4 and 5: ``align_pairs``).

With ``alignment="consensus"`` steps 4 and 5 rotate all clients into one common space and back:
``m`` clients need ``m`` alignments instead of ``m (m - 1)``. The consensus needs only the sum of
the rotated embeddings. So with ``alignment="secure"`` each client rotates its own embeddings, and
the secure sum of ``flower_graph.secure`` adds them up. The server learns this sum, and nothing else
of the embeddings; ``W_i`` never leaves client ``i``. Iteration ``t``, two exchanges:

1. server -> client ``i``: ``R``, the common mean of the last iteration, for its public nodes
   (``CommonMean.of``);
2. client: ``X'_i = R W_i^T`` with the client's previous ``W_i`` (``rotated_back``), trains with it
   as above, and embeds its graph;
3. client: ``W_i``, the orthogonal matrix with the least ``||X_i W_i - R||_F`` (equation 4);
4. client -> server: ``X_i W_i`` (3 and 4: ``rotated``), masked;
5. server: adds up, and in the second exchange takes the masks off; ``R`` = sum / holders, for each
   node (``CommonMean.take``).

The plain form repeats steps 3 and 5 until ``R`` stands still. Here each iteration does them once
and starts from the last ``R``. The server never asks for a second sum of the same embeddings: with
as many sums as clients it could compute each client's part. In iteration 1 clients rotate to random
points, in iteration 2 to the first mean. The first mean is too blurred to learn from: clients train
towards ``X'_i`` from iteration 3. Nodes with too few holders are in no sum; a client keeps its own
rows of them.

*Unlike the paper*:

- The paper's public nodes are in all graphs; here a public node may be in some.
- The paper has one alignment, that of pairs; the consensus and the secure form are ours.
- The paper repeats until convergence; here a run has a set number of rounds, or stops early.
- The paper's embeddings are columns, and aligned as ``W X``; here they are rows: ``X W``.
- With ``absent="last"`` the mean has the last embeddings of clients that did not answer.

*Where to change* the loss: ``gat_loss``; DeepWalk's is in gensim, which ``DeepWalk._train`` in
``modules.py`` calls (the loss that ``DeepWalk.learn`` returns is only measured). The model: ``GAT``
and ``DeepWalk`` in ``modules.py``, or any ``EmbeddingModel``, of which ``SingleModels`` in
``client.py`` makes ``EmbeddingModels``. The mean: ``align_pairs`` and ``consensus`` in
``flower_graph/ops/procrustes.py`` (``Overlap.means`` calls one of them), in the secure form
``CommonMean.take``. What travels, in ``client.py``: ``PublicRequest`` and ``PublicReply``, in the
secure form also ``SumOrder``, the vector of ``SecureConsensusClient.fit`` and, if the server is not
trusted, ``Claims``.
``client.py`` and ``strategy.py`` carry the two halves over Flower; ``evaluation.py`` measures
embeddings and their alignment. This file imports neither Flower nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from flower_graph.ops.procrustes import align_pairs, consensus, orthogonal_procrustes
from flower_graph.rng import derive_seed

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
# By client: the rows [p] of its public nodes, and their means X'_i [p, d], if there are any
RowsAndMeans = Mapping[int, tuple[IntArray, FloatArray | None]]
LEARNT_FROM = 2  # sums that the server makes before clients train towards the common mean
ABSENT = -1  # slot of a node that is not in a sum

# Formulas -----------------------------------------------------------------------------------------

# ``orthogonal_procrustes`` is equation 4; ``align_pairs`` and ``consensus`` are steps 4 and 5.


def gat_loss(
    hidden: Tensor,
    logits: Tensor,
    y: Tensor,
    share: Tensor,
    rows: Tensor,
    targets: Tensor,
    pull: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the clients' losses, and each training node's part of the cross-entropy.

    These are equations 8 and 9.
    """
    # logits [t, k] and y [t] of training nodes; hidden [n, d] of all nodes, and the rows [p] of
    # public nodes in it, with their targets X'_i [p, d]. share [t] and pull [p] weigh each node by
    # 1 and beta over the number of such nodes at its client: the loss is a sum over clients.
    losses = cross_entropy(logits, y, reduction="none") * share
    loss = losses.sum()
    if rows.numel():
        near = cosine_similarity(hidden.index_select(0, rows), targets)
        loss = loss + ((1 - near) * pull).sum()  # equation 9
    return loss, losses


def disagreement(embeddings: FloatArray, targets: FloatArray | None) -> float:
    """Return the mean of 1 - cos between rows ``[p, d]`` and their targets (equation 8)."""
    if targets is None:
        return math.nan
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (embeddings, targets))
    return float(1.0 - cosine_similarity(a, b).mean())


def first_points(seed: int, nodes: int, dimension: int) -> DoubleArray:
    """Draw the points ``[u, d]`` to which clients rotate before there is a mean."""
    # Any fixed points do: clients with similar embeddings get similar rotated embeddings.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


# The client's half --------------------------------------------------------------------------------


class EmbeddingModel(Protocol):
    """Anything that embeds the nodes of one client and can be pulled towards targets."""

    # Another process may answer the next message. So a model that keeps state from round to round
    # needs PyTorch's ``state_dict`` and ``load_state_dict``. The names, shapes and types of its
    # state never change. A model draws random numbers from a seed, its client and the round alone.

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        """Train for one round."""
        # rows [p], targets [p, d]

    def embed(self) -> FloatArray:
        """Return the embeddings of all nodes of the client, ``[n, d]``."""


class EmbeddingModels(Protocol):
    """The models of several clients."""

    def train(self, asked: RowsAndMeans, server_round: int) -> dict[int, float]:
        """Train clients for one round; return the loss of each."""

    def outputs(self, clients: Sequence[int]) -> Mapping[int, tuple[FloatArray, Tensor | None]]:
        """Return clients' embeddings ``[n, d]``, and logits ``[n, k]`` if a model has them."""


class Learnt(NamedTuple):
    """A client after step 2."""

    loss: float  # of a GAT the cross-entropy, of DeepWalk skip-gram's loss
    embeddings: FloatArray  # [n, d] of all its nodes
    public: FloatArray  # [p, d] X_i, of its public nodes
    distance: float  # mean of 1 - cos of X_i and the means; NaN without means


def train_and_embed(
    models: EmbeddingModels, asked: RowsAndMeans, server_round: int
) -> dict[int, Learnt]:
    """Train clients towards their means, and embed their graphs (step 2)."""
    losses, outputs = models.train(asked, server_round), models.outputs([*asked])
    learnt = dict[int, Learnt]()
    for client, (rows, means) in asked.items():
        embeddings, _ = outputs[client]
        x = embeddings[rows]
        learnt[client] = Learnt(losses[client], embeddings, x, disagreement(x, means))
    return learnt


def rotated_back(
    mean: FloatArray, rotation: DoubleArray, own: Callable[[], FloatArray]
) -> FloatArray:
    """Return ``X'_i = R W_i^T``; nodes without a mean have the client's own embeddings."""
    # mean [p, d], rotation [d, d], own() [p, d]
    targets: FloatArray = (mean @ rotation.T).astype(np.float32)
    if (missing := ~mean.any(1)).any():
        targets[missing] = own()[missing]
    return targets


def rotated(x: DoubleArray, mean: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """Return ``W_i`` and ``X_i W_i`` (steps 3 and 4 of the secure form)."""
    # x [p, d] and mean [p, d] of the nodes that are in the sum
    rotation = orthogonal_procrustes(x, mean) if len(x) else np.eye(x.shape[1])
    return rotation, x @ rotation


# The server's half --------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """The embeddings of clients, set beside each other by node."""

    clients: list[int]  # numbers of the m clients, ascending
    x: Tensor  # [m, u, d] of the u nodes that some client holds
    held: Tensor  # [m, u] whether a client holds a node
    slots: list[IntArray]  # of each client, where in u its public nodes are

    @classmethod
    def of(cls, embeddings: Mapping[int, FloatArray], ids: Mapping[int, IntArray]) -> Overlap:
        clients = sorted(embeddings)
        nodes = np.unique(np.concatenate([ids[client] for client in clients]))
        slots = [np.searchsorted(nodes, ids[client]) for client in clients]
        x = np.zeros((len(clients), nodes.size, embeddings[clients[0]].shape[1]), np.float32)
        held = np.zeros(x.shape[:2], np.bool_)
        for place, (client, slot) in enumerate(zip(clients, slots, strict=True)):
            x[place, slot], held[place, slot] = embeddings[client], True
        return cls(clients, torch.from_numpy(x), torch.from_numpy(held), slots)

    def means(self, *, in_pairs: bool) -> dict[int, FloatArray]:
        """Return each client's ``X'_i`` ``[p, d]`` (steps 4 and 5)."""
        average = align_pairs if in_pairs else (lambda x, held: consensus(x, held).aligned)
        means = average(self.x, self.held).numpy()
        parts = zip(self.clients, means, self.slots, strict=True)
        return {client: own[slot] for client, own, slot in parts}


def fewest_holders(clients: int, dropout: float, least: int) -> int:
    """Return how many clients must hold a node of a sum, if the server is trusted."""
    # At most the share ``dropout`` of the clients may be missing from a sum that is opened, so two
    # are then always in the sum of every node: no row is one client's alone.
    return max(least, 2 + math.floor(dropout * clients))


def common_nodes(held: Iterable[Mapping[int, IntArray]], fewest: int) -> IntArray:
    """Choose the nodes that at least ``fewest`` holders have, by ascending id."""
    # held: of each holder, the ids of its clients' public nodes. A holder is a client, or a
    # SuperNode if the server is not trusted.
    each = [np.unique(np.concatenate(list(one.values()))) for one in held]
    nodes, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *each]), return_counts=True)
    return nodes[counts >= fewest]


def find_slots(nodes: IntArray, common: IntArray) -> IntArray:
    """Find nodes ``[p]`` among the ascending common ones; ``ABSENT`` for others."""
    at = np.searchsorted(common, nodes)
    return np.where(np.isin(nodes, common), at, ABSENT)


class CommonMean:
    """The mean ``R`` of the rotated embeddings, by node."""

    def __init__(self) -> None:
        self.made = 0  # sums so far
        self.nodes: IntArray = np.zeros(0, np.int64)  # ids of the rows, ascending
        # The rows, and one of zeros behind them, which a slot of -1 has
        self.padded: FloatArray = np.zeros((1, 0), np.float32)
        self.slots: dict[int, IntArray] = {}  # the rows of each client's nodes

    @property
    def rows(self) -> FloatArray:
        return self.padded[:-1]

    def choose(self, nodes: IntArray, ids: Mapping[int, IntArray], dimension: int) -> None:
        """Set the nodes of the next sum; a node that stays keeps its mean."""
        if not self.made:
            self.padded = np.zeros((self.nodes.size + 1, dimension), np.float32)
        self.padded = self.padded[np.append(find_slots(nodes, self.nodes), ABSENT)]
        self.slots = {client: find_slots(own, nodes) for client, own in ids.items()}
        self.nodes = nodes

    def of(self, client: int) -> FloatArray | None:
        """Return the rows of a client's public nodes (step 1)."""
        return self.padded[self.slots[client]] if self.made else None

    def take(self, total: DoubleArray, contributors: Iterable[int]) -> None:
        """Divide a sum by the number of holders (step 5); a node without any keeps its mean."""
        slots = np.concatenate([self.slots[client] for client in contributors])
        holders = np.bincount(slots + 1, minlength=self.nodes.size + 1)[1:, None]
        np.divide(total.reshape(self.rows.shape), holders, out=self.rows, where=holders > 0)
        self.made += 1
