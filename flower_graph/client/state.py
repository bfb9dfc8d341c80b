"""Keeps the state of one SuperNode's clients between two messages, and their checkpoints.

Flower keeps state in ``Context.state``, but sends a context with every message: through Ray, or to
and from the process that runs the ClientApp. So the place depends on size and node config:

* up to 1 MiB (a deployment's client with one user): in ``Context.state`` itself, which
  ``keep_state`` saves if the SuperNode has a folder of its own;
* larger: in a file that is replaced as a whole after each message, in the SuperNode's folder
  (``state-dir`` or ``data-folder``) or else in shared memory;
* ``state-dir = ":memory:"`` (the in-process engine): in this process.

The version, in ``Context.state``, is the number of messages handled. Older tensors raise
``StateLostError``. Newer tensors are accepted: Flower restores the old context if a step after the
handling fails (a mod, a full disk), which the server sees as a lost reply.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flower_graph.data.description import check_clients
from flower_graph.errors import CheckpointError, StateLostError, brief, told
from flower_graph.storage import checkpoint
from flower_graph.storage.files import (
    IN_PROCESS,
    STATE_DIR,
    default_folder,
    node_name,
    own_folder,
    own_place,
    state_key,
)
from flower_graph.storage.writing import remove, remove_empty, remove_folder
from flower_graph.wire.arrays import Config, Measurements, encode_array
from flower_graph.wire.client_errors import AT_HOME
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CHECKPOINT, NOT_SAVED, RUN_TOKEN, SERVER_ROUND

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph, EgoNetwork

LOG = logging.getLogger(__name__)
SMALL_BYTES = 1 << 20
VERSION = "state-version"  # key of the version among the tensors of a saved file
CONTEXT, SAVED, PROCESS = "context", "saved", "process"  # where the tensors are
# In a checkpoint: the clients' numbers, and what stands before the names of further tensors
NUMBERS, BESIDE = "clients", "beside/"
KEPT_AT_CLIENT = 3  # the server may fall back to the one before the last two are complete
Tensors = dict[str, Tensor]
T = TypeVar("T")
G = TypeVar("G", bound="ClientGraph | EgoNetwork")
# Makes the clients' tensors from a checkpoint of other clients: its tensors, its clients' numbers
# and its other tensors; None if they do not suffice
Adopt = Callable[[Tensors, Tensor, Tensors], Tensors | None]

# Live objects of this process, by (run, node), with their version and what tells that the kept
# tensors are theirs: the context's token, or the file's inode and time. They need no reload.
_LIVE: dict[tuple[int, int], tuple[int, object, str]] = {}
_FIXED: dict[tuple[int, int], object] = {}


class StateStore:
    """Keeps a client's object and its tensors from message to message."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name
        self._key = (context.run_id, context.node_id)
        self._in_process = context.node_config.get(STATE_DIR, "") == IN_PROCESS
        own, self._sealed = own_place(context), state_key(context)
        # A SuperNode that is started anew may have another id; without a folder its state is gone.
        node = f"node-{context.node_id}" if own is None else node_name(context)
        self._folder = (own or default_folder()) / f"run-{context.run_id}"
        self._file = self._folder / f"{name}-{node}.safetensors"
        self._found = 0  # version of the loaded tensors

    @property
    def version(self) -> int:
        record = self._context.state.config_records.get(self._name)
        return 0 if record is None else int(record["version"])  # type: ignore[arg-type]

    def is_due(self, resume: Resume) -> bool:
        # A client that is asked again under another node id has loaded it before.
        loaded = self._context.state.config_records.get(f"{self._name}-resumed")
        return bool(resume.server_round) and dict(loaded or {}) != resume.to_config()

    def note(self, resume: Resume) -> None:
        self._context.state[f"{self._name}-resumed"] = ConfigRecord(resume.to_config())

    # Any: what is kept is of the class that ``build`` makes, in this process or an earlier call
    def load(self, build: Callable[[Tensors], object]) -> Any:
        """Return the live object, rebuilt from its tensors if this process does not have it."""
        record, who = self._context.state.config_records[self._name], f"client {self._key[1]}"
        kind, mark = str(record["kind"]), str(record["token"])
        if kind == SAVED:
            mark = self._mark()
        version, live, own = _LIVE.get(self._key, (0, None, ""))
        # If Flower restored an old context, a version may exist twice, but not a mark.
        if version >= self.version and (kind == PROCESS or own == mark):
            self._found = version
            return live
        if kind == PROCESS:
            raise StateLostError(f"{who}: its state is gone, or half changed")
        if kind == CONTEXT:
            arrays = self._context.state.array_records[f"{self._name}-tensors"]
            tensors = {k: torch.from_numpy(v.numpy().copy()) for k, v in arrays.items()}
            self._found = self.version
        else:
            try:
                tensors = checkpoint.load_client(self._file, str(self._key[0]), self._sealed)
            except CheckpointError as error:
                raise StateLostError(f"{who}: its state is lost: {error}") from error
            self._found = int(tensors.pop(VERSION, torch.tensor(-1)))
            if self._found < self.version:
                versions = f"has version {self._found}, expected version {self.version}"
                raise StateLostError(f"{who}: {self._file} {versions}")
        live = build(tensors)
        _LIVE[self._key] = (self._found, live, mark)
        return live

    def once(self, build: Callable[[], T]) -> T:
        """Return an object that stays the same during a run; build it once a process."""
        if self._key not in _FIXED:
            _FIXED[self._key] = build()
        return cast(T, _FIXED[self._key])

    @contextmanager
    def changing(self, undone: Callable[[], object]) -> Iterator[None]:
        """Forget the object while a message changes it; after an error keep ``undone()``."""
        before = _LIVE.pop(self._key, None)
        try:
            yield
        except BaseException:
            live = undone()
            if self.version and before is not None and live is not None:
                _LIVE[self._key] = (self._found, live, before[2])
            raise

    def commit(self, live: object, tensors: Tensors) -> None:
        version, mark = max(self._found, self.version) + 1, secrets.token_hex(8)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        kind = PROCESS if self._in_process else CONTEXT if size <= SMALL_BYTES else SAVED
        record = ConfigRecord({"version": version, "kind": kind, "token": mark})
        if kind == SAVED:
            own_folder(self._folder)
            numbered = tensors | {VERSION: torch.tensor(version)}
            checkpoint.save_client(self._file, numbered, str(self._key[0]), self._sealed)
            mark = self._mark()
        elif kind == CONTEXT:
            small = {n: encode_array(n, t.detach().cpu().numpy()) for n, t in tensors.items()}
            self._context.state[f"{self._name}-tensors"] = ArrayRecord(small)
        self._context.state[self._name] = record
        _LIVE[self._key] = (version, live, mark)

    def drop(self) -> None:
        for kept in (_LIVE, _FIXED):
            kept.pop(self._key, None)
        for record in (self._name, f"{self._name}-tensors", f"{self._name}-resumed"):
            self._context.state.pop(record, None)
        remove(self._file)
        remove_empty(self._folder)

    def _mark(self) -> str:
        """Return what tells the file from every other; "" if it is gone."""
        with suppress(FileNotFoundError):
            result = self._file.stat()
            return f"{result.st_ino} {result.st_mtime_ns}"
        return ""


