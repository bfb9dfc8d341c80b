"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours.

Zhang, Yang, Li, Sun and Yiu, "Subgraph Federated Learning with Missing Neighbor Generation",
NeurIPS 2021; here as baselines of FedSCem, on ego-networks and with FedSCem's classifier. The
networks, NeighGen with ``dGen`` and ``fGen`` and the classifier, are in ``modules.py``.

1. *Alone* (epoch 0; ``train_alone``). Each client hides a quarter of its nodes and trains NeighGen
   on what is left: smooth L1 on the number of hidden neighbours, the squared distance of each
   generated neighbour to the nearest hidden one, and the classes on the mended graph.
2. *Together* (FedSage+, epochs 1, 2, ...). Each client shows its feature generator ``fGen`` and
   its encoded nodes, with noise (``show``). Every other client generates neighbours of them
   (``generate``). It answers with the gradient, by the weights of ``fGen``, of
   ``sum ||g - x_u||^2``, where ``x_u`` is its own node nearest to the generated ``g``
   (``compare``). The server adds these gradients up (``add_up``). The author takes the mean of them
   and of its own loss's gradient, and steps ``fGen`` (``step_together``).
3. Every client mends its whole ego-network, once (``SageModel.mend``).
4. *Rounds*, Flower's own. Each client trains the classifier on its mended ego-network
   (``class_loss``) and measures it. FedSage+ averages the classifiers, weighted by training nodes
   (FedAvg); of LocalSage+ nothing but measurements travels.

*Where we differ.* ``fGen`` is smaller (``modules.py``). As in the paper, and unlike
its published code, nodes are hidden among all nodes, the number and feature losses run over all
that are left, and others compare with their nearest node, not a random one. Of a node's slots the
losses see as many as neighbours are hidden, ``NEIGHBOURS`` at most.

*Late clients.* One that comes after the first round trains its generator alone.
*Privacy.* The server sees generators, encoded nodes with unit noise, and gradients, unmasked.

Shapes: ``n`` nodes, ``f`` features, ``r`` generated neighbours, ``w`` weights of an ``fGen``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from flower_graph.engine.cohort import GraphOnDevice
from flower_graph.ops.graph import Adjacency, csr, csr_tensor, gcn_adjacency
from flower_graph.ops.mending import (
    Impaired,
    Slots,
    impair,
    mended_edges,
    nearest_hidden,
    nearest_of_each,
    slots,
)
from flower_graph.rng import generator
from flower_graph.strategies.fed_sage.modules import (
    NEIGHBOURS,
    SageModel,
    features_of,
    split_like,
)

GENERATOR_EPOCHS = 20  # steps of NeighGen alone; FedSage+ takes as many together after them
HIDDEN_SHARE = 0.25  # of a client's nodes, while its generator learns; published: 3 to 28 %
TABLE = 16_777_216  # numbers in the table of distances that a client fills at a time

# Formulas ----------------------------------------------------------------------------------------


class ImpairedGraph(NamedTuple):
    """A generator's training graph: a client's graph without the nodes that it hides."""

    client: int
    x: Tensor  # [n, f] features of all nodes
    impaired: Impaired
    rest: Tensor  # [k, f] features of the nodes that are left
    adjacency: Adjacency
    y: Tensor  # [k] their classes
    trains: Tensor  # [k] which of them train

    @classmethod
    def of(cls, graph: GraphOnDevice, seed: int) -> ImpairedGraph:
        """Hide a share of a client's nodes, always the same."""
        x, n = graph.x, len(graph.x)
        order = torch.randperm(n, generator=generator(seed, "hidden", graph.client))
        impaired = impair(graph.edge_index, (order < int(HIDDEN_SHARE * n)).to(x.device))
        kept = impaired.kept
        adjacency = gcn_adjacency(impaired.edge_index, kept.numel())
        train = graph.masks["train"][kept]
        return cls(graph.client, x, impaired, x[kept], adjacency, graph.y[kept], train)


def generator_loss(model: SageModel, graph: ImpairedGraph, noise: Tensor) -> Tensor:
    """Add up the losses of number, features and classes on an impaired graph."""
    made_by, missing, n = model.generator, graph.impaired.missing, graph.rest.shape[0]
    z = made_by.encode(graph.rest, graph.adjacency)
    numbers = made_by.numbers(z)
    count, true = made_by.counts(numbers), missing.clamp(max=NEIGHBOURS)
    slot = slots(torch.maximum(count, true))
    made = features_of(made_by.feature_weights(), z + noise, slot)
    is_true = slot.slot < true[slot.parent]
    matched = Slots(slot.parent[is_true], slot.slot[is_true])
    nearest = nearest_hidden(made[is_true], matched, graph.impaired, graph.x)
    distance = (made[is_true] - graph.x[nearest]).square().sum()
    parent = slot.parent.where(slot.slot < count[slot.parent], -1)
    edges = mended_edges(graph.impaired.edge_index, n, parent)
    mended = gcn_adjacency(edges, n + parent.numel())
    logits = model.classify(n, torch.cat([graph.rest, made]), mended)
    number_loss = functional.smooth_l1_loss(numbers, missing.to(numbers.dtype))
    return number_loss + distance / n + class_loss(logits, graph.y, graph.trains)


