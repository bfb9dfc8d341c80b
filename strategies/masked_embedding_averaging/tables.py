"""What FedSCem's tables alone have: a central reference, clients' costs, and what masks change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

from flower_graph.data.cached import cached_data
from flower_graph.engine.epoch import Epoch
from flower_graph.strategies.masked_embedding_averaging.central import train_whole
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig
from flower_graph.strategies.masked_embedding_averaging.cost import costs_by_size
from flower_graph.strategies.masked_embedding_averaging.method import METHOD, ego_settings


def train(config: FedSCemConfig) -> list[Epoch]:
    """Train the model on the whole graph."""
    return train_whole(config, cached_data(config), METHOD.graphs(config), ego_settings(config))


def costs(config: FedSCemConfig) -> list[tuple[dict[str, int], dict[str, float]]]:
    """Measure clients by size: keys and figures of each group (Figure 8)."""
    # Some builds of PyTorch's profiler fill the error stream; what goes wrong is an exception.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    result = costs_by_size(METHOD.graphs(config), ego_settings(config))
    return [
        (
            {"group": number, "clients": cost.clients},
            {
                "nodes": cost.nodes,
                "edges": cost.edges,
                "seconds-per-round": cost.seconds,
                "peak-mib": cost.peak_bytes / 2**20,
            },
        )
        for number, cost in enumerate(result, start=1)
    ]


def masked_gap(shown: Sequence[Any]) -> dict[str, Any] | None:
    """Say how far the masked run's test accuracy ever is from the plain run's, by data set."""
    masked = {one.data: one.runs for one in shown if one.method.endswith("masked")}
    plain = {one.data: one.runs for one in shown if not one.method.endswith("masked")}
    gaps, seed = [], None
    for data in masked:
        for seed in masked[data].keys() & plain.get(data, {}).keys():
            both = masked[data][seed].test_accuracy, plain[data][seed].test_accuracy
            far = [abs(a - b) for a, b in zip(*both, strict=True) if isfinite(a) and isfinite(b)]
            rounds = f"{len(far)} of {len(both[0])} rounds"
            gaps.append(f"{max(far, default=nan):.4f} on {data} ({rounds})")
    return {"gaps": ", ".join(gaps), "seed": seed} if gaps else None
