"""The saved form of a torch module, and predictions from its logits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flower_graph import models
from flower_graph.data.graph import ClientGraph, called
from flower_graph.outputs.files import Predictions, SavedModels, role_of


class Form(NamedTuple):
    """The class and the arguments of a saved model."""

    module: str  # its dotted name
    arguments: dict[str, object]


# The engine's own GCN is saved as one of PyG's layers.
GCN = "flower_graph.outputs.modules.GCN"
GCN_NAMES = {
    "first.weight": "conv1.lin.weight",
    "first.bias": "conv1.bias",
    "second.weight": "conv2.lin.weight",
    "second.bias": "conv2.bias",
}


def predictions_from(
    graphs: Sequence[ClientGraph],
    logits: Tensor,
    classes: Sequence[str] | None,
    nodes: object = None,
) -> Predictions:
    """Make the clients' predictions for all their nodes, concatenated.

    ``nodes``: the nodes' names, if they differ from the graphs'.
    """
    return Predictions.of(
        logits,
        np.repeat([graph.client for graph in graphs], [graph.y.numel() for graph in graphs]),
        called(graphs) if nodes is None else nodes,
        np.concatenate([role_of(g.train_mask, g.val_mask, g.test_mask) for g in graphs]),
        torch.cat([graph.y for graph in graphs]).cpu(),
        classes,
    )


def values_from(graph: ClientGraph, values: Tensor) -> Predictions:
    """Make one client's predictions of numbers ``[n]``, in their own unit."""
    assert graph.targets is not None
    role = role_of(graph.train_mask, graph.val_mask, graph.test_mask)
    return Predictions.of_values(values, graph.client, called([graph]), role, graph.targets)


def form_of(module: nn.Module, make: Callable[[], nn.Module], client: int) -> SavedModels:
    """Return the saved form of a client's module that ``make`` made, with nothing shared.

    Its arguments are known if ``make`` is a ``partial`` of its class, with arguments that JSON can
    hold; otherwise the class must need none.
    """
    kind = type(module)
    own = {name: value[None] for name, value in module.state_dict().items()}
    if isinstance(module, models.GCN):
        widths = module.first.in_features, module.first.out_features, module.second.out_features
        sizes: dict[str, object] = dict(zip(("features", "hidden", "classes"), widths, strict=True))
        own = {GCN_NAMES[name]: value for name, value in own.items()}
        return SavedModels(GCN, sizes | {"dropout": module.dropout}, [client], {}, own)
    if isinstance(module, models.PairModel) and isinstance(module.rows, models.GCN):
        rows = form_of(module.rows, make, client)
        decoder = {f"decoder.{n}": one[None] for n, one in module.decoder.state_dict().items()}
        return SavedModels(f"{GCN}Pairs", rows.arguments, [client], {}, rows.own | decoder)
    saved_as: Callable[[], Form] | None = getattr(module, "saved_as", None)
    if saved_as is not None:  # another class with the same names of tensors
        return SavedModels(*saved_as(), [client], {}, own)
    arguments = dict[str, object]()
    if isinstance(make, partial) and make.func is kind:
        names = [
            one.name for one in inspect.signature(kind).parameters.values()
            if one.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]  # fmt: skip
        with suppress(TypeError, ValueError):  # what JSON cannot say, or has no name
            named = {**dict(zip(names[: len(make.args)], make.args, strict=True)), **make.keywords}
            arguments = json.loads(json.dumps(named, allow_nan=False))
    return SavedModels(f"{kind.__module__}.{kind.__qualname__}", arguments, [client], {}, own)