def class_loss(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Average the cross-entropy over the masked nodes; zero without any."""
    total = functional.cross_entropy(logits[mask], y[mask], reduction="sum")
    return total / mask.sum().clamp(min=1)


def distance_gradient(
    generated: Tensor, author: Tensor, x: Tensor, ptr: list[int], clients: Tensor
) -> Tensor:
    """FedSage+'s cross-client term: compare generated neighbours with other clients' nodes."""
    # The term is ``sum_j min_{u in V_j} ||g - x_u||^2`` over the clients ``j`` that are not the
    # author. Its gradient is all that an author needs.
    # generated [r, f], author [r], x [n, f], clients [c]
    gradient = torch.empty_like(generated)
    row, column = x.nonzero(as_tuple=True)
    features = csr(row, column, x[row, column], *x.shape)
    step = max(1, TABLE // max(x.shape[0], 1))
    for first in range(0, generated.shape[0], step):
        part = slice(first, first + step)
        other = (clients[:, None] != author[part]).float()
        nearest = nearest_of_each(generated[part], features, ptr)
        # 2 (g - x_u), summed over the clients: a sparse matrix has the chosen u of every g.
        choice = csr_tensor(
            torch.arange(nearest.shape[1] + 1, device=x.device) * nearest.shape[0],
            nearest.T.ravel(),
            other.T.ravel(),
            (nearest.shape[1], x.shape[0]),
        )
        chosen = (choice @ features).to_dense()
        gradient[part] = 2 * (generated[part] * other.sum(0)[:, None] - chosen)
    return gradient


# Client ------------------------------------------------------------------------------------------


def train_alone(model: SageModel, graph: ImpairedGraph, adam: torch.optim.Optimizer) -> None:
    """Train NeighGen, with the classifier, on the client's own graph (step 1)."""
    model.generator.requires_grad_()
    for epoch in range(GENERATOR_EPOCHS):
        adam.zero_grad()
        own_loss(model, graph, "local", epoch).backward()
        adam.step()
    adam.zero_grad()
    model.freeze_encoder()
    model.generator.client.fill_(graph.client)


def own_loss(model: SageModel, graph: ImpairedGraph, purpose: str, epoch: int) -> Tensor:
    """Return the client's own loss with the epoch's noise."""
    noise = model.generator.noise(graph.client, purpose, epoch, graph.rest)
    return generator_loss(model, graph, noise)


@torch.no_grad()
def show(model: SageModel, graph: ImpairedGraph, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what other clients compare with their nodes in this epoch (step 2)."""
    # Of the nodes with a hidden neighbour: their number of these [q], and the nodes, encoded, with
    # noise [q, latent]; and the weights of fGen [w]
    z = model.generator.encode(graph.rest, graph.adjacency)
    z = z + model.generator.noise(graph.client, "together", epoch, z)
    missing = graph.impaired.missing
    chosen = (missing > 0).nonzero().flatten()
    weights = parameters_to_vector(model.generator.feature_weights())
    return missing[chosen].clamp(max=NEIGHBOURS), z[chosen], weights


def generate(
    missing: Sequence[Tensor], encoded: Sequence[Tensor], weights: Tensor, like: Sequence[Tensor]
) -> list[Tensor]:
    """Generate neighbours ``[r, f]`` as each of the authors would, from what it shows (step 2)."""
    # weights [a, w], by which ``compare`` takes the gradient; like: those of an fGen, by layers
    weights.requires_grad_()
    return [
        features_of(split_like(own, like), z, slots(count))
        for own, z, count in zip(weights.unbind(), encoded, missing, strict=True)
    ]


def compare(
    authors: Tensor,
    generated: Sequence[Tensor],
    weights: Tensor,
    features: Sequence[Tensor],
    clients: Tensor,
) -> Tensor:
    """Return the gradients ``[a, w]`` of the authors' weights towards the nodes here (step 2)."""
    # generated: of each of the authors [a]; features [n, f]: of each of the clients here [c]
    made, sizes = torch.cat([*generated]), torch.tensor([len(part) for part in generated])
    author = authors.repeat_interleave(sizes.to(authors.device))
    ptr = [0, *accumulate(map(len, features))]
    wanted = distance_gradient(made.detach(), author, torch.cat([*features]), ptr, clients)
    (gradient,) = torch.autograd.grad(made, weights, wanted)
    return gradient


def step_together(
    model: SageModel,
    graph: ImpairedGraph,
    epoch: int,
    came: Tensor,
    others: int,
    adam: torch.optim.Optimizer,
) -> None:
    """Step ``fGen`` by the mean of the client's own gradient and the others' (step 2)."""
    # came [w], summed over the others
    weights = model.generator.feature_weights()
    loss = own_loss(model, graph, "together", epoch)
    own = parameters_to_vector(torch.autograd.grad(loss, weights))
    # The own term is a mean over the client's nodes, the others' arrives as a sum.
    mean = (own + came.to(own) / len(graph.rest)) / (others + 1)
    for weight, grad in zip(weights, split_like(mean, weights), strict=True):
        weight.grad = grad
    adam.step()
    adam.zero_grad()


# Server ------------------------------------------------------------------------------------------


def add_up(
    gradients: Sequence[NDArray[np.floating]], authors: Sequence[int]
) -> list[NDArray[np.floating]]:
    """Sum the gradients of all SuperNodes; return the rows of each SuperNode's authors (step 2)."""
    # gradients [a, w], authors: their number at each SuperNode
    return np.split(np.sum(gradients, axis=0), np.cumsum(authors)[:-1])
