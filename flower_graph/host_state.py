"""What a SuperNode's clients keep: changed whole or not at all, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from flower_graph.checkpoint import ClientCheckpoints
from flower_graph.errors import CheckpointError
from flower_graph.records.resume import Resume
from flower_graph.state import StateStore, Tensors

if TYPE_CHECKING:
    from flwr.app import Context

T = TypeVar("T")
CLIENTS = "clients"  # in a checkpoint
Build = Callable[[Tensors], tuple[T, Tensors]]


class HostState(Generic[T]):
    """Keeps an object and its tensors behind the ClientApp's context.

    Parameters
    ----------
    context : Context
        The ClientApp's.
    name : str
        Record name in the context, one per kind of client.
    clients : sequence of int
        Numbers of the clients here.
    folder : Path or None
        The server's folder of checkpoints, if client and server share one.
    """

    def __init__(
        self, context: Context, name: str, clients: Sequence[int], folder: Path | None
    ) -> None:
        self._store, self._checkpoints = (
            StateStore(context, name),
            ClientCheckpoints(context, folder),
        )
        self._clients = torch.tensor(list(clients))

    @contextmanager
    def opened(self, start: Callable[[], Tensors], build: Build[T]) -> Iterator[T]:
        """Work with the object; what changed counts when the block ends well.

        Parameters
        ----------
        start : callable
            Makes the tensors of clients that are new.
        build : callable
            Makes the object from tensors; returns both, the tensors where the object has them.
        """
        live, tensors = self._open(start, build)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        self._store.begin()
        try:
            yield live
        except BaseException:
            # A client that failed half way goes back to where it was, and can take part again.
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(before[name])
            built = build(tensors)  # the object may remember more than its tensors
            self._store.commit(built, built[1])
            raise
        self._store.commit((live, tensors), tensors)

    def save(
        self, server_round: int, run: str, start: Callable[[], Tensors], build: Build[T]
    ) -> str:
        """Write a round's checkpoint; return why it cannot be written, or nothing."""
        opened = self._open(start, build)
        if not self._store.version:
            self._store.commit(opened, opened[1])
        return self._checkpoints.save(server_round, opened[1] | {CLIENTS: self._clients}, run)

    def restore(self, resume: Resume, start: Callable[[], Tensors], build: Build[T]) -> None:
        """Go on from a round's checkpoint, once an attempt: asked again, they have gone on since.

        Raises
        ------
        CheckpointError
            If there is none, or it is damaged, of another run or of other clients.
        """
        if not self._store.is_due(resume):
            return
        tensors = self._checkpoints.load(resume.server_round, resume.run)
        path = self._checkpoints.path(resume.server_round, resume.run)
        if not torch.equal(tensors.pop(CLIENTS), self._clients):
            raise CheckpointError(
                f"{path}: other clients; resume with as many SuperNodes as before"
            )
        _check_forms(path, tensors, start())
        built = build(self._store.create(tensors))
        self._store.commit(built, built[1])
        self._store.note(resume)

    def handled(self, start: Callable[[], Tensors], build: Build[T]) -> int:
        """Return how many messages the clients have behind them; 0 if what they kept is lost."""
        return self._store.handled(lambda: self._open(start, build))

    def drop(self) -> None:
        """Forget the run."""
        self._store.drop()

    def _open(self, start: Callable[[], Tensors], build: Build[T]) -> tuple[T, Tensors]:
        if self._store.version:
            found: tuple[T, Tensors] = self._store.load(build)
            return found
        return build(self._store.create(start()))


def _check_forms(path: Path, found: Tensors, wanted: Tensors) -> None:
    """Refuse tensors that other data or settings made; names the tensor."""
    for name in {**wanted, **found}:
        forms = [
            (tuple(own[name].shape), own[name].dtype) if name in own else None
            for own in (found, wanted)
        ]
        if forms[0] != forms[1]:
            raise CheckpointError(f"{path}: {name} is {forms[0]}, expected {forms[1]}")
