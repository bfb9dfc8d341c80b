"""Users' maps between rounds: rounds that were applied, rows in a file, other users, saved models.

``algorithm.py`` has what the maps compute. This file needs PyTorch alone, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_graph.ops.active_rows import ActiveRows, take
from flower_graph.ops.graph import row_entries
from flower_graph.outputs.files import SavedModels, SparseRows
from flower_graph.storage import row_file
from flower_graph.strategies.nfedgnn.algorithm import (
    ADAM_TENSORS,
    STEP,
    Maps,
    OwnMaps,
    Tensors,
    UserSettings,
)
from flower_graph.wire.keys import GRADIENT_ROUND

AT_A_TIME = 1 << 14  # users whose rows are read from a file at a time
ROWS = "rows"  # where each user's rows of weights begin, for a run that goes on with other users
# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
AVERAGE_ROUND = "average-round"
ROUNDS = (GRADIENT_ROUND, AVERAGE_ROUND)
MODULE = "flower_graph.strategies.nfedgnn.modules.UserModel"  # of saved models


def placed(tensors: Tensors, device: torch.device) -> Tensors:
    """Move tensors of maps to a device; counts of rounds stay with the CPU's bookkeeping."""
    return {name: t if name in ROUNDS else t.to(device) for name, t in tensors.items()}


def saved_models(maps: Maps, users: Sequence[int], weight: Tensor) -> SavedModels:
    """Return a linear map ``[f, h]`` that some users share; a bias is its last row."""
    bias = maps.settings.bias
    arguments = {"features": len(weight) - int(bias), "latent_size": weight.shape[1], "bias": bias}
    return SavedModels(MODULE, arguments, list(users), {"weight": weight.detach().cpu()}, {})


class HostedMaps(OwnMaps):
    """Users' own maps, with what a SuperNode notes about each user."""

    @property
    def kept(self) -> Tensors:
        """The tensors that a client keeps between messages."""
        return self.tensors

    def start(self) -> Tensors:
        return super().start() | self._notes() | {ROWS: self.rows.ptr}

    def _notes(self) -> Tensors:
        never = torch.zeros(self.rows.num_users, dtype=torch.int32)
        return {name: never.clone() for name in ROUNDS}

    def note_new(self, name: str, users: Tensor, rounds: Tensor) -> Tensor:
        """Return which users have not had a round's message yet; note that they have it now."""
        seen = self.tensors[name]
        fresh = seen[users] < rounds
        seen[users[fresh]] = rounds[fresh].to(seen)
        return fresh

    def adopt(self, saved: Tensors, theirs: Tensor, ours: Tensor) -> Tensors:
        """Take the tensors of those of our users that are among the users that were saved."""
        # theirs, ours: the numbers of both
        result, ptr = self.tensors, (self.rows.ptr.cpu(), saved.pop(ROWS))
        both = np.intersect1d(ours.numpy(), theirs.numpy(), return_indices=True)[1:]
        users = [torch.from_numpy(place) for place in both]
        rows = [row_entries(p, one)[1] for p, one in zip(ptr, users, strict=True)]
        for name, tensor in saved.items():
            here, there = rows if name in ADAM_TENSORS else users
            result[name][here] = tensor[there].to(result[name])
        return result

    def models(self, users: Sequence[int]) -> SavedModels:
        rows, tensors = self.rows, self.tensors
        inactive = tensors["inactive-weight"] if "inactive-weight" in tensors else self.first()
        weight, feature, ptr = (t.cpu() for t in (tensors["weight"], rows.feature, rows.ptr.long()))
        own = SparseRows("weight", weight, feature, ptr)
        return replace(saved_models(self, users, inactive), rows=own)


class StoredMaps(HostedMaps):
    """Users whose weights and moments are in a file, for more users than fit into memory.

    The file's numbers ``[3 r h]`` are mapped into memory. A user that was never asked has the
    common first weights, and takes no room on the disk.
    """

    def __init__(
        self,
        rows: ActiveRows,
        settings: UserSettings,
        path: Path,
        tensors: Tensors | None = None,
    ) -> None:
        self._path, self._width = path, len(ADAM_TENSORS) * settings.latent_size  # of a row
        super().__init__(rows, settings, tensors)
        self._kept = self.tensors
        numbers = row_file.mapped(path, self._width * rows.feature.numel())
        shape = len(ADAM_TENSORS), -1, settings.latent_size
        self.tensors = self._kept | dict(zip(ADAM_TENSORS, numbers.view(shape), strict=True))

    @property
    def kept(self) -> Tensors:
        return self._kept

    def start(self) -> Tensors:
        row_file.create(self._path, self._width * self.rows.feature.numel())
        return self._notes() | {STEP: torch.zeros(self.rows.num_users, dtype=torch.int32)}

    def forward(self, users: Tensor) -> Tensor:  # type: ignore[override]
        forward = super().forward
        return torch.cat([forward(part) for part in self._begun(users)])

    def step(self, users: Tensor, gradient: Tensor, rate: float) -> None:  # type: ignore[override]
        # Users with equal counts side by side step together, which is quicker.
        order = torch.argsort(self.tensors[STEP][users], stable=True)
        parts = zip(self._begun(users[order]), order.split(AT_A_TIME), strict=True)
        for part, place in parts:
            super().step(part, gradient[place], rate)

    def models(self, users: Sequence[int]) -> SavedModels:
        for _ in self._begun(torch.arange(self.rows.num_users)):
            pass
        return super().models(users)

    def check_room(self, users: Tensor) -> None:
        """Raise ``OSError`` if the disk has no room for the rows of these users."""
        rows = int((self.rows.ptr[users + 1] - self.rows.ptr[users]).sum())
        row_file.check_room(self._path, self._width * rows)

    def _begun(self, users: Tensor) -> Iterator[Tensor]:
        first = self.first()
        for part in users.split(AT_A_TIME):
            rows, place = take(self.rows, part[self.tensors[STEP][part] == 0])
            self.tensors["weight"][place] = first[rows.feature]
            yield part
