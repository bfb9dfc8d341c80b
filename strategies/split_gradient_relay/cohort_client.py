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

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import Tensors
from flower_graph.messages.fields import Resume
from flower_graph.ops.active_rows import ActiveRows, pack, pack_csr
from flower_graph.strategies.split_gradient_relay.users import (
    Cohort,
    LinearCohort,
    ModuleCohort,
    UserSettings,
)

if TYPE_CHECKING:
    from flwr.app import Context


# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
GRADIENT_ROUND, AVERAGE_ROUND = "gradient-round", "average-round"
Opened = tuple[Cohort, Tensors]


@dataclass
class ChosenUsers:
    """The users that one message is about."""

    cohort: Cohort  # All users of the client
    tensors: Tensors  # The cohort's tensors and the two round counters
    place: Tensor  # [p] places of the chosen users in the cohort

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


class UserCohortClient:
    """Keeps the users of one client from message to message."""

    # Parameters are those of ``NodeClient``.

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
        self._state = CohortState[Opened](
            context, "node-client", self.users, checkpoint_dir, key="users", copies=False
        )

    def weight_shape(self, settings: UserSettings) -> tuple[int, int]:
        """Return the shape of one user's weights as they are averaged."""
        if self._model is not None:
            return sum(p.numel() for p in self._model.parameters()), 1
        return self._x.shape[1] + int(settings.bias), settings.latent_size

    def handled(self, settings: UserSettings) -> int:
        """Return how many messages the users have behind them; 0 if their state is lost, too."""
        return self._state.processed(self._makers(settings))

    @contextmanager
    def message(
        self, settings: UserSettings, users: NDArray[Any], *, follows: bool = False
    ) -> Iterator[ChosenUsers]:
        """Open the state for one message; it counts as handled when the block ends well."""
        # users [p]
        place = self._places(users)
        with self._state.opened(self._makers(settings), follows=follows) as (cohort, tensors):
            yield ChosenUsers(cohort, tensors, place)

    def save(self, settings: UserSettings, server_round: int, run: str) -> str:
        """Write the round's checkpoint of these users; return why it cannot be done, or nothing."""
        return self._state.save(server_round, run, self._makers(settings))

    def restore(self, settings: UserSettings, resume: Resume) -> None:
        """Go on from the checkpoint of these users that the server names, if it names one."""
        self._state.restore(resume, self._makers(settings))

    def drop(self) -> None:
        """Forget the run."""
        self._state.drop()

    def _makers(self, settings: UserSettings) -> Makers[Opened]:
        def start() -> Tensors:
            never = torch.zeros(self.users.numel(), dtype=torch.int32)
            rounds = {GRADIENT_ROUND: never, AVERAGE_ROUND: never.clone()}
            return self._cohort(settings, None).tensors() | rounds

        def build(tensors: Tensors) -> tuple[Opened, Tensors]:
            tensors = self._placed(tensors)
            return (self._cohort(settings, tensors), tensors), tensors

        return Makers(start, build)

    def _placed(self, tensors: Tensors) -> Tensors:
        """Move weights to the device; the round counters stay with the CPU's bookkeeping."""
        counters = (GRADIENT_ROUND, AVERAGE_ROUND)
        return {k: t if k in counters else t.to(self._device) for k, t in tensors.items()}

    def _cohort(self, settings: UserSettings, tensors: Tensors | None) -> Cohort:
        if self._model is not None:
            return ModuleCohort(self._x.to(self._device), self._model, settings, tensors)
        rows = self._state.store.once(lambda: self._pack(settings.bias))
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
        result = torch.searchsorted(self.users[order], wanted).clamp(max=order.numel() - 1)
        place = order[result]
        if not torch.equal(self.users[place], wanted):
            raise ValueError("the message names users that this client does not host")
        return place
