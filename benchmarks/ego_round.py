"""A round of FedSCem without messages, masks and alignment; needs PyTorch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.graph_batch import Metrics
from flower_graph.strategies.masked_embedding_averaging.cohort import ChosenEgos, Shared


class Overlap:
    """Which nodes several clients hold; what alignment finds in a run."""

    def __init__(self, egos: Sequence[EgoNetwork], device: torch.device | str = "cpu") -> None:
        nodes = torch.cat([ego.nodes for ego in egos])
        _, slot, count = torch.unique(nodes, return_inverse=True, return_counts=True)
        self.place = (count[slot] > 1).nonzero().flatten().to(device)
        self._slot, self._count = slot.to(device), count[:, None].to(device)

    def mean(self, h: Tensor) -> Tensor:
        """Average the embeddings of each node (equation 7): ``[n, h]`` to ``[s, h]``."""
        total = h.new_zeros(self._count.numel(), h.shape[1]).index_add_(0, self._slot, h)
        return (total / self._count)[self._slot[self.place]]


def engine_round(chosen: ChosenEgos, overlap: Overlap) -> Metrics:
    """Train, average the embeddings, fuse and judge all clients."""
    chosen.train(1)
    chosen.fuse(Shared(overlap.place, overlap.mean(chosen.embed())), 1)
    return chosen.evaluate(chosen.embed())
