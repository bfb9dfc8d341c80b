"""Figures of FedSCem's tables: a central reference, and clients' costs.

The central reference is the same model, trained on the whole graph in one place. Costs are a
client's time and memory in a round, by the size of its ego-network (FedSCem, Figure 8).
"""

import os
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flower_graph.client.learner import NODES
from flower_graph.data.graph import ClientGraph, WholeGraph, to_undirected
from flower_graph.data.partition.client_graphs import split_global
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.cohort import joined, placed_on
from flower_graph.engine.machine import resolve_device
from flower_graph.records.rounds import Epoch
from flower_graph.strategies.fedscem.algorithm import EgoCohort, Shared, trained_alone
from flower_graph.strategies.fedscem.config import EgoSettings, FedSCemConfig
from flower_graph.strategies.fedscem.method import METHOD, ego_settings

ROUNDS = 7  # measured ones, after one that is not
Row = tuple[dict[str, int], dict[str, float]]  # keys and figures of a group of clients


def train(config: FedSCemConfig) -> list[Epoch]:
    """Train one model on all nodes, and evaluate it as clients are evaluated."""
    if config.partition.split != "global":
        raise ValueError(f"partition.split: {config.partition.split!r}; only 'global' will do")
    data, egos, settings = cached_data(config), METHOD.graphs(config), ego_settings(config)
    device = resolve_device(config.device)
    nodes = torch.cat([ego.nodes for ego in egos]).to(device)
    judges = joined([placed_on(ego, device) for ego in egos])
    epochs = []
    for whole in trained_alone(_whole(data, config), settings, config.rounds, device):
        logits = whole.logits()
        found = NODES.shares(judges.judged(logits[nodes]))
        _, val, test = (float(accuracy.nanmean()) for accuracy in found)
        loss = float(NODES.training_loss(whole.graph.judged(logits)))
        epochs.append(Epoch(loss, val, test))
    return epochs


def _whole(data: WholeGraph, config: FedSCemConfig) -> ClientGraph:
    count = int(data.y.numel())
    network = ClientGraph.bare(0, data.x, data.y, to_undirected(data.edge_index, count))
    partition = config.partition
    seed = config.seed if partition.seed is None else partition.seed
    return split_global([network], data.y, partition.ratios, seed)[0]


def costs(config: FedSCemConfig) -> list[Row]:
    """Measure clients by size (Figure 8)."""
    # Some builds of PyTorch's profiler fill the error stream; real errors are exceptions.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return costs_by_size(METHOD.graphs(config), ego_settings(config))


def costs_by_size(
    egos: Sequence[ClientGraph], settings: EgoSettings, *, groups: int = 10
) -> list[Row]:
    """Train ego-networks of about equal size together, from the smallest to the largest."""
    # A round is FedSCem's at a client: a step on the classification loss, embeddings, a step with
    # the contrastive loss, measurements. Masks and messages are not part of it.
    ordered = sorted(egos, key=lambda ego: ego.nodes.numel())
    is_shared = torch.bincount(torch.cat([ego.nodes for ego in egos])) > 1
    groups = min(groups, len(ordered))
    bounds = pairwise(len(ordered) * group // groups for group in range(groups + 1))
    parts = [ordered[start:end] for start, end in bounds]
    return [
        ({"group": number, "clients": len(part)}, _figures(part, is_shared, settings))
        for number, part in enumerate(parts, start=1)
    ]


def _figures(
    egos: Sequence[ClientGraph], is_shared: torch.Tensor, settings: EgoSettings
) -> dict[str, float]:
    place = is_shared[torch.cat([ego.nodes for ego in egos])].nonzero().flatten()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # Built under the profiler, so that memory between rounds counts too.
        cohort = EgoCohort(egos, settings)
        _round(cohort, place)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        _round(cohort, place)
        seconds.append(time.perf_counter() - started)
    return {
        "nodes": fmean(ego.nodes.numel() for ego in egos),
        "edges": fmean(ego.edges.shape[1] / 2 for ego in egos),  # each counted once
        "seconds-per-round": median(seconds) / len(egos),
        # Bytes of a client's tensors: graph, weights, optimiser, and those of a round
        "peak-mib": _peak(profiler) / len(egos) / 2**20,
    }


def _round(cohort: EgoCohort, place: torch.Tensor) -> None:
    with cohort.part() as group:
        group.train(1)
        # A node's own embedding stands for the mean: the values do not change what it costs.
        group.fuse(Shared(place, group.embed()[place]), 1)
        NODES.shares(group.graph.judged(group.logits()))


def _peak(profiler: profile) -> int:
    # PyTorch's own summaries have no peak. Its events count what is allocated and freed.
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes: list[tuple[int, int]] = [
        (one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"
    ]
    return max(accumulate(size for _, size in sorted(changes)))
