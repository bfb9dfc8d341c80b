"""The papers' mathematics as pure functions on tensors; nothing here imports Flower."""

from flower_graph.ops.procrustes import (
    Consensus,
    align_pairs,
    alignment_precision,
    consensus,
    orthogonal_procrustes,
)

__all__ = [
    "Consensus",
    "align_pairs",
    "alignment_precision",
    "consensus",
    "orthogonal_procrustes",
]
