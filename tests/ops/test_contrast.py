"""NT-Xent by hand, against equation 9 term by term, and what it holds in memory."""

import math
from typing import Any

import pytest
import torch
from graph_helpers import Largest
from hypothesis import given
from hypothesis import strategies as st
from plain.fedscem import nt_xent as slow_nt_xent
from torch import Tensor

from flower_graph.ops import contrast
from flower_graph.ops.contrast import nt_xent, projected_nt_xent


def run(
    z: Tensor, shared: Tensor, place: list[int], ptr: list[int], bounds: list[int], tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses and the gradients of a sum in which client ``c`` counts ``c + 1``."""
    z, shared = z.clone().requires_grad_(), shared.clone().requires_grad_()
    losses = nt_xent(z, shared, torch.tensor(place, dtype=torch.long), ptr, bounds, tau)
    (losses * torch.arange(1, losses.numel() + 1)).sum().backward()
    assert z.grad is not None and shared.grad is not None
    return losses.detach(), z.grad, shared.grad


def test_a_small_temperature_overflows_nowhere():
    """The mean points the other way, the other node the same way: ``log(1 + exp(2 / tau))``."""
    z, shared = torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[-1.0, 0]])
    loss, grad, _ = run(z, shared, [0], [0, 2], [0, 1], 0.005)
    torch.testing.assert_close(loss, torch.tensor([400.0]))
    assert grad.isfinite().all()


@st.composite
def clients(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Draw the number of nodes of each client, and which are shared: none, some, all."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return [(n, sorted(draw(st.sets(st.integers(0, n - 1))))) for n in sizes]


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    draw = torch.Generator().manual_seed(0)
    z, shared = torch.randn(30, 4, generator=draw), torch.randn(20, 4, generator=draw)
    case: Any = (z, shared, list(range(5, 25)), [0, 30], [0, 20], 0.5)
    whole = run(*case)
    for numbers in (1, 150, 170):  # one anchor at a time, three, three and a rest
        monkeypatch.setattr(contrast, "BLOCK_ROWS", 1)
        monkeypatch.setattr(contrast, "BLOCK_NUMBERS", numbers)
        for one, other in zip(run(*case), whole, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("width", [2, 4, 5, 12])
@given(case=clients(), tau=st.sampled_from([0.2, 1.0, 10.0]), seed=st.integers(0, 99))
def test_projections_equal_the_slow_version(
    width: int, case: list[tuple[int, list[int]]], tau: float, seed: int
):
    """Embeddings of 3 numbers, projected to fewer, to the most that are made, and to more."""
    draw = torch.Generator().manual_seed(seed)
    ptr, bounds, place = [0], [0], []
    for n, rows in case:
        place += [ptr[-1] + row for row in rows]
        ptr.append(ptr[-1] + n)
        bounds.append(bounds[-1] + len(rows))
    shapes = [(ptr[-1], 3), (bounds[-1], 3), (len(case), 3, width), (len(case), width)]
    given_ = [torch.randn(s, generator=draw, dtype=torch.double).requires_grad_() for s in shapes]
    h, means, weight, bias = given_
    rows = torch.tensor(place, dtype=torch.long)
    losses = projected_nt_xent(h, means, weight, bias, rows, ptr, bounds, tau)

    wanted = []
    for c, (_, own) in enumerate(case):
        z, shared = (
            part @ weight[c] + bias[c]
            for part in (h[ptr[c] : ptr[c + 1]], means[bounds[c] : bounds[c + 1]])
        )
        wanted.append(slow_nt_xent(z, shared, torch.tensor(own, dtype=torch.long), tau).sum())
    torch.testing.assert_close(losses, torch.stack(wanted))
    counts = torch.arange(1, len(case) + 1)
    how: Any = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad((losses * counts).sum(), given_, **how)
    total = (torch.stack(wanted) * counts).sum() + 0 * h.sum()
    slow = torch.autograd.grad(total, given_, **how)
    for one, other in zip(grads, slow, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_projection_of_zero_has_no_direction(scale: float):
    """``z_0`` cancels but for rounding: its similarity to the other node and to its mean is 0."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 2, 64, generator=draw) * scale
    bias = -0.3 * weight[:, 0]
    h = torch.tensor([[0.3, 0], [0.5, 2]], requires_grad=True)
    mean = torch.tensor([[0.1, 0.7]])
    loss = projected_nt_xent(h, mean, weight, bias, torch.tensor([0]), [0, 2], [0, 1], 0.1)
    torch.testing.assert_close(loss, torch.tensor([math.log(2)]), rtol=0, atol=0.01)
    (grad,) = torch.autograd.grad(loss.sum(), h)
    assert grad.isfinite().all()


@pytest.mark.parametrize("place", [[], [0, 1]])
def test_a_head_that_decayed_to_almost_nothing_has_finite_slopes(place: list[int]):
    """That of a client that shares no node has no gradient but weight decay's."""
    draw = torch.Generator().manual_seed(0)
    weight = (torch.randn(1, 2, 8, generator=draw) * 1e-15).requires_grad_()
    inputs = torch.ones(3, 2), torch.ones(len(place), 2), weight, torch.zeros(1, 8)
    rows = torch.tensor(place, dtype=torch.long)
    loss = projected_nt_xent(*inputs, rows, [0, 3], [0, len(place)], 1.0)
    (grad,) = torch.autograd.grad(loss.sum(), weight)
    assert grad.isfinite().all()


@pytest.mark.parametrize(("clients_", "nodes"), [(100, 20), (1, 1_500)])
def test_no_matrix_of_all_by_all(clients_: int, nodes: int):
    """Many small clients, and one whose own matrix would be large."""
    n, d = clients_ * nodes, 8
    z, ptr = torch.randn(n, d), list(range(0, n + 1, nodes))
    with Largest() as seen:
        run(z, torch.randn(n, d), list(range(n)), ptr, ptr, 1.0)
    blocks = min(contrast.BLOCK_NUMBERS, 2 * nodes * nodes)
    assert seen.numbers <= max(blocks, 2 * n * d)
    assert 10 * seen.numbers < n * 2 * n
