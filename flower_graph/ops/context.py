"""The context between a formula's forward and backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Saved(FunctionCtx):
    """PyTorch's context; it has whatever the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
