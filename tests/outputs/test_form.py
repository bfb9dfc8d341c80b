"""How a module of anybody's is saved, and builds again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flower_graph.outputs.files import SavedModels
from flower_graph.outputs.form import form_of
from flower_graph.outputs.modules import GCN


class Own(nn.Module):
    """A module as somebody writes one."""

    def __init__(self, width: int, *, sizes: tuple[int, ...] = (), **more: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (partial(Own, 3), {"width": 3}),
        (partial(Own, width=3, sizes=(1, 2), name="x"), {"width": 3, "sizes": [1, 2], "name": "x"}),
        (partial(Own, 3, act=torch.relu), {}),  # which JSON cannot say
        (lambda: Own(3), {}),
        (partial(Own, 3, rate=float("nan")), {}),
    ],
)
def test_arguments_are_those_of_a_partial(
    make: Callable[[], nn.Module], arguments: dict[str, Any]
) -> None:
    form = form_of(make(), make, 0)
    assert form.module == f"{__name__}.Own" and form.arguments == arguments
    assert form.state_dict(0).keys() == {"linear.weight", "linear.bias"}


def test_a_gcn_of_pygs_layers_is_itself() -> None:
    make = partial(GCN, 3, 4, 2, dropout=0.1)
    form = form_of(make(), make, 0)
    assert form.module == "flower_graph.outputs.modules.GCN"
    assert form.arguments == {"features": 3, "hidden": 4, "classes": 2, "dropout": 0.1}


def test_what_is_alike_is_kept_once() -> None:
    make = partial(Own, 3)
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    torch.nn.init.ones_(other.linear.bias)
    (saved,) = SavedModels.join([form_of(one, make, 7), form_of(other, make, 9)])
    assert saved.shared.keys() == {"linear.weight"} and saved.own.keys() == {"linear.bias"}
    assert torch.equal(saved.state_dict(9)["linear.bias"], torch.ones(2))
    assert saved.clients == [7, 9]
