"""A device that is not there: tensors that say they are elsewhere, and compute on the CPU.

A tensor of `elsewhere` is on PyTorch's device ``meta`` for whoever asks, and has its numbers in a
tensor on the CPU. So a whole training step runs, with masks and sizes that depend on numbers, which
tensors without numbers cannot do. It refuses what a GPU refuses, and records what a GPU makes slow:
an operand that is on the CPU, and a copy to the host.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
READS = {aten._local_scalar_dense.default, aten.item.default, aten.equal.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class Far(Tensor):
    """A tensor that is elsewhere."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        about: dict[str, Any] = {"dtype": near.dtype, "device": ELSEWHERE}
        if near.layout == torch.strided:  # a sparse one passes for dense
            about |= {"strides": near.stride(), "storage_offset": near.storage_offset()}
        result: Far = Tensor._make_wrapper_subclass(cls, near.shape, **about)  # type: ignore[attr-defined]
        result.near = near
        return result

    def tolist(self) -> Any:
        """Read the numbers, for which PyTorch does not ask `dispatch`."""
        if LOG:
            LOG[-1].reads[_where()] += 1
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


@dataclass
class Log:
    """What was refused or slow since `watched` began, by who did it."""

    reads: Counter[str] = field(default_factory=Counter)  # numbers that the host waited for
    copies: Counter[str] = field(default_factory=Counter)  # tensors that were copied to the host
    mixed: Counter[str] = field(default_factory=Counter)  # operations on tensors here and elsewhere


LOG: list[Log] = []


def _where() -> str:
    """Name the innermost function of this project that is at work."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        is_ours = path.is_relative_to(ROOT) and not {"tests", ".venv"} & {*path.parts}
        if is_ours and not frame.name.startswith("<"):  # a comprehension is its function's
            return f"{path.relative_to(ROOT)}:{frame.name}"
    return "a test"


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; the result is elsewhere if an operand is, or if it is asked for."""
    given = _tensors((args, kwargs))
    far = [one for one in given if isinstance(one, Far)]
    asked = kwargs.get("device")
    goes = torch.device(asked) if asked is not None else None
    log = LOG[-1] if LOG else Log()
    is_copy = func in COPIES
    if far and goes is not None and goes.type == "cpu":
        log.copies[_where()] += 1
    elif func in READS:
        if far:
            log.reads[_where()] += 1
    elif func is aten.copy_.default and far and not isinstance(args[0], Far):
        log.copies[_where()] += 1
    elif far and not is_copy:
        # PyTorch lets a number, and an index, be on the host.
        others = _tensors(args[0]) if func in INDEXED else given
        if any(not isinstance(one, Far) and one.dim() for one in others):
            log.mixed[f"{_where()} ({func})"] += 1
    if goes is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    near_args, near_kwargs = (tree_map_only(Far, lambda one: one.near, v) for v in (args, kwargs))
    result = func(*near_args, **near_kwargs)
    if func in READS:
        return result
    is_far = goes.type == ELSEWHERE.type if goes is not None else bool(far)
    if func is aten.copy_.default:
        is_far = isinstance(args[0], Far)
    if not is_far:
        return result
    if is_copy and goes is not None and any(result is one for one in _tensors(near_args)):
        result = result.clone()
    wrapped = tree_map_only(Tensor, Far, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Makes(TorchDispatchMode):
    """Makes tensors elsewhere where the device is asked for and no operand is there yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have `torch.tensor` make its numbers here and move them: for ``meta`` it would drop them."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        result = make(*args, **kwargs)
        return result if device is None else result.to(device)

    return made


@contextmanager
def watched() -> Iterator[Log]:
    """Let tensors be made elsewhere, and record what is done with them."""
    log = Log()
    LOG.append(log)
    try:
        with (
            # A mode would not reach the thread that goes backward.
            patch.object(torch, "tensor", _moved(torch.tensor)),
            patch.object(torch, "as_tensor", _moved(torch.as_tensor)),
            _Makes(),
        ):
            yield log
    finally:
        LOG.pop()
