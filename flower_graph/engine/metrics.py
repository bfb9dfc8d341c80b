"""How well each client of a batch does: accuracy by role, and cross-entropy.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.engine.graph_batch import ROLES, GraphBatch
from flower_graph.ops.grouped import group_sum


class Metrics(NamedTuple):
    """How well each of ``c`` clients does; NaN where it has no such nodes."""

    accuracy: Tensor  # [c, 3] on its nodes for training, validation and test
    loss: Tensor  # [c] cross-entropy, mean over its training nodes


def node_losses(batch: GraphBatch, logits: Tensor) -> Tensor:
    """Return the cross-entropy of each node, ``[n]``; of no meaning for one without a label."""
    return -log_shares(logits).gather(0, batch.y.clamp(min=0)[None])[0]


def log_shares(logits: Tensor) -> Tensor:
    """Return the logarithm of each class's share, ``[n, k]`` to ``[k, n]``."""
    # A log-softmax over a few neighbouring numbers takes PyTorch ten times as long.
    return logits.T.contiguous().log_softmax(0)


@torch.no_grad()
def evaluate(batch: GraphBatch, logits: Tensor) -> Metrics:
    """Measure accuracy and loss of each client."""
    # logits [n, k]
    masks = torch.stack([batch.masks[role] for role in ROLES], 1).double()
    right = (logits.argmax(1) == batch.y)[:, None] * masks
    loss = node_losses(batch, logits).double() * masks[:, 0]
    sums = group_sum(torch.cat([right, loss[:, None]], 1), batch.ptr)
    counts = group_sum(masks, batch.ptr)  # 0 gives NaN below
    return Metrics((sums[:, :3] / counts).cpu(), (sums[:, 3] / counts[:, 0]).cpu())
