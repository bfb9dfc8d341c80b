"""The state of one SuperNode's clients. A message changes all of it or nothing."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flower_graph.client.state import StateStore, Tensors
from flower_graph.data.checked import check_clients
from flower_graph.errors import CheckpointError, StateLostError, brief, told
from flower_graph.storage import checkpoint
from flower_graph.storage.files import own_folder
from flower_graph.storage.places import node_name, own_place, state_key
from flower_graph.storage.writing import remove, remove_empty
from flower_graph.wire.client_errors import AT_HOME
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CHECKPOINT, NOT_SAVED, RUN_TOKEN, SERVER_ROUND
from flower_graph.wire.numpy_client import Config, Measurements

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.data.partition.client_graphs import ClientGraph
    from flower_graph.data.partition.ego_networks import EgoNetwork

T = TypeVar("T")
G = TypeVar("G", bound="ClientGraph | EgoNetwork")
LOG = logging.getLogger(__name__)
KEPT_AT_CLIENT = 3  # the server may fall back to the one before the last two are complete
# Makes the clients' tensors from a checkpoint of other clients: its tensors, its clients' numbers
# and its other tensors; None if they do not suffice
Adopt = Callable[[Tensors, Tensor, Tensors], Tensors | None]


class Makers(NamedTuple, Generic[T]):
    """Two functions that make a cohort; their settings may come with a message."""

    start: Callable[[], Tensors]  # returns the tensors of new clients
    build: Callable[
        [Tensors], tuple[T, Tensors]
    ]  # returns the object that works on the tensors, and the tensors


class CohortState(Generic[T]):
    """Keeps an object and its tensors between messages.

    A checkpoint has the clients' numbers, ``numbers``, under the name ``key``. Without ``copies``,
    for millions of users, a failed message loses the clients' state.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        numbers: Sequence[int] | Tensor,
        folder: Path | None,
        *,
        key: str = "clients",
        copies: bool = True,
        prefix: str = "",  # prefix of these tensors' names in a checkpoint that has others too
        beside: str = "",  # name of another tensor in it, if these have no prefix
    ) -> None:
        self.store = StateStore(context, name)
        self._checkpoints = ClientCheckpoints(context, folder)
        self._numbers = torch.as_tensor(numbers, dtype=torch.int64)
        self._key, self._copies, self._prefix, self._beside = key, copies, prefix, beside

    @contextmanager
    def opened(self, makers: Makers[T], *, follows: bool = False) -> Iterator[T]:
        """Yield the object. Keep its changes only if the block ends without an error."""
        if follows:  # the server says that there were earlier messages
            self.store.expect()
        live, tensors = self._open(makers)
        before = {name: tensor.clone() for name, tensor in tensors.items() if self._copies}
        self.store.begin()
        try:
            yield live
            self._collect(live, tensors)
        except BaseException:
            # The state goes back to what it was, so that the client can take part again.
            if self._copies:
                with torch.no_grad():
                    for name, tensor in before.items():
                        tensors[name].copy_(tensor)
                self.store.undo(
                    makers.build(tensors)
                )  # the object may hold more state than tensors
            raise
        self.store.commit((live, tensors), tensors)

    def look(self, makers: Makers[T]) -> T:
        return self._open(makers)[0]

    def save(
        self, server_round: int, run: str, makers: Makers[T], more: Tensors | None = None
    ) -> str:
        """Write a round's checkpoint; return an error message, or an empty string."""
        opened = self._open(makers)
        if not self.store.version:  # not known before the first message
            self.store.commit(opened, opened[1])
        local = {f"{self._prefix}{name}": tensor for name, tensor in opened[1].items()}
        result = local | {self._key: self._numbers} | (more or {})
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
        tensors = self._checkpoints.load(resume.server_round, resume.run)
        path = self._checkpoints.path(resume.server_round, resume.run)
        numbers = tensors.pop(self._key)
        cut, local = len(self._prefix), [name for name in tensors if name.startswith(self._prefix)]
        local = [name for name in local if name != self._beside]
        kept = {name[cut:]: tensors.pop(name) for name in local}
        if not torch.equal(numbers, self._numbers):
            if adopt is None or (adopted := adopt(kept, numbers, tensors)) is None:
                why = f"other {self._key}; resume with the same, on as many SuperNodes as before"
                raise told(CheckpointError(f"{path}: {why}"), f"its checkpoint: {why}")
            kept = adopted
        if self._copies:
            _check_forms(path, kept, makers.start())
        built = makers.build(self.store.create(kept))
        self.store.commit(built, built[1])
        self.store.note(resume)
        return tensors

    def begin(self, resume: Resume) -> None:
        """Start fresh in a resumed run: the clients joined after its checkpoint."""
        if self.store.is_due(resume):
            self.store.drop()
            self.store.note(resume)

    def processed(self, makers: Makers[T]) -> int:
        """Return the number of messages handled; 0 if the state is lost."""
        try:
            if self.store.version:
                self._open(makers)
        except StateLostError as error:
            LOG.warning("%s: its clients begin anew", error)
            self.store.drop()
        return self.store.version

    def drop(self) -> None:
        self.store.drop()

    def _collect(self, live: T, tensors: Tensors) -> None:
        """Write the object's changes into the tensors, unless it works on them in place."""

    def _open(self, makers: Makers[T]) -> tuple[T, Tensors]:
        if self.store.version:
            result: tuple[T, Tensors] = self.store.load(makers.build)
            return result
        return makers.build(self.store.create(makers.start()))


