"""A cohort whose users' rows are in a file, for more users than fit into memory.

Until its first step a user has the common first weights, so the file has nothing of it. A round
reads and writes only the rows of the users that it asks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flower_graph.ops.active_rows import ActiveRows, project, take
from flower_graph.storage.row_file import RowFile, new_index
from flower_graph.strategies.nfedgnn.users import (
    ADAM_TENSORS,
    LinearCohort,
    Tensors,
    UserSettings,
    adam_step,
    shared_linear_weight,
)

AT_A_TIME = 1 << 14  # users


class StoredCohort(LinearCohort):
    """Users with a linear map each, whose rows of weights and moments are in a file."""

    def __init__(
        self, rows: ActiveRows, settings: UserSettings, tensors: Tensors, file: RowFile
    ) -> None:
        super().__init__(rows, settings, tensors)
        self.file = file
        self._begun = shared_linear_weight(rows.num_features - int(settings.bias), settings)

    def forward(self, users: Tensor | None) -> Tensor:
        count = self.num_users if users is None else users.numel()
        result = torch.empty(count, self.settings.latent_size)
        for part, local in self._parts(users):
            rows, (weight,) = self._read(local, 1)
            result[part] = project(rows, weight)
        return result

    def step(self, users: Tensor | None, gradient: Tensor, learning_rate: float) -> None:
        users = torch.arange(self.num_users) if users is None else users
        # Users with equal counts side by side step together, which is quicker.
        order = torch.argsort(self._state["step"][users], stable=True)
        for part, local in self._parts(users[order]):
            rows, whole = self._read(local, len(ADAM_TENSORS))
            self._state["step"][local] += 1
            step = self._state["step"][local]
            adam_step(
                rows, whole, gradient[order[part]], step, learning_rate, self.settings.weight_decay
            )
            self.file.write(local, rows.ptr, whole)

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Refuse: an average changes the weights of all users at once."""
        raise ValueError("users whose rows are in a file do not average their weights")

    def set_weights(self, users: Tensor | None, mean: Tensor) -> None:
        """Refuse: an average changes the weights of all users at once."""
        raise ValueError("users whose rows are in a file do not average their weights")

    def whole(self) -> Tensor:
        """Read all users' weights, ``[r, h]``, as they would be in memory."""
        return torch.cat([self._read(local, 1)[1][0] for _, local in self._parts(None)])

    def _parts(self, users: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        users = torch.arange(self.num_users) if users is None else users
        for first in range(0, users.numel(), AT_A_TIME):
            yield slice(first, first + AT_A_TIME), users[first : first + AT_A_TIME]

    def _read(self, users: Tensor, count: int) -> tuple[ActiveRows, list[Tensor]]:
        rows, _ = take(self.rows, users)
        begun = self._begun.index_select(0, rows.feature)
        parts = [begun, *(torch.zeros_like(begun) for _ in range(count - 1))]
        self.file.read(users, rows.ptr, parts)
        return rows, parts


def stored_state(num_users: int) -> Tensors:
    """Make the tensors of a cohort before its first round, for an empty file."""
    return {"step": torch.zeros(num_users, dtype=torch.int32), **new_index(num_users)}
