"""The users of one SuperNode as tensors, if all users share one first layer.

User ``i`` sends ``x'_i = W x_i`` and is answered ``g_i``; the gradient of the loss by ``W`` is the
sum of all ``x_i g_i^T``. A SuperNode adds up its users' products. Adam's step with the sum over
all SuperNodes gives the weights that one network in one place would have.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.ops.active_rows import ActiveRows, take
from flower_graph.ops.adam import Adam
from flower_graph.ops.graph import csr_tensor, pointers, weighted_sums
from flower_graph.rng import chances
from flower_graph.strategies.nfedgnn.users import (
    ADAM_TENSORS,
    FlatModule,
    Tensors,
    UserSettings,
    shared_linear_weight,
)

STEP, ROUND = "step", "round"  # how many were taken; of which round the last was
BLOCK_ROWS = 65_536  # of which features are dropped at a time, about
FEATURES_OF_A_USER = 1 << 32  # at most, so that each has a number of its own

Numbers = TypeVar("Numbers", bound=NDArray[np.floating])


def bounded(total: Numbers, limit: float) -> Numbers:
    """Scale a sum of gradients down to a length of ``limit``, if it is longer."""
    length = float(np.linalg.norm(total))
    if length <= limit:
        return total
    result: Numbers = np.clip(total * (limit / length), -limit, limit)
    return result


class Dropped(NamedTuple):
    """The random dropout of users' features in one round."""

    rate: float
    seed: int
    server_round: int

    def scale(self, user: Tensor, feature: Tensor) -> Tensor:
        """Return the factors of users' features: 0, or the factor that keeps the mean."""
        # A draw for each user and round; it depends on the numbers, not on the SuperNode.
        numbers = user.long() * FEATURES_OF_A_USER + feature.long()
        drawn = chances(numbers, self.seed, "feature-dropout", self.server_round)
        return (drawn >= self.rate).float() / (1 - self.rate)


class LinearLayer:
    """A linear map ``[f, h]`` that all users share; a bias is its last row."""

    def __init__(self, rows: ActiveRows, numbers: Tensor, settings: UserSettings) -> None:
        # numbers [n]: the users' in the server's graph
        device = rows.value.device
        self.rows, self.numbers, self.settings = rows, numbers.to(device), settings
        order = torch.argsort(rows.feature, stable=True).to(torch.int32)
        ptr = pointers(rows.feature, rows.num_features)
        self._by_feature = order, rows.user.index_select(0, order), ptr
        self._last: tuple[Dropped | None, Tensor] = None, rows.value
        self._parts = rows.blocks(BLOCK_ROWS)  # so small that what is made of them stays in cache

    def start(self, settings: UserSettings) -> Tensor:
        return shared_linear_weight(self.rows.num_features - int(settings.bias), settings)

    def forward(self, weight: Tensor, users: Tensor | None, dropped: Dropped | None) -> Tensor:
        """Return latent vectors ``[p, h]`` of some users or all."""
        rows, value = self.rows, self._values(dropped)
        if users is not None:
            rows, place = take(rows, users)
            value = value[place]
        if not value.numel():
            return weight.new_zeros(rows.num_users, weight.shape[1])
        return weighted_sums(rows.feature, rows.ptr, value, weight)

    def gradient(
        self, weight: Tensor, users: Tensor, gradient: Tensor, dropped: Dropped | None
    ) -> Tensor:
        """Add up the users' gradients, ``[f, h]``, in double precision."""
        # gradient [p, h], by the users' latent vectors; gradients of other users are 0
        rows, (order, user, ptr), value = self.rows, self._by_feature, self._values(dropped)
        size = rows.num_users, gradient.shape[1]
        every = torch.zeros(size, dtype=torch.float64, device=value.device)
        every[users.to(value.device)] = gradient.to(every)
        if not value.numel():
            return every.new_zeros(rows.num_features, every.shape[1])
        by_feature = value.index_select(0, order).double()
        entries = csr_tensor(ptr, user, by_feature, (rows.num_features, rows.num_users))
        total: Tensor = entries @ every
        return total

    def _values(self, dropped: Dropped | None) -> Tensor:
        if dropped is None or not self._parts:
            return self.rows.value
        if self._last[0] != dropped:  # asked for twice a round
            self._last = dropped, torch.cat([self._kept(dropped, *part) for part in self._parts])
        return self._last[1]

    def _kept(self, dropped: Dropped, users: slice, part: slice) -> Tensor:
        """Return some users' features after dropout; a bias is never dropped."""
        rows, size = self.rows, part.stop - part.start
        ends, feature = rows.ptr[users.start : users.stop + 1], rows.feature[part]
        counts = ends[1:] - ends[:-1]
        number = self.numbers[users].repeat_interleave(counts, output_size=size)
        value = rows.value[part] * dropped.scale(number, feature)
        if self.settings.bias:
            value[feature == rows.num_features - 1] = 1
        return value


