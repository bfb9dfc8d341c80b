"""What the tests of the alignment draw."""

from __future__ import annotations

import torch
from torch import Tensor

DOUBLE = torch.float64


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def orthogonal(seed: int, *shape: int) -> Tensor:
    """Draw orthogonal matrices: reflections are as frequent as rotations."""
    q: Tensor = torch.linalg.qr(normal(seed, *shape))[0]
    return q * torch.sign(normal(seed + 1, *shape[:-2], 1, shape[-1]))


def spaces(seed: int, m: int, u: int, d: int, noise: float = 0.0) -> Tensor:
    """Draw embeddings [m, u, d] of the same nodes by clients that each have their own space."""
    base = normal(seed, u, d)
    return (base + noise * normal(seed + 10, m, u, d)) @ orthogonal(seed + 20, m, d, d)


def masks(seed: int, m: int, u: int, d: int) -> Tensor:
    """Draw who holds what [m, u], so that all share the first 2 d nodes and any of the others."""
    held = normal(seed + 30, m, u) > 0
    held[:, : 2 * d] = True
    return held
