"""Every engine's step on a device that is not the CPU gives the same numbers.

Whether a GPU's kernel gives these numbers, runs with `device=cuda` and `device=cpu` show. Here the
device is not there: its tensors say that they are on PyTorch's device ``meta``, and have their
numbers in a tensor on the CPU. So a whole training step runs, with masks and sizes that depend on
numbers. It refuses an operand that is on the CPU, as a GPU does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ego_helpers import SETTINGS as EGO
from ego_helpers import toy_egos, toy_shared
from graph_helpers import CLASSES, small_graph
from test_ppfl_models import ROWS, Client, make_client, make_targets
from test_ppfl_models import SETTINGS as GAT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import pack
from flower_graph.strategies.fedscem.algorithm import EgoCohort, EgoGroup, Shared
from flower_graph.strategies.nfedgnn.algorithm import CommonMap, OwnMaps, UserSettings
from flower_graph.strategies.nfedgnn.strategy import config_of, server_of
from flower_graph.strategies.ppfl.modules import GATCohort

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
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; the result is elsewhere if an operand is, or if it is asked for."""
    given = _tensors((args, kwargs))
    is_far, asked = any(isinstance(one, Far) for one in given), kwargs.get("device")
    if is_far and func not in COPIES | READS and asked is None:
        # PyTorch lets a number, and an index, be on the host.
        others = _tensors(args[0]) if func in INDEXED else given
        assert all(isinstance(one, Far) or not one.dim() for one in others), f"{func}: two devices"
    if asked is not None:
        is_far = torch.device(asked).type == ELSEWHERE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    near_args, near_kwargs = (tree_map_only(Far, lambda one: one.near, v) for v in (args, kwargs))
    result = func(*near_args, **near_kwargs)
    if func is aten.copy_.default:
        is_far = isinstance(args[0], Far)
    if func in READS or not is_far:
        return result
    if func in COPIES and asked is not None and any(result is one for one in _tensors(near_args)):
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
def elsewhere() -> Iterator[None]:
    """Let tensors be made elsewhere."""
    with (
        # A mode would not reach the thread that goes backward.
        patch.object(torch, "tensor", _moved(torch.tensor)),
        patch.object(torch, "as_tensor", _moved(torch.as_tensor)),
        _Makes(),
    ):
        yield


# Engines -----------------------------------------------------------------------------------------

USERS = UserSettings(4, True, 5e-4, 0, "holders")
DATA = small_graph(12)
Place = torch.device
Step = Callable[[], None]
Reply = Callable[[], list[Tensor]]


def linear(device: Place) -> tuple[Step, Reply]:
    maps = OwnMaps(pack(DATA.x, bias=True).to(device), USERS)
    some = torch.tensor([1, 4, 7])

    def step() -> None:
        maps.step(None, torch.ones(12, 4, device=device), 0.01)
        maps.step(some, torch.ones(3, 4, device=device), 0.01)

    return step, lambda: [maps.forward(None), maps.forward(some)]


def relay_server(device: Place) -> tuple[Step, Reply]:
    config = config_of(reg_weight=1.0, seed=3)
    config.device = str(device)  # which no user may choose
    model = build_server_model("gcn", hidden=4, heads=1, classes=CLASSES, dropout=0.0, seed=3)
    server = server_of(DATA, model, config, 4)
    latent = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).numpy()
    found: list[Tensor] = []

    def step() -> None:
        server.receive(np.arange(12), latent)
        found[:] = [server.gradients(1, server.latent, server.known)[1]]
        server.step(1, 0.01)

    return step, lambda: found


def egos(device: Place) -> tuple[Step, Reply]:
    cohort = EgoCohort(toy_egos(), EGO, device=device)
    group = EgoGroup(cohort.group(cohort.clients), EGO)
    shared = Shared(*(part.to(device) for part in toy_shared(toy_egos())))

    def step() -> None:
        group.train(1)
        group.fuse(shared, 1)

    return step, lambda: [group.embed(), group.logits()]


def common_layer(device: Place) -> tuple[Step, Reply]:
    settings = UserSettings(4, True, 5e-4, 0, dropout=0.5)
    users = torch.arange(12, device=device)
    common = CommonMap(pack(DATA.x, bias=True).to(device), settings, users)
    total: list[Tensor] = []

    def step() -> None:
        total[:] = [common.gradient(users, torch.ones(12, 4, device=device), 1)]

    return step, lambda: [*total, common.forward(users, 1)]


def attention(device: Place) -> tuple[Step, Reply]:
    still = dataclasses.replace(GAT, gat=dataclasses.replace(GAT.gat, dropout=0.0))
    model = GATCohort([placed(make_client(), device)], still, 3)
    return (
        lambda: (model.learn(ROWS, make_targets(), 1), None)[1],
        lambda: [torch.from_numpy(model.embed())],
    )


def placed(graph: Client, device: Place) -> Client:
    parts = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    moved = {n: t.to(device) for n, t in parts.items() if isinstance(t, Tensor)}
    return dataclasses.replace(graph, **moved)


ENGINES = {f.__name__: f for f in (linear, relay_server, egos, common_layer, attention)}


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_elsewhere_gives_the_same(name: str) -> None:
    step, reply = ENGINES[name](torch.device("cpu"))
    step()
    here = reply()
    with elsewhere():
        step, reply = ENGINES[name](ELSEWHERE)
        step()
        there = reply()
    for one, other in zip(here, there, strict=True):
        near = other.near if isinstance(other, Far) else other
        assert torch.equal(one.nan_to_num(7.5), near.nan_to_num(7.5))
