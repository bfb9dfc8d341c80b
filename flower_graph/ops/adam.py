"""Adam for a model's parameters, and for rows of many clients with a step count each.

``torch.optim.Adam`` imports PyTorch's compiler, which takes longer than many a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from flower_graph.ops.grouped import group_sizes

BETAS, EPS = (0.9, 0.999), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # PyTorch's names


class Rates(NamedTuple):
    """What a step takes besides tensors."""

    learning_rate: float
    weight_decay: float
    decoupled: bool = False


def adam_rows_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    step: Tensor,
    ptr: Sequence[int],
    rates: Rates,
) -> None:
    """Take one step of PyTorch's fused Adam in place; weight decay is added to the gradient."""
    # weight, exp_avg, exp_avg_sq [r, w], gradient [r, w], step [g]; a group of step 0 stays
    _adam(_runs((weight, gradient, exp_avg, exp_avg_sq), step, ptr), rates, fused=True)


def _runs(rows: Sequence[Tensor], step: Tensor, ptr: Sequence[int]) -> list[Sequence[Tensor]]:
    """Cut rows where neighbours have taken different numbers of steps: usually nowhere."""
    device, taken = rows[0].device, step.tolist()
    if taken.count(taken[0]) == len(taken):  # quick: small models take many steps
        return [(*rows, torch.tensor(taken[0] - 1.0).to(device))] if taken[0] else []
    counts, groups = torch.unique_consecutive(step, return_counts=True)
    sizes = group_sizes([0, *(ptr[at] for at in groups.cumsum(0).tolist())])
    steps = (counts - 1).float().to(device).unbind()  # Adam counts the step itself
    parts = zip(*(one.split(sizes) for one in rows), steps, strict=True)
    return [*compress(parts, (counts > 0).tolist())]


def _adam(every: Sequence[Sequence[Tensor]], rates: Rates, *, fused: bool) -> None:
    # every: weights, gradient, both moments and count of steps of each parameter
    if not every:
        return
    params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*every, strict=True))
    # PyTorch has the switch from 2.7 on
    decoupled: dict[str, Any] = {"decoupled_weight_decay": True} if rates.decoupled else {}
    adam(
        params=params,
        grads=[grad.contiguous() for grad in grads],  # or a fused step would read another order
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        state_steps=steps,
        lr=rates.learning_rate,
        weight_decay=rates.weight_decay,
        max_exp_avg_sqs=[],
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        maximize=False,
        foreach=False if fused else None,  # both without a choice: PyTorch's own
        fused=fused or None,
        **decoupled,
    )


class Adam:
    """``torch.optim.Adam`` with its defaults: the same numbers.

    Parameters
    ----------
    parameters : iterable of Tensor
        The parameters to train.
    lr : float
        Step size; it may change between two steps.
    weight_decay : float
        L2 weight, added to the gradient.
    decoupled : bool
        Take the weight decay from the weights instead: ``torch.optim.AdamW``.

    Attributes
    ----------
    state : dict
        Step count and moments of each parameter, under PyTorch's names.
    clients : tuple of int
        The number of clients ``c`` if the parameters are stacks; empty for a plain module.
    bounds : dict
        Of stacks that have several rows a client: ``c + 1`` bounds of the clients' rows.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.weight_decay, self.decoupled = lr, weight_decay, decoupled
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.clients: tuple[int, ...] = ()
        self.bounds: dict[Tensor, list[int]] = {}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, moves: Tensor | None = None) -> None:
        """Take a step; of stacks for all clients, or for those in ``moves``, ``[c]``."""
        whole, runs = list[Sequence[Tensor]](), list[Sequence[Tensor]]()
        rates = Rates(self.lr, self.weight_decay, self.decoupled)
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            held = self._held(parameter)
            tensors = parameter, parameter.grad, held["exp_avg"], held["exp_avg_sq"]
            if not held["step"].dim():  # not a stack with a count for each client
                whole.append((*tensors, held["step"]))
                continue
            held["step"] += 1 if moves is None else moves
            taken = held["step"] if moves is None else held["step"] * moves
            is_turned = not parameter.is_contiguous()
            flat = [(one.transpose(-1, -2) if is_turned else one).flatten(1) for one in tensors]
            runs += _runs(flat, taken, self.bounds.get(parameter) or range(len(parameter) + 1))
        _adam(runs, rates, fused=True)
        _adam(whole, rates, fused=False)

    def state_dict(self) -> dict[str, list[Tensor]]:
        held = [self._held(parameter) for parameter in self.parameters]
        return {name: [one[name] for one in held] for name in MOMENTS}

    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        for name in MOMENTS:
            for parameter, saved in zip(self.parameters, state[name], strict=True):
                self._held(parameter)[name].copy_(saved)

    def _held(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = moments_of(parameter, *self.clients)
        return self.state[parameter]


def moments_of(parameter: Tensor, *clients: int) -> dict[str, Tensor]:
    """Return Adam's state before the first step, with a step count for each of ``clients``."""
    # Counts are with the CPU: on a GPU, reading them would wait for it.
    moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS[:2]}
    return moments | {"step": torch.zeros(clients)}


def in_memory_order(stack: Tensor) -> Tensor:
    """Return a dense tensor, or its transpose, so that neighbours are neighbours in memory."""
    return stack if stack.is_contiguous() else stack.transpose(-1, -2)
