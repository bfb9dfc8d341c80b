"""Feature hashing: short vectors with about the same products as long ones.

Weinberger and others, "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flower_graph.rng import chances


def sketched(x: Tensor, buckets: int, seed: int) -> Tensor:
    """Add up features ``[n, f]``, dense or CSR, by signed buckets, to dense ``[n, buckets]``.

    The seed and a feature's number decide its bucket: parties with the same seed hash alike.
    """
    number = torch.arange(x.shape[1])
    bucket = (chances(number, seed, "sketch-bucket") * buckets).long()
    sign = 1 - 2 * (chances(number, seed, "sketch-sign") < 0.5).to(x.dtype)
    result = torch.zeros(x.shape[0], buckets, dtype=x.dtype)
    if x.layout == torch.strided:
        return result.index_add_(1, bucket, x * sign)
    feature = x.col_indices().long()
    row = torch.repeat_interleave(torch.arange(x.shape[0]), x.crow_indices().diff())
    place = row * buckets + bucket[feature]
    result.view(-1).index_add_(0, place, x.values() * sign[feature])
    return result
