"""Checkpoints: a folder per round, written whole or not at all; the last two are kept.

Each client writes ``round-000100/client-0.safetensors``. After all clients answered, the server
writes ``round-000100/server.safetensors``, which completes the folder. A client of a deployment
writes into a folder of its own instead (``client.state``). Every file has a SHA-256 of its content
and the token of its run: a damaged file, or one of another run, is refused. Reading runs no code:
the server's state is JSON in a tensor, and its arrays and tensors are beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from safetensors import numpy as of_arrays
from safetensors.torch import save
from torch import Tensor

from flower_graph.errors import CheckpointError, told
from flower_graph.storage.files import remove_folder, replaced
from flower_graph.storage.formats import load_tensors, read_tensors, write_tensors
from flower_graph.storage.reading import (
    MOST_TENSORS,
    SEALED,
    open_regular,
    parse_json,
    read_bytes,
    reading,
    reason,
)

if TYPE_CHECKING:
    from flower_graph.storage.sealed import StateKey

LOG = logging.getLogger(__name__)
KEPT = 2
SERVER_FILE, REFUSED_FILE = "server.safetensors", "server.safetensors.refused"
CHECKSUM, RUN = "sha256", "run"  # in a file's metadata
STATE = "state"  # name of the tensor with the server's JSON
# What the only key of a JSON object says of its value
DICT, TUPLE, TENSOR, ARRAY, RECORD = "dict", "tuple", "tensor", "array", "array-record"
BYTES = "bytes"
Values = Tensor | NDArray[np.generic]
SCALARS = (bool, int, float, str, type(None))


def round_folder(folder: Path, server_round: int) -> Path:
    """Return the folder of one round's checkpoint."""
    return folder / f"round-{server_round:06d}"


# Files --------------------------------------------------------------------------------------------


def save_client(
    path: Path, tensors: dict[str, Tensor], run: str, key: StateKey | None = None
) -> None:
    """Write a client's tensors for its owner alone, whole or not at all; encrypted with a key."""
    local = on_processor(tensors)
    metadata = {RUN: run, CHECKSUM: _checksum(local, run)}
    with replaced(path) as stream:
        if key is None:
            write_tensors(stream, local, metadata)
        else:
            stream.write(key.seal(save(local, metadata=metadata), path))


def on_processor(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the form that safetensors writes."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_client(
    path: Path, run: str | None = None, key: StateKey | None = None
) -> dict[str, Tensor]:
    """Read a client's tensors."""
    try:
        data = b"" if key is None else read_bytes(path, MOST_TENSORS)
        tensors, result = read_tensors(path) if key is None else load_tensors(key.open(data, path))
    except CheckpointError:
        raise
    except Exception as error:  # any error that damaged bytes cause
        why = reason(error)
        with suppress(OSError), open_regular(path, MOST_TENSORS) as file:
            if file.read(len(SEALED)) == SEALED:
                why = "it is encrypted, and state-key is not set"
        raise refused(path, "cannot be read", f": {why}") from error
    if result.get(CHECKSUM) != _checksum(tensors, result.get(RUN, "")):
        raise refused(path, "damaged: it does not have the SHA-256 that it names")
    if run is not None and result[RUN] != run:
        raise refused(path, "of another run", f", {result[RUN]}; this one is {run}")
    # Aligned as new tensors are: sums over those in a file may differ in their last bit
    return {name: tensor.clone() for name, tensor in tensors.items()}


def refused(path: Path, why: str, more: str = "") -> CheckpointError:
    """Return the error for an unusable client's file; the server gets its reason without names."""
    return told(CheckpointError(f"{path}: {why}{more}"), f"its checkpoint: {why}")


def save_server(folder: Path, server_round: int, state: dict[str, object]) -> bool:
    """Write the server's state, which completes the round's checkpoint, and drop old rounds."""
    path = round_folder(folder, server_round) / SERVER_FILE
    try:
        save_client(path, {n: torch.as_tensor(one) for n, one in _flat(state).items()}, "")
    except OSError as error:
        LOG.warning("round %d: no checkpoint: %s: %s", server_round, path, error)
        return False
    oldest = complete_rounds(folder)[-KEPT:][0]
    with suppress(OSError):
        keep_rounds(folder, range(oldest, sys.maxsize))  # drops what was never completed, too
    return True


