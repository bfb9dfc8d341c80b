"""Predictions and models of a run: as arrays and tensors, and as files that are read back.

A folder has ``predictions.npz``, the same as a table, ``predictions.csv``, and the models of its
clients: for one client ``model.safetensors``, the ``state_dict`` of the module that ``model.json``
names; for several ``models.safetensors`` and ``models.json``, which store shared tensors once.
Other users cannot read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.config.foreign import NOBODY, Trust
from flower_graph.data.graph import ClientGraph, called
from flower_graph.errors import OutputError, brief
from flower_graph.storage.files import private_folder, remove, replaced, saying
from flower_graph.storage.formats import read_arrays, read_tensors, write_tensors
from flower_graph.storage.reading import MOST_RECORD, Tree, read_json, reading
from flower_graph.wire.keys import ROLES

NO_CLIENT = -1  # client number of the server's own rows
NODE_ROLES = ("none", *ROLES)  # a node may have no role
Numbers = NDArray[Any]


class Rounds(list[dict[str, object]]):
    """The lines of ``metrics.jsonl``: a mapping for each round."""

    def __repr__(self) -> str:
        return f"<{len(self)} rounds; .to_pandas() has all>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each round, nested keys joined by dots."""
        import pandas as pd

        return pd.json_normalize(list(self))


