"""The graphs of several clients as one block-diagonal graph, and their dropout.

Nothing in a batch mixes clients: any division of clients into batches gives the same numbers. The
first layer's weights are stored by active rows (``FeatureRows``).

A graph without edges has the identity as its normalised adjacency, so two graph convolutions are an
MLP of two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.engine.grouped import feature_rows
from flower_graph.ops.graph import Adjacency, csr_tensor, gcn_adjacency
from flower_graph.wire.keys import MAX_CLASSES


@dataclass(frozen=True)
class GraphBatch:
    """Clients' graphs, concatenated."""

    ptr: list[int]  # c + 1 bounds of the clients' nodes
    graph: Adjacency  # [n, n] normalised with self-loops
    x: Adjacency  # [n, r] features, a column per active row, and the transpose
    feature: Tensor  # [r] the feature of an active row
    row_client: Tensor  # [r] place of the client that owns an active row
    row_ptr: list[int]  # c + 1 bounds of the clients' active rows
    num_features: int  # Rows of a full first layer
    node_client: Tensor  # [n] place of the client that owns a node

    @property
    def size(self) -> int:
        return len(self.ptr) - 1


def check_classes(num_classes: int) -> None:
    """Refuse more classes than a run can have, before weights are made for them."""
    if not 1 <= num_classes <= MAX_CLASSES:
        raise ValueError(f"num_classes is {num_classes}, must be from 1 to {MAX_CLASSES}")


# Any: a client's graph
def check_sizes(graph: Any, num_features: int, num_classes: int) -> None:
    """Refuse a client whose features or classes differ from the run's; name the client."""
    check_classes(num_classes)
    if graph.x.shape[1] != num_features:
        given = f"{graph.x.shape[1]} features"
        raise ValueError(f"client {graph.client} has {given}, the run has {num_features}")
    if graph.y.numel() and (largest := int(graph.y.max())) >= num_classes:
        raise ValueError(
            f"client {graph.client} has class {largest}, allowed: 0 to {num_classes - 1}"
        )


# Any: clients' graphs, of whatever class
def pack_graphs(graphs: Sequence[Any], device: torch.device | str = "cpu") -> GraphBatch:
    """Concatenate the graphs of several clients."""
    ptr = list(accumulate((graph.y.numel() for graph in graphs), initial=0))
    edges = [graph.edge_index + start for graph, start in zip(graphs, ptr, strict=False)]
    x, rows = feature_rows([graph.x for graph in graphs])
    graph, x = (
        Adjacency(*(part.to(device) for part in pair))
        for pair in (gcn_adjacency(torch.cat(edges, dim=1), ptr[-1]), x)
    )
    rows, width = rows.to(device), int(graphs[0].x.shape[1])
    owner = torch.arange(len(graphs)).repeat_interleave(torch.tensor(ptr).diff()).to(device)
    return GraphBatch(ptr, graph, x, *rows, width, owner)


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
    device = batch.x.matrix.device
    begin = batch.x.matrix.crow_indices()[torch.tensor(batch.ptr, device=device)].tolist()
    inputs, inner = [], []
    for number, rng in enumerate(chances):
        if input_rate:
            entries = begin[number + 1] - begin[number]
            inputs.append(draw_mask((steps, entries), input_rate, rng))
        if hidden_rate:
            n = batch.ptr[number + 1] - batch.ptr[number]
            inner.append(draw_mask((steps, n, hidden), hidden_rate, rng))
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
