"""Sorting whole numbers: NumPy does it several times as fast as PyTorch on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def order_of(key: Tensor) -> Tensor:
    """Return what sorts some numbers."""
    # key [n]
    if key.device.type == "cpu":
        return torch.from_numpy(np.argsort(key.numpy()))
    return key.argsort()


def largest_of(key: Tensor, k: int) -> Tensor:
    """Return the largest numbers of each row."""
    # key [b, n]
    if key.device.type != "cpu":
        return key.topk(k, dim=1).values
    below = key.shape[1] - k
    kept = np.partition(key.numpy(), below, axis=1)[:, below:]
    return torch.from_numpy(np.sort(kept, axis=1)).flip(1)
