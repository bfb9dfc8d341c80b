"""Labels spread over a graph, and what a server can learn of them without seeing one.

Non-parametric label propagation, the moments of what it gives, and how smooth that is (FedGTA, Li
et al., PVLDB 17(1), 2023, section 3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flower_graph.ops.graph import Adjacency, propagate

MOMENTS = ("raw", "central", "hybrid")


def propagate_labels(graph: Adjacency, start: Tensor, steps: int, restart: float) -> Tensor:
    """Spread rows over a graph: ``Y <- restart Y_0 + (1 - restart) A Y``, ``steps`` times."""
    # start [n, k]
    if not 0 <= restart <= 1:
        raise ValueError(f"restart is {restart}, must be at least 0 and at most 1")
    rows = start
    for _ in range(steps):
        rows = restart * start + (1 - restart) * propagate(graph, rows)
    return rows


def moments(rows: Tensor, order: int, kind: str = "hybrid") -> Tensor:
    """Give the columns' means of powers 1 to ``order``: of values, of deviations, or both."""
    # rows [n, k]; the result is flat: order times k numbers, twice as many of `hybrid`
    if kind not in MOMENTS:
        raise ValueError(f"kind {kind!r} is unknown: allowed are {', '.join(MOMENTS)}")
    of = {"raw": [rows], "central": [rows - rows.mean(0)]}
    chosen = of["raw"] + of["central"] if kind == "hybrid" else of[kind]
    return torch.cat([(x**power).mean(0) for x in chosen for power in range(1, order + 1)])


def smoothing_confidence(shares: Tensor, degree: Tensor) -> float:
    """Add up ``degree (1/e + p log p)`` over nodes and classes: 0 if every ``p`` is ``1/e``."""
    # shares [n, k] sum to 1 over classes, degree [n]. -p log p is largest, 1/e, at p = 1/e: the
    # surer the nodes, and those with many neighbours most, the more.
    certainty = (1 / math.e + torch.special.xlogy(shares, shares)).sum(1)
    return float((degree * certainty).double().sum())
