"""The papers' mathematics as pure functions on tensors; nothing here imports Flower."""

from flower_graph.ops.generalised_procrustes import Consensus, consensus
from flower_graph.ops.procrustes import align_pairs, alignment_precision, orthogonal_procrustes

__all__ = [
    "Consensus",
    "align_pairs",
    "alignment_precision",
    "consensus",
    "orthogonal_procrustes",
]
