"""Weights and Adam's moments of many clients' models, stacked in a few tensors.

A network is one model on one graph of a batch. Its first layer's matrix is stored by active rows
(``graph_batch.py``); its other parameters are one row of ``rest``. All networks have the same
shapes. Networks of one *kind* share a model, such as a GNN or a feature encoder.

An inactive row has no gradient, and stays as it was when the round began. In a dense model weight
decay alone would move it by Adam's full step, against the clients that have the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_graph.engine.graph_batch import GraphBatch
from flower_graph.ops.adam import adam_rows_

Tensors = dict[str, Tensor]
PARTS, MOMENTS = ("first", "rest"), ("weight", "exp-avg", "exp-avg-sq")  # each part has each


@dataclass
class ModelWeights:
    """A full model, such as FedAvg's mean: ``[f, h]`` first layer, ``[D]`` all other parameters."""

    first: Tensor
    rest: Tensor


def stacked_state(
    batch: GraphBatch, models: Sequence[ModelWeights], kinds: Sequence[int] | None = None
) -> Tensors:
    """Return the state of networks that have not trained yet."""
    kind = _kinds(kinds, batch)
    state: Tensors = {"step": torch.zeros(batch.size, dtype=torch.int32)}
    for name, value in zip(PARTS, _spread(models, kind, _sources(kind, batch)), strict=True):
        for moment in MOMENTS:
            state[f"{moment}.{name}"] = value if moment == "weight" else torch.zeros_like(value)
    return state


def sum_first_layers(active: Tensor, feature: Tensor, inactive: Tensor, without: Tensor) -> Tensor:
    """Add up first layers that are stored by active rows."""
    # active [r, h], feature [r], inactive [f, h], without [f]
    return (inactive * without[:, None]).index_add_(0, feature, active)