@dataclass(repr=False)
class Rows:
    """Base of arrays with a row for each node, or edge, of each client."""

    FILE: ClassVar[str]
    client: Numbers
    node: Numbers

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the rows of a folder; None if there are none."""
        path = Path(folder) / cls.FILE
        if not path.exists():
            return None
        with reading(path, OutputError, f"not {path.stem} of a run"):
            arrays: dict[str, Any] = read_arrays(path)
            check_columns(arrays)
            if "classes" in arrays:
                arrays["classes"] = tuple(arrays["classes"].tolist())
            return cls(**arrays)

    def write(self, folder: Path) -> None:
        classes = vars(self).get("classes")
        arrays = self.arrays()
        if classes is not None:
            arrays["classes"] = np.array(classes, np.str_)
        with replaced(folder / self.FILE) as stream:
            np.savez(stream, **arrays)

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
        joined: dict[str, Any] = dict.fromkeys(given[0])
        for name in set.intersection(*map(set, given)):
            joined[name] = np.concatenate([one[name] for one in given])
        return replace(parts[0], **joined)


@dataclass(repr=False)
class Predictions(Rows):
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

    FILE = "predictions.npz"
    predicted: Numbers
    probability: Numbers
    role: Numbers
    label: Numbers
    classes: tuple[str, ...] | None = None
    fold: Numbers | None = None

    @classmethod
    def of(
        cls,
        outputs: Tensor,
        clients: object,
        nodes: object,
        role: object,
        label: object,
        classes: Sequence[str] | None = None,
        fold: object = None,
    ) -> Predictions:
        """Make predictions from logits ``[n, k]`` or numbers ``[n]``; all else is ``[n]``."""
        outputs, are_values = outputs.detach().cpu(), outputs.dim() == 1
        label = np.asarray(label, np.float64 if are_values else np.int64)
        if are_values:
            predicted, chance = outputs.double(), torch.full(outputs.shape, torch.nan)
        else:
            predicted, chance = outputs.argmax(1), outputs.softmax(1).amax(1).float()
            label = np.maximum(label, -1)
        names = nodes.cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
        return cls(
            np.broadcast_to(np.asarray(clients, np.int64), (len(outputs),)).copy(),
            names.astype(np.int64 if names.dtype.kind in "iu" else np.str_),
            predicted.numpy(),
            chance.numpy(),
            np.asarray(role, np.int8),
            label,
            None if classes is None else tuple(classes),
            None if fold is None else np.asarray(fold, np.int64),
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

    FILE = "embeddings.npz"
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

    FILE = "links.npz"
    other: Numbers


def predictions_from(
    graphs: Sequence[ClientGraph],
    outputs: Tensor,
    classes: Sequence[str] | None = None,
    nodes: object = None,
) -> Predictions:
    """Make the clients' predictions for all their nodes, concatenated; see ``Predictions.of``.

    ``nodes``: the nodes' names, if they differ from the graphs'.
    """
    truths = [graph.y if outputs.dim() > 1 else graph.targets for graph in graphs]
    return Predictions.of(
        outputs,
        np.repeat([graph.client for graph in graphs], [graph.y.numel() for graph in graphs]),
        called(graphs) if nodes is None else nodes,
        np.concatenate([role_of(g.train_mask, g.val_mask, g.test_mask) for g in graphs]),
        torch.cat([truth for truth in truths if truth is not None]).cpu(),
        classes,
    )


def role_of(train: Tensor, val: Tensor, test: Tensor) -> Numbers:
    """Return the indices in ``NODE_ROLES`` of nodes ``[n]``, from their masks."""
    result = np.zeros(len(train), np.int8)
    for number, mask in enumerate((train, val, test), start=1):
        result[mask.cpu().numpy()] = number
    return result


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
    for name, values in arrays.items():
        is_column = values.dtype.kind in COLUMNS.get(name, "")
        is_column &= values.ndim == (2 if name == "embeddings" else 1)
        is_column &= name == "classes" or len(values) == len(arrays["client"])
        is_column &= values.dtype.kind == "i" or name not in most
        if is_column and values.dtype.kind in "iu" and name not in ("node", "other"):
            least = 0 if name == "role" else -1
            is_column = bool(((values >= least) & (values < most.get(name, np.inf))).all())
        if not is_column:
            raise ValueError(f"{name}: {values.dtype} {list(values.shape)} is no such column")
    if "label" in arrays and arrays["label"].dtype.kind != arrays["predicted"].dtype.kind:
        raise ValueError("predicted and label are partly of classes, partly of numbers")


KINDS = ("shared", "own", "rows")  # of the tensors' names if models have several forms


class SparseRows(NamedTuple):
    """The rows of one weight matrix in which clients differ: those of their features."""

    name: str  # of the weight in the ``state_dict``
    values: Tensor  # [R, h] the rows of all clients, concatenated
    feature: Tensor  # [R] int64, the feature of each row
    ptr: Tensor  # [c + 1] int64, where each client's rows begin
    transposed: bool = False  # whether features are columns, [h, f], as a ``Linear`` has them

    def fit(self, matrix: Tensor, count: int) -> bool:
        """Return whether these are rows of a matrix, of this number of clients."""
        feature, ptr, whole = self.feature, self.ptr, {torch.int64, torch.int32}
        if matrix.dim() != 2 or feature.dim() != 1 or type(self.transposed) is not bool:
            return False
        width, height = matrix.shape if self.transposed else matrix.T.shape
        shapes, numbers = (self.values.shape, ptr.shape), {feature.dtype, ptr.dtype}
        if shapes != ((len(feature), width), (count + 1,)) or not numbers <= whole:
            return False
        is_cut = (int(ptr[0]), int(ptr[-1])) == (0, len(feature)) and bool((ptr.diff() >= 0).all())
        return is_cut and bool(((feature >= 0) & (feature < height)).all())

    @classmethod
    def join(cls, parts: Sequence[SparseRows]) -> SparseRows:
        counts = torch.cat([one.ptr.diff() for one in parts])
        return parts[0]._replace(
            values=torch.cat([one.values for one in parts]),
            feature=torch.cat([one.feature for one in parts]),
            ptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        )


@dataclass
class SavedModels:
    """Models of one form, of some clients."""

    module: str  # dotted name of the module's class
    arguments: Tree  # of the class, as JSON can hold them
    clients: list[int]  # -1: the server
    shared: dict[str, Tensor]  # entries of the ``state_dict`` that all clients share
    own: dict[str, Tensor]  # the others, stacked: [c, ...]
    rows: SparseRows | None = None  # of ``shared[rows.name]``, in which each client differs
    trust: Trust = NOBODY  # whether the class may be one that the user does not have

    def check(self) -> None:
        numbers = self.clients
        if (type(self.module), type(self.arguments), type(numbers)) != (str, dict, list):
            raise ValueError("module, arguments and clients are not a name, a mapping and a list")
        count = len(numbers)
        if any(type(one) is not int or one < -1 for one in numbers) or len({*numbers}) < count:
            raise ValueError("clients are not different numbers")
        if any(value.shape[:1] != (count,) for value in self.own.values()):
            raise ValueError(f"weights are not those of {count} clients")
        if self.rows is not None and not self.rows.fit(self.shared[self.rows.name], count):
            raise ValueError(f"rows of {self.rows.name} do not fit it")

    def state_dict(self, client: int) -> dict[str, Tensor]:
        """Return one client's dense weights, as its module takes them."""
        if client not in self.clients:
            raise OutputError(f"client {client}: no model of it; there are {brief(self.clients)}")
        index = self.clients.index(client)
        state = dict(self.shared) | {name: value[index] for name, value in self.own.items()}
        if self.rows is not None:
            name, values, feature, ptr, transposed = self.rows
            begin, end = int(ptr[index]), int(ptr[index + 1])
            dense = state[name].clone()
            # A view: writing into it changes `dense`.
            by_feature = dense.T if transposed else dense
            by_feature[feature[begin:end].long()] = values[begin:end].to(dense.dtype)
            state[name] = dense
        return state

    @classmethod
    def join(cls, parts: Sequence[SavedModels]) -> list[SavedModels]:
        """Join models of one form that share the same weights, which are stored once."""
        groups: list[list[SavedModels]] = []
        for one in parts:
            if same := next((group for group in groups if group[0].is_like(one)), None):
                same.append(one)
            else:
                groups.append([one])
        joined = []
        for group in groups:
            own = {name: torch.cat([one.own[name] for one in group]) for name in group[0].own}
            alike = {n: value[0] for n, value in own.items() if bool((value == value[0]).all())}
            rows = [one.rows for one in group if one.rows is not None]
            joined.append(
                replace(
                    group[0],
                    clients=[client for one in group for client in one.clients],
                    shared=group[0].shared | alike,
                    own={name: value for name, value in own.items() if name not in alike},
                    rows=SparseRows.join(rows) if rows else None,
                )
            )
        return joined

    def is_like(self, other: SavedModels) -> bool:
        """Whether the two differ only in clients, their own entries and rows."""
        rows = [None if one.rows is None else one.rows[::4] for one in (self, other)]
        return (
            (self.module, self.arguments) == (other.module, other.arguments)
            and rows[0] == rows[1]
            and self.shared.keys() == other.shared.keys()
            and all(torch.equal(value, other.shared[n]) for n, value in self.shared.items())
        )


