"""The users of one SuperNode as tensors, computed in one batched program.

A user has a feature vector ``x_i`` and a model ``f_u(theta_i, .)``. Where each user has a layer of
its own, nothing in a cohort mixes users, so any assignment of users to cohorts gives the same
numbers. ``LinearCohort`` is the paper's linear map, stored by active rows; ``ModuleCohort`` takes
any module. ``CommonLayer`` is one layer for all users.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.ops.active_rows import ActiveRows, adam_, project, sum_by_feature, take
from flower_graph.ops.adam import MOMENTS, Adam, Rates
from flower_graph.ops.graph import csr_tensor, pointers, weighted_sums
from flower_graph.outputs.files import SavedModels, SparseRows
from flower_graph.rng import chances, generator
from flower_graph.storage import row_file
from flower_graph.wire.keys import GRADIENT_ROUND

Tensors = dict[str, Tensor]
# What Adam changes, by its name in a cohort's state
ADAM_TENSORS = ("weight", "exp-avg", "exp-avg-sq")
AT_A_TIME = 1 << 14  # users whose rows are read from a file at a time
STEP, ROUND = "step", "round"  # steps taken; of the common layer: round of the last step
# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
AVERAGE_ROUND = "average-round"
BLOCK_ROWS = 65_536  # of which features are dropped at a time, about
FEATURES_OF_A_USER = 1 << 32  # at most, so that each has a number of its own
MODULE = "flower_graph.strategies.nfedgnn.modules.UserModel"  # of saved models

Numbers = TypeVar("Numbers", bound=NDArray[np.floating])


class UserSettings(NamedTuple):
    """Settings of every user's model and optimiser, sent by the server; constant in a run.

    Attributes
    ----------
    latent_size : int
        Length of the latent vector, ``h``.
    bias : bool
        Whether the linear map has a bias, ``x_i W_i + b_i``.
    weight_decay : float
        Adam's, as in ``torch.optim.Adam``.
    seed : int
        The run's seed: all users start from the same weights.
    average_over : str
        ``"holders"`` or ``"all"``, where each user has a layer of its own; see
        ``Cohort.weight_sum``.
    dropout : float
        Share of its features that a user drops in training, where all users have one layer.
    """

    latent_size: int
    bias: bool
    weight_decay: float
    seed: int
    average_over: str = "holders"
    dropout: float = 0.0


def shared_linear_weight(num_features: int, settings: UserSettings) -> Tensor:
    """Draw the weights from which every user starts."""
    weight = torch.empty(num_features, settings.latent_size)
    nn.init.xavier_uniform_(weight, generator=generator(settings.seed, "user-model"))
    return torch.cat([weight, torch.zeros(int(settings.bias), settings.latent_size)])


def unless_all(users: Tensor | None, count: int) -> Tensor | slice:
    """Return the places of some users; a slice, the fast path, for all in their order."""
    is_all = users is None or torch.equal(users, torch.arange(count, device=users.device))
    return slice(None) if is_all else users  # type: ignore[return-value]


class Cohort:
    """Users, and the tensors that they learn.

    Where a method takes ``users``, ``None`` means all of them.
    """

    tensors: Tensors  # weights, moments, counts
    kept: Tensors  # those of them that the client keeps

    def __init__(self, rows: ActiveRows, settings: UserSettings) -> None:
        self.rows, self.settings = rows, settings

    def first(self) -> Tensor:
        """Return the weights from which users start."""
        features = self.rows.num_features - int(self.settings.bias)
        return shared_linear_weight(features, self.settings)

    def start(self) -> Tensors:
        """Return the tensors of users that have learnt nothing."""
        raise NotImplementedError

    def hold(self, tensors: Tensors) -> None:
        """Work on tensors, in place; counts of rounds stay with the CPU's bookkeeping."""
        device, rounds = self.rows.value.device, (GRADIENT_ROUND, AVERAGE_ROUND)
        placed = {name: t if name in rounds else t.to(device) for name, t in tensors.items()}
        self.tensors = self.kept = placed

    def _part(self, users: Tensor | None) -> tuple[ActiveRows, Tensor | slice]:
        """Return some users' rows, and their place in the tensors."""
        chosen = unless_all(users, self.rows.num_users)
        return (self.rows, chosen) if isinstance(chosen, slice) else take(self.rows, chosen)