def keep_rounds(folder: Path, kept: Container[int]) -> None:
    """Remove the folders of all rounds but these."""
    for old in rounds_of(folder.glob("round-*")):
        if old not in kept:
            remove_folder(round_folder(folder, old))


def load_server(folder: Path, server_round: int) -> dict[str, object]:
    """Read the server's state of one round; ``CheckpointError`` if it is damaged."""
    path = round_folder(folder, server_round) / SERVER_FILE
    tensors = load_client(path)
    with reading(path, CheckpointError):
        return dict(_nested(tensors))


# Any: as nested as what was written
def write_state(state: object) -> bytes:
    """Write numbers, texts, bytes, arrays and tensors, in lists, tuples and tables of these."""
    return bytes(of_arrays.save({name: np.asarray(one) for name, one in _flat(state).items()}))


def read_state(data: bytes) -> Any:
    """Read the output of ``write_state``."""
    return _nested(of_arrays.load(data))


def _flat(state: object) -> dict[str, Values]:
    """Return nested values as tensors: one has the JSON that says where the others belong."""
    tensors = dict[str, Values]()
    text = json.dumps(_taken_out(state, "", tensors)).encode()
    return tensors | {STATE: np.frombuffer(bytearray(text), np.uint8)}


def _nested(tensors: Mapping[str, Values]) -> Any:
    text = np.asarray(tensors[STATE]).tobytes()
    return parse_json(text, object_hook=partial(_put_back, tensors))


def _taken_out(value: object, name: str, tensors: dict[str, Values]) -> object:
    """Return a state as JSON; ``tensors`` gets its arrays and tensors."""
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, bytes):
        return {BYTES: value.hex()}
    if isinstance(value, list | tuple):
        inner = [_taken_out(one, f"{name}[{k}]", tensors) for k, one in enumerate(value)]
        return inner if isinstance(value, list) else {TUPLE: inner}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        inner = [_taken_out(one, f"{name}.{key}", tensors) for key, one in value.items()]
        return {RECORD if isinstance(value, ArrayRecord) else DICT: [list(value), inner]}
    if isinstance(value, Array):
        value = value.numpy()
    kind, number = TENSOR if isinstance(value, Tensor) else ARRAY, str(len(tensors))
    if isinstance(value, Tensor):
        tensors[number] = value.detach().clone()  # no two share their memory
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fiub":
        tensors[number] = np.array(value, order="C")
    else:
        raise CheckpointError(f"{name[1:]}: no checkpoint can hold a {type(value).__name__}")
    return {kind: number}


# Any: what was taken out; all within it is back already
def _put_back(tensors: Mapping[str, Values], entry: dict[str, Any]) -> Any:
    ((kind, inner),) = entry.items()
    if kind == TENSOR:
        return torch.as_tensor(tensors[inner])
    if kind == BYTES:
        return bytes.fromhex(inner)
    if kind == ARRAY:
        return np.asarray(tensors[inner]).copy()
    if kind == TUPLE:
        return tuple(inner)
    result = dict(zip(*inner, strict=True))
    if kind == RECORD:
        return ArrayRecord({name: Array(array) for name, array in result.items()})
    return result


def complete_rounds(folder: Path) -> list[int]:
    """Return the rounds with a complete checkpoint, oldest first."""
    return rounds_of(path.parent for path in folder.glob(f"round-*/{SERVER_FILE}"))


def last_round(folder: Path) -> int:
    """Return the last round with a complete checkpoint; ``CheckpointError`` if there is none."""
    rounds = complete_rounds(folder)
    if not rounds:
        raise CheckpointError(f"{folder}: no complete checkpoint (checkpoint_every) is there")
    return rounds[-1]


# Helpers ------------------------------------------------------------------------------------------


def _checksum(tensors: Mapping[str, Tensor], run: str) -> str:
    digest = hashlib.sha256(run.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rounds_of(folders: Iterator[Path]) -> list[int]:
    """Return the rounds that these folders are named after, ascending."""
    result = (re.fullmatch(r"round-(\d+)", folder.name) for folder in folders)
    return sorted(int(match[1]) for match in result if match)
