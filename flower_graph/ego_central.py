"""FedSCem's upper reference: the same model, trained on the whole graph in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flower_graph.central import Epoch
from flower_graph.data.ego_networks import EgoNetwork, WholeGraph, split_global
from flower_graph.data.graph import to_undirected
from flower_graph.ego_cohort import EgoCohort, EgoSettings
from flower_graph.relay import resolve_device

if TYPE_CHECKING:
    from flower_graph.config_fedscem import FedSCemConfig


def train_whole(
    config: FedSCemConfig, data: WholeGraph, egos: Sequence[EgoNetwork], settings: EgoSettings
) -> list[Epoch]:
    """Train one model on all nodes and judge it as the clients are judged.

    Parameters
    ----------
    config : FedSCemConfig
        The run; ``rounds`` counts epochs of ``local_epochs`` steps.
    data : WholeGraph
        The graph.
    egos : sequence of EgoNetwork
        The ego-networks of the run, with the global split: then no node on which the model is
        judged is one that it trained on.
    settings : EgoSettings
        Sizes of the model, its optimiser and the seed.

    Returns
    -------
    list of Epoch
        One entry an epoch. Accuracies are means over the ego-networks, as the clients' are, with
        embeddings that know the whole graph; the cross-entropy is over all training nodes.

    Raises
    ------
    ValueError
        If the split is not the global one.
    """
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
        _, val, test = chosen.judge(h[nodes]).accuracy.nanmean(0).tolist()
        epochs.append(Epoch(float(model.judge(h).loss), val, test))
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
