"""Where a SuperNode keeps what has to outlast it, and under which name it finds it again.

A SuperNode that is started anew without authentication gets another node id, so its id is no name
for files. Its data folder, or the number of its partition, stays.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flower_graph.errors import StateLostError

if TYPE_CHECKING:
    from flwr.app import Context

IN_PROCESS = ":memory:"
STATE_VARIABLE = "FLOWER_GRAPH_STATE"  # set by who starts a run, and clears up after it
STATE_DIR, DATA_FOLDER, PARTITION = "state-dir", "data-folder", "partition-id"  # node config


def own_place(context: Context) -> Path | None:
    """Return the SuperNode's own lasting folder."""
    named = str(context.node_config.get(STATE_DIR, ""))
    if named == IN_PROCESS:
        return None
    if named:
        return Path(named).expanduser()
    data = str(context.node_config.get(DATA_FOLDER, ""))
    return Path(data).expanduser() / "state" if data else None


def node_name(context: Context) -> str:
    """Return a name for the SuperNode's files that it has again when it is started anew."""
    config = context.node_config
    if PARTITION in config:
        return str(config[PARTITION])  # whether it is a number, the app says
    if data := str(config.get(DATA_FOLDER, "")):
        folder = Path(data).expanduser().absolute()
        # Several SuperNodes of a machine may share one state-dir.
        return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    return "0"


def own_folder(folder: Path) -> None:
    """Make a run's folder, for its owner alone; refuse one that another user made first."""
    # Its parent may lie in a place that is open to all.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for place in (folder.parent, folder):
        if place.stat().st_uid != os.getuid():
            raise StateLostError(
                f"{place} belongs to another user; set state-dir in the node's config to another "
                "folder"
            )


def default_folder() -> Path:
    """Return where state files lie by default: shared memory if the machine has it."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named)
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"flower-graph-{os.getuid()}"


def remove_if_empty(folder: Path) -> None:
    """Remove a run's folder after the last of its files, whichever process that was."""
    with suppress(OSError):
        folder.rmdir()