class LinearCohort(Cohort):
    """Users with a linear map each, stored by active rows."""

    def start(self) -> Tensors:
        shared = self.first()
        tensors = self._begun(shared.index_select(0, self.rows.feature.cpu()))
        if self.settings.average_over == "all":  # the rows that users do not store
            nothing = {f"inactive-{name}": torch.zeros_like(shared) for name in ADAM_TENSORS}
            tensors |= nothing | {"inactive-weight": shared}
        return tensors

    def _begun(self, weight: Tensor) -> Tensors:
        tensors = {name: torch.zeros_like(weight) for name in ADAM_TENSORS} | {"weight": weight}
        return tensors | self._counts()

    def _counts(self) -> Tensors:
        never = torch.zeros(self.rows.num_users, dtype=torch.int32)
        return {name: never.clone() for name in (STEP, GRADIENT_ROUND, AVERAGE_ROUND)}

    def forward(self, users: Tensor | None) -> Tensor:
        rows, place = self._part(users)
        return project(rows, self.tensors["weight"][place])

    def step(self, users: Tensor | None, gradient: Tensor, rate: float) -> None:
        """Take Adam's step with the gradients ``[p, h]`` by the users' latent vectors."""
        tensors, chosen = self.tensors, unless_all(users, self.rows.num_users)
        rows, place = self._part(users)
        tensors[STEP][chosen] += 1
        part = [tensors[name][place] for name in ADAM_TENSORS]
        slope = self._slope(part[0], gradient.to(part[0].device), chosen)
        rates = Rates(rate, self.settings.weight_decay)
        adam_(rows, part[0], part[1], part[2], slope, tensors[STEP][chosen], rates)
        if not isinstance(place, slice):
            for name, value in zip(ADAM_TENSORS, part, strict=True):
                tensors[name][place] = value
        if "inactive-weight" in tensors:
            # Only weight decay acts on rows that users do not store. All users started from the
            # same row and are averaged together, so one matrix stands for the inactive rows of
            # everybody. It holds only if all users step together.
            part = [tensors[f"inactive-{name}"] for name in ADAM_TENSORS]
            nothing = torch.zeros_like(part[0])
            step = tensors[STEP][:1].expand(nothing.shape[0])
            adam_(_a_row_each(nothing), part[0], part[1], part[2], nothing, step, rates)

    def _slope(self, weight: Tensor, gradient: Tensor, users: Tensor | slice) -> Tensor:
        """Return what ``adam_`` multiplies by the rows' values."""
        return gradient

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum the users' weights; return the sum and how many users each row has."""
        # With ``"holders"``, a feature's row is summed over the users that have the feature, and
        # the bias stays personal (its count is 0). With ``"all"``, over all users and all rows.
        rows, place = self._part(users)
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
        tensors, (rows, place) = self.tensors, self._part(users)
        weight = mean.to(tensors["weight"])
        new = weight.index_select(0, rows.feature)
        tensors["weight"][place] = torch.where(new.isnan(), tensors["weight"][place], new)
        if "inactive-weight" in tensors:
            tensors["inactive-weight"].copy_(weight)

    def models(self, users: Sequence[int]) -> SavedModels:
        """Return the users' maps; rows of features that a user lacks are the first weights."""
        rows, tensors = self.rows, self.tensors
        inactive = tensors["inactive-weight"] if "inactive-weight" in tensors else self.first()
        weight, feature, ptr = (t.cpu() for t in (tensors["weight"], rows.feature, rows.ptr.long()))
        own = SparseRows("weight", weight, feature, ptr)
        return replace(saved_map(users, inactive, self.settings), rows=own)


def _a_row_each(like: Tensor) -> ActiveRows:
    """Let each row of a matrix belong to a user of its own, with value 1 of one feature."""
    n = like.shape[0]
    ptr = torch.arange(n + 1, dtype=torch.int32, device=like.device)
    return ActiveRows(ptr, torch.zeros_like(ptr[:-1]), torch.ones_like(like[:, 0]), 1)


