"""The graphs of several clients as one block-diagonal graph; dropout; accuracy of each client.

Nothing in a batch mixes clients: any division of clients into batches gives the same numbers. The
first layer's weights are stored by active rows: a client keeps row ``k`` of its matrix only if one
of its nodes has feature ``k``; the other rows never touch its output.

A graph without edges has the identity as its normalised adjacency, so two graph convolutions are an
MLP of two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flower_graph.engine.grouped import feature_rows
from flower_graph.ops.graph import Adjacency, csr_tensor, gcn_adjacency
from flower_graph.ops.grouped import group_sizes, group_sum
from flower_graph.wire.keys import MAX_CLASSES, ROLES


class Nodes(Protocol):
    """A client's nodes, with or without edges."""

    @property
    def client(self) -> int: ...

    @property
    def x(self) -> Tensor: ...

    @property
    def y(self) -> Tensor: ...


class Graph(Nodes, Protocol):
    """The parts of a client's graph that a batch needs."""

    @property
    def edge_index(self) -> Tensor: ...

    @property
    def train_mask(self) -> Tensor: ...

    @property
    def val_mask(self) -> Tensor: ...

    @property
    def test_mask(self) -> Tensor: ...


@dataclass(frozen=True)
class GraphBatch:
    """Clients' graphs, concatenated."""

    clients: tuple[int, ...]  # Number of each graph's client
    ptr: list[int]  # c + 1 bounds of the clients' nodes
    graph: Adjacency  # [n, n] normalised with self-loops
    x: Adjacency  # [n, r] features, a column per active row, and the transpose
    feature: Tensor  # [r] the feature of an active row
    row_ptr: list[int]  # c + 1 bounds of the clients' active rows
    row_client: Tensor  # [r] place of the client that owns an active row
    node_client: Tensor  # [n] place of the client that owns a node
    y: Tensor  # [n] classes
    masks: dict[str, Tensor]  # [n] which nodes train, validate and test
    train_share: Tensor  # [n] weight of a node in its client's mean over the training nodes
    num_features: int  # Rows of a full first layer

    @property
    def size(self) -> int:
        return len(self.clients)


def check_classes(num_classes: int) -> None:
    """Refuse more classes than a run can have, before weights are made for them."""
    if not 1 <= num_classes <= MAX_CLASSES:
        raise ValueError(f"num_classes is {num_classes}, must be from 1 to {MAX_CLASSES}")


def check_sizes(graph: Nodes, num_features: int, num_classes: int) -> None:
    """Refuse a client whose features or classes differ from the run's; name the client."""
    check_classes(num_classes)
    if graph.x.shape[1] != num_features:
        given = f"{graph.x.shape[1]} features"
        raise ValueError(f"client {graph.client} has {given}, the run has {num_features}")
    if graph.y.numel() and (largest := int(graph.y.max())) >= num_classes:
        raise ValueError(
            f"client {graph.client} has class {largest}, allowed: 0 to {num_classes - 1}"
        )


def pack_graphs(graphs: Sequence[Graph], device: torch.device | str = "cpu") -> GraphBatch:
    """Concatenate the graphs of several clients."""
    ptr = list(accumulate((graph.y.numel() for graph in graphs), initial=0))
    node_client = _owners(ptr)
    edges = [graph.edge_index + start for graph, start in zip(graphs, ptr, strict=False)]
    num_features = int(graphs[0].x.shape[1])
    x, rows = feature_rows([graph.x for graph in graphs])
    masks = {
        role: torch.cat([getattr(graph, f"{role}_mask") for graph in graphs]) for role in ROLES
    }
    return GraphBatch(
        clients=tuple(graph.client for graph in graphs),
        ptr=ptr,
        graph=_to(gcn_adjacency(torch.cat(edges, dim=1), ptr[-1]), device),
        x=_to(x, device),
        feature=rows.feature.to(device),
        row_ptr=rows.ptr,
        row_client=rows.owner.to(device),
        node_client=node_client.to(device),
        y=torch.cat([graph.y for graph in graphs]).to(device),
        masks={role: mask.to(device) for role, mask in masks.items()},
        train_share=mean_shares(masks["train"], ptr).to(device),
        num_features=num_features,
    )


