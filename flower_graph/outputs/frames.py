"""Display of runs in notebooks: a short text, or a data frame if pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_graph.wire.keys import ROLES

NODE_ROLES = ("none", *ROLES)  # a node may have no role
SHORT = ("loss", "val-accuracy", "test-accuracy")  # keys of a round that are shown
SHOWN = 10  # rows and columns of a table in a notebook


class Rounds(list[dict[str, object]]):
    """The lines of ``metrics.jsonl``: a mapping for each round."""

    def __repr__(self) -> str:
        last = self[-1] if self else {}
        figures = (f"{key} {last[key]:.4g}" for key in SHORT if isinstance(last.get(key), float))
        return f"<{len(self)} rounds; the last: {', '.join(figures)}; .to_pandas() has all>"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def to_pandas(self) -> Any:  # a data frame: pandas may not be there
        """Return a data frame with a row for each round, nested keys joined by dots."""
        return pandas_module().json_normalize(list(self))


class HasFrame(Protocol):
    """An object that can be shown as a data frame."""

    def to_pandas(self) -> Any:  # a data frame: pandas may not be there
        ...


class Framed:
    """Base of classes of arrays with a row for each node of each client."""

    node: NDArray[np.generic]
    client: NDArray[np.generic]
    role: NDArray[np.generic]
    classes: tuple[str, ...] | None

    def __repr__(self) -> str:
        count = f"{len(self.node)} nodes, {len(np.unique(self.client))} clients"
        return f"<{type(self).__name__.lower()}: {count}; .to_pandas() has all>"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def to_pandas(self) -> Any:  # a data frame: pandas may not be there
        """Return a data frame of the rows, with names of roles and classes."""
        arrays = {name: one for name, one in vars(self).items() if isinstance(one, np.ndarray)}
        arrays["role"] = np.asarray(NODE_ROLES)[self.role]
        if self.classes:
            names = np.asarray([*self.classes, None], object)  # -1 takes the last
            arrays |= {name: names[arrays[name]] for name in ("predicted", "label")}
        return pandas_module().DataFrame(arrays)


# NumPy kinds of the columns that a run's arrays may have; other arrays have a row per class
COLUMNS = {
    **dict.fromkeys(("client", "role", "fold", "number"), "iu"),
    **dict.fromkeys(("predicted", "label"), "iuf"),
    **{
        "node": "iuU",
        "other": "iuU",
        "probability": "f",
        "public": "b",
        "embeddings": "f",
        "classes": "U",
    },
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


def pandas_module() -> ModuleType:
    """Import pandas, which only data frames need."""
    try:
        return import_module("pandas")
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install pandas") from error


def html_of(shown: HasFrame) -> str | None:
    """Return a short table as HTML; None without pandas: the notebook then shows the text."""
    try:
        return str(shown.to_pandas().to_html(max_rows=SHOWN, max_cols=SHOWN))
    except ImportError:
        return None