class StackedWeights:
    """The networks of a state: changes are made in the state."""

    def __init__(
        self, state: Tensors, batch: GraphBatch, kinds: Sequence[int] | None = None
    ) -> None:
        self.batch, self._state, self._device = batch, state, batch.y.device
        self.kind = _kinds(kinds, batch)
        self._sources = _sources(self.kind, batch)
        self._start: list[ModelWeights] = []  # the models that this round began with
        self._leaves: tuple[list[int], list[Tensor]] | None = None

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the networks' weights: ``[r, h]`` active rows and ``[c, D]`` all the rest."""
        return self._state["weight.first"], self._state["weight.rest"]

    def indices(self, places: Sequence[int]) -> Tensors:
        """Return where some networks lie in each tensor of the state."""
        ptr, at = self.batch.row_ptr, torch.tensor(places)
        rows = torch.cat([torch.arange(ptr[place], ptr[place + 1]) for place in places])
        found = {
            f"{one}.{part}": rows if part == "first" else at for one in MOMENTS for part in PARTS
        }
        return {key: i.to(self._state[key].device) for key, i in (found | {"step": at}).items()}

    def leaves(self) -> list[Tensor]:
        """Return the weights as tensors with gradients: the same ones until the weights change."""
        # So what was computed of them stays of use, from one message to the next. PyTorch counts
        # the changes of a tensor; steps tell those that another process made in a mapped state.
        weights = self.weights()
        known: list[int] = self._state["step"].tolist() + [one._version for one in weights]
        if self._leaves is None or self._leaves[0] != known:
            self._leaves = known, [one.detach().requires_grad_() for one in weights]
        return self._leaves[1]

    def largest(self) -> Tensor:
        """Return each network's largest absolute weight, ``[c]``; infinity for NaN."""
        sizes = (weight.abs().amax(1) for weight in self.weights())
        first, rest = (size.nan_to_num(torch.inf, posinf=torch.inf) for size in sizes)
        rows = torch.zeros_like(rest).scatter_reduce_(0, self.batch.row_client, first, "amax")
        return torch.maximum(rows, rest)

    def start_from(self, *models: ModelWeights, replace: bool = True) -> None:
        """Replace the networks' weights by shared ones (FedAvg, FedProx); moments stay."""
        # With a new optimiser every round, each of Adam's steps would have full size, whatever the
        # gradient: at FedSCem's one step a round FedAvg then ends with a constant prediction.
        device = self._device
        self._start = [ModelWeights(m.first.to(device), m.rest.to(device)) for m in models]
        if replace:
            for held, value in zip(self.weights(), self._anchors(), strict=True):
                held.copy_(value)

    def inactive_rows(self, kind: int = 0) -> Tensor:
        """Return the first layer's rows of networks that lack the rows' feature, ``[f, h]``."""
        assert self._start, "only with shared models: start_from comes first"
        return self._start[kind].first

    def step(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        learning_rate: float,
        weight_decay: float,
        proximal: float = 0.0,
        moves: Tensor | None = None,
    ) -> Tensor:
        """Take an Adam step of all networks, or of those in ``moves``; each counts its steps."""
        # moves [c]
        parts = self.leaves()
        value = loss(*parts)
        grads = torch.autograd.grad(value, parts, materialize_grads=True)  # some have no rest
        self._leaves = None  # a gradient can be taken once
        steps = self._state["step"]
        steps += 1 if moves is None else moves.int()
        taken = steps if moves is None else steps * moves  # 0: the network does not move
        anchors = self._anchors() if proximal and self._start else (None, None)
        bounds = self.batch.row_ptr, list(range(self.batch.size + 1))
        for name, grad, anchor, ptr in zip(("first", "rest"), grads, anchors, bounds, strict=True):
            held = [self._state[f"{moment}.{name}"] for moment in MOMENTS]
            if anchor is not None:
                grad = grad + proximal * (held[0] - anchor)
            rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
            adam_rows_(held[0], held[1], held[2], grad, taken, ptr, **rates)
        return value.detach()

    def forget_moments(self, places: Sequence[int] | None = None) -> None:
        """Reset Adam's moments; the weights stay."""
        chosen = range(self.batch.size) if places is None else places
        for key, index in self.indices(chosen).items() if chosen else ():
            if not key.startswith("weight"):
                self._state[key][index] = 0

    def restart(self, places: Sequence[int], *models: ModelWeights) -> None:
        fresh, indices = _spread(models, self.kind, self._sources), self.indices(places)
        for part, value in zip(PARTS, fresh, strict=True):
            index = indices[f"weight.{part}"]
            self._state[f"weight.{part}"][index] = value[index]
        self.forget_moments(places)

    def weighted_sums(self, shares: Tensor, *, divisor: float = 1.0) -> list[ModelWeights]:
        """Add up the networks' full models, kind by kind; only after ``start_from``."""
        # shares [c]
        assert self._start, "only with shared models: start_from comes first"
        share = shares.to(self._device, torch.float64)
        weights = self.weights()
        return [self._sum(weights, share, kind, divisor) for kind in range(len(self._start))]

    def _sum(
        self, weights: tuple[Tensor, Tensor], share: Tensor, kind: int, divisor: float
    ) -> ModelWeights:
        batch, (first, rest) = self.batch, weights
        kept = (self.kind == kind) & (share > 0)
        feature, owner = batch.feature, batch.row_client
        if not bool(kept.all()):
            rows = kept[owner].nonzero().flatten()
            first, feature, owner = first[rows], feature[rows], owner[rows]
        of_row = share[owner]
        holders = share.new_zeros(batch.num_features).index_add_(0, feature, of_row)
        without = share[kept].sum() - holders
        inactive = self.inactive_rows(kind).double()
        total = sum_first_layers(first * of_row[:, None], feature, inactive, without)
        others = (rest[kept] * share[kept, None]).sum(0)
        return ModelWeights((total / divisor).float(), (others / divisor).float())

    def _anchors(self) -> tuple[Tensor, Tensor]:
        return _spread(self._start, self.kind, self._sources)


def _kinds(kinds: Sequence[int] | None, batch: GraphBatch) -> Tensor:
    if kinds is None:
        return torch.zeros(batch.size, dtype=torch.long, device=batch.y.device)
    return torch.tensor(kinds, dtype=torch.long, device=batch.y.device)


def _sources(kind: Tensor, batch: GraphBatch) -> Tensor:
    """Return the index of each active row in the kinds' stacked first layers, ``[r]``."""
    return kind[batch.row_client] * batch.num_features + batch.feature


def _spread(models: Sequence[ModelWeights], kind: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Return each network's model by kind: ``[r, h]`` active rows and ``[c, D]`` the rest."""
    first = torch.cat([model.first.to(kind.device) for model in models])
    rest = torch.stack([model.rest.to(kind.device) for model in models])
    return first[sources], rest[kind]
