"""What one message does to the users that it names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.state import Tensors
from flower_graph.strategies.nfedgnn.messages import RelayRequest
from flower_graph.strategies.nfedgnn.users import Cohort

# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
GRADIENT_ROUND, AVERAGE_ROUND = "gradient-round", "average-round"


@dataclass
class ChosenUsers:
    """The users that one message names."""

    cohort: Cohort  # All users of the client
    tensors: Tensors  # The cohort's tensors and the two round counters
    place: Tensor  # [p] places of the chosen users in the cohort

    def take_average(self, average: NDArray[np.generic], average_round: int) -> None:
        """Replace the weights of the users that have not taken that round's average yet."""
        seen = self.tensors[AVERAGE_ROUND]
        due = self.place[seen[self.place] < average_round]
        if due.numel():
            self.cohort.set_weights(self._unless_all(due), torch.from_numpy(average))
            seen[due] = average_round

    def step(self, request: RelayRequest) -> None:
        """Step the users for which the request's gradient is new."""
        rounds = torch.from_numpy(request.gradient_round).to(torch.int32)
        seen = self.tensors[GRADIENT_ROUND]
        fresh = seen[self.place] < rounds
        due = self.place[fresh]
        if due.numel():
            gradient = torch.from_numpy(request.gradient)
            gradient = gradient if due.numel() == rounds.numel() else gradient[fresh]
            self.cohort.step(self._unless_all(due), gradient, request.learning_rate)
            seen[due] = rounds[fresh]

    def latent(self) -> NDArray[np.float32]:
        """Return the users' latent vectors, ``[p, h]``."""
        return self.cohort.forward(self._unless_all(self.place)).cpu().numpy()

    def weight_sum(self) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Return the users' weights added up, ``[f, h]``, and counted, ``[f]``."""
        total, count = self.cohort.weight_sum(self._unless_all(self.place))
        return total.cpu().numpy(), count.cpu().numpy()

    def _unless_all(self, place: Tensor) -> Tensor | None:
        return unless_all(place, self.cohort.num_users)


def unless_all(place: Tensor, count: int) -> Tensor | None:
    """Return the tensor of indices; ``None``, the fast path, for all users in their order."""
    # place [p]
    return None if torch.equal(place, torch.arange(count)) else place
