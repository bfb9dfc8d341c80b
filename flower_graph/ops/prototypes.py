"""Mean rows of classes (prototypes), and the distance of nodes to their class's mean."""

from __future__ import annotations

import torch
from torch import Tensor


def class_sums(rows: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Add up rows by class, ``[k, h]``, and count them, ``[k]``."""
    # rows [n, h], y [n]
    sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)
    return sums, torch.bincount(y, minlength=classes)


def distance_to_means(rows: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Return the mean squared distance of each row to its class's mean; 0 where that is NaN."""
    # rows [n, h], y [n], means [k, h], result [n]
    goal = means[y]
    has_goal = ~goal.isnan().any(1)
    return (rows - torch.where(has_goal[:, None], goal, 0.0)).square().mean(1) * has_goal
