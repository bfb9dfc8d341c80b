"""Graph attention without its linear map: the server's part of a split GAT.

The users hold the map ``x'_i = W_i x_i``; scores, softmax and the weighted sum over neighbours
need only ``x'`` and the graph (nFedGNN, appendix D; Velickovic et al., 2018, equations 1 to 4).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.ops.graph import pointers, weighted_product, with_self_loops

SLOPE = 0.2  # of the LeakyReLU below 0, as in the paper


class AttentionGraph(NamedTuple):
    """Edges with self-loops, sorted by target, and their order sorted by source."""

    source: Tensor  # [e] ends of each edge, sorted by target
    target: Tensor
    ptr: Tensor  # [n + 1] where the edges of each target begin
    # [e] edge numbers sorted by source, and [n + 1] where those of each source begin
    by_source: Tensor
    source_ptr: Tensor


def attention_graph(edge_index: Tensor, n: int) -> AttentionGraph:
    """Sort the edges of a graph for attention."""
    # edge_index [2, e]
    edges = with_self_loops(edge_index, n)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    source, target = edges
    by_source = torch.argsort(source, stable=True)
    return AttentionGraph(source, target, pointers(target, n), by_source, pointers(source, n))


def edge_softmax(score: Tensor, graph: AttentionGraph) -> Tensor:
    """Normalise scores over the neighbourhood of each target."""
    # score [e, k]
    n = graph.ptr.numel() - 1
    index = graph.target[:, None].expand_as(score)
    top = score.new_full((n, score.shape[1]), -torch.inf)
    top.scatter_reduce_(0, index, score.detach(), "amax")
    weight = (score - top.index_select(0, graph.target)).exp()
    total = weight.new_zeros(n, weight.shape[1]).index_add(0, graph.target, weight)
    return weight / total.index_select(0, graph.target)


def attend(
    x: Tensor,
    attention_source: Tensor,
    attention_target: Tensor,
    graph: AttentionGraph,
    *,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum the neighbours' vectors, weighted by attention, for each head.

    ``drop`` is the dropout of the weights ``[e, heads]``, which are in the order of the edges.
    """
    # ``e_ij = LeakyReLU(a_target . x_i + a_source . x_j)``, ``alpha_ij = softmax_j(e_ij)``, ``out_i
    # = sum_j alpha_ij x_j``.
    # x [n, heads, h], attention_source, attention_target [heads, h]
    from_source = (x * attention_source).sum(-1)
    from_target = (x * attention_target).sum(-1)
    score = from_source.index_select(0, graph.source) + from_target.index_select(0, graph.target)
    alpha = edge_softmax(torch.nn.functional.leaky_relu(score, SLOPE), graph)
    alpha = alpha if drop is None else drop(alpha)
    col, order = graph.source.to(torch.int32), graph.by_source
    turned = graph.source_ptr, graph.target[order].to(torch.int32), order
    heads = zip(alpha.unbind(1), x.unbind(1), strict=True)
    return torch.stack([weighted_product(*head, graph.ptr, col, turned) for head in heads], 1)