def forget_run(run_id: int) -> None:
    """Remove the state files that clients of a run left on this machine."""
    with suppress(OSError):
        remove_folder(default_folder() / f"run-{run_id}")
    for kept in (_LIVE, _FIXED):
        for key in [key for key in kept if key[0] == run_id]:
            del kept[key]


# A cohort -----------------------------------------------------------------------------------------


class Makers(NamedTuple, Generic[T]):
    """Two functions that make a cohort; their settings may come with a message."""

    start: Callable[[], Tensors]  # returns the tensors of new clients
    # returns the object that works on the tensors, and the tensors
    build: Callable[[Tensors], tuple[T, Tensors]]


class CohortState(Generic[T]):
    """Keeps an object and its tensors between messages.

    A checkpoint has the clients' ``numbers`` too. Without ``copies``, for millions of users, a
    failed message loses what is not in a file.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        numbers: Sequence[int] | Tensor,
        folder: Path | None,
        *,
        copies: bool = True,
    ) -> None:
        self.store = StateStore(context, name)
        self.drop = self.store.drop
        self._checkpoints = ClientCheckpoints(context, folder)
        self.rows_at = self._checkpoints.rows_at
        self._numbers = torch.as_tensor(numbers, dtype=torch.int64)
        self._copies = copies

    @contextmanager
    def opened(self, makers: Makers[T], *, follows: bool = False) -> Iterator[T]:
        """Yield the object. Keep its changes only if the block ends without an error."""
        if follows and not self.store.version:  # the server says that there were earlier messages
            raise StateLostError("its state of this run is gone; name a state-dir in node-config")
        live, tensors, spare = self._open(makers)
        before = _copied(tensors, spare) if self._copies else {}

        @torch.no_grad()
        def undone() -> object:
            """Take the state back to what it was, so that the client can take part again."""
            for name, tensor in before.items():
                tensors[name].copy_(tensor)
            # The object may hold more state than tensors
            return (*makers.build(tensors), before) if self._copies else None

        with self.store.changing(undone):
            yield live
            self._collect(live, tensors)
        self.store.commit((live, tensors, before), tensors)

    def look(self, makers: Makers[T]) -> T:
        return self._open(makers)[0]

    def save(
        self, server_round: int, run: str, makers: Makers[T], more: Tensors | None = None
    ) -> str:
        """Write a round's checkpoint; return an error message, or an empty string."""
        opened = self._open(makers)
        if not self.store.version:  # not known before the first message
            self.store.commit(opened, opened[1])
        beside = {f"{BESIDE}{name}": tensor for name, tensor in (more or {}).items()}
        result = opened[1] | {NUMBERS: self._numbers} | beside
        return self._checkpoints.save(server_round, result, run)

    def save_if_asked(
        self, config: Config, answer: Measurements, makers: Makers[T]
    ) -> Measurements:
        if not config.get(CHECKPOINT):
            return answer
        loss, weight, metrics = answer
        why = self.save(int(config[SERVER_ROUND]), str(config[RUN_TOKEN]), makers)
        return (loss, weight, metrics | {NOT_SAVED: why}) if why else answer

    def restore(
        self, resume: Resume, makers: Makers[T], adopt: Adopt | None = None
    ) -> Tensors | None:
        # A resumed server names one; a client loads it once.
        if not self.store.is_due(resume):
            return None
        path = self._checkpoints.path(resume.server_round, resume.run)
        tensors = self._checkpoints.load(resume.server_round, resume.run)

        def refused(detail: str, why: str = "") -> CheckpointError:
            return told(CheckpointError(f"{path}: {detail}"), f"its checkpoint: {why or detail}")

        if (numbers := tensors.pop(NUMBERS, None)) is None:
            raise refused("of another version")
        kept = {name: tensors.pop(name) for name in [*tensors] if not name.startswith(BESIDE)}
        beside = {name.removeprefix(BESIDE): tensor for name, tensor in tensors.items()}
        if not torch.equal(numbers, self._numbers):
            if adopt is None or (adopted := adopt(kept, numbers, beside)) is None:
                raise refused("other clients; resume with the same, on as many SuperNodes")
            kept = adopted
        if self._copies:
            found, expected = forms_of(kept), forms_of(makers.start())
            for name in expected | found:
                if found.get(name) != expected.get(name):
                    forms = f"{name} is {found.get(name)}, expected {expected.get(name)}"
                    raise refused(forms, "made with other data or settings")
        built = makers.build(kept)
        self.store.commit((*built, {}), built[1])
        self.store.note(resume)
        return beside

    def begin(self, resume: Resume) -> None:
        """Start fresh in a resumed run: the clients joined after its checkpoint."""
        if self.store.is_due(resume):
            self.drop()
            self.store.note(resume)

    def processed(self, makers: Makers[T]) -> int:
        try:
            if self.store.version:
                self._open(makers)
        except StateLostError as error:
            LOG.warning("%s: its clients begin anew", error)
            self.drop()
        return self.store.version

    def _collect(self, live: T, tensors: Tensors) -> None:
        """Write the object's changes into the tensors, unless it works on them in place."""

    def _open(self, makers: Makers[T]) -> tuple[T, Tensors, Tensors]:
        """Return the object, its tensors, and the copies that the last message made of them."""
        if self.store.version:
            result: tuple[T, Tensors, Tensors] = self.store.load(lambda t: (*makers.build(t), {}))
            return result
        return *makers.build(makers.start()), {}