SERVER = "server"  # how a table names the server
TABLE = "predictions.csv"
SAID = "outputs.json"  # has the round of the files beside it
ONE, SEVERAL = "model", "models"
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # how what a spreadsheet computes begins


class Snapshot(NamedTuple):
    """The outputs of some clients, or of a server, at one moment."""

    predictions: Predictions | None  # for their nodes
    models: Sequence[SavedModels] = ()
    embeddings: Embeddings | None = None  # where the method's result is embeddings
    links: KnownLinks | None = None  # where links are learnt

    def write(self, folder: Path) -> None:
        """Write files into a folder, each whole or not at all; else ``OutputError``."""
        with saying(folder):
            private_folder(folder)
            if self.predictions is not None:
                write_table(folder / TABLE, table_of(self.predictions))
            if self.models:
                _write_models(folder, self.models)
            for rows in (self.predictions, self.embeddings, self.links):
                if rows is not None:
                    rows.write(folder)


# Writing ------------------------------------------------------------------------------------------


def table_of(predictions: Predictions) -> Any:  # a data frame of text
    """Return predictions as the table that spreadsheets read."""

    def cell(value: object) -> str:
        if isinstance(value, str):
            return as_text(value)
        if isinstance(value, float):  # -1.0 is a value, -1 no class
            return "" if math.isnan(value) else f"{value:.6g}"
        return "" if value is None or value == -1 else str(value)

    table = predictions.to_pandas()
    table["client"] = table["client"].astype(object).replace(NO_CLIENT, SERVER)
    names = {"predicted": "class"}
    if predictions.are_values:
        del table["probability"]
        names = {"predicted": "value", "label": "target"}
    return table.rename(columns=names).map(cell)