class ModuleLayer:
    """Any module from one user's features to its latent vector, the same for all users."""

    def __init__(self, x: Tensor, numbers: Tensor, module: nn.Module) -> None:
        # x [n, f], numbers [n]
        self.x, self.numbers = x, numbers.to(x.device)
        self._module = FlatModule(module, x.device)

    def start(self, settings: UserSettings) -> Tensor:
        return self._module.start()[:, None]

    def forward(self, weight: Tensor, users: Tensor | None, dropped: Dropped | None) -> Tensor:
        users = torch.arange(self.x.shape[0]) if users is None else users
        with torch.no_grad():
            return self._call(weight, users, dropped)

    def gradient(
        self, weight: Tensor, users: Tensor, gradient: Tensor, dropped: Dropped | None
    ) -> Tensor:
        """Add up the users' gradients, all parameters one behind the other, ``[f, 1]``."""
        double = weight.double().requires_grad_()  # as the sum is of many small numbers
        latent = self._call(double, users, dropped)
        (total,) = torch.autograd.grad(latent, double, gradient.to(latent), materialize_grads=True)
        return total

    def _call(self, weight: Tensor, users: Tensor, dropped: Dropped | None) -> Tensor:
        x = self.x[users]
        if dropped is not None:
            feature = torch.arange(x.shape[1], device=x.device).expand_as(x)
            x = x * dropped.scale(self.numbers[users][:, None].expand_as(x), feature)
        return self._module(weight[:, 0], x.to(weight.dtype))


Layer = LinearLayer | ModuleLayer


class CommonLayer:
    """The weights that all users share, Adam's moments, and the round of the last step."""

    def __init__(self, layer: Layer, settings: UserSettings, tensors: Tensors) -> None:
        self.layer, self.settings, self.tensors = layer, settings, tensors
        self.weight = tensors["weight"]

    @staticmethod
    def start(layer: Layer, settings: UserSettings) -> Tensors:
        weight = layer.start(settings)
        moments = {name: torch.zeros_like(weight) for name in ADAM_TENSORS[1:]}
        counts = {STEP: torch.zeros(()), ROUND: torch.zeros((), dtype=torch.int64)}
        return {"weight": weight, **moments, **counts}

    @property
    def round(self) -> int:
        """The round of the last step; 0 before the first."""
        return int(self.tensors[ROUND])

    def forward(self, users: Tensor | None = None, server_round: int = 0) -> Tensor:
        return self.layer.forward(self.weight, users, self._dropped(server_round))

    def gradient(self, users: Tensor, gradient: Tensor, server_round: int) -> Tensor:
        """Add up some users' gradients with respect to the weights, with ``forward``'s dropout."""
        return self.layer.gradient(self.weight, users, gradient, self._dropped(server_round))

    def step(self, total: Tensor, server_round: int, learning_rate: float) -> None:
        adam = Adam([self.weight], lr=learning_rate, weight_decay=self.settings.weight_decay)
        exp_avg, exp_avg_sq = (self.tensors[name] for name in ADAM_TENSORS[1:])
        count = self.tensors[STEP].clone()
        adam.state[0] = {"step": count, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.weight.grad = total.reshape(self.weight.shape).to(self.weight)
        adam.step()
        adam.zero_grad()
        self.tensors[STEP] += 1
        self.tensors[ROUND].fill_(server_round)

    def _dropped(self, server_round: int) -> Dropped | None:
        if not server_round or not self.settings.dropout:
            return None
        return Dropped(self.settings.dropout, self.settings.seed, server_round)
