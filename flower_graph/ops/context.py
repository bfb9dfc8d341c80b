"""The context between a formula's forward and backward pass."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Saved(FunctionCtx):
    """PyTorch's context, with the attributes of the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