class StoredCohort(LinearCohort):
    """Users whose weights and moments are in a file, for more users than fit into memory.

    The file's numbers ``[3 r h]`` are mapped into memory. A user that was never asked has the
    common first weights, and takes no room on the disk.
    """

    def __init__(self, rows: ActiveRows, settings: UserSettings, path: Path) -> None:
        super().__init__(rows, settings)
        self._path, self._width = path, len(ADAM_TENSORS) * settings.latent_size

    def start(self) -> Tensors:
        row_file.create(self._path, self._width * self.rows.feature.numel())
        return self._counts()

    def hold(self, tensors: Tensors) -> None:
        numbers = row_file.mapped(self._path, self._width * self.rows.feature.numel())
        parts = numbers.view(len(ADAM_TENSORS), -1, self.settings.latent_size)
        self.kept, self._first = tensors, self.first()
        self.tensors = tensors | dict(zip(ADAM_TENSORS, parts, strict=True))

    def check_room(self, users: Tensor) -> None:
        """Raise ``OSError`` if the disk has no room for the rows of these users."""
        rows = int((self.rows.ptr[users + 1] - self.rows.ptr[users]).sum())
        row_file.check_room(self._path, self._width * rows)

    def forward(self, users: Tensor) -> Tensor:  # type: ignore[override]
        parts = users.split(AT_A_TIME)
        return torch.cat([super(StoredCohort, self).forward(self._there(part)) for part in parts])

    def step(self, users: Tensor, gradient: Tensor, rate: float) -> None:  # type: ignore[override]
        # Users with equal counts side by side step together, which is quicker.
        order = torch.argsort(self.tensors[STEP][users], stable=True)
        for part in order.split(AT_A_TIME):
            super().step(self._there(users[part]), gradient[part], rate)

    def models(self, users: Sequence[int]) -> SavedModels:
        self._there(torch.arange(self.rows.num_users))
        return super().models(users)

    def _there(self, users: Tensor) -> Tensor:
        """Write the first weights of users that have not stepped yet; return all ``users``."""
        rows, place = take(self.rows, users[self.tensors[STEP][users] == 0])
        self.tensors["weight"][place] = self._first[rows.feature]
        return users


