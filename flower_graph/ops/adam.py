"""Adam for a model's parameters, and for rows of many clients with a step count each.

``torch.optim.Adam`` imports PyTorch's compiler, which takes longer than many a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

BETAS, EPS = (0.9, 0.999), 1e-8
# What PyTorch's function is told in each step: its optimiser's defaults
_DEFAULTS: dict[str, Any] = {
    "max_exp_avg_sqs": [],
    "amsgrad": False,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "eps": EPS,
    "maximize": False,
}


def adam_rows_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    step: Tensor,
    ptr: list[int],
    *,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Take one step of PyTorch's fused Adam in place; weight decay is added to the gradient."""
    # weight, exp_avg, exp_avg_sq [r, w], gradient [r, w], step [g]; a group of step 0 stays
    gradient = gradient.contiguous()  # or the fused step would read it in another order
    # Neighbours with as many steps are one parameter to Adam: usually all of them.
    counts, owners = torch.unique_consecutive(step, return_counts=True)
    ends = torch.tensor(ptr)[owners.cumsum(0)]
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
    moves = counts > 0
    params, grads, exp_avgs, exp_avg_sqs = (
        list(compress(rows.split(sizes), moves.tolist()))
        for rows in (weight, gradient, exp_avg, exp_avg_sq)
    )
    counts = counts[moves].to(weight.device).unbind()
    fused_step_(params, grads, exp_avgs, exp_avg_sqs, counts, learning_rate, weight_decay)


def fused_step_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: Iterable[Tensor],
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Take a step that passes over memory once; a parameter's count includes this step."""
    adam(
        params=params,
        grads=grads,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        # Adam counts the step itself.
        state_steps=[(count - 1).float() for count in counts],
        lr=learning_rate,
        weight_decay=weight_decay,
        **_DEFAULTS,
        foreach=False,
        fused=True,
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
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.weight_decay = lr, weight_decay
        # Counts are with the CPU: on a GPU, reading them would wait for it.
        self.steps = [torch.tensor(0.0) for _ in self.parameters]
        self.averages = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        grads = [each.grad for each in self.parameters]
        every = self.parameters, self.averages, self.squares, self.steps
        moves = [grad is not None for grad in grads]
        params, exp_avgs, exp_avg_sqs, steps = (list(compress(part, moves)) for part in every)
        adam(
            params=params,
            grads=[grad for grad in grads if grad is not None],
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            state_steps=steps,
            lr=self.lr,
            weight_decay=self.weight_decay,
            **_DEFAULTS,
        )

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "averages": self.averages, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        for name in ("steps", "averages", "squares"):
            for own, saved in zip(getattr(self, name), state[name], strict=True):
                own.copy_(saved)
