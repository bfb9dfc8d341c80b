"""Keeps the state of one SuperNode's clients between two messages, and their checkpoints.

The live object, such as modules on a GPU, is an attribute of the ``Context``. The home of the
clients (the in-process grid, or ``client.home``) keeps the context from message to
message. The bytes of its tensors last elsewhere, which ``CohortState._commit`` decides:

* up to 1 MiB (a deployment's client with one user): in ``Context.state``, which ``keep_state``
  saves if the SuperNode has a folder of its own;
* larger: in a file that is replaced as a whole after each message, in the SuperNode's folder
  (``state-dir`` or ``data-folder``) or else in shared memory;
* ``state-dir = ":memory:"`` (in one process, and in workers on Ray): nowhere.

The version, in ``Context.state``, is the number of messages handled. Older tensors raise
``StateLostError``. Newer tensors are accepted: Flower restores the old context if a step after the
handling fails (a mod, a full disk), which the server sees as a lost reply.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from flower_graph.data.description import check_clients
from flower_graph.errors import CheckpointError, StateLostError, told
from flower_graph.storage import checkpoint, files, row_file
from flower_graph.wire.arrays import Config
from flower_graph.wire.client_errors import AT_HOME
from flower_graph.wire.codec import Resume, SaveRequest
from flower_graph.wire.keys import NOT_SAVED

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph

LOG = logging.getLogger(__name__)
SMALL_BYTES = 1 << 20
VERSION = "state-version"  # key of the version among the tensors of a saved file
CLIENTS, RESUMED = "clients", "clients-resumed"  # in Context.state; in a checkpoint their numbers
ROWS = ".rows"  # in the place of a checkpoint's suffix: the copy of a file of rows
KEPT_AT_CLIENT = 3  # the server may fall back to the one before the last two are complete
Tensors = dict[str, Tensor]
T = TypeVar("T")
# Makes the clients' object that works on tensors, by default those of new clients; and its tensors
Make = Callable[[Tensors | None], tuple[T, Tensors]]
# Makes the clients' tensors from a checkpoint of other clients, its tensors and their numbers; None
# if they do not suffice
Adopt = Callable[[Tensors, Tensor], Tensors | None]


@dataclass
class Live:
    """The object that this process has of a SuperNode's clients; it needs no reload."""

    version: int = 0  # of the object; 0 while a message changes it
    held: Any = None  # the object and its tensors
    # Of a method: the bytes of a further part of the state, and the object that was read from them
    beside: tuple[Any, Any] = field(default=(None, None), repr=False)

    def __reduce__(self) -> tuple[type[Live], tuple[()]]:
        return Live, ()  # a context that Ray sends goes without it


def forget_run(run_id: int) -> None:
    """Remove the state files that clients of a run left on this machine."""
    with suppress(OSError):
        files.remove_folder(files.default_folder() / f"run-{run_id}")