def write_table(path: Path, table: Any) -> None:
    """Write a data frame as a file that spreadsheets read, whole or not at all."""
    with replaced(path) as stream:
        stream.write(table.to_csv(index=False).encode())


def as_text(text: str) -> str:
    """Mark text that a spreadsheet would take for a formula by an apostrophe."""
    if text[:1] not in FORMULAS or not text:
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text  # a number stays one


def _write_models(folder: Path, models: Sequence[SavedModels]) -> None:
    models = [one for one in models if one.clients]
    is_one = [len(one.clients) for one in models] == [1]
    tensors, entries = dict[str, Tensor](), list[Tree]()
    for number, one in enumerate(models):
        entry: Tree = {"module": one.module, "arguments": one.arguments}
        entry |= {"client": one.clients[0]} if is_one else {"clients": one.clients}
        parts = {"shared": one.shared, "own": one.own}
        if is_one:
            parts = {"shared": one.state_dict(one.clients[0])}
        elif (rows := one.rows) is not None:
            parts["rows"] = {"values": rows.values, "feature": rows.feature, "ptr": rows.ptr}
            entry["rows"] = {"name": rows.name, "transposed": rows.transposed}
        for kind, part in parts.items():
            prefix = "" if is_one else f"{number}/{kind}/"
            tensors |= {f"{prefix}{name}": value for name, value in part.items()}
        entries.append(entry)
    stem, other = (ONE, SEVERAL) if is_one else (SEVERAL, ONE)
    with replaced(folder / f"{stem}.safetensors") as stream:
        write_tensors(stream, apart(tensors))
    with replaced(folder / f"{stem}.json") as stream:
        # On one line, which is written at once: a line for each of many clients takes seconds
        stream.write(f"{json.dumps(entries[0] if is_one else entries)}\n".encode())
    for ending in ("safetensors", "json"):
        remove(folder / f"{other}.{ending}")


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, which safetensors refuses."""
    result, seen = dict[str, Tensor](), set[int]()
    for name, value in tensors.items():
        local = value.detach().cpu().contiguous()
        address = local.untyped_storage().data_ptr()
        result[name] = local.clone() if address in seen else local
        seen.add(address)
    return result


# Reading ------------------------------------------------------------------------------------------


def read_models(folder: Path) -> list[SavedModels]:
    """Read models; an empty list if there are none."""
    folder = Path(folder)
    stem = next((name for name in (ONE, SEVERAL) if (folder / f"{name}.json").exists()), None)
    if stem is None:
        return []
    path = folder / f"{stem}.json"
    with reading(path, OutputError, "not models of a run"):
        tensors, _ = read_tensors(folder / f"{stem}.safetensors", MOST_RECORD)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, kind, key = (f"0/shared/{name}" if stem == ONE else name).split("/", 2)
            parts.setdefault(f"{number}/{kind}", {})[key] = tensor
        models = []
        content = read_json(path)
        for index, entry in enumerate([content] if stem == ONE else content):
            shared, own, in_rows = (parts.get(f"{index}/{kind}", {}) for kind in KINDS)
            rows = SparseRows(**{**entry["rows"], **in_rows}) if "rows" in entry else None
            clients = [entry["client"]] if stem == ONE else entry["clients"]
            about = entry["module"], entry["arguments"], clients
            models.append(SavedModels(*about, shared, own, rows))
            models[-1].check()
        return models
