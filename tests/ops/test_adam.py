"""Adam by owner against PyTorch's own optimiser, one for each owner."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_graph.ops.adam import Adam, Rates, adam_rows_

RATE, DECAY, WIDTH = 0.01, 0.1, 3
PTR = [0, 4, 4, 5, 9]  # the second owner has no rows


def start() -> Tensor:
    return torch.randn(PTR[-1], WIDTH, generator=torch.Generator().manual_seed(0))


def gradients(steps: int) -> Tensor:
    return torch.randn(steps, PTR[-1], WIDTH, generator=torch.Generator().manual_seed(1))


def test_a_gradient_in_another_order_of_memory() -> None:
    found = []
    for gradient in (gradients(1)[0], gradients(1)[0].T.contiguous().T):
        weight, moments = start(), torch.zeros(2, *start().shape)
        rates = Rates(RATE, DECAY)
        adam_rows_(weight, *moments, gradient, torch.tensor([1]), [0, PTR[-1]], rates)
        assert torch.equal(gradient, gradients(1)[0]), "what the caller holds stays as it is"
        found.append(weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("begin", [[0, 0, 0, 0], [0, 0, 2, 2], [3, 1, 0, 2]])
def test_equals_an_optimiser_for_each_owner(begin: list[int], decoupled: bool) -> None:
    """Owner ``g`` joins after ``begin[g]`` steps, so that the step counts differ."""
    steps = gradients(6)
    weight = start()
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(steps):
        active = [g for g in range(4) if begin[g] <= number]
        rows = torch.cat([torch.arange(PTR[g], PTR[g + 1]) for g in active])
        sizes = [PTR[g + 1] - PTR[g] for g in active]
        held = [tensor[rows] for tensor in (weight, *moments)]
        adam_rows_(
            *held,
            gradient[rows],
            torch.tensor([number + 1 - begin[g] for g in active], dtype=torch.int32),
            [0, *torch.tensor(sizes).cumsum(0).tolist()],
            Rates(RATE, DECAY, decoupled),
        )
        for tensor, part in zip((weight, *moments), held, strict=True):
            tensor[rows] = part
    for g in range(4):
        own = slice(PTR[g], PTR[g + 1])
        parameter = nn.Parameter(start()[own].clone())
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind([parameter], lr=RATE, weight_decay=DECAY)
        for gradient in steps[begin[g] :]:
            parameter.grad = gradient[own].clone()
            optimizer.step()
        torch.testing.assert_close(weight[own], parameter.detach(), rtol=1e-6, atol=1e-7)


def steps_of(optimizer: Any, parameters: list[nn.Parameter], numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        for parameter in parameters[: 1 + number % 2]:  # the second has not always a gradient
            parameter.grad = torch.randn(parameter.shape, generator=seeded(number))
        optimizer.step()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_models_adam_is_pytorchs_to_the_bit(decoupled: bool) -> None:
    """Also where it goes on from a state."""
    options, ends = {"lr": RATE, "weight_decay": DECAY}, []
    pytorchs = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours = partial(Adam, decoupled=decoupled)
    for kind, stops in ((pytorchs, False), (ours, False), (ours, True)):
        both = [nn.Parameter(torch.randn(size, generator=seeded(7))) for size in (5, 3)]
        optimizer: Any = kind(both, **options)
        steps_of(optimizer, both, range(4))
        if stops:
            state = copy.deepcopy(optimizer.state_dict())
            steps_of(optimizer, [one.clone() for one in both], range(3))  # what is saved stays
            optimizer = ours(both, **options)
            optimizer.load_state_dict(state)
        steps_of(optimizer, both, range(4, 9))
        ends.append(both)
    expected, *rest = ends
    for parameters in rest:
        assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))