def _check_forms(path: Path, loaded: Tensors, wanted: Tensors) -> None:
    """Refuse tensors made with other data or settings; the error names the tensor."""
    for name in {**wanted, **loaded}:
        forms = [
            (tuple(local[name].shape), local[name].dtype) if name in local else None
            for local in (loaded, wanted)
        ]
        if forms[0] != forms[1]:
            error = CheckpointError(f"{path}: {name} is {forms[0]}, expected {forms[1]}")
            raise told(error, "its checkpoint: made with other data or settings")


def check_graphs(graphs: Sequence[G], *, all_train: bool = True) -> list[G]:
    """Refuse graphs that cannot train, if all must; the error names the client."""
    if not graphs:
        raise ValueError("graphs: none is given; a SuperNode hosts at least one client")
    numbers = [graph.client for graph in graphs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"graphs: client numbers {numbers!s:.60} are not all different")
    for graph in graphs:
        if all_train and not graph.train_mask.any():
            raise ValueError(f"client {graph.client} has no training node: it cannot train")
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
        return checkpoint.round_folder(self._folder(run), server_round) / self._file_name

    def save(self, server_round: int, tensors: dict[str, Tensor], run: str) -> str:
        path = self.path(server_round, run)
        try:
            if self._own is not None:
                own_folder(path.parent, self._own)
            checkpoint.save_client(path, tensors, run, self._sealed)
        except OSError as error:
            LOG.warning("%s: no checkpoint: %s", path, error)
            why = (
                os.strerror(error.errno) if error.errno else AT_HOME
            )  # the error's text names files
            return f"its checkpoint cannot be written: {why}"
        if self._own is not None:
            run_folder = self._folder(run)
            files = run_folder.glob(f"round-*/{self._file_name}")
            kept = checkpoint.rounds_of(file.parent for file in files)
            for old in kept[:-KEPT_AT_CLIENT]:
                round_folder = checkpoint.round_folder(run_folder, old)
                remove(round_folder / self._file_name)
                remove_empty(round_folder)  # unless other SuperNodes have files there
        return ""

    def load(self, server_round: int, run: str) -> dict[str, Tensor]:
        return checkpoint.load_client(self.path(server_round, run), run, self._sealed)

    def _folder(self, run: str) -> Path:
        if self._own is not None:
            # The token comes with a message: it must not lead out of this folder.
            if not re.fullmatch(r"[0-9a-f]{32}", run):
                raise CheckpointError(f"run token: {brief(run)} is not 32 hexadecimal digits")
            return self._own / "checkpoints" / run
        if self._shared is None:
            why = (
                "the server wants a checkpoint, but checkpoint_dir is not set, and the node's "
                "config has neither state-dir nor data-folder"
            )
            raise told(CheckpointError(why), why)
        return self._shared
