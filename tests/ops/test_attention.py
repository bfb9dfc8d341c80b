"""Attention without its linear map against PyG's ``GATConv`` whose map is the identity."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv

from flower_graph.ops.attention import attend, attention_graph, edge_softmax
from flower_graph.rng import seeded

# A triangle with a tail; node 4 is alone.
EDGES = torch.tensor([[0, 1, 0, 2, 1, 2, 2, 3], [1, 0, 2, 0, 2, 1, 3, 2]])
DIRECTED = torch.tensor([[3, 0, 2, 3, 1], [0, 1, 1, 1, 4]])
NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)
N, HEADS, H = 5, 3, 4


def draws(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw node vectors and both halves of the attention vectors."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(N, HEADS, H, generator=draw)
    return x, *torch.randn(2, HEADS, H, generator=draw)


def pyg_attention(x: Tensor, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
    """Run ``GATConv`` with the identity as its linear map."""
    layer = GATConv(HEADS * H, H, heads=HEADS, bias=False)
    with torch.no_grad():
        layer.lin.weight.copy_(torch.eye(HEADS * H))
    del layer.att_src, layer.att_dst
    layer.att_src, layer.att_dst = source[None], target[None]
    return layer(x.reshape(N, -1), edge_index).view(N, HEADS, H)


@pytest.mark.parametrize("edge_index", [EDGES, DIRECTED, NO_EDGES])
def test_equals_gatconv_with_gradients(edge_index: Tensor):
    ours = [t.requires_grad_() for t in draws()]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out = attend(*ours, attention_graph(edge_index, N))
    expected = pyg_attention(*theirs, edge_index)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((out * weight).sum(), ours)
    want = torch.autograd.grad((expected * weight).sum(), theirs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1.0, 100.0]))
@settings(max_examples=30, deadline=None)
def test_softmax_sums_to_one_over_each_neighbourhood(seed: int, scale: float):
    graph = attention_graph(EDGES, N)
    draw = torch.Generator().manual_seed(seed)
    score = scale * torch.randn(graph.target.numel(), HEADS, generator=draw)
    weight = edge_softmax(score, graph)
    assert (weight >= 0).all()
    total = torch.zeros(N, HEADS).index_add_(0, graph.target, weight)
    torch.testing.assert_close(total, torch.ones(N, HEADS))
    torch.testing.assert_close(edge_softmax(score + 50, graph), weight, rtol=1e-3, atol=1e-4)


def attend_to_all(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Let ``n`` nodes, marked by unit vectors, attend equally to all; return coefficients."""
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    graph = attention_graph(torch.tensor(pairs).T, n)
    x = torch.eye(n)[:, None, :].requires_grad_()
    zeros = torch.zeros(1, n)
    with seeded(torch.device("cpu"), seed, "test"):
        return attend(x, zeros, zeros, graph, drop=partial(functional.dropout, p=0.25))[:, 0], x


def test_dropout_drops_coefficients_and_scales_the_rest():
    # Every coefficient is 1/60; what is kept is divided by 0.75.
    shares, _ = attend_to_all(60, seed=5)
    kept = shares > 0
    torch.testing.assert_close(shares[kept], torch.full_like(shares[kept], 1 / 60 / 0.75))
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.03)  # 3,600 draws
    assert torch.equal(shares, attend_to_all(60, seed=5)[0])
    assert not torch.equal(shares, attend_to_all(60, seed=6)[0])


def test_dropped_coefficients_carry_no_gradient():
    shares, x = attend_to_all(6, seed=5)
    assert (shares == 0).any()
    (gradient,) = torch.autograd.grad(shares[:, 0].sum(), x)
    # Without attention vectors the output is linear in x, with the kept shares as its matrix.
    torch.testing.assert_close(gradient[:, 0, 0], shares.sum(0).detach())
