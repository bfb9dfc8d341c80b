"""FedSCem's upper reference: the same model, trained on the whole graph in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flower_graph.data.graph import WholeGraph, to_undirected
from flower_graph.data.partition.ego_networks import EgoNetwork, split_global
from flower_graph.engine.device import resolve_device
from flower_graph.engine.epoch import Epoch
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings

if TYPE_CHECKING:
    from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig


def train_whole(
    config: FedSCemConfig, data: WholeGraph, egos: Sequence[EgoNetwork], settings: EgoSettings
) -> list[Epoch]:
    """Train one model on all nodes and judge it as the clients are judged."""
    if config.partition.split != "global":
        raise ValueError(f"partition.split: {config.partition.split!r}; only 'global' will do")
    device = resolve_device(config.device)
    whole = EgoCohort([_whole(data, config)], settings, device=device)
    judges = EgoCohort(egos, settings, device=device)
    model = whole.choose([0])
    chosen = judges.choose([ego.client for ego in egos])
    nodes = torch.cat([ego.nodes for ego in egos]).to(device)
    epochs = []
    for _ in range(config.rounds):
        model.train()
        h = model.embed()
        # The judges' own first layers play no part: their embeddings come from the whole graph.
        judges.tensors()["weight.rest"].copy_(whole.tensors()["weight.rest"])
        _, val, test = chosen.evaluate(h[nodes]).accuracy.nanmean(0).tolist()
        epochs.append(Epoch(float(model.evaluate(h).loss), val, test))
    return epochs


def _whole(data: WholeGraph, config: FedSCemConfig) -> EgoNetwork:
    """Make the whole graph one client's, with the roles that its nodes have at the clients."""
    count = int(data.y.numel())
    nobody = torch.zeros(count, dtype=torch.bool)
    edges = to_undirected(data.edge_index, count)
    network = EgoNetwork(0, 0, torch.arange(count), edges, data.x, data.y, nobody, nobody, nobody)
    partition = config.partition
    seed = config.seed if partition.seed is None else partition.seed
    return split_global([network], data.y, partition.ratios, seed)[0]
