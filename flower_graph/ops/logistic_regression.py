"""Multinomial logistic regression, full-batch, by L-BFGS, with PyTorch alone."""

from collections import deque

import torch
from torch import Tensor

MEMORY = 10  # pairs of steps and changes of the gradient, as in scikit-learn


def fit(
    x: Tensor,
    y: Tensor,
    classes: int,
    strength: float,
    *,
    start: Tensor | None = None,
    steps: int = 50,
    tolerance: float = 1e-4,
) -> Tensor:
    """Minimise ``mean cross-entropy + |W|^2 / (2 C n)``: scikit-learn's loss divided by ``C n``."""
    # By L-BFGS with halved steps.
    # x [n, f] dense or CSR, y [n], strength C; result [f + 1, k], the last row the bias, which is
    # not penalised. As scikit-learn, it stops where no entry of the gradient exceeds `tolerance`.
    n, chosen = x.shape[0], (torch.arange(len(x)), y)
    turned = x.t() if x.layout == torch.strided else x.t().to_sparse_csr()

    def loss(weights: Tensor) -> tuple[float, Tensor]:
        logs = torch.log_softmax(scores(x, weights), 1)
        residual = logs.exp()
        residual[chosen] -= 1
        residual /= n
        decay = weights[:-1] / (strength * n)
        gradient = torch.cat([turned @ residual + decay, residual.sum(0, keepdim=True)])
        return float((decay * weights[:-1]).sum() / 2 - logs[chosen].mean()), gradient

    weights = torch.zeros(x.shape[1] + 1, classes) if start is None else start
    pairs = deque[tuple[Tensor, Tensor]](maxlen=MEMORY)
    value, gradient = loss(weights)
    for _ in range(steps):
        if float(gradient.abs().max()) <= tolerance:
            break
        direction, factors = -gradient, []  # times the inverse Hessian, by the two-loop recursion
        for step, change in reversed(pairs):
            factors.append((step * direction).sum() / (step * change).sum())
            direction = direction - factors[-1] * change
        if pairs:
            step, change = pairs[-1]
            direction = direction * ((step * change).sum() / change.square().sum())
        for (step, change), factor in zip(pairs, reversed(factors), strict=True):
            along = (change * direction).sum() / (step * change).sum()
            direction = direction + (factor - along) * step
        slope = float((gradient * direction).sum())
        size = 1.0 if pairs else min(1.0, 1 / float(gradient.abs().sum()))
        after, slopes = loss(weights + size * direction)
        while not after <= value + 1e-4 * size * slope:
            size /= 2
            if size < 1e-6:  # as near as float32 comes
                return weights
            after, slopes = loss(weights + size * direction)
        step, change = size * direction, slopes - gradient
        weights, value, gradient = weights + step, after, slopes
        if float((step * change).sum()) > 0:
            pairs.append((step, change))
    return weights


def scores(x: Tensor, weights: Tensor) -> Tensor:
    """Give every row's score for every class, ``[n, k]``."""
    result: Tensor = x @ weights[:-1]
    return result + weights[-1]
