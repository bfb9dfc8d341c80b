"""FedGLS's messages: models both ways, and what clients measure.

Models travel under Flower's own keys, so that any Flower strategy that averages can carry them: one
array record, and ``num-examples`` as the weight. Measurements are sums over the clients of a
SuperNode divided by ``num-examples``; Flower's weighted mean of them is then the sum over all
clients, divided by a number that is the same for all: the quotient of two is a mean over clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.engine.graph_batch import ROLES
from flower_graph.engine.metrics import Metrics
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.messages.client_means import sums
from flower_graph.messages.keys import ARRAY_NAMES, CLIENTS, LEFT_OUT

Arrays = list[NDArray[Any]]

# The two models, theta and omega, each as its first layer and all the rest
MODEL_KEYS = (("gnn-first", "gnn-rest"), ("encoder-first", "encoder-rest"))
# What divides the array of a name without this end, where not every client has a part in it
SHARE_END = "-share"
SHARE_KEYS = tuple(f"{first.partition('-')[0]}{SHARE_END}" for first, _ in MODEL_KEYS)
PROTOTYPES, PROTOTYPES_SHARE = "prototypes", f"prototypes{SHARE_END}"
STRUCTURE_NAMES = (
    *("precision", "recall", "homophily", "true-homophily", "degree", "true-degree"),
)
CONTRAST, DISTILLATION, LOSS = "contrast", "distillation", "cross-entropy"


class SharedModels(NamedTuple):
    """Models as they travel."""

    models: list[ModelWeights]  # Theta and, where there is one, omega
    # Which part of the nodes each model was trained on; None where every client has all models
    shares: list[float] | None = None

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Give the arrays by their keys."""
        arrays: dict[str, NDArray[np.float32]] = {}
        for number, model in enumerate(self.models):
            first, rest = MODEL_KEYS[number]
            arrays |= {first: model.first.cpu().numpy(), rest: model.rest.cpu().numpy()}
            if self.shares is not None:
                share = np.array([self.shares[number]], np.float32)
                arrays[SHARE_KEYS[number]] = share
        return arrays

    @classmethod
    def from_arrays(cls, parameters: Sequence[NDArray[Any]], num_models: int) -> SharedModels:
        """Read them back, in the order of ``to_arrays``."""
        per_model, rest = divmod(len(parameters), num_models)
        if rest or per_model not in (2, 3):
            raise ValueError(
                f"{len(parameters)} arrays came for {num_models} models: must be 2 each, or 3 "
                "with shares"
            )
        parts = [torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in parameters]
        starts = range(0, len(parts), per_model)
        models = [ModelWeights(parts[at], parts[at + 1]) for at in starts]
        shares = [float(parts[at + 2]) for at in starts] if per_model == 3 else None
        return cls(models, shares)


class SharedPrototypes(NamedTuple):
    """FedProto's prototypes as they travel."""

    vectors: Tensor  # [k, h] up: sums over nodes divided by num-examples; down: means
    share: Tensor  # [k] up: nodes of the class divided by num-examples; down: 0 for a class without

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Give the arrays by their keys."""
        vectors, share = (part.float().cpu().numpy() for part in self)
        return {PROTOTYPES: vectors, PROTOTYPES_SHARE: share}

    @classmethod
    def from_arrays(cls, parameters: Sequence[NDArray[Any]]) -> SharedPrototypes:
        """Read them back, in the order of ``to_arrays``."""
        if len(parameters) != 2:
            raise ValueError(f"{len(parameters)} arrays came: must be prototypes and their shares")
        return cls(*(torch.from_numpy(np.ascontiguousarray(p, np.float32)) for p in parameters))


def training_metrics(
    losses: Mapping[str, Tensor],
    weight: int,
    clients: int,
    names: Sequence[str],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """Write what ``fit`` says besides arrays and weight."""
    metrics: dict[str, Any] = {ARRAY_NAMES: list(names), CLIENTS: clients}
    for name in (CONTRAST, DISTILLATION):
        metrics |= sums(name, losses.get(name, torch.zeros(0)), weight)
    return metrics | ({LEFT_OUT: list(left_out)} if left_out else {})


def measurements(judged: Metrics, structure: Mapping[str, Tensor] | None) -> dict[str, float]:
    """Write what ``evaluate`` measured; the weight is the number of clients."""
    # structure [g]
    clients = judged.accuracy.shape[0]
    metrics = sums(LOSS, judged.loss, clients)
    for role, values in zip(ROLES, judged.accuracy.T, strict=True):
        metrics |= sums(role, values, clients)
    for name in STRUCTURE_NAMES:
        metrics |= sums(name, (structure or {}).get(name, torch.zeros(0)), clients)
    return metrics
