"""Folders: of raw data sets, and those that a SuperNode's node config names."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flower_graph.errors import DataError
from flower_graph.storage.writing import named

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.storage.sealed import StateKey

# Keys of the node config; the in-process engine's value in place of a folder
STATE_DIR, IN_PROCESS = "state-dir", ":memory:"
DATA_FOLDER, PARTITION, PARTITIONS = "data-folder", "partition-id", "num-partitions"
ROOT_VARIABLE = "FLOWER_GRAPH_DATA"


def data_root(setting: str | None) -> Path | None:
    """Return the folder of raw files, or None when none is set."""
    value, origin = setting, "data.root"
    if not value:
        value, origin = os.environ.get(ROOT_VARIABLE), ROOT_VARIABLE
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(f"{origin} = {value!r}: there is no such folder")
    return folder


# A SuperNode that is started anew without authentication gets another node id, so its id is no name
# for files. Its data folder, or the number of its partition, stays.


def own_place(context: Context) -> Path | None:
    """Return the SuperNode's own lasting folder."""
    given = str(context.node_config.get(STATE_DIR, ""))
    if given == IN_PROCESS:
        return None
    if given:
        return named(given)
    data = str(context.node_config.get(DATA_FOLDER, ""))
    return named(data) / "state" if data else None


def state_key(context: Context) -> StateKey | None:
    """Return the key that encrypts the SuperNode's files, if its node config names one."""
    if "state-key" not in context.node_config:
        return None
    from flower_graph.storage.sealed import StateKey  # loads cryptography

    return StateKey.of(context.node_config, own_place(context))


def node_name(context: Context) -> str:
    """Return a name for the SuperNode's files that stays when it is started anew."""
    config = context.node_config
    if PARTITION in config:
        return str(config[PARTITION])  # the app checks that it is a number
    if data := str(config.get(DATA_FOLDER, "")):
        folder = Path(data).expanduser().absolute()
        # Several SuperNodes of a machine may share one state-dir.
        return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    return "0"
