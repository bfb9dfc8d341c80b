"""Folders with one party's part of a run's data: a SuperNode's clients', or the server's.

``flower-graph partition`` writes them, so that each party gets only its own data. A folder has
``manifest.json`` and, if there are tensors, ``data.safetensors``. The manifest has the settings
that made the data; a run with other settings refuses the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

from safetensors.torch import save
from torch import Tensor

from flower_graph.config.common import POINT
from flower_graph.config.metrics import VALUES
from flower_graph.config.partition import keys_of_others
from flower_graph.data.sources.generators import SIGNAL
from flower_graph.data.sources.names import GRAPH_FILES, has_ending
from flower_graph.errors import DataError, told
from flower_graph.storage.places import DATA_FOLDER
from flower_graph.storage.reading import (
    MOST_RECORD,
    MOST_TENSORS,
    Tree,
    parse_json,
    read_bytes,
    reason,
)
from flower_graph.storage.tensors import load_tensors
from flower_graph.storage.writing import make_folder, replaced, saying

T = TypeVar("T")
FORMAT = 1  # of the folders; a folder of another format is refused
MANIFEST, TENSORS = "manifest.json", "data.safetensors"
CLIENTS, SERVER = "clients", "server"
KEY = {CLIENTS: DATA_FOLDER, SERVER: "server-folder"}  # where a folder is named
HINT = {
    CLIENTS: (
        "give the SuperNode a folder that `flower-graph partition` made for it: "
        "--node-config 'data-folder=\"/path/client-0000\"'"
    ),
    SERVER: (
        "give the run the folder `server` that `flower-graph partition` made: "
        "--run-config 'server-folder=\"/path/server\"'"
    ),
}
_NUMBERS = ("format", "num_clients", "features", "classes")
CLASS_NAMES, DATA_FORM = "class-names", "data-form"
# Keys of ``data`` that do not change a party's data: its folder, and users that came and went
_OTHERS = ("root", "add", "remove")
_TABLES = ("settings", "details", "files", "versions")


@dataclass(frozen=True)
class Manifest:
    """The description of a folder."""

    role: str  # "clients" or "server"
    settings: dict[str, object]  # The settings that decide the data (deciding_settings)
    clients: list[int]  # Numbers of the clients whose data are here; none in the server's folder
    num_clients: int  # Clients of the whole run
    features: int  # Of the whole run
    classes: int
    details: Tree = field(default_factory=dict)  # Further entries for one method
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each file, by name
    versions: dict[str, str] = field(default_factory=dict)  # Versions of the packages that wrote it
    format: int = FORMAT

    @property
    def app(self) -> str:
        return str(self.settings.get("app"))

    def to_json(self) -> dict[str, object]:
        return {
            "format": self.format,
            "role": self.role,
            "app": self.app,
            "clients": self.clients,
            "num-clients": self.num_clients,
            "features": self.features,
            "classes": self.classes,
            "fingerprint": fingerprint(self.settings),
            "settings": self.settings,
            "details": self.details,
            "versions": self.versions,
            "files": self.files,
        }


@dataclass(frozen=True)
class RunFolder:
    """A folder that was opened and checked."""

    path: Path  # The folder
    manifest: Manifest  # What it is
    tensors: dict[str, Tensor]  # What it holds, by name

    @property
    def class_names(self) -> list[str] | None:
        """Names of the run's classes, by number; None if the numbers are the names."""
        names: list[str] | None = self.manifest.details.get(CLASS_NAMES)
        return names

    def detail(self, key: str, kind: type[T]) -> T:
        """Read one of the manifest's details; ``DataError`` if it is missing or of another type."""
        value = self.manifest.details.get(key)
        if not isinstance(value, kind):
            raise _broken(self.path / MANIFEST, f"details: {key}: {value!r:.40} is unfit")
        return value


def deciding_settings(config: Tree) -> dict[str, object]:
    """Return the settings that decide each party's data, by dotted key."""
    data = {key: value for key, value in config["data"].items() if key not in _OTHERS}
    # A new key at its default decides nothing; the first is of generated graphs only
    for key, default in (("signal", SIGNAL), ("decimal", POINT), ("label", None), ("weight", None)):
        if data.get(key) == default:
            data.pop(key, None)
    if data.get("split_seed", 0) is None:
        data["split_seed"] = config["seed"]
    result = {f"data.{key}": value for key, value in data.items()}
    name = str(config["data"]["name"])
    if has_ending(name, ("/", *GRAPH_FILES)) or name.startswith(("/", ".", "~")):
        result["data.name"] = PurePath(name).name
    partition = dict(config.get("partition", {}))
    own_seed = partition.pop("seed", None)
    # Keys that play no part decide nothing.
    if "method" in partition:
        others = keys_of_others(partition["method"])
        partition = {key: value for key, value in partition.items() if key not in others}
    if not partition.get("every_node", True):
        del partition["every_node"]
    result |= {f"partition.{key}": value for key, value in partition.items()}
    if "graphless_ratio" in config.get("graph", {}):
        result["graph.graphless_ratio"] = config["graph"]["graphless_ratio"]
    if config.get("task") == VALUES:
        result["task"] = VALUES
    seed = config["seed"] if own_seed is None else own_seed
    return {"app": config["app"], "seed": seed, **result}


