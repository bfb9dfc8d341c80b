"""PPFL-GNN, one client at a time, with PyG's layers, PyTorch's Adam and scipy: slow and plain.

Zhang, Cai and Seo (2023), algorithms 1 and 2. ``pairs`` is the server of the paper, ``summed`` the
one that sees nothing but sums. A client's model embeds its nodes (``embed``), and trains for a
round, with the means of its public nodes from the second round on (``learn``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv

Rows = NDArray[Any]  # [p, d]


class PlainGAT(nn.Module):
    """Two layers of attention; the hidden layer is the embedding."""

    def __init__(self, graph: Any, dimension: int, classes: int, settings: Any) -> None:
        super().__init__()
        heads = settings.heads
        self.first = GATConv(graph.x.shape[1], dimension // heads, heads)
        self.second = GATConv(dimension, classes)
        self.graph, self.settings = graph, settings
        rate, decay = settings.learning_rate, settings.weight_decay
        self.adam = torch.optim.Adam(self.parameters(), lr=rate, weight_decay=decay, fused=True)

    @torch.no_grad()
    def take_over(self, weights: Mapping[str, Tensor]) -> None:
        """Start from weights by name."""
        for layer, name in ((self.first, "hidden"), (self.second, "output")):
            layer.lin.weight.copy_(weights[f"{name}.linear"].T)
            layer.att_src.copy_(weights[f"{name}.source"][None])
            layer.att_dst.copy_(weights[f"{name}.target"][None])
            layer.bias.copy_(weights[f"{name}.bias"])

    def hidden(self) -> Tensor:
        return functional.elu(self.first(self.graph.x.to_dense(), self.graph.edge_index))

    def embed(self) -> Rows:
        return self.hidden().detach().numpy()

    def learn(self, rows: NDArray[np.int64], targets: Rows | None, server_round: int) -> float:
        """Minimise the cross-entropy and the distance to the means (equation 9), no dropout."""
        graph, known, own = self.graph, self.graph.train_mask, 0.0
        for _ in range(self.settings.epochs):
            hidden = self.hidden()
            logits = self.second(hidden, graph.edge_index)
            loss = functional.cross_entropy(logits[known], graph.train_y[known])
            own = float(loss.detach())
            if targets is not None:
                cosine = functional.cosine_similarity(hidden[rows], torch.from_numpy(targets))
                loss = loss + self.settings.beta * (1 - cosine.mean())
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
        return own


class Member(NamedTuple):
    """A client: its model, its nodes, and the places of the public ones."""

    model: Any
    nodes: NDArray[np.int64]
    rows: NDArray[np.int64]

    def train(self, targets: Rows | None, server_round: int) -> Rows:
        """Return the public embeddings after a round."""
        self.model.learn(self.rows, targets, server_round)
        return self.model.embed()[self.rows].astype(np.float64)


def pairs(members: Mapping[int, Member], rounds: int) -> dict[int, Rows]:
    """Return each client's means after some rounds (equation 4, and the mean of algorithm 2)."""
    ids = {client: one.nodes[one.rows] for client, one in members.items()}
    targets: dict[int, Any] = dict.fromkeys(members)
    for number in range(1, rounds + 1):
        x = {client: one.train(targets[client], number) for client, one in members.items()}
        for i in members:
            total, holders = x[i].copy(), np.ones((len(ids[i]), 1))
            for j in members:
                _, own, other = np.intersect1d(ids[i], ids[j], return_indices=True)
                if j != i and own.size:
                    turn, _ = orthogonal_procrustes(x[j][other], x[i][own])
                    total[own] += x[j][other] @ turn
                    holders[own] += 1
            targets[i] = (total / holders).astype(np.float32)
    return targets


class Summed(NamedTuple):
    """What clients had in each round, and the mean after the last."""

    mean: Rows
    own: list[dict[int, Rows]]  # X_i
    turned: list[dict[int, Rows]]  # X_i W_i
    turns: list[dict[int, Rows]]  # W_i


def summed(
    members: Mapping[int, Member],
    nodes: Sequence[int],
    points: Rows,
    rounds: int,
    absent: Mapping[int, set[int]],
) -> Summed:
    """Average what clients have turned to the last mean; ``absent``: who fails in which round.

    ``points`` are turned to first; clients learn from the mean of the second sum on.
    """
    at = {client: np.searchsorted(nodes, one.nodes[one.rows]) for client, one in members.items()}
    found, turns, mean = Summed(points, [], [], []), dict[int, Rows](), points
    for number in range(1, rounds + 1):
        own, turned = {}, {}
        total, holders = np.zeros(points.shape), np.zeros((len(points), 1))
        for client, one in members.items():
            if client in absent.get(number, set()):
                continue
            is_taught = number > 2 and client in turns
            back = (mean[at[client]] @ turns[client].T).astype(np.float32) if is_taught else None
            own[client] = one.train(back, number)
            turns[client], _ = orthogonal_procrustes(own[client], mean[at[client]])
            turned[client] = own[client] @ turns[client]
            total[at[client]] += turned[client]
            holders[at[client]] += 1
        mean = total / holders
        for kept, part in zip(found[1:], (own, turned, dict(turns)), strict=True):
            kept.append(part)
    return found._replace(mean=mean)