class FlatModule:
    """A module of any kind, without dropout, whose parameters are one vector."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = copy.deepcopy(module).eval().to(device)
        self._named = dict(self._module.named_parameters())

    def start(self) -> Tensor:
        """Return the parameters that the module came with, ``[d]``."""
        return torch.nn.utils.parameters_to_vector(self._named.values()).detach()

    def __call__(self, flat: Tensor, x: Tensor) -> Tensor:
        """Compute the outputs of rows ``[n, f]`` with the parameters in ``flat``."""
        parts = flat.split([parameter.numel() for parameter in self._named.values()])
        pairs = zip(self._named.items(), parts, strict=True)
        parameters = {name: part.view(like.shape) for (name, like), part in pairs}
        return torch.func.functional_call(self._module, parameters, (x,))  # type: ignore[no-any-return]


class ModuleCohort(LinearCohort):
    """Users with a module each, of any kind; each user's parameters are a row of ``weight``."""

    def __init__(self, x: Tensor, module: nn.Module, settings: UserSettings) -> None:
        self.x, self._module = x, FlatModule(module, x.device)
        # Of all its parameters a user has one row, which everybody has.
        super().__init__(_a_row_each(x), settings._replace(bias=False, average_over="holders"))

    def start(self) -> Tensors:
        return self._begun(self._module.start().cpu().expand(self.rows.num_users, -1).clone())

    def _call(self, weights: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda flat, row: self._module(flat, row[None])[0])(weights, x)

    def forward(self, users: Tensor | None) -> Tensor:
        chosen = unless_all(users, self.rows.num_users)
        with torch.no_grad():
            return self._call(self.tensors["weight"][chosen], self.x[chosen])

    def _slope(self, weight: Tensor, gradient: Tensor, users: Tensor | slice) -> Tensor:
        x = self.x[users]
        (slope,) = torch.func.vjp(lambda weights: self._call(weights, x), weight)[1](gradient)
        return slope  # type: ignore[no-any-return]


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
        self._parts = rows.blocks(BLOCK_ROWS)  # so small that what is made of them stays in cache

    def start(self) -> Tensors:
        weight = self.first()
        moments = {name: torch.zeros_like(weight) for name in ADAM_TENSORS[1:]}
        counts = {STEP: torch.zeros(()), ROUND: torch.zeros((), dtype=torch.int64)}
        return {"weight": weight, **moments, **counts}

    @property
    def weight(self) -> Tensor:
        return self.tensors["weight"]

    @property
    def round(self) -> int:
        """The round of the last step; 0 before the first."""
        return int(self.tensors[ROUND])

    def forward(self, users: Tensor | None = None, server_round: int = 0) -> Tensor:
        """Return latent vectors ``[p, h]`` of some users or all."""
        rows, place = self._part(users)
        value = self._values(server_round)[place]
        if not value.numel():
            return self.weight.new_zeros(rows.num_users, self.weight.shape[1])
        return weighted_sums(rows.feature, rows.ptr, value, self.weight)

    def gradient(self, users: Tensor, gradient: Tensor, server_round: int) -> Tensor:
        """Add up the users' gradients by the weights, ``[f, h]``, in double precision."""
        # gradient [p, h], by the users' latent vectors; gradients of other users are 0
        rows, (order, user, ptr), value = self.rows, self._by_feature, self._values(server_round)
        size = rows.num_users, gradient.shape[1]
        every = torch.zeros(size, dtype=torch.float64, device=value.device)
        every[users.to(value.device)] = gradient.to(every)
        if not value.numel():
            return every.new_zeros(rows.num_features, every.shape[1])
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
        if not self.settings.dropout or not server_round or not self._parts:
            return self.rows.value
        draw = self.settings.seed, server_round
        if self._last[0] != draw:  # asked for twice a round
            self._last = draw, torch.cat([self._kept(server_round, *part) for part in self._parts])
        return self._last[1]

    def _kept(self, server_round: int, users: slice, part: slice) -> Tensor:
        """Return some users' features after dropout; a bias is never dropped."""
        rows, size = self.rows, part.stop - part.start
        ends, feature = rows.ptr[users.start : users.stop + 1], rows.feature[part]
        number = self.numbers[users].repeat_interleave(ends.diff(), output_size=size)
        value = rows.value[part] * dropped(self.settings, server_round, number, feature)
        if self.settings.bias:
            value[feature == rows.num_features - 1] = 1
        return value

    def models(self, users: Sequence[int]) -> SavedModels:
        return saved_map(users, self.weight, self.settings)


class CommonModule(CommonLayer):
    """Any module from one user's features to its latent vector, the same for all users.

    ``weight`` has all parameters one behind the other, ``[1, d]``.
    """

    def __init__(
        self, x: Tensor, numbers: Tensor, module: nn.Module, settings: UserSettings
    ) -> None:
        # x [n, f], numbers [n]
        Cohort.__init__(self, _a_row_each(x), settings)
        self.x, self.numbers, self._module = x, numbers.to(x.device), FlatModule(module, x.device)

    def first(self) -> Tensor:
        return self._module.start()[None].cpu()

    def forward(self, users: Tensor | None = None, server_round: int = 0) -> Tensor:
        with torch.no_grad():
            return self._call(self.weight, users, server_round)

    def gradient(self, users: Tensor, gradient: Tensor, server_round: int) -> Tensor:
        double = self.weight.double().requires_grad_()  # as the sum is of many small numbers
        latent = self._call(double, users, server_round)
        (total,) = torch.autograd.grad(latent, double, gradient.to(latent), materialize_grads=True)
        return total

    def _call(self, weight: Tensor, users: Tensor | None, server_round: int) -> Tensor:
        chosen = unless_all(users, len(self.x))
        x = self.x[chosen]
        if self.settings.dropout and server_round:
            feature = torch.arange(x.shape[1], device=x.device).expand_as(x)
            user = self.numbers[chosen][:, None].expand_as(x)
            x = x * dropped(self.settings, server_round, user, feature)
        return self._module(weight[0], x.to(weight.dtype))


def saved_map(users: Sequence[int], weight: Tensor, settings: UserSettings) -> SavedModels:
    """Return a linear map that some users share."""
    # weight [f, h], with a bias its last row
    features, bias = weight.shape[0] - int(settings.bias), settings.bias
    arguments = {"features": features, "latent_size": weight.shape[1], "bias": bias}
    return SavedModels(MODULE, arguments, list(users), {"weight": weight.detach().cpu()}, {})