@torch.no_grad()
def _copied(tensors: Tensors, spare: Tensors) -> Tensors:
    """Copy tensors into those of an earlier copy: fresh memory costs more than the copy."""

    def form(one: Tensor | None) -> object:
        return None if one is None else (one.shape, one.stride(), one.dtype, one.device)

    return {
        name: spare[name].copy_(one) if form(spare.get(name)) == form(one) else one.clone()
        for name, one in tensors.items()
    }


def forms_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and type of each tensor."""
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def check_graphs(graphs: Sequence[G]) -> list[G]:
    """Refuse no graphs, and two of one client; return them in the order of the clients."""
    if not graphs:
        raise ValueError("graphs: none is given; a SuperNode hosts at least one client")
    numbers = [graph.client for graph in graphs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"graphs: client numbers {numbers!s:.60} are not all different")
    check_clients(graphs)
    return sorted(graphs, key=lambda graph: graph.client)


# Checkpoints --------------------------------------------------------------------------------------


class ClientCheckpoints:
    """Writes and reads the checkpoints of one SuperNode's clients."""

    # With ``state-dir`` or ``data-folder`` in the node's config that is a folder of its own,
    # ``<state-dir>/checkpoints/<run token>/round-N``, of which it keeps the last three. Without, as
    # in a simulation, it is the server's folder, and the server drops old rounds.

    def __init__(self, context: Context, folder: Path | None) -> None:
        self._own, self._shared = own_place(context), folder
        self._sealed = state_key(context)
        self._file_name = f"client-{node_name(context)}.safetensors"

    def path(self, server_round: int, run: str) -> Path:
        if self._own is None and self._shared is None:
            why = "no place for a checkpoint: set checkpoint_dir, state-dir or data-folder"
            raise told(CheckpointError(why), why)
        # The token comes with a message: it must not lead out of the SuperNode's folder.
        if self._own is not None and not re.fullmatch(r"[0-9a-f]{32}", run):
            raise CheckpointError(f"run token: {brief(run)} is not 32 hexadecimal digits")
        folder = self._shared if self._own is None else self._own / "checkpoints" / run
        return checkpoint.round_folder(cast(Path, folder), server_round) / self._file_name

    def rows_at(self, server_round: int, run: str) -> Path:
        """Return the path of a copy of the clients' mapped numbers (``storage.row_file``)."""
        return self.path(server_round, run).with_suffix(".rows")

    def save(self, server_round: int, tensors: dict[str, Tensor], run: str) -> str:
        path = self.path(server_round, run)
        try:
            if self._own is not None:
                own_folder(path.parent, self._own)
            checkpoint.save_client(path, tensors, run, self._sealed)
        except OSError as error:
            LOG.warning("%s: no checkpoint: %s", path, error)
            # The error's text names files
            why = os.strerror(error.errno) if error.errno else AT_HOME
            return f"its checkpoint cannot be written: {why}"
        if self._own is not None:
            files = path.parent.parent.glob(f"round-*/{self._file_name}")
            for old in checkpoint.rounds_of(file.parent for file in files)[:-KEPT_AT_CLIENT]:
                for file in (self.path(old, run), self.rows_at(old, run)):
                    remove(file)
                remove_empty(self.path(old, run).parent)  # unless others have files there
        return ""

    def load(self, server_round: int, run: str) -> dict[str, Tensor]:
        return checkpoint.load_client(self.path(server_round, run), run, self._sealed)
