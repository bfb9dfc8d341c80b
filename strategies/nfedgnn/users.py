"""The users of one SuperNode as tensors, computed in one batched program.

A user has a feature vector ``x_i`` and a linear map ``W_i``. Where each user has a map of its own,
nothing in a cohort mixes users, so any assignment of users to cohorts gives the same numbers.
``LinearCohort`` has these maps, stored by active rows; ``CommonLayer`` is one map for all users.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.ops.active_rows import ActiveRows, adam_, project, sum_by_feature, take
from flower_graph.ops.adam import MOMENTS, Adam, Rates, adam_rows_
from flower_graph.ops.graph import csr_tensor, pointers, weighted_sums
from flower_graph.outputs.files import SavedModels, SparseRows
from flower_graph.rng import chances, generator
from flower_graph.storage import row_file
from flower_graph.wire.keys import GRADIENT_ROUND

Tensors = dict[str, Tensor]
# What Adam changes, by its name in a cohort's state
ADAM_TENSORS = ("weight", "exp-avg", "exp-avg-sq")
AT_A_TIME = 1 << 14  # users whose rows are read from a file at a time
ROWS = "rows"  # where each user's rows of weights begin, for a run that goes on with other users
STEP, ROUND = "step", "round"  # steps taken; of the common layer: round of the last step
# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
AVERAGE_ROUND = "average-round"
BLOCK_ROWS = 65_536  # of which features are dropped at a time, so that they stay in cache
FEATURES_OF_A_USER = 1 << 32  # at most, so that each has a number of its own
MODULE = "flower_graph.strategies.nfedgnn.modules.UserModel"  # of saved models

Numbers = TypeVar("Numbers", bound=NDArray[np.floating])


class UserSettings(NamedTuple):
    """Settings of every user's model and optimiser, sent by the server; constant in a run."""

    latent_size: int  # of a latent vector, ``h``
    bias: bool  # whether the linear map has a bias, ``x_i W_i + b_i``
    weight_decay: float  # Adam's, as in ``torch.optim.Adam``
    seed: int  # of the run: all users start from the same weights
    average_over: str = "holders"  # or "all": `LinearCohort.weight_sum`
    dropout: float = 0.0  # share of its features that a user drops, if all have one layer


def shared_linear_weight(num_features: int, settings: UserSettings) -> Tensor:
    """Draw the weights from which every user starts."""
    weight = torch.empty(num_features, settings.latent_size)
    nn.init.xavier_uniform_(weight, generator=generator(settings.seed, "user-model"))
    return torch.cat([weight, torch.zeros(int(settings.bias), settings.latent_size)])


def unmoved(weight: Tensor, prefix: str = "") -> Tensors:
    """Return weights, and Adam's moments before the first step, by their names in a state."""
    moments = {f"{prefix}{name}": torch.zeros_like(weight) for name in ADAM_TENSORS[1:]}
    return {f"{prefix}{ADAM_TENSORS[0]}": weight, **moments}


class Cohort:
    """Users, and the tensors that they learn.

    Where a method takes ``users``, ``None`` means all of them.
    """

    tensors: Tensors  # weights, moments, counts
    kept: Tensors  # those of them that the client keeps

    def __init__(self, rows: ActiveRows, settings: UserSettings) -> None:
        self.rows, self.settings = rows, settings

    def first(self) -> Tensor:
        features = self.rows.num_features - int(self.settings.bias)
        return shared_linear_weight(features, self.settings)

    def start(self) -> Tensors:
        raise NotImplementedError

    def hold(self, tensors: Tensors) -> None:
        """Work on tensors, in place; counts of rounds stay with the CPU's bookkeeping."""
        device, rounds = self.rows.value.device, (GRADIENT_ROUND, AVERAGE_ROUND)
        placed = {name: t if name in rounds else t.to(device) for name, t in tensors.items()}
        self.tensors = self.kept = placed

    def _part(self, users: Tensor | None) -> tuple[ActiveRows, Tensor | slice, Tensor | slice]:
        """Return some users' rows, and the places of users and rows in the tensors."""
        every = torch.arange(self.rows.num_users, device=None if users is None else users.device)
        if users is None or torch.equal(users, every):  # the fast path: no copies
            return self.rows, slice(None), slice(None)
        rows, place = take(self.rows, users)
        return rows, users, place

    def _map(self, users: Sequence[int], weight: Tensor) -> SavedModels:
        """Return a linear map ``[f, h]`` that some users share; a bias is its last row."""
        features, bias = weight.shape[0] - int(self.settings.bias), self.settings.bias
        arguments = {"features": features, "latent_size": weight.shape[1], "bias": bias}
        return SavedModels(MODULE, arguments, list(users), {"weight": weight.detach().cpu()}, {})


