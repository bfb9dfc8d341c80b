"""FedGLS's messages: models both ways, and what clients measure.

Models travel under Flower's own keys, so that any Flower strategy that averages can carry them: one
array record, and ``num-examples`` as the weight. Measurements are sums over the clients of a
SuperNode divided by ``num-examples``; Flower's weighted mean of them is then the sum over all
clients, divided by a number that is the same for all: the quotient of two is a mean over clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.graph_batch import ROLES
from flower_graph.judgement import Judgement
from flower_graph.records.keys import ARRAY_NAMES, CLIENTS, LEFT_OUT
from flower_graph.stacked_weights import ModelWeights

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
    """Models as they travel.

    Attributes
    ----------
    models : list of ModelWeights
        Theta and, where there is one, omega.
    shares : list of float, optional
        Which part of the nodes each model was trained on; None where every client has all models.
    """

    models: list[ModelWeights]
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
        """Read them back, in the order of ``to_arrays``.

        Raises
        ------
        ValueError
            If there are more or fewer arrays than the models have.
        """
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
    """FedProto's prototypes as they travel.

    Attributes
    ----------
    vectors : Tensor
        ``[k, h]`` up: sums over nodes divided by ``num-examples``; down: means.
    share : Tensor
        ``[k]`` up: nodes of the class divided by ``num-examples``; down: 0 for a class without.
    """

    vectors: Tensor
    share: Tensor

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
    """Write what ``fit`` says besides arrays and weight.

    Parameters
    ----------
    losses : mapping
        A loss of each client that has it, by name.
    weight : int
        What the reply calls ``num-examples``.
    clients : int
        Clients that the reply speaks for.
    names : sequence of str
        Keys of the arrays, in order.
    left_out : sequence of str
        Clients whose part is not in the arrays, and why.

    Returns
    -------
    dict
        For ``NumPyClient.fit``.
    """
    metrics: dict[str, Any] = {ARRAY_NAMES: list(names), CLIENTS: clients}
    for name in (CONTRAST, DISTILLATION):
        metrics |= _sums(name, losses.get(name, torch.zeros(0)), weight)
    return metrics | ({LEFT_OUT: list(left_out)} if left_out else {})


def measurements(judged: Judgement, structure: Mapping[str, Tensor] | None) -> dict[str, float]:
    """Write what ``evaluate`` measured; the weight is the number of clients.

    Parameters
    ----------
    judged : Judgement
        Accuracies and losses of ``c`` clients.
    structure : mapping, optional
        ``[g]`` of each figure of the graphs, as ``StructureCohort.structure`` gives them.

    Returns
    -------
    dict
        For ``NumPyClient.evaluate``.
    """
    clients = judged.accuracy.shape[0]
    metrics = _sums(LOSS, judged.loss, clients)
    for role, values in zip(ROLES, judged.accuracy.T, strict=True):
        metrics |= _sums(role, values, clients)
    for name in STRUCTURE_NAMES:
        metrics |= _sums(name, (structure or {}).get(name, torch.zeros(0)), clients)
    return metrics


def mean_of(metrics: Mapping[str, Any], name: str) -> float:
    """Return the mean over clients from Flower's mean of the sums; NaN where no client has any."""
    share = metrics.get(f"has-{name}", 0.0)
    return metrics[name] / share if isinstance(share, float) and share > 0 else math.nan


def _sums(name: str, values: Tensor, weight: int) -> dict[str, float]:
    """Add up what is not NaN, and count it, both divided by the weight."""
    known = ~values.isnan()
    total = float(values[known].double().sum())
    return {name: total / weight, f"has-{name}": float(known.sum()) / weight}
