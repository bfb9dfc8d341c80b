"""Dropout that keeps bits: the numbers, and the draws, are PyTorch's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flower_graph.ops.dropout import dropout, relu_dropout_


def both(x: Tensor, rate: float, *, training: bool) -> list[list[Tensor]]:
    """Give result and gradient of ours and of PyTorch's, and what is drawn next."""
    found = []
    for ours in (True, False):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        first = dropout(leaf, rate, training=training) if ours else None
        first = functional.dropout(leaf, rate, training) if first is None else first
        moved = first - 0.2
        if ours:
            last = relu_dropout_(moved, rate, training=training)
        else:
            last = functional.dropout(moved.relu_(), rate, training)
        last.backward(torch.linspace(-1, 1, last.numel()).view_as(last))
        assert leaf.grad is not None
        found.append([last.detach(), leaf.grad, torch.rand(3)])
    return found


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_the_same_as_pytorchs(rate: float, training: bool) -> None:
    x = torch.randn(203, 7, generator=torch.Generator().manual_seed(1))
    ours, theirs = both(x, rate, training=training)
    assert all(map(torch.equal, ours, theirs))
    assert (ours[0] == 0).float().mean() > (0.3 + rate / 2 if training else 0.3)