class LinearCohort(Cohort):
    """Users with a linear map each, stored by active rows."""

    def start(self) -> Tensors:
        shared = self.first()
        tensors = self._counts() | unmoved(shared.index_select(0, self.rows.feature.cpu()))
        tensors[ROWS] = self.rows.ptr
        if self.settings.average_over == "all":  # the rows that users do not store
            tensors |= unmoved(shared, "inactive-")
        return tensors

    def _counts(self) -> Tensors:
        never = torch.zeros(self.rows.num_users, dtype=torch.int32)
        return {name: never.clone() for name in (STEP, GRADIENT_ROUND, AVERAGE_ROUND)}

    def forward(self, users: Tensor | None) -> Tensor:
        rows, _, place = self._part(users)
        return project(rows, self.tensors["weight"][place])

    def step(self, users: Tensor | None, gradient: Tensor, rate: float) -> None:
        """Take Adam's step with the gradients ``[p, h]`` by the users' latent vectors."""
        tensors, (rows, chosen, place) = self.tensors, self._part(users)
        rates = Rates(rate, self.settings.weight_decay)
        tensors[STEP][chosen] += 1
        weight, mean, square = (tensors[name][place] for name in ADAM_TENSORS)
        slope = gradient.to(weight.device)
        adam_(rows, weight, mean, square, slope, tensors[STEP][chosen], rates)
        if not isinstance(place, slice):
            for name, value in zip(ADAM_TENSORS, (weight, mean, square), strict=True):
                tensors[name][place] = value
        if "inactive-weight" in tensors:
            # Only weight decay acts on rows that users do not store. All users started from the
            # same row and are averaged together, so one matrix stands for the inactive rows of
            # everybody. It holds only if all users step together.
            weight, mean, square = (tensors[f"inactive-{name}"] for name in ADAM_TENSORS)
            nothing, whole = torch.zeros_like(weight), [0, len(weight)]
            adam_rows_(weight, mean, square, nothing, tensors[STEP][:1].cpu(), whole, rates)

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum the users' weights; return the sum and how many users each row has."""
        # With ``"holders"``, a feature's row is summed over the users that have the feature, and
        # the bias stays personal (its count is 0). With ``"all"``, over all users and all rows.
        rows, _, place = self._part(users)
        total, count = sum_by_feature(rows, self.tensors["weight"][place])
        if self.settings.average_over == "all":
            others = (rows.num_users - count).double()[:, None]
            total += others * self.tensors["inactive-weight"].double()
            count = torch.full_like(count, rows.num_users)
        elif self.settings.bias:
            total[-1], count[-1] = 0, 0
        return total, count

    def set_weights(self, users: Tensor | None, mean: Tensor) -> None:
        """Replace the users' weights by ``[f, h]`` means; rows that nobody averaged are NaN."""
        tensors, (rows, _, place) = self.tensors, self._part(users)
        weight = mean.to(tensors["weight"])
        new = weight.index_select(0, rows.feature)
        tensors["weight"][place] = torch.where(new.isnan(), tensors["weight"][place], new)
        if "inactive-weight" in tensors:
            tensors["inactive-weight"].copy_(weight)

    def models(self, users: Sequence[int]) -> SavedModels:
        rows, tensors = self.rows, self.tensors
        inactive = tensors["inactive-weight"] if "inactive-weight" in tensors else self.first()
        weight, feature, ptr = (t.cpu() for t in (tensors["weight"], rows.feature, rows.ptr.long()))
        return replace(self._map(users, inactive), rows=SparseRows("weight", weight, feature, ptr))


class StoredCohort(LinearCohort):
    """Users whose weights and moments are in a file, for more users than fit into memory.

    The file's numbers ``[3 r h]`` are mapped into memory. A user that was never asked has the
    common first weights, and takes no room on the disk.
    """

    def __init__(self, rows: ActiveRows, settings: UserSettings, path: Path) -> None:
        super().__init__(rows, settings)
        self._path, self._shape = path, (len(ADAM_TENSORS), -1, settings.latent_size)
        self._width = len(ADAM_TENSORS) * settings.latent_size  # of a row

    def start(self) -> Tensors:
        row_file.create(self._path, self._width * self.rows.feature.numel())
        return self._counts()

    def hold(self, tensors: Tensors) -> None:
        numbers = row_file.mapped(self._path, self._width * self.rows.feature.numel())
        named = zip(ADAM_TENSORS, numbers.view(self._shape), strict=True)
        self.kept, self.tensors = tensors, tensors | dict(named)

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


