"""Modules on graphs, and the tensors that last from message to message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flower_graph.client.state import Tensors
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.rng import seeded

__all__ = ["GraphOnDevice", "Learner", "Tensors", "build", "first_module", "start"]

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # as Adam calls them


class Training(Protocol):
    """What is read from the settings."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def keep_optimiser(self) -> bool: ...
    @property
    def seed(self) -> int: ...


class GraphOnDevice(NamedTuple):
    """A client's graph where its module computes."""

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
    """Make the module that all begin with."""
    with seeded(torch.device("cpu"), seed, "module"):
        return make_module()


def start(
    make_module: Callable[[], nn.Module],
    clients: Sequence[int],
    settings: Training,
    device: torch.device,
) -> Tensors:
    """Give what clients keep before their first message."""
    module = first_module(make_module, settings.seed)
    tensors: Tensors = {}
    for client in clients:
        for name, value in module.state_dict().items():
            tensors[f"{client}/{name}"] = value.detach().clone().to(device)
        if settings.keep_optimiser:
            for name, value in module.named_parameters():
                for moment in MOMENTS[:2]:
                    tensors[f"{client}/{name}/{moment}"] = torch.zeros_like(value, device=device)
                # Adam counts steps on the CPU.
                tensors[f"{client}/{name}/step"] = torch.zeros(())
    return tensors


def build(
    make_module: Callable[[], nn.Module],
    graphs: Sequence[ClientGraph],
    settings: Training,
    device: torch.device,
    tensors: Tensors,
) -> tuple[list[Learner], Tensors]:
    """Make modules whose state is these tensors: training changes them in place."""
    placed = {n: t if n.endswith("/step") else t.to(device) for n, t in tensors.items()}
    learners = []
    for graph in graphs:
        module = first_module(make_module, settings.seed).to(device)
        names = module.state_dict().keys()
        local = {name: placed[f"{graph.client}/{name}"] for name in names}
        module.load_state_dict(local, assign=True)
        adam = torch.optim.Adam(
            module.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        if settings.keep_optimiser:
            for name, parameter in module.named_parameters():
                held = {each: placed[f"{graph.client}/{name}/{each}"] for each in MOMENTS}
                adam.state[parameter] = held
        learners.append(Learner(module, adam, _placed(graph, device)))
    return learners, placed


def _placed(graph: ClientGraph, device: torch.device) -> GraphOnDevice:
    x = graph.x if graph.x.layout == torch.strided else graph.x.to_dense()
    edges = graph.edge_index
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
    return GraphOnDevice(
        graph.client,
        x.to(device),
        edges.to(device),
        graph.y.to(device),
        {role: mask.to(device) for role, mask in masks.items()},
    )
