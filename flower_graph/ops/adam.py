"""Adam for rows that many clients own, each with a step count of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam

BETAS, EPS = (0.9, 0.999), 1e-8


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
    """Take one step of PyTorch's fused Adam in place; weight decay is added to the gradient.

    Parameters
    ----------
    weight, exp_avg, exp_avg_sq : Tensor
        ``[r, w]`` weights and Adam's two moments, changed in place.
    gradient : Tensor
        ``[r, w]``.
    step : Tensor
        ``[g]`` steps that each owner has taken, this one included; on the CPU.
    ptr : list of int
        ``g + 1`` bounds of the owners' rows.
    learning_rate, weight_decay : float
        As in ``torch.optim.Adam``.
    """
    gradient = gradient.contiguous()  # or the fused step would read it in another order
    # Neighbours with as many steps are one parameter to Adam: usually all of them.
    counts, owners = torch.unique_consecutive(step, return_counts=True)
    ends = torch.tensor(ptr)[owners.cumsum(0)]
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
    adam(
        params=list(weight.split(sizes)),
        grads=list(gradient.split(sizes)),
        exp_avgs=list(exp_avg.split(sizes)),
        exp_avg_sqs=list(exp_avg_sq.split(sizes)),
        max_exp_avg_sqs=[],
        # Adam counts the step itself.
        state_steps=list((counts - 1).to(weight.device, torch.float32).unbind()),
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=EPS,
        maximize=False,
        foreach=False,
        fused=True,
    )
