"""The users that one SuperNode hosts: their cohort, its state between messages, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.checkpoint import ClientCheckpoints
from flower_graph.cohort import Cohort, LinearCohort, ModuleCohort, UserSettings
from flower_graph.errors import CheckpointError
from flower_graph.ops.active_rows import ActiveRows, pack, pack_csr
from flower_graph.records.resume import Resume
from flower_graph.state import StateStore, Tensors

if TYPE_CHECKING:
    from flwr.app import Context


# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
GRADIENT_ROUND, AVERAGE_ROUND = "gradient-round", "average-round"


@dataclass
class ChosenUsers:
    """The users that one message is about.

    Attributes
    ----------
    cohort : Cohort
        All users of the client.
    tensors : dict of Tensor
        The cohort's tensors and the two round counters.
    place : Tensor
        ``[p]`` places of the chosen users in the cohort.
    """

    cohort: Cohort
    tensors: Tensors
    place: Tensor

    def take_average(self, average: NDArray[Any], average_round: int) -> None:
        """Replace the weights of those users that have not done so for that round yet."""
        seen = self.tensors[AVERAGE_ROUND]
        due = self.place[seen[self.place] < average_round]
        if due.numel():
            self.cohort.set_weights(self._unless_all(due), torch.from_numpy(average))
            seen[due] = average_round

    def step(self, gradient: NDArray[Any], gradient_round: NDArray[Any]) -> None:
        """Step those users for which the gradient ``[p, h]`` is new."""
        rounds = torch.from_numpy(gradient_round).to(torch.int32)
        seen = self.tensors[GRADIENT_ROUND]
        fresh = seen[self.place] < rounds
        due = self.place[fresh]
        if due.numel():
            wanted = torch.from_numpy(gradient)
            wanted = wanted if due.numel() == rounds.numel() else wanted[fresh]
            self.cohort.step(self._unless_all(due), wanted)
            seen[due] = rounds[fresh]

    def latent(self) -> NDArray[Any]:
        """Return the users' latent vectors, ``[p, h]``."""
        return self.cohort.forward(self._unless_all(self.place)).cpu().numpy()

    def weight_sum(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the users' weights added up, ``[f, h]``, and counted, ``[f]``."""
        total, count = self.cohort.weight_sum(self._unless_all(self.place))
        return total.cpu().numpy(), count.cpu().numpy()

    def _unless_all(self, place: Tensor) -> Tensor | None:
        """Return ``None`` where all users are meant in their order: the fast path."""
        n = self.cohort.num_users
        same = place.numel() == n and bool((place == torch.arange(n)).all())
        return None if same else place


class UserHost:
    """Keeps the users of one client from message to message.

    Parameters are those of ``NodeClient``.
    """

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        user_model: nn.Module | None,
        device: torch.device,
        checkpoint_dir: Path | None,
    ) -> None:
        if x.shape[0] != users.numel() or users.numel() == 0:
            raise ValueError(f"x has {x.shape[0]} rows for {users.numel()} users; give one each")
        self.users = users.long().cpu()
        self._x, self._model, self._device = x, user_model, device
        self._store = StateStore(context, "node-client")
        self._checkpoints = ClientCheckpoints(context, checkpoint_dir)

    def weight_shape(self, settings: UserSettings) -> tuple[int, int]:
        """Return the shape of one user's weights as they are averaged."""
        if self._model is not None:
            return sum(p.numel() for p in self._model.parameters()), 1
        return self._x.shape[1] + int(settings.bias), settings.latent_size

    def handled(self, settings: UserSettings) -> int:
        """Return how many messages the users have behind them; 0 if their state is lost, too."""
        return self._store.handled(lambda: self._open(settings))

    @contextmanager
    def message(
        self, settings: UserSettings, users: NDArray[Any], *, follows: bool = False
    ) -> Iterator[ChosenUsers]:
        """Open the state for one message; it counts as handled when the block ends well.

        Parameters
        ----------
        settings : UserSettings
            The message's settings.
        users : ndarray
            ``[p]`` numbers of the users it is about.
        follows : bool
            Whether the server knows of earlier messages, and the state must be there.

        Raises
        ------
        StateLostError
            If it is not.
        """
        place = self._places(users)
        if follows:
            self._store.expect()
        cohort, tensors = self._open(settings)
        self._store.begin()
        yield ChosenUsers(cohort, tensors, place)
        self._store.commit((cohort, tensors), tensors)

    def save(self, server_round: int, run: str) -> str:
        """Write the round's checkpoint of these users; return why it cannot be done, or nothing."""
        _, tensors = self._store.load(lambda _: None)
        return self._checkpoints.save(server_round, tensors | {"users": self.users}, run)

    def restore(self, settings: UserSettings, resume: Resume) -> None:
        """Go on from the checkpoint of these users that the server names, if it names one."""
        if not self._store.is_due(resume):
            return
        tensors = self._checkpoints.load(resume.server_round, resume.run)
        if not torch.equal(tensors.pop("users"), self.users):
            raise CheckpointError(
                f"round {resume.server_round}: other users; resume with as many SuperNodes as "
                "before"
            )
        tensors = self._store.create(self._placed(tensors))
        self._store.commit((self._cohort(settings, tensors), tensors), tensors)
        self._store.note(resume)

    def drop(self) -> None:
        """Forget the run."""
        self._store.drop()

    def _open(self, settings: UserSettings) -> tuple[Cohort, Tensors]:
        def build(tensors: Tensors) -> tuple[Cohort, Tensors]:
            tensors = self._placed(tensors)
            return self._cohort(settings, tensors), tensors

        if self._store.version:
            return self._store.load(build)  # type: ignore[no-any-return]
        never = torch.zeros(self.users.numel(), dtype=torch.int32)
        rounds = {GRADIENT_ROUND: never, AVERAGE_ROUND: never.clone()}
        return build(self._store.create(self._cohort(settings, None).tensors() | rounds))

    def _placed(self, tensors: Tensors) -> Tensors:
        """Move weights to the device; the round counters stay with the CPU's bookkeeping."""
        counters = (GRADIENT_ROUND, AVERAGE_ROUND)
        return {k: t if k in counters else t.to(self._device) for k, t in tensors.items()}

    def _cohort(self, settings: UserSettings, tensors: Tensors | None) -> Cohort:
        if self._model is not None:
            return ModuleCohort(self._x.to(self._device), self._model, settings, tensors)
        rows = self._store.once(lambda: self._pack(settings.bias))
        return LinearCohort(rows, settings, tensors)

    def _pack(self, bias: bool) -> ActiveRows:
        x = self._x
        if x.layout == torch.sparse_csr:
            parts = x.crow_indices(), x.col_indices(), x.values(), x.shape[1]
            return pack_csr(*parts, bias=bias).to(self._device)
        return pack(x, bias=bias).to(self._device)

    def _places(self, users: NDArray[Any]) -> Tensor:
        """Turn user numbers into places in this client; refuse users of others."""
        wanted = torch.from_numpy(np.ascontiguousarray(users))
        if torch.equal(wanted, self.users):
            return torch.arange(wanted.numel())
        order = torch.argsort(self.users)
        found = torch.searchsorted(self.users[order], wanted).clamp(max=order.numel() - 1)
        place = order[found]
        if not torch.equal(self.users[place], wanted):
            raise ValueError("the message names users that this client does not host")
        return place