# One layer for all -------------------------------------------------------------------------------


def bounded(total: Numbers, limit: float) -> Numbers:
    """Scale a sum of gradients down to a length of ``limit``, if it is longer."""
    length = float(np.linalg.norm(total))
    if length <= limit:
        return total
    result: Numbers = np.clip(total * (limit / length), -limit, limit)
    return result


def dropped(settings: UserSettings, server_round: int, user: Tensor, feature: Tensor) -> Tensor:
    """Return the factors of users' features in a round: 0, or the factor that keeps the mean."""
    # A draw for each user and round; it depends on the numbers, not on the SuperNode.
    numbers = user.long() * FEATURES_OF_A_USER + feature.long()
    drawn = chances(numbers, settings.seed, "feature-dropout", server_round)
    return (drawn >= settings.dropout).float() / (1 - settings.dropout)


class CommonLayer(Cohort):
    """A linear map ``[f, h]`` that all users share; a bias is its last row.

    Features are dropped in a round of training; round 0 stands for none.
    """

    def __init__(self, rows: ActiveRows, numbers: Tensor, settings: UserSettings) -> None:
        # numbers [n]: the users' in the server's graph
        super().__init__(rows, settings)
        self.numbers = numbers.to(rows.value.device)
        order = torch.argsort(rows.feature, stable=True).to(torch.int32)
        ptr = pointers(rows.feature, rows.num_features)
        self._by_feature = order, rows.user.index_select(0, order), ptr
        self._last = (0, 0), rows.value  # of a seed and a round

    def start(self) -> Tensors:
        counts = {STEP: torch.zeros(()), ROUND: torch.zeros((), dtype=torch.int64)}
        return unmoved(self.first()) | counts

    @property
    def round(self) -> int:
        return int(self.tensors[ROUND])

    def forward(self, users: Tensor | None = None, server_round: int = 0) -> Tensor:
        (rows, _, place), weight = self._part(users), self.tensors["weight"]
        return weighted_sums(rows.feature, rows.ptr, self._values(server_round)[place], weight)

    def gradient(self, users: Tensor, gradient: Tensor, server_round: int) -> Tensor:
        """Add up the users' gradients by the weights, ``[f, h]``, in double precision."""
        # gradient [p, h], by the users' latent vectors; gradients of other users are 0
        rows, (order, user, ptr), value = self.rows, self._by_feature, self._values(server_round)
        size = rows.num_users, gradient.shape[1]
        every = torch.zeros(size, dtype=torch.float64, device=value.device)
        every[users.to(value.device)] = gradient.to(every)
        by_feature = value.index_select(0, order).double()
        entries = csr_tensor(ptr, user, by_feature, (rows.num_features, rows.num_users))
        total: Tensor = entries @ every
        return total

    def step(self, total: Tensor, server_round: int, rate: float) -> None:
        weight, *held = (self.tensors[name] for name in (*ADAM_TENSORS, STEP))
        adam = Adam([weight], lr=rate, weight_decay=self.settings.weight_decay)
        adam.state[weight] = dict(zip(MOMENTS, held, strict=True))
        weight.grad = total.reshape(weight.shape).to(weight)
        adam.step()
        adam.zero_grad()
        self.tensors[ROUND].fill_(server_round)

    def _values(self, server_round: int) -> Tensor:
        settings, rows = self.settings, self.rows
        if not settings.dropout or not server_round:
            return rows.value
        draw = settings.seed, server_round
        if self._last[0] != draw:  # asked for twice a round
            columns = (one.split(BLOCK_ROWS) for one in (rows.user, rows.feature, rows.value))
            value = torch.cat(
                [
                    value * dropped(settings, server_round, self.numbers[user.long()], feature)
                    for user, feature, value in zip(*columns, strict=True)
                ]
            )
            if settings.bias:
                value[rows.feature == rows.num_features - 1] = 1
            self._last = draw, value
        return self._last[1]

    def models(self, users: Sequence[int]) -> SavedModels:
        return self._map(users, self.tensors["weight"])
