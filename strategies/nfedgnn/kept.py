"""Outputs of nFedGNN: the server's predictions and half, and the users' halves.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.models import PairModel, SplitGAT, SplitGCN, SplitSAGE
from flower_graph.ops.active_rows import ActiveRows
from flower_graph.outputs.files import (
    NO_CLIENT,
    Embeddings,
    KnownLinks,
    Predictions,
    SavedModels,
    Snapshot,
    SparseRows,
    role_of,
)
from flower_graph.strategies.nfedgnn.server_model import LinkRelayServer, RelayServer
from flower_graph.strategies.nfedgnn.users import Tensors, UserSettings, shared_linear_weight
from flower_graph.wire.keys import ROLES

if TYPE_CHECKING:
    from flower_graph.records.rounds import BestRound

LOG = logging.getLogger(__name__)
MODULES = "flower_graph.strategies.nfedgnn.modules"
# Of each split model: the module's name, and what its parameters are called there
NAMES: dict[type[nn.Module], tuple[str, dict[str, str]]] = {
    SplitGCN: (
        "ServerGCN",
        {"bias": "conv1.bias", "linear.weight": "conv2.lin.weight", "linear.bias": "conv2.bias"},
    ),
    SplitGAT: (
        "ServerGAT",
        {
            "source_1": "conv1.att_src",
            "target_1": "conv1.att_dst",
            "bias_1": "conv1.bias",
            "linear.weight": "conv2.lin.weight",
            "source_2": "conv2.att_src",
            "target_2": "conv2.att_dst",
            "bias_2": "conv2.bias",
        },
    ),
    SplitSAGE: (
        "ServerSAGE",
        {
            "bias": "conv1.lin_l.bias",
            "own.weight": "conv2.lin_r.weight",
            "own.bias": "conv2.lin_l.bias",
            "neighbours.weight": "conv2.lin_l.weight",
        },
    ),
}


def server_snapshot(server: RelayServer) -> Snapshot:
    """Return the server's half of a run, of users that have answered."""
    users = server.known.nonzero().flatten().cpu()
    every = np.arange(server.num_nodes) if server.names is None else np.array(list(server.names))
    nodes, client = every[users.numpy()], np.full(len(users), NO_CLIENT)
    models, is_public = server_models(server.eval_model), np.zeros(len(users), bool)

    def beside(rows: Tensor) -> Embeddings:
        return Embeddings(client, nodes, users.numpy(), is_public, rows.cpu()[users].numpy())

    if isinstance(server, LinkRelayServer):
        edges = server.whole[:, server.known[server.whole].all(0)].cpu().numpy()
        known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *every[edges])
        return Snapshot(None, models, beside(server.rows(server.whole)), known)
    masks = (server.masks[name].cpu()[users] for name in ROLES)
    logits, label = server.logits().cpu()[users], server.y.cpu()[users]
    role = role_of(*masks)
    predictions = Predictions.of(logits, NO_CLIENT, nodes, role, label, server.classes)
    return Snapshot(predictions, models, beside(server.latent))


def user_lines(
    server: RelayServer, traffic: NDArray[np.int64], best: BestRound, right_then: Tensor | None
) -> Iterator[list[str]]:
    """Give a line for each user that has answered, for the last and the best round.

    ``right_then``: whose class was right in the best round, ``[n]``.
    """
    role = np.full(server.num_nodes, -1)
    for index, name in enumerate(ROLES):
        role[server.masks[name].cpu().numpy()] = index
    rounds = {"last": (best.last, server.right), "best": (best.number, right_then)}
    texts = {
        at: (str(number), right.cpu().tolist())
        for at, (number, right) in rounds.items()
        if right is not None
    }
    for user in server.known.nonzero().flatten().tolist():
        counts = [str(count) for count in traffic[user].tolist()]
        for at, (number, right) in texts.items():
            accuracy = ["", "", ""]
            if role[user] >= 0:
                accuracy[role[user]] = "1.0" if right[user] else "0.0"
            yield [str(user), at, number, "1", "", *accuracy, *counts]


def server_models(model: nn.Module) -> list[SavedModels]:
    """Return the server's half as a module of PyG's layers; nothing for other models."""
    if isinstance(model, PairModel):
        decoder = {f"decoder.{n}": one.cpu() for n, one in model.decoder.state_dict().items()}
        return [
            replace(one, module=f"{one.module}Pairs", shared=one.shared | decoder)
            for one in server_models(model.rows)
        ]
    if type(model) not in NAMES:
        LOG.warning("%s: saved by its own name alone, in weights.safetensors", type(model).__name__)
        return []
    name, names = NAMES[type(model)]
    state = {names[key]: value.detach().cpu() for key, value in model.state_dict().items()}
    for key in state:
        if ".att_" in key:
            state[key] = state[key][None]
    return [SavedModels(f"{MODULES}.{name}", _arguments(model), [NO_CLIENT], state, {})]


def _arguments(model: nn.Module) -> dict[str, int | float]:
    last = model.own if isinstance(model, SplitSAGE) else model.linear
    assert isinstance(last, nn.Linear) and isinstance(model.dropout, float)
    arguments = {"classes": last.out_features, "dropout": model.dropout}
    if isinstance(model, SplitGAT):
        return {"hidden": last.in_features // model.heads, "heads": model.heads, **arguments}
    return {"hidden": last.in_features, **arguments}


def user_models(
    users: Sequence[int], rows: ActiveRows, tensors: Tensors, settings: UserSettings
) -> SavedModels:
    """Return the users' linear maps; rows of features that a user lacks are the first weights."""
    features, bias = rows.num_features - int(settings.bias), settings.bias
    rest = tensors.get("inactive-weight")
    begun = (shared_linear_weight(features, settings) if rest is None else rest).cpu()[:features]
    weight, feature, ptr = (t.cpu() for t in (tensors["weight"], rows.feature, rows.ptr.long()))
    own: dict[str, Tensor] = {}
    if bias:  # the last row of each
        last = ptr[1:] - 1
        own["linear.bias"] = weight[last]
        chosen = torch.ones(feature.numel(), dtype=torch.bool)
        chosen[last] = False
        weight, feature = weight[chosen], feature[chosen]
        ptr = ptr - torch.arange(ptr.numel())
    kept = SparseRows("linear.weight", weight, feature, ptr, transposed=True)
    arguments = {"features": features, "latent_size": settings.latent_size, "bias": bias}
    shared = {"linear.weight": begun.T}
    return SavedModels(f"{MODULES}.UserModel", arguments, list(users), shared, own, kept)


def common_model(users: Sequence[int], weight: Tensor, bias: bool) -> SavedModels:
    """Return the linear map that all users share."""
    # weight [f, h], with a bias its last row
    weight = weight.detach().cpu()
    features = weight.shape[0] - int(bias)
    shared = {"linear.weight": weight[:features].T.contiguous()}
    if bias:
        shared["linear.bias"] = weight[features].clone()
    arguments = {"features": features, "latent_size": weight.shape[1], "bias": bias}
    return SavedModels(f"{MODULES}.UserModel", arguments, list(users), shared, {})
