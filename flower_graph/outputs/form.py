"""How a torch module is saved: which class builds it again, with what, and its state."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_graph import models
from flower_graph.outputs.files import SavedModels

# The engine's own GCN is saved as one of PyG's layers.
GCN = "flower_graph.outputs.modules.GCN"
GCN_NAMES = {
    "first.weight": "conv1.lin.weight",
    "first.bias": "conv1.bias",
    "second.weight": "conv2.lin.weight",
    "second.bias": "conv2.bias",
}


class Form(NamedTuple):
    """One module, as it is saved."""

    module: str  # dotted name of its class
    arguments: dict[str, Any]  # what the class is called with
    state: dict[str, Tensor]


def form_of(module: nn.Module, make: Callable[[], nn.Module]) -> Form:
    """Say how a module is saved that ``make`` made.

    What it is made with is known if ``make`` is a ``partial`` of its class whose arguments JSON can
    say; otherwise its class is taken to need none.
    """
    kind, state = type(module), module.state_dict()
    if isinstance(module, models.GCN):
        widths = module.first.in_features, module.first.out_features, module.second.out_features
        names = ("features", "hidden", "classes")
        arguments = dict(zip(names, widths, strict=True)) | {"dropout": module.dropout}
        return Form(GCN, arguments, {GCN_NAMES[name]: value for name, value in state.items()})
    arguments = {}
    if isinstance(make, partial) and make.func is kind:
        bound = inspect.signature(kind).bind(*make.args, **make.keywords)
        arguments = _plain(dict(bound.arguments), inspect.signature(kind)) or {}
    return Form(f"{kind.__module__}.{kind.__qualname__}", arguments, state)


def join_forms(clients: Sequence[int], forms: Sequence[Form]) -> list[SavedModels]:
    """Put modules of one class together: entries that are the same at all clients once."""
    name, arguments, first = forms[0]
    shared, own = dict[str, Tensor](), dict[str, Tensor]()
    for key, value in first.items():
        if all(torch.equal(value, form.state[key]) for form in forms[1:]):
            shared[key] = value
        else:
            own[key] = torch.stack([form.state[key] for form in forms])
    return [SavedModels(name, arguments, list(clients), shared, own)]


def _plain(bound: dict[str, Any], signature: inspect.Signature) -> dict[str, Any] | None:
    """Give arguments by name as JSON has them; None if it cannot have them."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = dict[str, Any]()
    for name, value in bound.items():
        if signature.parameters[name].kind == variadic[0]:
            return None
        named |= value if signature.parameters[name].kind == variadic[1] else {name: value}
    try:
        found: dict[str, Any] = json.loads(json.dumps(named, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return found
