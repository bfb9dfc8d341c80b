"""Attention without its linear map against PyG's ``GATConv`` whose map is the identity."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

from flower_graph.ops.attention import attend, attention_graph

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
