"""Predictions and models as files, written by a client or a server, and read back.

A folder has ``predictions.npz``, the same as a table, ``predictions.csv``, and the models of its
clients: for one client ``model.safetensors``, the ``state_dict`` of the module that ``model.json``
names; for several ``models.safetensors`` and ``models.json``, which store shared tensors once.
Other users cannot read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import OutputError
from flower_graph.outputs.rows import (
    NO_CLIENT,
    NODE_ROLES,
    Embeddings,
    KnownLinks,
    Predictions,
    Rows,
    check_columns,
    role_of,
)
from flower_graph.outputs.weights import SavedModels, SparseRows, saved_models
from flower_graph.storage.archives import read_arrays
from flower_graph.storage.files import private_folder
from flower_graph.storage.reading import MOST_RECORD, read_json, reading
from flower_graph.storage.tensors import read_tensors, write_tensors
from flower_graph.storage.writing import remove, replaced, saying

__all__ = [
    "NODE_ROLES",
    "NO_CLIENT",
    "Embeddings",
    "KnownLinks",
    "Predictions",
    "SavedModels",
    "Snapshot",
    "SparseRows",
    "read_embeddings",
    "read_links",
    "read_models",
    "read_predictions",
    "role_of",
    "write_outputs",
]

SERVER = "server"  # how a table names the server
PREDICTIONS, TABLE = "predictions.npz", "predictions.csv"
SAID = "outputs.json"  # has the round of the files beside it
EMBEDDINGS, LINK_ROWS = "embeddings.npz", "links.npz"
ONE, SEVERAL = "model", "models"
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # how what a spreadsheet computes begins
Numbers = NDArray[Any]
T = TypeVar("T", bound=Rows)


class Snapshot(NamedTuple):
    """The outputs of some clients, or of a server, at one moment.

    Attributes
    ----------
    predictions : Predictions or None
        Predictions for their nodes.
    models : list of SavedModels
        Their models.
    embeddings : Embeddings or None
        Embeddings, if the method's result is embeddings.
    """

    predictions: Predictions | None
    models: list[SavedModels]
    embeddings: Embeddings | None = None
    links: KnownLinks | None = None  # where links are learnt


# Writing ------------------------------------------------------------------------------------------


def write_outputs(
    folder: Path,
    predictions: Predictions | None,
    models: Sequence[SavedModels],
    embeddings: Embeddings | None = None,
    links: KnownLinks | None = None,
) -> None:
    """Write predictions, models and embeddings into a folder, each file whole or not at all.

    ``OutputError`` if a file cannot be written.
    """
    with saying(folder):
        private_folder(folder)
        if predictions is not None:
            write_table(folder / TABLE, table_of(predictions))
        if models:
            _write_models(folder, models)
        files = {PREDICTIONS: predictions, EMBEDDINGS: embeddings, LINK_ROWS: links}
        for name, rows in files.items():
            if rows is not None:
                _write_rows(folder / name, rows)


def _write_rows(path: Path, rows: Rows) -> None:
    arrays = rows.arrays()
    if isinstance(rows, Predictions) and rows.classes is not None:
        arrays["classes"] = np.array(rows.classes, np.str_)
    with replaced(path) as stream:
        np.savez(stream, **arrays)


def table_of(predictions: Predictions) -> Any:  # a data frame of text
    """Return predictions as the table that spreadsheets read."""
    import pandas as pd

    columns: dict[str, Iterable[str]] = {
        "client": [SERVER if one == NO_CLIENT else str(one) for one in predictions.client.tolist()],
        "node": map(as_text, map(str, predictions.node.tolist())),
    }
    said, true = ("value", "target") if predictions.are_values else ("class", "label")
    columns[said] = _cells(predictions.predicted, predictions.classes)
    if not predictions.are_values:
        columns["probability"] = _cells(predictions.probability)
    columns["role"] = np.asarray(NODE_ROLES)[predictions.role]
    columns[true] = _cells(predictions.label, predictions.classes)
    if predictions.fold is not None:
        columns["fold"] = map(str, predictions.fold.tolist())
    return pd.DataFrame({name: list(cells) for name, cells in columns.items()}, dtype=str)


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


def _cells(values: Numbers, classes: Sequence[str] | None = None) -> list[str]:
    if values.dtype.kind == "f":
        return ["" if value != value else f"{value:.6g}" for value in values.tolist()]
    words = None if classes is None else [as_text(name) for name in classes]
    return ["" if v < 0 else str(v) if words is None else words[v] for v in values.tolist()]


def _write_models(folder: Path, models: Sequence[SavedModels]) -> None:
    clients = [client for one in models for client in one.clients]
    if len(clients) == 1:
        (one,) = (one for one in models if one.clients)
        tensors, stem = one.state_dict(clients[0]), ONE
        entries: Any = {"module": one.module, "arguments": one.arguments, "client": clients[0]}
    else:
        tensors, stem, entries = {}, SEVERAL, []
        for number, one in enumerate(models):
            tensors |= {f"{number}/shared/{name}": value for name, value in one.shared.items()}
            tensors |= {f"{number}/own/{name}": value for name, value in one.own.items()}
            entry = {"module": one.module, "arguments": one.arguments, "clients": one.clients}
            if (rows := one.rows) is not None:
                tensors |= {f"{number}/rows/{name}": getattr(rows, name)
                            for name in ("values", "feature", "ptr")}  # fmt: skip
                entry["rows"] = {"name": rows.name, "transposed": rows.transposed}
            entries.append(entry)
    local = apart(tensors)
    other = SEVERAL if stem == ONE else ONE
    with replaced(folder / f"{stem}.safetensors") as stream:
        write_tensors(stream, local)
    with replaced(folder / f"{stem}.json") as stream:
        # On one line, which is written at once: a line for each of many clients takes seconds
        stream.write(f"{json.dumps(entries)}\n".encode())
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


def read_predictions(folder: Path) -> Predictions | None:
    """Read predictions; None if there are none."""
    return _read_rows(Path(folder) / PREDICTIONS, Predictions)


def read_embeddings(folder: Path) -> Embeddings | None:
    """Read embeddings; None if there are none."""
    return _read_rows(Path(folder) / EMBEDDINGS, Embeddings)


def read_links(folder: Path) -> KnownLinks | None:
    """Read known links; None if there are none."""
    return _read_rows(Path(folder) / LINK_ROWS, KnownLinks)


def _read_rows(path: Path, kind: type[T]) -> T | None:
    if not path.exists():
        return None
    with reading(path, OutputError, f"not {path.stem} of a run"):
        arrays: dict[str, Any] = read_arrays(path)
        check_columns(arrays)
        if "classes" in arrays:
            arrays["classes"] = tuple(arrays["classes"].tolist())
        return kind(**arrays)


def read_models(folder: Path) -> list[SavedModels]:
    """Read models; an empty list if there are none."""
    folder = Path(folder)
    stem = next((name for name in (ONE, SEVERAL) if (folder / f"{name}.json").exists()), None)
    if stem is None:
        return []
    path = folder / f"{stem}.json"
    with reading(path, OutputError, "not models of a run"):
        entry = read_json(path)
        tensors, _ = read_tensors(folder / f"{stem}.safetensors", MOST_RECORD)
        if stem == ONE:
            models = [
                SavedModels(entry["module"], entry["arguments"], [entry["client"]], tensors, {})
            ]
        else:
            models = saved_models(entry, tensors)
        for one in models:
            one.check()
        return models
