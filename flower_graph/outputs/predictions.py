"""Predictions of nodes: classes or numbers, a row for each node of each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.outputs.frames import NODE_ROLES, Framed

NO_CLIENT = -1  # client number of the server's own predictions
Numbers = NDArray[Any]


@dataclass(repr=False)
class Predictions(Framed):
    """Predictions: one row for each node of each client.

    Attributes
    ----------
    client : ndarray
        ``[r]`` int64, the client that predicts; -1 for a server.
    node : ndarray
        ``[r]`` the node's name as the user's data have it (str), else its number (int64).
    predicted, probability : ndarray
        ``[r]`` the class of the highest probability (int64), and that probability (float32). For
        a regression: the number (float64), and NaN.
    role : ndarray
        ``[r]`` int8, the node's place in ``NODE_ROLES``.
    label : ndarray
        ``[r]`` int64, the true class, -1 if unknown; or float64, the true number, NaN if unknown.
    classes : tuple of str or None
        Names of the classes, by their numbers.
    fold : ndarray or None
        ``[r]`` int64, the fold of the classifier, if several were trained.
    """

    client: Numbers
    node: Numbers
    predicted: Numbers
    probability: Numbers
    role: Numbers
    label: Numbers
    classes: tuple[str, ...] | None = None
    fold: Numbers | None = None

    @classmethod
    def of(
        cls,
        logits: Tensor,
        clients: object,
        nodes: object,
        role: object,
        label: object,
        classes: Sequence[str] | None = None,
        fold: object = None,
    ) -> Predictions:
        """Make predictions from logits ``[n, k]`` and tensors, arrays or lists ``[n]``."""
        logits = logits.detach().cpu()
        label = np.asarray(label, np.int64)
        return cls(
            np.broadcast_to(np.asarray(clients, np.int64), (len(logits),)).copy(),
            _names(nodes),
            logits.argmax(1).numpy(),
            logits.softmax(1).amax(1).float().numpy(),
            np.asarray(role, np.int8),
            np.where(label < 0, -1, label),
            None if classes is None else tuple(classes),
            None if fold is None else np.asarray(fold, np.int64),
        )

    @classmethod
    def of_values(
        cls, values: Tensor, client: int, nodes: object, role: Numbers, targets: Tensor
    ) -> Predictions:
        """Make predictions of one client from numbers ``[n]`` and the true ones, NaN for none."""
        n = len(values)
        return cls(
            np.full(n, client, np.int64),
            _names(nodes),
            values.detach().double().cpu().numpy(),
            np.full(n, np.nan, np.float32),
            np.asarray(role, np.int8),
            targets.detach().double().cpu().numpy(),
        )

    @property
    def are_values(self) -> bool:
        """Whether numbers are predicted, not classes."""
        return self.predicted.dtype.kind == "f"

    @property
    def known(self) -> Numbers:
        """The rows with a known truth, ``[r]`` bool."""
        result: Numbers = ~np.isnan(self.label) if self.are_values else self.label >= 0
        return result

    def of_client(self, client: int) -> Predictions:
        return self.rows(self.client == client)

    def rows(self, chosen: Numbers) -> Predictions:
        """Return some rows, by a mask or by indices."""
        arrays = {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray)}
        local: dict[str, Any] = {name: values[chosen] for name, values in arrays.items()}
        return replace(self, **local)

    def of_role(self, role: str) -> Predictions:
        """Return the rows of one role whose label is known."""
        return self.rows((self.role == NODE_ROLES.index(role)) & self.known)

    def errors(self) -> tuple[float, float]:
        """Return mean squared and mean absolute error of rows whose number is known."""
        apart = (self.predicted - self.label)[self.known] if self.are_values else np.empty(0)
        if not apart.size:
            return float("nan"), float("nan")
        return float(np.square(apart).mean()), float(np.abs(apart).mean())

    def accuracy(self) -> float:
        """Return the accuracy, as runs report it; NaN without rows, and for a regression.

        It is the mean over clients of the mean over each client's folds. Of a server's predictions
        each node counts once.
        """
        fold = np.zeros_like(self.client) if self.fold is None else self.fold
        right, shares = self.predicted == self.label, []
        for client in np.unique(self.client):
            here = self.client == client
            folds = np.unique(fold[here])
            shares.append(np.mean([right[here & (fold == one)].mean() for one in folds]))
        return float(np.mean(shares)) if shares and not self.are_values else float("nan")

    @classmethod
    def join(cls, parts: Sequence[Predictions]) -> Predictions:
        columns = {one.name for one in fields(cls)} - {"classes", "fold"}
        # If some clients have names, numbers become names too.
        local = {name: np.concatenate([_column(one, name, parts) for one in parts])
                 for name in columns}  # fmt: skip
        folds = [one.fold for one in parts if one.fold is not None]
        fold = np.concatenate(folds) if len(folds) == len(parts) else None
        return cls(**local, classes=parts[0].classes, fold=fold)


def _column(one: Predictions, name: str, parts: Sequence[Predictions]) -> Numbers:
    value: Numbers = getattr(one, name)
    named = name == "node" and any(part.node.dtype.kind == "U" for part in parts)
    return value.astype(str) if named else value


def role_of(train: Tensor, val: Tensor, test: Tensor) -> Numbers:
    """Return the indices in ``NODE_ROLES`` of nodes ``[n]``, from their masks."""
    result = np.zeros(len(train), np.int8)
    for number, mask in enumerate((train, val, test), start=1):
        result[mask.cpu().numpy()] = number
    return result


def _names(nodes: object) -> Numbers:
    values = nodes.cpu().numpy() if isinstance(nodes, torch.Tensor) else np.asarray(nodes)
    return values.astype(np.int64) if values.dtype.kind in "iu" else values.astype(np.str_)