class CohortState(Generic[T]):
    """Keeps an object and its tensors between messages, and writes and reads its checkpoints.

    ``make`` returns the object that works on tensors in place, and the tensors. A checkpoint has
    the clients' ``numbers`` too, and a copy of the file ``rows``, where clients have numbers in one
    (``storage.row_file``). Without ``copies``, for millions of users, a failed message loses what
    is not in a file.
    """

    # With ``state-dir`` or ``data-folder`` in the node's config, the last three checkpoints are in
    # the SuperNode's folder; without, in the server's folder, and the server drops old ones.

    def __init__(
        self,
        context: Context,
        numbers: Sequence[int] | Tensor,
        folder: Path | None,
        make: Make[T],
        *,
        copies: bool = True,
        rows: Path | None = None,
    ) -> None:
        self._context, self._make, self._copies, self._rows = context, make, copies, rows
        self._numbers = torch.as_tensor(numbers, dtype=torch.int64)
        self._own, self._sealed = files.own_place(context), files.state_key(context)
        self._shared = folder
        # A SuperNode that is started anew may have another id; without a folder its state is gone.
        node = f"node-{context.node_id}" if self._own is None else files.node_name(context)
        self._folder = (self._own or files.default_folder()) / f"run-{context.run_id}"
        self._file = self._folder / f"{CLIENTS}-{node}.safetensors"

    @property
    def version(self) -> int:
        record = self._context.state.config_records.get(CLIENTS)
        return 0 if record is None else int(record["version"])  # type: ignore[arg-type]

    @property
    def live(self) -> Live:
        live: Live = vars(self._context).setdefault("live", Live())
        return live

    @contextmanager
    def opened(self, *, follows: bool = False) -> Iterator[T]:
        """Yield the object. Keep its changes only if the block ends without an error."""
        if follows and not self.version:  # the server says that there were earlier messages
            raise StateLostError("its state of this run is gone; name a state-dir in node-config")
        held, tensors = self._open()
        before = None  # needed only where no bytes last
        if self._copies and self._in_process:
            before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        live = self.live
        version, live.version = live.version, 0
        try:
            yield held
        except BaseException:
            if before is not None:  # the object may hold more state than tensors
                live.held, live.version = self._make(before), version
            raise
        self._commit(held, tensors)

    def look(self) -> T:
        return self._open()[0]

    def tensors(self) -> Tensors:
        return self._open()[1]

    def replace(self, tensors: Tensors) -> None:
        """Make the object anew, with some of its tensors replaced by others of their form."""
        self._commit(*self._make(self._open()[1] | tensors))

    def processed(self) -> int:
        try:
            if self.version:
                self._open()
        except StateLostError as error:
            LOG.warning("%s: its clients begin anew", error)
            self.drop()
        return self.version

    def drop(self, *more: str) -> None:
        """Forget what clients have learnt, and further records of the context's state."""
        vars(self._context).pop("live", None)
        for record in (CLIENTS, RESUMED, *more):
            self._context.state.pop(record, None)
        for file in filter(None, (self._file, self._rows)):  # of rows the checkpoints have copies
            files.remove(file)
            files.remove_empty(file.parent)

    # Checkpoints

    def save(self, server_round: int, run: str) -> str:
        """Write a round's checkpoint; return an error message, or an empty string."""
        held, tensors = self._open()
        if not self.version:  # not known before the first message
            self._commit(held, tensors)
        path = self.checkpoint_file(server_round, run)
        try:
            if self._own is not None:
                files.own_folder(path.parent, self._own)
            if self._rows is not None:
                row_file.copy(self._rows, path.with_suffix(ROWS))
            saved = tensors | {CLIENTS: self._numbers}
            checkpoint.save_client(path, saved, run, self._sealed)
        except OSError as error:
            LOG.warning("%s: no checkpoint: %s", path, error)
            # The error's text names files
            why = os.strerror(error.errno) if error.errno else AT_HOME
            return f"its checkpoint cannot be written: {why}"
        if self._own is not None:
            saves = path.parent.parent.glob(f"round-*/{path.name}")
            for old in checkpoint.rounds_of(file.parent for file in saves)[:-KEPT_AT_CLIENT]:
                file = self.checkpoint_file(old, run)
                files.remove(file)
                files.remove(file.with_suffix(ROWS))
                files.remove_empty(file.parent)
        return ""

    def save_asked(self, config: Config) -> dict[str, str]:
        """Write the checkpoint that a message asks for; return the answer's entry if it failed."""
        asked = SaveRequest.from_config(config)
        why = self.save(asked.server_round, asked.run)
        return {NOT_SAVED: why} if why else {}

    def checkpoint_file(self, server_round: int, run: str) -> Path:
        folder = self._shared
        if self._own is not None:
            folder = self._own / "checkpoints" / run
        if folder is None:
            why = "no place for a checkpoint: set checkpoint_dir, state-dir or data-folder"
            raise told(CheckpointError(why), why)
        name = f"client-{files.node_name(self._context)}.safetensors"
        return checkpoint.round_folder(folder, server_round) / name

    def is_due(self, resume: Resume) -> bool:
        # A client that is asked again under another node id has loaded it before.
        loaded = self._context.state.config_records.get(RESUMED)
        return bool(resume.server_round) and dict(loaded or {}) != resume.to_config()

    def restore(self, resume: Resume, adopt: Adopt | None = None) -> bool:
        """Go on from the checkpoint that a resumed server names, once; return whether it did."""
        if not self.is_due(resume):
            return False
        path = self.checkpoint_file(resume.server_round, resume.run)
        kept = checkpoint.load_client(path, resume.run, self._sealed)
        numbers = kept.pop(CLIENTS, torch.zeros(0))
        if not torch.equal(numbers, self._numbers):
            if adopt is None or (adopted := adopt(kept, numbers)) is None:
                raise checkpoint.refused(path, "of other clients; resume with the same SuperNodes")
            kept = adopted
        if self._copies and forms_of(kept) != forms_of(self._make(None)[1]):
            raise checkpoint.refused(path, "made with other data or settings")
        if self._rows is not None:
            try:
                row_file.copy(path.with_suffix(ROWS), self._rows)
            except OSError as error:
                raise checkpoint.refused(path, "without its rows", f": {error}") from error
        self._commit(*self._make(kept))
        self._note(resume)
        return True

    def begin(self, resume: Resume) -> None:
        """Start fresh in a resumed run: the clients joined after its checkpoint."""
        if self.is_due(resume):
            self.drop()
            self._note(resume)

    def _note(self, resume: Resume) -> None:
        self._context.state[RESUMED] = ConfigRecord(resume.to_config())

    # Where the tensors are

    @property
    def _in_process(self) -> bool:
        return self._context.node_config.get(files.STATE_DIR) == files.IN_PROCESS

    def _open(self) -> tuple[T, Tensors]:
        if not self.version:
            return self._make(None)
        live = self.live
        if live.version < self.version:
            live.held, live.version = self._make(self._read()), self.version
        return cast(tuple[T, Tensors], live.held)

    def _read(self) -> Tensors:
        context, who = self._context, f"client {self._context.node_id}: its state is lost"
        if self._in_process:
            raise StateLostError(f"{who}, or half changed")
        small = context.state.config_records[CLIENTS].get("tensors")
        if isinstance(small, bytes):
            return load(small)
        try:
            tensors = checkpoint.load_client(self._file, str(context.run_id), self._sealed)
        except CheckpointError as error:
            raise StateLostError(f"{who}: {error}") from error
        if (found := int(tensors.pop(VERSION, torch.tensor(-1)))) < self.version:
            versions = f"has version {found}, expected version {self.version}"
            raise StateLostError(f"{who}: {self._file} {versions}")
        return tensors

    def _commit(self, held: T, tensors: Tensors) -> None:
        version = self.version + 1
        record = ConfigRecord({"version": version})
        if self._in_process:
            pass
        elif sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_BYTES:
            record["tensors"] = save(checkpoint.on_processor(tensors))
        else:
            files.own_folder(self._folder)
            numbered = tensors | {VERSION: torch.tensor(version)}
            run = str(self._context.run_id)
            checkpoint.save_client(self._file, numbered, run, self._sealed)
        self._context.state[CLIENTS] = record
        self.live.held, self.live.version = (held, tensors), version


def places_of(own: Tensor, users: NDArray[np.integer]) -> Tensor:
    """Return where users are among a SuperNode's own; ``ValueError`` if one is not there."""
    local = own.numpy()
    if np.array_equal(users, local):
        return torch.arange(users.size)
    order = np.argsort(local)
    place = order.take(np.searchsorted(local, users, sorter=order), mode="clip")
    if not np.array_equal(local[place], users):
        raise ValueError("the message names users that this client does not host")
    return torch.from_numpy(place)


def forms_of(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and type of each tensor."""
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def check_graphs(graphs: Sequence[ClientGraph]) -> list[ClientGraph]:
    """Refuse no graphs, and two of one client; return them in the order of the clients."""
    if not graphs:
        raise ValueError("graphs: none is given; a SuperNode hosts at least one client")
    numbers = [graph.client for graph in graphs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"graphs: client numbers {numbers!s:.60} are not all different")
    check_clients(graphs)
    return sorted(graphs, key=lambda graph: graph.client)
