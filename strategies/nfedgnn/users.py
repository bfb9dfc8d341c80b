"""Cohorts: the users of one SuperNode, computed in one batched tensor program.

A node-client owns one feature vector ``x_i`` and one model ``f_u(theta_i, .)``. Nothing in a
cohort mixes users, so any assignment of users to cohorts gives the same numbers. ``LinearCohort``
is the papers' linear map, stored by active rows; ``ModuleCohort`` takes any module.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from flower_graph.ops.active_rows import ActiveRows, adam_, project, sum_by_feature, take
from flower_graph.rng import generator

Tensors = dict[str, Tensor]
# What Adam changes, by its name in a cohort's state
ADAM_TENSORS = ("weight", "exp-avg", "exp-avg-sq")
AT_A_TIME = 1 << 14  # users whose rows are read from a file at a time


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


def adam_step(
    rows: ActiveRows,
    tensors: list[Tensor],
    gradient: Tensor,
    step: Tensor,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Take an Adam step on ``ADAM_TENSORS``, in place."""
    weight, exp_avg, exp_avg_sq = tensors
    adam_(
        rows,
        weight,
        exp_avg,
        exp_avg_sq,
        gradient.to(weight.device),
        step,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


def _a_row_each(like: Tensor) -> ActiveRows:
    """Let each row of a matrix belong to a user of its own, with value 1."""
    n = like.shape[0]
    ptr = torch.arange(n + 1, dtype=torch.int32, device=like.device)
    return ActiveRows(ptr, ptr[:-1], torch.ones_like(like[:, 0]), n)


class LinearCohort:
    """Users with a linear map each, stored by active rows."""

    def __init__(
        self, rows: ActiveRows, settings: UserSettings, tensors: Tensors | None = None
    ) -> None:
        self.rows, self.settings = rows, settings
        self.num_users = rows.num_users
        self._state = linear_state(rows, settings) if tensors is None else tensors

    def tensors(self) -> Tensors:
        """Return weights, moments and step counts; the inactive row's with ``"all"``."""
        return self._state

    def forward(self, users: Tensor | None) -> Tensor:
        """Return latent vectors ``[p, h]``."""
        if users is None:
            return project(self.rows, self._state["weight"])
        rows, place = take(self.rows, users)
        return project(rows, self._state["weight"][place])

    def step(self, users: Tensor | None, gradient: Tensor, learning_rate: float) -> None:
        state, rates = self._state, (learning_rate, self.settings.weight_decay)
        if users is None:
            state["step"] += 1
            whole = [state[name] for name in ADAM_TENSORS]
            adam_step(self.rows, whole, gradient, state["step"], *rates)
        else:
            state["step"][users] += 1
            rows, place = take(self.rows, users)
            part = [state[name][place] for name in ADAM_TENSORS]
            adam_step(rows, part, gradient, state["step"][users], *rates)
            for name, value in zip(ADAM_TENSORS, part, strict=True):
                state[name][place] = value
        if "inactive-weight" in state:
            self._step_inactive(*rates)

    def _step_inactive(self, learning_rate: float, weight_decay: float) -> None:
        """Move the rows that users do not store: only weight decay acts on them."""
        # All users started from the same row and are averaged together, so one matrix stands for
        # the inactive rows of everybody. It holds only if all users step together.
        state = self._state
        nothing = torch.zeros_like(state["inactive-weight"])
        part = [state[f"inactive-{name}"] for name in ADAM_TENSORS]
        step = state["step"][:1].expand(nothing.shape[0])
        adam_step(_a_row_each(nothing), part, nothing, step, learning_rate, weight_decay)

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum the users' weights; return the sum and how many users each row has."""
        # With ``"holders"``, a feature's row is summed over the users that have the feature, and
        # the bias stays personal (its count is 0). With ``"all"``, over all users and all rows.
        rows, weight = self.rows, self._state["weight"]
        if users is not None:
            rows, place = take(self.rows, users)
            weight = weight[place]
        total, count = sum_by_feature(rows, weight)
        if self.settings.average_over == "all":
            others = (rows.num_users - count).double()[:, None]
            total += others * self._state["inactive-weight"].double()
            count = torch.full_like(count, rows.num_users)
        elif self.settings.bias:
            total[-1], count[-1] = 0, 0
        return total, count

    def set_weights(self, users: Tensor | None, mean: Tensor) -> None:
        """Replace the users' weights by ``[f, h]`` means; rows that nobody averaged are NaN."""
        weight, state = mean.to(self._state["weight"]), self._state
        rows, place = (self.rows, None) if users is None else take(self.rows, users)
        new = weight.index_select(0, rows.feature)
        old = state["weight"] if place is None else state["weight"][place]
        new = torch.where(new.isnan(), old, new)
        if place is None:
            state["weight"].copy_(new)
        else:
            state["weight"][place] = new
        if "inactive-weight" in state:
            state["inactive-weight"].copy_(weight)


def linear_state(rows: ActiveRows, settings: UserSettings) -> Tensors:
    """Make the tensors of a cohort before its first round."""
    device = rows.value.device
    num_features = rows.num_features - int(settings.bias)
    shared = shared_linear_weight(num_features, settings).to(device)
    weight = shared.index_select(0, rows.feature)
    state = {
        "weight": weight,
        "exp-avg": torch.zeros_like(weight),
        "exp-avg-sq": torch.zeros_like(weight),
        "step": torch.zeros(rows.num_users, dtype=torch.int32, device=device),
    }
    if settings.average_over == "all":
        state |= {
            "inactive-weight": shared,
            "inactive-exp-avg": torch.zeros_like(shared),
            "inactive-exp-avg-sq": torch.zeros_like(shared),
        }
    return state


class StoredCohort(LinearCohort):
    """Users whose weights and moments are in a file, for more users than fit into memory.

    The file's numbers ``[3 r h]`` are mapped into memory. A user that was never asked has the
    common first weights, and takes no room on the disk.
    """

    def __init__(
        self, rows: ActiveRows, settings: UserSettings, tensors: Tensors, numbers: Tensor
    ) -> None:
        size = len(ADAM_TENSORS), rows.feature.numel(), settings.latent_size
        parts = numbers.view(size)
        super().__init__(rows, settings, tensors | dict(zip(ADAM_TENSORS, parts, strict=True)))
        self._first = shared_linear_weight(rows.num_features - int(settings.bias), settings)

    def forward(self, users: Tensor | None) -> Tensor:
        parts = self._everyone(users).split(AT_A_TIME)
        return torch.cat([super(StoredCohort, self).forward(self._begun(part)) for part in parts])

    def step(self, users: Tensor | None, gradient: Tensor, learning_rate: float) -> None:
        users = self._everyone(users)
        # Users with equal counts side by side step together, which is quicker.
        order = torch.argsort(self._state["step"][users], stable=True)
        for part in order.split(AT_A_TIME):
            super().step(self._begun(users[part]), gradient[part], learning_rate)

    def weight_sum(self, *_: object) -> NoReturn:
        """Refuse: an average changes the weights of all users at once."""
        raise ValueError("users whose weights are in a file do not average them")

    def set_weights(self, *_: object) -> NoReturn:
        """Refuse, as ``weight_sum``."""
        self.weight_sum()

    def tensors(self) -> Tensors:
        """Return weights, moments and step counts of all users, as they would be in memory."""
        self._begun(self._everyone(None))
        return self._state

    def _everyone(self, users: Tensor | None) -> Tensor:
        return torch.arange(self.num_users) if users is None else users

    def _begun(self, users: Tensor) -> Tensor:
        """Write the first weights of users that have not stepped yet; return all ``users``."""
        rows, place = take(self.rows, users[self._state["step"][users] == 0])
        self._state["weight"][place] = self._first[rows.feature]
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


class ModuleCohort:
    """Users with a module each, of any kind; each user's parameters are a row of ``weight``."""

    def __init__(
        self,
        x: Tensor,
        module: nn.Module,
        settings: UserSettings,
        tensors: Tensors | None = None,
    ) -> None:
        self.x, self.settings, self.num_users = x, settings, x.shape[0]
        self._module = FlatModule(module, x.device)
        self._state = self._initial() if tensors is None else tensors

    def _initial(self) -> Tensors:
        weight = self._module.start().expand(self.num_users, -1).clone()
        state = {name: torch.zeros_like(weight) for name in ADAM_TENSORS} | {"weight": weight}
        return state | {
            "step": torch.zeros(self.num_users, dtype=torch.int32, device=weight.device)
        }

    def tensors(self) -> Tensors:
        return self._state

    def _all(self, users: Tensor | None) -> Tensor:
        return torch.arange(self.num_users) if users is None else users

    def _call(self, weights: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda flat, row: self._module(flat, row[None])[0])(weights, x)

    def forward(self, users: Tensor | None) -> Tensor:
        users = self._all(users)
        with torch.no_grad():
            return self._call(self._state["weight"][users], self.x[users])

    def step(self, users: Tensor | None, gradient: Tensor, learning_rate: float) -> None:
        users, state = self._all(users), self._state
        x, part = self.x[users], [self._state[name][users] for name in ADAM_TENSORS]
        pull_back = torch.func.vjp(lambda weights: self._call(weights, x), part[0])[1]
        (slope,) = pull_back(gradient.to(x.device))
        state["step"][users] += 1
        rows, decay = _a_row_each(slope), self.settings.weight_decay
        adam_step(rows, part, slope, state["step"][users], learning_rate, decay)
        for name, value in zip(ADAM_TENSORS, part, strict=True):
            state[name][users] = value

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum all parameters over the users, ``[f, 1]``; every user counts."""
        users = self._all(users)
        total = self._state["weight"][users].double().sum(0)[:, None]
        return total, torch.full((total.shape[0],), users.numel())

    def set_weights(self, users: Tensor | None, mean: Tensor) -> None:
        """Replace the users' parameters by ``[f, 1]`` means."""
        self._state["weight"][self._all(users)] = mean[:, 0].to(self._state["weight"])


# What ``NodeClient`` works with; where a cohort is asked for ``users``, ``None`` means all of them.
Cohort = LinearCohort | ModuleCohort
