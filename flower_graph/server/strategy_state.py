"""The state of a Flower strategy in a checkpoint.

Flower's strategies have no checkpoint method and keep lasting state, such as FedAdam's moments, in
attributes. Every attribute that changed since the run began is saved if it consists of numbers and
arrays, and refused otherwise: without it, a resumed run would differ.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import CheckpointError

SCALARS = (bool, int, float, str, type(None))
PLAIN = (*SCALARS, np.ndarray, np.generic, list, dict, ArrayRecord)
RECORD = "array-record"  # the key of a dict that stands for an array
# Attributes that a checkpoint saves elsewhere, or that last only a run or a round
OWN = {"arrays", "own_arrays", "session", "central_noise", "robust"}
OWN |= {"_round", "_kept", "_config", "_evaluate_config", "best", "_outputs", "counts"}


class StrategyState:
    """The attributes of a strategy that change during a run."""

    def __init__(self, strategy: object, others: Collection[str] = OWN) -> None:
        self._strategy, self._others = strategy, set(others)
        self._start = {name: _copied(value) for name, value in self._attributes().items()}

    def state_dict(self) -> dict[str, object]:
        return {
            name: packed(value, f"{type(self._strategy).__name__}.{name}")
            for name, value in self._attributes().items()
            if name not in self._start or not _same(value, self._start[name])
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the output of ``state_dict``; reset all other attributes."""
        for name, value in self._start.items():
            setattr(self._strategy, name, _copied(value))
        for name, value in state.items():
            setattr(self._strategy, name, unpacked(value))

    def _attributes(self) -> dict[str, object]:
        local = vars(self._strategy)
        return {name: value for name, value in local.items() if name not in self._others}


def _copied(value: object) -> object:
    return copy.deepcopy(value) if type(value) in PLAIN else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or type(one) not in PLAIN:
        return False
    if isinstance(one, ArrayRecord):
        return _same(values_of(one), values_of(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    return bool(one == other) or (one != one and other != other)


def packed(value: object, name: str) -> object:
    """Turn arrays into tensors, which ``torch.load`` reads without running code."""
    if isinstance(value, ArrayRecord):
        return {RECORD: packed(values_of(value), name)}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: packed(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list):
        return [packed(entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiub":
        return torch.from_numpy(np.array(value))
    if isinstance(value, SCALARS):
        return value
    raise CheckpointError(
        f"{name} has changed since the run began and is a {type(value).__name__}: a checkpoint "
        "takes numbers, strings, arrays, and lists and dicts of them; set checkpoint_every=0"
    )


# Any: as nested as what was packed
def unpacked(value: object) -> Any:
    """Undo ``packed``."""
    if isinstance(value, dict) and list(value) == [RECORD]:
        result = unpacked(value[RECORD])
        return ArrayRecord({name: Array(values) for name, values in result.items()})
    if isinstance(value, dict):
        return {key: unpacked(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [unpacked(entry) for entry in value]
    return value.numpy().copy() if isinstance(value, Tensor) else value


# Models -----------------------------------------------------------------------------------------


def packed_models(shared: ArrayRecord, own: Mapping[int, ArrayRecord]) -> dict[str, object]:
    """Return the common model and the clients' own models for a checkpoint."""
    models = {
        "arrays": values_of(shared),
        "own-arrays": {client: values_of(model) for client, model in own.items()},
    }
    return {name: packed(value, name) for name, value in models.items()}


def unpacked_models(
    state: Mapping[str, object], model: ArrayRecord
) -> tuple[ArrayRecord, dict[int, ArrayRecord]]:
    """Read the output of ``packed_models``; ``ValueError`` if it does not fit this model."""
    own = unpacked(state["own-arrays"])
    shared = arrays_like(model, unpacked(state["arrays"]))
    return shared, {client: arrays_like(model, values) for client, values in own.items()}


def arrays_like(model: ArrayRecord, saved: Mapping[str, NDArray[np.generic]]) -> ArrayRecord:
    """Make a model from saved arrays; ``ValueError`` if they do not fit."""
    # Averaging may have changed their type: FedAdam's is wider than the first model's.
    forms = {name: tuple(array.shape) for name, array in model.items()}
    shapes = {name: values.shape for name, values in saved.items()}
    if list(forms.items()) != list(shapes.items()):
        raise ValueError(f"its arrays are {shapes}, this run's are {forms}")
    return ArrayRecord({name: Array(values) for name, values in saved.items()})


def values_of(record: ArrayRecord) -> dict[str, object]:
    """Return the arrays of a record by their names."""
    return {name: array.numpy() for name, array in record.items()}
