"""Rows that a run leaves for nodes of clients: predictions, embeddings and known links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.wire.keys import ROLES

NO_CLIENT = -1  # client number of the server's own rows
NODE_ROLES = ("none", *ROLES)  # a node may have no role
SHORT = ("loss", "val-accuracy", "test-accuracy")  # keys of a round that are shown
SHOWN = 10  # rows and columns of a table in a notebook
Numbers = NDArray[Any]


class Framed:
    """Base of what notebooks show as a data frame."""

    def to_pandas(self) -> Any:  # a data frame
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(max_rows=SHOWN, max_cols=SHOWN))


class Rounds(Framed, list[dict[str, object]]):
    """The lines of ``metrics.jsonl``: a mapping for each round."""

    def __repr__(self) -> str:
        last = self[-1] if self else {}
        figures = (f"{key} {last[key]:.4g}" for key in SHORT if isinstance(last.get(key), float))
        return f"<{len(self)} rounds; the last: {', '.join(figures)}; .to_pandas() has all>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each round, nested keys joined by dots."""
        import pandas as pd

        return pd.json_normalize(list(self))


@dataclass(repr=False)
class Rows:
    """Base of arrays with a row for each node, or edge, of each client."""

    client: Numbers
    node: Numbers

    def arrays(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if isinstance(one, np.ndarray)}

    def rows(self, chosen: Numbers) -> Self:
        """Return some rows, by a mask or by indices."""
        return replace(self, **{name: values[chosen] for name, values in self.arrays().items()})

    def of_client(self, client: int) -> Self:
        return self.rows(self.client == client)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rows; an array that a part lacks is left out."""
        # If some clients have names, NumPy makes names of numbers too.
        given = [part.arrays() for part in parts]
        joined: dict[str, Any] = {
            name: np.concatenate([one[name] for one in given]) if all(name in one for one in given)
            else None
            for name in given[0]
        }  # fmt: skip
        return replace(parts[0], **joined)


@dataclass(repr=False)
class Predictions(Rows, Framed):
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

    def __repr__(self) -> str:
        count = f"{len(self.node)} nodes, {len(np.unique(self.client))} clients"
        return f"<predictions: {count}; .to_pandas() has all>"

    def to_pandas(self) -> Any:
        """Return a data frame of the rows, with names of roles and classes."""
        import pandas as pd

        arrays = self.arrays() | {"role": np.asarray(NODE_ROLES)[self.role]}
        if self.classes:
            names = np.asarray([*self.classes, None], object)  # -1 takes the last
            arrays |= {name: names[arrays[name]] for name in ("predicted", "label")}
        return pd.DataFrame(arrays)


@dataclass(repr=False)
class Embeddings(Rows):
    """Embeddings, in each client's own space: one row for each node of each client.

    Attributes
    ----------
    client, node : ndarray
        ``[r]`` as in ``Predictions``.
    number : ndarray
        ``[r]`` int64, the node's id, common to all clients.
    public : ndarray
        ``[r]`` bool, whether other clients may have the node too.
    embeddings : ndarray
        ``[r, d]`` float32.
    """

    number: Numbers
    public: Numbers
    embeddings: Numbers


@dataclass(repr=False)
class KnownLinks(Rows):
    """Edges, in both directions, by the nodes' names.

    Attributes
    ----------
    client : ndarray
        ``[e]`` int64, the client in whose graph the edge is; -1 for a server.
    node, other : ndarray
        ``[e]`` the two nodes' names as the user's data have them (str), else numbers (int64).
    """

    other: Numbers


def role_of(train: Tensor, val: Tensor, test: Tensor) -> Numbers:
    """Return the indices in ``NODE_ROLES`` of nodes ``[n]``, from their masks."""
    result = np.zeros(len(train), np.int8)
    for number, mask in enumerate((train, val, test), start=1):
        result[mask.cpu().numpy()] = number
    return result


def _names(nodes: object) -> Numbers:
    values = nodes.cpu().numpy() if isinstance(nodes, torch.Tensor) else np.asarray(nodes)
    return values.astype(np.int64) if values.dtype.kind in "iu" else values.astype(np.str_)


# NumPy kinds of the columns that a run's arrays may have; other arrays have a row per class
COLUMNS = {
    **dict.fromkeys(("client", "role", "fold", "number"), "iu"),
    **dict.fromkeys(("predicted", "label"), "iuf"),
    **dict.fromkeys(("node", "other"), "iuU"),
    **dict.fromkeys(("probability", "embeddings"), "f"),
    **{"public": "b", "classes": "U"},
}


# Any: arrays of whatever types a file has, which are checked here
def check_columns(arrays: Mapping[str, Any]) -> None:
    """Refuse arrays that are not columns with a row for each node: ``ValueError``."""
    most = {"role": len(NODE_ROLES)}
    if "classes" in arrays:
        most |= dict.fromkeys(("predicted", "label"), len(arrays["classes"]))
    kinds = {arrays[name].dtype.kind == "f" for name in ("predicted", "label") if name in arrays}
    if len(kinds) > 1 or (True in kinds and "classes" in arrays):
        raise ValueError("predicted, label and classes are partly of classes, partly of numbers")
    for name, values in arrays.items():
        wide = 2 if name == "embeddings" else 1
        if values.dtype.kind not in COLUMNS.get(name, "") or values.ndim != wide:
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)}")
        if name != "classes" and len(values) != len(arrays["client"]):
            raise ValueError(f"{name} has {len(values)} rows, client {len(arrays['client'])}")
        least = 0 if name == "role" else -1
        is_whole = values.dtype.kind in "iu" and name not in ("node", "other")
        if is_whole and ((values < least) | (values >= most.get(name, np.inf))).any():
            raise ValueError(f"{name} goes from {values.min()} to {values.max()}")
