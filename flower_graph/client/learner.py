"""One client of a ``ModuleClient``: a module, its optimiser, and its graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.data.description import Caution, tell
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.errors import ConfigError
from flower_graph.ops.links import LinkSplit
from flower_graph.rng import seeded

LocalGraph = ClientGraph | EgoNetwork
UNUSED = "its forward takes no edge_weight, so all edges count the same"


class GraphOnDevice(NamedTuple):
    """A client's graph on its module's device."""

    client: int
    x: Tensor  # [n, f], dense
    edge_index: Tensor  # [2, e]; without edges at a graphless client
    y: Tensor  # [n]; below 0 without a label
    masks: dict[str, Tensor]  # [n] bool by role: train, val, test
    edge_weight: Tensor | None = None  # [e]; None: all edges count alike
    pairs: Tensor | None = None  # [2, m] of which the module is to give logits; None: of the nodes
    targets: Tensor | None = None  # [n] numbers to learn, standardised; NaN for none
    links: LinkSplit | None = None  # where links are learnt; ``edge_index`` has none held out


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


def weighed(module: nn.Module, graph: GraphOnDevice) -> tuple[Tensor, ...]:
    """Return a module's arguments: features, edges and, if ``forward`` takes them, edge weights."""
    if graph.edge_weight is None:
        return graph.x, graph.edge_index
    if not takes_weights(module):
        tell(f"{type(module).__name__}", [Caution(UNUSED)])
        return graph.x, graph.edge_index
    return graph.x, graph.edge_index, graph.edge_weight


def asked(module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
    """Return the pairs that the module must decode, if any; ``ConfigError`` if it takes none."""
    if graph.pairs is None:
        return {}
    if "pairs" not in inspect.signature(module.forward).parameters:
        kind = type(module).__name__
        raise ConfigError(f"links.decoder: mlp is not for {kind}, whose forward takes no pairs")
    return {"pairs": graph.pairs}


def takes_weights(module: nn.Module) -> bool:
    """Whether a module's third argument is the edges' weights."""
    return "edge_weight" in inspect.signature(module.forward).parameters


def dense(x: Tensor) -> Tensor:
    """Return features ``[n, f]`` as a dense matrix."""
    return x if x.layout == torch.strided else x.to_dense()


def placed_on(graph: LocalGraph, device: torch.device) -> GraphOnDevice:
    """Move a client's graph to its module's device."""
    edges = graph.edge_index
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
    weight = graph.edge_weight if isinstance(graph, ClientGraph) else None
    return GraphOnDevice(
        graph.client,
        dense(graph.x).to(device),
        edges.to(device),
        graph.y.to(device),
        {role: mask.to(device) for role, mask in masks.items()},
        None if weight is None else weight.to(device),
    )


def is_finite(module: nn.Module, sent: Mapping[str, NDArray[np.generic]]) -> bool:
    """Whether all numbers that a client sends, and those that its module keeps, are finite."""
    kept = all(bool(one.isfinite().all()) for one in module.parameters())
    return kept and all(np.isfinite(values).all() for values in sent.values())


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