def mean_shares(chosen: Tensor, ptr: list[int]) -> Tensor:
    """Return each node's weight in its client's mean over the chosen nodes, ``[n]``."""
    # chosen [n]
    count = group_sum(chosen.float(), ptr).clamp(min=1)
    return chosen / count[_owners(ptr).to(chosen.device)]


def _owners(ptr: list[int]) -> Tensor:
    return torch.arange(len(ptr) - 1).repeat_interleave(torch.tensor(group_sizes(ptr)))


def _to(pair: Adjacency, device: torch.device | str) -> Adjacency:
    return Adjacency(pair.matrix.to(device), pair.transpose.to(device))


# Dropout -----------------------------------------------------------------------------------------

# PyTorch's dropout draws from one stream for the whole batch, so that a client's draws would depend
# on who shares its cohort. Here every network has a generator of its own for every round, and its
# draws for all steps of the round come at once.


class DropoutMask(NamedTuple):
    """The factors of dropout in each of ``E`` steps: 0 or 1 / (1 - p); None: no dropout."""

    inputs: Tensor | None  # [E, z] for each entry of the batch's features, node by node
    hidden: Tensor | None  # [E, n, h] for each number in the hidden layer


def draw_kept(
    batch: GraphBatch,
    chances: Sequence[torch.Generator],
    steps: int,
    hidden: int,
    input_rate: float,
    hidden_rate: float,
) -> DropoutMask:
    """Draw the dropout masks of a round."""
    begin = batch.x.matrix.crow_indices()[torch.tensor(batch.ptr, device=batch.y.device)].tolist()
    inputs, inner = [], []
    for number, rng in enumerate(chances):
        if input_rate:
            entries = begin[number + 1] - begin[number]
            inputs.append(draw_mask((steps, entries), input_rate, rng))
        if hidden_rate:
            n = batch.ptr[number + 1] - batch.ptr[number]
            inner.append(draw_mask((steps, n, hidden), hidden_rate, rng))
    device = batch.y.device
    return DropoutMask(
        *(torch.cat(part, 1).to(device) if part else None for part in (inputs, inner))
    )


def draw_mask(shape: tuple[int, ...], rate: float, chance: torch.Generator) -> Tensor:
    """Draw a dropout mask: 0 or 1 / (1 - p)."""
    count = torch.Size(shape).numel()
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=chance)
    threshold = max(1, round(256 * (1 - rate)))
    stays = words.view(torch.uint8)[:count] < threshold if threshold < 256 else torch.ones(count)
    return stays.to(torch.float32).mul_(256 / threshold).reshape(shape)


def with_dropout(x: Adjacency, turn: Tensor, kept: Tensor) -> Adjacency:
    """Multiply each entry of sparse features."""
    # x [n, r], turn [z], kept [z]
    values = x.matrix.values() * kept
    pairs = zip(x, (values, values.index_select(0, turn)), strict=True)
    parts = (
        csr_tensor(one.crow_indices(), one.col_indices(), value, (one.shape[0], one.shape[1]))
        for one, value in pairs
    )
    return Adjacency(*parts)


def turn_of(x: Adjacency) -> Tensor:
    """Return the index into the matrix's entries of each entry of the transpose, ``[z]``."""
    return x.matrix.col_indices().argsort(stable=True)


# Accuracy and loss of each client
# ----------------------------------------------------------------------


@dataclass
class Epoch:
    """Training loss and accuracies after one epoch of training in one place."""

    cross_entropy: float
    val_accuracy: float
    test_accuracy: float


def log_shares(logits: Tensor) -> Tensor:
    """Return log-probabilities of classes: ``[n, k]`` to ``[k, n]``."""
    # A log-softmax over a few neighbouring numbers takes PyTorch ten times as long.
    return logits.T.contiguous().log_softmax(0)