def fingerprint(settings: Mapping[str, object]) -> str:
    """Return the SHA-256 of settings, as hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_folder(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that only its owner can read."""
    files = {}
    with saying(path):
        make_folder(path, 0o700, may_exist=False)
    if tensors:
        # Copies: safetensors takes neither views nor two names for one tensor.
        content = save({name: each.contiguous().clone() for name, each in tensors.items()})
        _write_private(path / TENSORS, content)
        files[TENSORS] = hashlib.sha256(content).hexdigest()
    record = manifest.to_json() | {"files": files}
    _write_private(path / MANIFEST, (json.dumps(record, indent=2) + "\n").encode())


def open_folder(path: Path, settings: Mapping[str, object], role: str) -> RunFolder:
    """Open a folder, and check that it is whole and of this run."""
    label = f"{KEY[role]} {path}"
    if not path.is_dir():
        error = DataError(f"{label}: there is no such folder; {HINT[role]}")
        raise told(error, f"{KEY[role]}: cannot be used")
    manifest = _read_manifest(path / MANIFEST, label, role)
    if manifest.role != role:
        raise DataError(f"{label}: it is for {KEY[manifest.role]}; {HINT[role]}")
    if differing := _differences(manifest.settings, settings):
        error = DataError(
            f"{label}: data folder of another run: {'; '.join(differing.values())}. Give this "
            "party a folder that `flower-graph partition` made with this run's settings"
        )
        raise told(error, f"{KEY[role]}: data folder of another run: {', '.join(differing)}")
    tensors: dict[str, Tensor] = {}
    for name, digest in manifest.files.items():
        tensors |= _read_tensors(path / name, digest)
    return RunFolder(path, manifest, tensors)


def _write_private(file: Path, content: bytes) -> None:
    with saying(file), replaced(file) as stream:
        stream.write(content)


def _read_manifest(file: Path, place: str, role: str) -> Manifest:
    content = _read(
        file, f"{place}: it is no folder of `flower-graph partition`; {HINT[role]}", 4 * MOST_RECORD
    )
    try:
        record = parse_json(content)
        if not isinstance(record, dict):
            raise ValueError(f"is a {type(record).__name__}, not a table")
        if record["format"] != FORMAT:
            raise DataError(
                f"{file}: format {record['format']!r:.20}; this version reads format {FORMAT}. "
                "Make the folders anew with the version of flower-graph that runs"
            )
        if fingerprint(record["settings"]) != record["fingerprint"]:
            raise ValueError("fingerprint: does not fit the settings")
        fields = {name.replace("_", "-"): name for name in Manifest.__dataclass_fields__}
        result = Manifest(**{name: record[key] for key, name in fields.items()})
        _check_types(result)
    except KeyError as error:
        raise _broken(file, f"{error} is missing") from error
    except DataError:
        raise
    except Exception as error:  # whatever the bytes bring about
        raise _broken(file, reason(error)) from error
    return result


def _check_types(manifest: Manifest) -> None:
    values = asdict(manifest)
    for names, kind in ((_NUMBERS, int), (_TABLES, dict)):
        for name in names:
            if not isinstance(values[name], kind):
                raise ValueError(f"{name.replace('_', '-')}: {values[name]!r:.40} is unfit")
    if manifest.role not in KEY:
        raise ValueError(f"role: {manifest.role!r:.40} is neither {CLIENTS} nor {SERVER}")
    good = isinstance(manifest.clients, list) and all(type(one) is int for one in manifest.clients)
    inside = good and all(0 <= one < manifest.num_clients for one in manifest.clients)
    if not inside or len(set(manifest.clients)) < len(manifest.clients):
        raise ValueError(f"clients: {manifest.clients!r:.40} are not different numbers of clients")
    if bad := set(manifest.files) - {TENSORS}:
        raise ValueError(f"files: {sorted(bad)!r:.60} are none of this format")


def _differences(theirs: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, str]:
    """Return which settings differ, and how; only the app if that differs."""
    keys = ["app"] if theirs.get("app") != ours["app"] else sorted({*theirs, *ours})
    return {
        key: f"{key} is {theirs.get(key)!r}, this run's is {ours.get(key)!r}"
        for key in keys
        if theirs.get(key) != ours.get(key)
    }


def _read_tensors(file: Path, digest: str) -> dict[str, Tensor]:
    content = _read(file, "the manifest names it; copy the whole folder again", MOST_TENSORS)
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(
            f"{file}: its SHA-256 is not that of the manifest: the file is damaged or another "
            "folder's. Copy the whole folder again"
        )
    try:
        return load_tensors(content)[0]
    except Exception as error:  # whatever the bytes bring about
        raise _broken(file, reason(error)) from error


def _read(file: Path, advice: str, most: int) -> bytes:
    try:
        return read_bytes(file, most)
    except FileNotFoundError as error:
        raise DataError(f"{file}: there is no such file; {advice}") from error
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}); make it readable for the user "
            f"{os.getuid()} that this process runs as"
        ) from error


def _broken(file: Path, why: str) -> DataError:
    return DataError(f"{file}: is damaged ({why}); copy the whole folder again")
