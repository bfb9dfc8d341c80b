"""Keeps a client's tensors between two messages.

Flower keeps state in ``Context.state``, but sends a context with every message: through Ray, or to
and from the process that runs the ClientApp. So the place depends on size and node config:

* up to 1 MiB (a deployment's client with one user): in ``Context.state`` itself, which
  ``flower_graph.client.adaptor`` saves if the SuperNode has a folder of its own;
* larger, with ``state-dir`` or ``data-folder``: in a file there, replaced as a whole after each
  message, so that a killed SuperNode continues from its last message;
* larger, without a folder: in a file that is mapped into memory and changed in place. Another
  process can take the next message without a copy, but a killed process leaves the file half
  changed. This is for simulations, which Ray ends as a whole;
* ``state-dir = ":memory:"`` (the in-process engine): in this process.

The version, in ``Context.state``, is the number of messages handled. Older or half-changed tensors
raise ``StateLostError``. Newer tensors are accepted: Flower restores the old context if a step
after the handling fails (a mod, a full disk), which the server sees as a lost reply.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.storage.checkpoint import load_client, save_client
from flower_graph.storage.files import default_folder, own_folder
from flower_graph.storage.places import IN_PROCESS, STATE_DIR, node_name, own_place, state_key
from flower_graph.storage.reading import MOST_KEY, read_text, reading
from flower_graph.storage.writing import (
    new_file,
    open_own,
    path_of,
    remove,
    remove_empty,
    remove_folder,
    replaced,
)

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.wire.fields import Resume

__all__ = ["SMALL_BYTES", "StateStore", "Tensors", "forget_run"]

SMALL_BYTES = 1 << 20
VERSION = "state-version"  # key of the version among the tensors of a saved file
Tensors = dict[str, Tensor]
T = TypeVar("T")

# Live objects of this process, by (run, node): with the right version they need no reload.
_LIVE: dict[tuple[int, int], tuple[int, object]] = {}
_TOKENS: dict[tuple[int, int], str] = {}
_FIXED: dict[tuple[int, int], object] = {}
# The mapping of a live object's file. Other processes change the same memory, and mapping it for
# every message would cost half as much as the message's computation. For a file that is replaced:
# the one that the live object was read from or written to.
_MAPS: dict[tuple[int, int], tuple[int, str]] = {}


class StateStore:
    """Keeps a client's object and its tensors from message to message."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name
        self._key = (context.run_id, context.node_id)
        self._in_process = context.node_config.get(STATE_DIR, "") == IN_PROCESS
        self._own, self._sealed = own_place(context), state_key(context)
        # Whether large tensors are in a file that is changed in place
        self._is_mapped = self._own is None and not self._in_process
        self._found = 0  # version of the loaded tensors

    @cached_property
    def _folder(self) -> Path:
        return (self._own or default_folder()) / f"run-{self._key[0]}"

    @cached_property
    def _file(self) -> Path:
        # A SuperNode that is started anew may have another id.
        here = f"{self._name}-{node_name(self._context)}.safetensors"
        return self._folder / (f"node-{self._key[1]}.bin" if self._own is None else here)

    @property
    def version(self) -> int:
        record = self._context.state.config_records.get(self._name)
        return 0 if record is None else int(record["version"])  # type: ignore[arg-type]

    def expect(self) -> None:
        if not self.version:
            raise StateLostError(
                f"client {self._key[1]}: its state of this run is gone, as Flower keeps it in "
                "memory; name a state-dir in the node's config"
            )

    def is_due(self, resume: Resume) -> bool:
        """Whether the server names a checkpoint that is not loaded yet."""
        # A client that is asked again under another node id has loaded it before.
        record = self._context.state.config_records.get(f"{self._name}-resumed")
        loaded = None if record is None else dict(record)
        return bool(resume.server_round) and loaded != resume.to_config()

    def note(self, resume: Resume) -> None:
        from flwr.app import ConfigRecord

        self._context.state[f"{self._name}-resumed"] = ConfigRecord(resume.to_config())

    # Any: what is kept is of the class that ``build`` makes, in this process or an earlier call
    def load(self, build: Callable[[Tensors], object]) -> Any:
        """Return the live object, rebuilt from its tensors if this process does not have it."""
        record = self._context.state.config_records[self._name]
        kind, layout = str(record["kind"]), str(record.get("layout", "saved"))
        version, live = _LIVE.get(self._key, (-1, None))
        if kind == "context":
            # If Flower restored an old context, a version may exist twice, but not a token.
            if _TOKENS.get(self._key) != record["token"]:
                version = -1
            self._found = self.version
        elif kind == "file":
            self._found = self._file_version()
            is_mapped = live is not None and _MAPS.get(self._key) == self._place(layout)
            version = self._found if is_mapped else -1
        else:
            is_there = kind == "process" or self._file.exists()
            if not is_there or (kind == "saved" and _MAPS.get(self._key) != self._place(layout)):
                version = -1
            self._found = max(version, self.version)
        if version == self._found:
            return live
        if kind == "process":
            half = "left half changed by a message that failed"
            what = half if live is not None and version < 0 else "kept in a process that is gone"
            raise StateLostError(
                f"client {self._key[1]}: version {self.version} of its state was {what} "
                f"(this process has {'none' if live is None else version})"
            )
        if kind == "context":
            arrays = self._context.state.array_records[f"{self._name}-tensors"]
            live = build({k: torch.from_numpy(v.numpy().copy()) for k, v in arrays.items()})
        else:
            live = build(self._mapped(json.loads(layout)) if kind == "file" else self._saved())
            _MAPS[self._key] = self._place(layout)
        _LIVE[self._key] = (self._found, live)
        _TOKENS[self._key] = str(record.get("token", ""))
        return live

    def once(self, build: Callable[[], T]) -> T:
        """Return an object that stays the same during a run; build it once a process."""
        if self._key not in _FIXED:
            _FIXED[self._key] = build()
        return cast(T, _FIXED[self._key])

    def begin(self) -> None:
        """Mark the tensors as being changed; ``commit`` unmarks them."""
        if self._key in _LIVE:
            _LIVE[self._key] = (-1, _LIVE[self._key][1])
        if self._is_mapped and self._file.exists():
            self._write_version(-1)

    def undo(self, live: object) -> None:
        """Undo ``begin``: restore the tensors, on which ``live`` works again."""
        if self.version and self._key in _LIVE:
            _LIVE[self._key] = (self._found, live)
        if self.version and self._is_mapped and self._file.exists():
            self._write_version(self._found)

    def create(self, tensors: Tensors) -> Tensors:
        """Move a new client's tensors to their storage, and return them there."""
        self.begin()
        if self._kind(tensors) != "file":
            return tensors
        own_folder(self._folder)
        layout, size = _layout(tensors)
        _check_room(self._folder, size)
        handle = new_file(self._file)
        try:
            os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)
        mapped = self._mapped(layout)
        for name, tensor in tensors.items():
            mapped[name].copy_(tensor)
        return mapped

    def commit(self, live: object, tensors: Tensors) -> None:
        from flwr.app import ArrayRecord, ConfigRecord

        from flower_graph.wire.arrays import encode_array

        version, kind = max(self._found, self.version) + 1, self._kind(tensors)
        record = ConfigRecord({"version": version, "kind": kind})
        if kind == "file":
            layout = record["layout"] = json.dumps(_layout(tensors)[0])
            self._write_version(version)
            _MAPS[self._key] = self._place(layout)
        elif kind == "saved":
            own_folder(self._folder)
            number = {VERSION: torch.tensor(version)}
            save_client(self._file, tensors | number, f"{self._key[0]}", self._sealed)
            _MAPS[self._key] = self._place("saved")
        elif kind == "context":
            record["token"] = _TOKENS[self._key] = secrets.token_hex(8)
            small = {n: encode_array(n, t.detach().cpu().numpy()) for n, t in tensors.items()}
            self._context.state[f"{self._name}-tensors"] = ArrayRecord(small)
        self._context.state[self._name] = record
        _LIVE[self._key] = (version, live)

    def drop(self) -> None:
        for kept in (_LIVE, _TOKENS, _FIXED, _MAPS):
            kept.pop(self._key, None)
        for record in (self._name, f"{self._name}-tensors", f"{self._name}-resumed"):
            self._context.state.pop(record, None)
        remove(self._file)
        remove(self._version_file)
        remove_empty(self._folder)

    def _kind(self, tensors: Tensors) -> str:
        if self._in_process:
            return "process"
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        on_cpu = all(t.device.type == "cpu" for t in tensors.values())
        if size <= SMALL_BYTES:
            return "context"
        if self._own is not None:
            return "saved"
        return "file" if on_cpu else "context"

    @property
    def _version_file(self) -> Path:
        return self._file.with_suffix(".version")

    def _place(self, layout: str) -> tuple[int, str]:
        result = self._file.stat()
        # A file that is changed in place keeps its inode number, but not its time of change.
        changed = "" if self._file.suffix == ".bin" else f" {result.st_mtime_ns}"
        return result.st_ino, layout + changed

    def _write_version(self, version: int) -> None:
        with replaced(self._version_file, lasting=False) as stream:
            stream.write(str(version).encode())

    def _file_version(self) -> int:
        if not self._file.exists() or not self._version_file.exists():
            raise StateLostError(f"client {self._key[1]}: its state {self._file} is gone")
        with reading(self._version_file, StateLostError):
            result = int(read_text(self._version_file, MOST_KEY))
        if result < self.version:
            what = "half changed by a process that died" if result < 0 else f"at version {result}"
            raise StateLostError(
                f"client {self._key[1]}: its state {self._file} is {what}, "
                f"expected version {self.version}"
            )
        return result

    def _saved(self) -> Tensors:
        try:
            tensors = load_client(self._file, f"{self._key[0]}", self._sealed)
        except CheckpointError as error:
            raise StateLostError(f"client {self._key[1]}: its state is lost: {error}") from error
        self._found = int(tensors.pop(VERSION, torch.tensor(-1)))
        if self._found < self.version:
            raise StateLostError(
                f"client {self._key[1]}: its state {self._file} is at version {self._found}, "
                f"expected version {self.version}"
            )
        return tensors

    def _mapped(self, layout: list[list[Any]]) -> Tensors:
        handle = open_own(self._file)
        try:
            storage = torch.UntypedStorage.from_file(
                path_of(handle), shared=True, nbytes=os.fstat(handle).st_size
            )
        finally:
            os.close(handle)
        out: Tensors = {}
        for name, dtype, shape, start in layout:
            flat = torch.empty(0, dtype=getattr(torch, dtype))
            flat.set_(storage, start // flat.element_size(), tuple(shape))  # type: ignore[call-overload]
            out[name] = flat
        return out


def forget_run(run_id: int) -> None:
    """Remove the state files that clients of a run left on this machine."""
    with suppress(OSError):
        remove_folder(default_folder() / f"run-{run_id}")
    for kept in (_LIVE, _TOKENS, _FIXED, _MAPS):
        for key in [key for key in kept if key[0] == run_id]:
            del kept[key]


def _layout(tensors: Tensors) -> tuple[list[list[object]], int]:
    """Lay out tensors one after the other, each at a multiple of 64 bytes."""
    layout: list[list[object]] = []
    end = 0
    for name, tensor in tensors.items():
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.numel() * tensor.element_size() // 64) * 64
    return layout, max(end, 64)


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise StateLostError(
            f"no room for a client's state: {folder} has {free:,} bytes free, {size:,} are needed; "
            "set state-dir in the node's config to another folder"
        )
