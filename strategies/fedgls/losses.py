"""The losses of classifying and of distilling (equations 10 and 11), for all networks at once.

Each loss is a product of log-shares with targets that have no gradient. For cross-entropy, the mean
over a client's training nodes, a node's target is its weight, at its class. For
``KL(softmax(H) || softmax(Z))``, the mean over all of a client's nodes, the targets are the shares
of ``H`` times the node's weight; the other term of the divergence depends on ``H`` alone and has no
gradient.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flower_graph.engine.graph_batch import GraphBatch
from flower_graph.ops.grouped import group_sizes, group_sum


class NodeLosses:
    """The sum of all networks' losses.

    Parameters
    ----------
    own : GraphBatch
        The clients, each with the network by which it classifies.
    num_classes : int
        Number of classes, ``k``.
    has_encoders : bool
        Whether each client's encoder follows, as a second network on the same nodes.
    """

    def __init__(self, own: GraphBatch, num_classes: int, *, has_encoders: bool) -> None:
        y, share, self._ptr = own.y, own.train_share, own.ptr
        self._sizes = torch.tensor(group_sizes(own.ptr), device=y.device)
        n, self._has_encoders = y.numel(), has_encoders
        self._targets = share.new_zeros(num_classes, 2 * n if has_encoders else n)
        self._targets[y.clamp(min=0), torch.arange(n, device=y.device)] = share
        self._each = (1 / self._sizes).repeat_interleave(self._sizes)  # [n] weight of every node
        self._last = share.new_zeros(num_classes, 0)

    def total(self, shares: Tensor) -> Tensor:
        """Add up the losses, without the terms that have no gradient."""
        # shares [k, n] or [k, 2 n], their logarithms
        if self._has_encoders:
            n, self._last = self._each.numel(), shares.detach()
            torch.mul(self._last[:, :n].exp(), self._each, out=self._targets[:, n:])
        return -(self._targets * shares).sum()

    def divergence(self) -> Tensor:
        """Return each client's divergence in the last step, ``[c]``; empty without encoders."""
        if not self._has_encoders:
            return torch.zeros(0)
        teacher, student = self._last.split(self._each.numel(), dim=1)
        apart = (teacher.exp() * (teacher - student)).sum(0)
        return group_sum(apart, self._ptr) / self._sizes
