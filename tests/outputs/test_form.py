"""How a module of anybody's is saved, and builds again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flower_graph import models
from flower_graph.config.foreign import OWN
from flower_graph.data.graph import to_undirected
from flower_graph.errors import OutputError
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import SavedModels
from flower_graph.outputs.form import GCN_NAMES, Form, form_of
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


class Inner(nn.Module):
    """What is left of a module that trains with more than it needs later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)


class Telling(Inner):
    """The same, which says how it is made."""

    def saved_as(self) -> Form:
        return Form(f"{__name__}.Telling", {"width": self.linear.in_features})


def test_an_exported_module_with_arguments_loads_or_says_how() -> None:
    def make() -> nn.Module:
        return nn.Sequential()  # whose parts are exported

    assert isinstance(build_module(replace(form_of(Telling(3), make, 0), trust=OWN)), Telling)
    with pytest.raises(OutputError, match=r"width.*saved_as"):
        build_module(replace(form_of(Inner(3), make, 0), trust=OWN))


def test_what_is_alike_is_kept_once() -> None:
    make = partial(Own, 3)
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    torch.nn.init.ones_(other.linear.bias)
    (saved,) = SavedModels.join([form_of(one, make, 7), form_of(other, make, 9)])
    assert saved.shared.keys() == {"linear.weight"} and saved.own.keys() == {"linear.bias"}
    assert torch.equal(saved.state_dict(9)["linear.bias"], torch.ones(2))
    assert saved.clients == [7, 9]


def test_a_gcn_is_the_engines() -> None:
    torch.manual_seed(0)
    x, edges = torch.rand(9, 5), to_undirected(torch.randint(0, 8, (2, 12)), 9)  # 8 is isolated
    engine, plain = models.GCN(5, 4, 3).eval(), GCN(5, 4, 3).eval()
    torch.nn.init.normal_(engine.first.bias)
    state = engine.state_dict()
    plain.load_state_dict({GCN_NAMES[name]: value for name, value in state.items()})
    torch.testing.assert_close(plain(x, edges), engine(x, edges), atol=1e-6, rtol=1e-5)
