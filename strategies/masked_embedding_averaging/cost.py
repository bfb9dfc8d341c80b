"""What a round costs a client, against the size of its ego-network (FedSCem, Figure 8)."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
from torch.profiler import ProfilerActivity, profile

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings, Shared

ROUNDS = 7  # measured ones, after one that is not


@dataclass(frozen=True)
class Cost:
    """Means over ego-networks of about one size."""

    clients: int
    nodes: float
    edges: float  # each counted once
    seconds: float  # of a client in a round
    peak_bytes: float  # of a client's tensors: graph, weights, optimiser, and what a round makes


def costs_by_size(
    egos: Sequence[EgoNetwork], settings: EgoSettings, *, groups: int = 10
) -> list[Cost]:
    """Train ego-networks of about equal size together, from the smallest to the largest."""
    # A round is FedSCem's at a client: a step on the classification loss, embeddings, a step with
    # the contrastive loss, measurements. Masks and messages are not part of it.
    ordered = sorted(egos, key=lambda ego: ego.nodes.numel())
    _, inverse, count = torch.unique(
        torch.cat([ego.nodes for ego in ordered]), return_inverse=True, return_counts=True
    )
    is_shared = (count[inverse] > 1).split([ego.nodes.numel() for ego in ordered])
    groups = min(groups, len(ordered))
    bounds = [len(ordered) * group // groups for group in range(groups + 1)]
    return [
        _cost(ordered[start:end], torch.cat(is_shared[start:end]), settings)
        for start, end in pairwise(bounds)
    ]


def _cost(egos: Sequence[EgoNetwork], is_shared: torch.Tensor, settings: EgoSettings) -> Cost:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # Built while it is watched, so that what lasts between rounds counts too.
        cohort = EgoCohort(egos, settings)
        _round(cohort, is_shared)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        _round(cohort, is_shared)
        seconds.append(time.perf_counter() - started)
    return Cost(
        len(egos),
        fmean(ego.nodes.numel() for ego in egos),
        fmean(ego.edge_index.shape[1] / 2 for ego in egos),
        median(seconds) / len(egos),
        _peak(profiler) / len(egos),
    )


def _round(cohort: EgoCohort, is_shared: torch.Tensor) -> None:
    chosen = cohort.choose([ego.client for ego in cohort.egos])
    chosen.train()
    h = chosen.embed()
    place = is_shared.nonzero().flatten()
    # A node's own embedding stands for the mean: the values do not change what it costs.
    chosen.fuse(Shared(place, h[place]))
    chosen.evaluate(chosen.embed())


def _peak(profiler: profile) -> int:
    """Read the most bytes allocated at a time; only the profiler's trace file tells it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    result = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [event["args"]["Total Allocated"] for event in result]
    # PyTorch counts on from profile to profile, and what is freed between two it never learns.
    before = totals[0] - result[0]["args"]["Bytes"]
    return int(max(totals) - before)
