"""One client of a ``ModuleClient``: a module, its optimiser, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.ops.counts import Counts
from flower_graph.rng import seeded
from flower_graph.wire.counts import added, counted
from flower_graph.wire.keys import ROLES

LocalGraph = ClientGraph | EgoNetwork


class GraphOnDevice(NamedTuple):
    """A client's graph on its module's device."""

    client: int
    x: Tensor  # [n, f], dense
    edge_index: Tensor  # [2, e]; without edges at a graphless client
    y: Tensor  # [n]; below 0 without a label
    masks: dict[str, Tensor]  # [n] bool by role: train, val, test


@dataclass
class Learner:
    """One client: module, optimiser, graph."""

    module: nn.Module
    optimiser: torch.optim.Optimizer
    graph: GraphOnDevice


def first_module(make_module: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make the initial module, the same for every client."""
    with seeded(torch.device("cpu"), seed, "module"):
        return make_module()


def dense(x: Tensor) -> Tensor:
    """Return features ``[n, f]`` as a dense matrix."""
    return x if x.layout == torch.strided else x.to_dense()


def placed_on(graph: LocalGraph, device: torch.device) -> GraphOnDevice:
    """Move a client's graph to its module's device."""
    edges = graph.edge_index
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
    return GraphOnDevice(
        graph.client,
        dense(graph.x).to(device),
        edges.to(device),
        graph.y.to(device),
        {role: mask.to(device) for role, mask in masks.items()},
    )


def measure(logits: Tensor, graph: GraphOnDevice) -> Tensor:
    """Return loss and accuracy by role; NaN if a client has no such nodes."""
    right, loss = (logits.argmax(1) == graph.y).double(), training_loss(logits, graph)
    shares = [right[graph.masks[role]].mean() for role in ROLES]
    result = torch.stack([loss.double(), *shares]).cpu()
    return torch.full_like(result, torch.nan) if has_diverged(loss, graph) else result


def count_all(
    logits: Sequence[Tensor], graphs: Sequence[GraphOnDevice], counting: str
) -> Counts | None:
    """Count clients' predictions together, if that is asked for; none of one that diverged."""
    parts = []
    for z, graph in zip(logits, graphs, strict=True) if counting else ():
        good = not has_diverged(training_loss(z, graph), graph)
        parts.append(counted(z, graph.y, {r: m & good for r, m in graph.masks.items()}, counting))
    return added(parts)


def training_loss(logits: Tensor, graph: GraphOnDevice) -> Tensor:
    """Return the mean cross-entropy of the training nodes; NaN without any."""
    mask = graph.masks["train"]
    return functional.cross_entropy(logits[mask], graph.y[mask])


def has_diverged(loss: Tensor, graph: GraphOnDevice) -> bool:
    """Whether the loss on the training nodes, if there are any, is NaN or infinite."""
    return not bool(loss.isfinite()) and bool(graph.masks["train"].any())


def is_finite(module: nn.Module, sent: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether what a client sends, and what its module keeps, are numbers."""
    kept = all(bool(one.isfinite().all()) for one in module.parameters())
    return kept and all(np.isfinite(values).all() for values in sent.values())


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
