"""How near the aligned embeddings of two clients are: P@1, P@5 and P@10 over drawn pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.strategies.procrustes_alignment.server_state import mean_of

MEASURED_PAIRS = 12  # ordered pairs whose alignment is measured in a round: all, up to 4 clients
TRIED_PAIRS = 1000  # of these some may share no node; all, up to 32 clients
NEAREST = (1, 5, 10)


def measure_alignment(
    x: Tensor, held: Tensor, rotations_only: bool, chance: torch.Generator
) -> dict[str, float]:
    """Say how often a node's aligned embedding is near that of the same node (Figures 3 to 6)."""
    # x, held [m, u, d]
    result: list[Mapping[int, float]] = []
    for source, target in islice(draw_pairs(x.shape[0], chance), TRIED_PAIRS):
        common = held[source] & held[target]
        if not common.any():
            continue
        a, b = x[source, common], x[target, common]
        turn = orthogonal_procrustes(a, b, rotations_only=rotations_only)
        result.append(alignment_precision(a, b, turn, NEAREST))
        if len(result) == MEASURED_PAIRS:
            break
    return {f"precision-{k}": mean_of([one[k] for one in result]) for k in NEAREST if result}


def draw_pairs(count: int, chance: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw the ordered pairs of different numbers below ``count``, each once, one at a time."""
    # Thousands of clients have more pairs than fit into memory.
    for distance in (1 + torch.randperm(max(count - 1, 0), generator=chance)).tolist():
        for source in torch.randperm(count, generator=chance).tolist():
            yield source, (source + distance) % count
