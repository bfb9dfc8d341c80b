"""Links as examples: held-out edges, pairs without an edge, and scores of pairs.

An undirected edge is a pair ``(u, v)`` with ``u < v``. In sums and sets it is the number
``u n + v``, so that pairs can be sorted and looked up.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_graph.ops.graph import pointers, row_entries

ROLES = 3  # training, validation, test: the numbers of roles are 0, 1, 2
HITS = (20, 50)
STEPS = 2**20  # in which reciprocal ranks are counted, so that their sums are exact
TRIES = 50  # draws of pairs, each of as many as are missing


@dataclass(frozen=True)
class LinkSplit:
    """A graph's edges as examples, as PyG's ``RandomLinkSplit`` makes them."""

    messages: Tensor  # [2, e] training edges both ways: the network's for training and validation
    later: Tensor  # [2, e'] training and validation edges: the network's for the test
    pairs: Tensor  # [2, m] edges, and as many pairs without an edge, of each role
    is_edge: Tensor  # [m] bool
    role: Tensor  # [m] 0 to 2


def split_links(
    edge_index: Tensor, num_nodes: int, val: float, test: float, rng: torch.Generator
) -> LinkSplit:
    """Hold out shares of a graph's edges, and draw a pair without an edge for each edge.

    Shares are rounded down; the rest is for training. The network never uses an edge that is held
    out for the role it predicts.
    """
    # edge_index [2, e], in one direction or both; self-loops are ignored
    edges = undirected(edge_index, num_nodes)  # [e]
    order = edges[torch.randperm(len(edges), generator=rng)]
    held = int(val * len(edges)), int(test * len(edges))
    sizes = [len(edges) - sum(held), *held]
    absent = draw_absent(edges, num_nodes, len(edges), rng)
    # Divided as edges are; a dense graph has fewer pairs without an edge
    cuts = [size * len(absent) // max(len(edges), 1) for size in sizes[1:]]
    shares = absent.split([len(absent) - sum(cuts), *cuts])
    both = [ends(part, num_nodes) for part in (*order.split(sizes), *shares)]
    counts = torch.tensor([part.shape[1] for part in both])
    number = torch.arange(2 * ROLES).repeat_interleave(counts)
    return LinkSplit(
        messages=both_directions(both[0]),
        later=both_directions(torch.cat(both[:2], 1)),
        pairs=torch.cat(both, 1),
        is_edge=number < ROLES,
        role=number % ROLES,
    )


def undirected(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return each undirected edge once, as a number, ascending; no self-loops."""
    low, high = edge_index.min(0).values, edge_index.max(0).values
    numbers: Tensor = (low * num_nodes + high)[low != high].unique()
    return numbers


def ends(numbers: Tensor, num_nodes: int) -> Tensor:
    """Return the two nodes of each pair, ``[2, m]``."""
    return torch.stack([numbers // num_nodes, numbers % num_nodes])


def both_directions(pairs: Tensor) -> Tensor:
    """Return edges in both directions, ``[2, 2m]``."""
    return torch.cat([pairs, pairs.flip(0)], 1)


def draw_absent(edges: Tensor, num_nodes: int, count: int, rng: torch.Generator | None) -> Tensor:
    """Draw different pairs of different nodes that have no edge; fewer if there are not enough.

    Returns numbers of pairs in the order of the draws; ``rng`` None: PyTorch's own.
    """
    # edges [e] numbers of the undirected edges, ascending
    found = edges.new_zeros(0)
    there = num_nodes * (num_nodes - 1) // 2 - len(edges)
    for _ in range(TRIES):
        missing = min(count, there) - len(found)
        if missing <= 0:
            break
        drawn = torch.randint(num_nodes, (2, 2 * missing + 8), generator=rng)
        low, high = drawn.min(0).values, drawn.max(0).values
        numbers = (low * num_nodes + high)[low != high]
        numbers = torch.cat([found, numbers[~contains(edges, numbers)]])
        ordered, place = numbers.sort(stable=True)  # the first of equal numbers stays
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        found = numbers[place[first].sort().values][:count]
    return found


def drawn_pairs(
    edge_index: Tensor, num_nodes: int, rng: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return a graph's edges and as many drawn pairs without one, ``[2, m]``, and which are edges.

    ``rng`` None: PyTorch's own.
    """
    own = undirected(edge_index.cpu(), num_nodes)
    absent = draw_absent(own, num_nodes, len(own), rng)
    pairs = ends(torch.cat([own, absent]), num_nodes).to(edge_index.device)
    return pairs, torch.arange(pairs.shape[1], device=pairs.device) < len(own)


def contains(ascending: Tensor, numbers: Tensor) -> Tensor:
    """Return for each number whether it is in ``ascending``."""
    if not len(ascending):
        return torch.zeros_like(numbers, dtype=torch.bool)
    at = torch.searchsorted(ascending, numbers).clamp(max=len(ascending) - 1)
    return ascending[at] == numbers


# Scores of pairs -------------------------------------------------------------------------------


def dot_products(rows: Tensor, pairs: Tensor) -> Tensor:
    """Return the dot product of the two rows of each pair, ``[m]``."""
    # rows [n, h], pairs [2, m]
    return (rows[pairs[0]] * rows[pairs[1]]).sum(1)


def common_neighbours(edge_index: Tensor, num_nodes: int, pairs: Tensor) -> Tensor:
    """Count the common neighbours of each pair, ``[m]``."""
    return _shared(edge_index, num_nodes, pairs, torch.ones(num_nodes))


def adamic_adar(edge_index: Tensor, num_nodes: int, pairs: Tensor) -> Tensor:
    """Add up ``1 / ln(degree)`` over the common neighbours of each pair, ``[m]``."""
    degree = torch.bincount(edge_index[0], minlength=num_nodes).double()
    # A common neighbour of two nodes has two neighbours at least.
    return _shared(edge_index, num_nodes, pairs, 1 / degree.clamp(min=2).log())


def _shared(edge_index: Tensor, num_nodes: int, pairs: Tensor, weight: Tensor) -> Tensor:
    # edge_index: both directions
    numbers = (edge_index[0] * num_nodes + edge_index[1]).unique()
    source, target = ends(numbers, num_nodes)  # sorted by source
    owner, place = row_entries(pointers(source, num_nodes), pairs[0])
    middle = target[place]
    is_common = contains(numbers, middle * num_nodes + pairs[1][owner])
    total = weight.new_zeros(pairs.shape[1])
    return total.index_add_(0, owner[is_common], weight[middle[is_common]])


# How good scores are ---------------------------------------------------------------------------


def area_of(own: Tensor, others: Tensor) -> Tensor:
    """Return the area under the ROC curve from counts by score, the lowest first; NaN if none."""
    # own, others [..., scores]: nodes with the label and without it; ties count half
    below = others.cumsum(-1) - others
    return (own * (below + others / 2)).sum(-1) / (own.sum(-1) * others.sum(-1))


def precision_of(own: Tensor, others: Tensor) -> float:
    """Return the average precision from counts by score, the highest score first."""
    # own, others: edges and other pairs of each score
    hits = own.cumsum(0).double()
    total = hits + others.cumsum(0)
    return float((own * hits / total.clamp(min=1)).sum() / own.sum()) if own.sum() else math.nan


def rank_counts(scores: Tensor, is_edge: Tensor) -> Tensor:
    """Count edges, those among the first ``HITS``, and add up reciprocal ranks, int64 ``[4]``.

    Each edge is ranked among the given pairs without an edge. A hit, as in OGB, scores above the
    K-th best of these pairs (or above all, if there are fewer). Reciprocal ranks are in steps of
    ``1 / STEPS``; a tie has the mean of its best and worst rank.
    """
    own, others = scores[is_edge], scores[~is_edge].sort().values
    if not len(own):
        return torch.zeros(2 + len(HITS), dtype=torch.int64)
    above = len(others) - torch.searchsorted(others, own, right=True)
    not_below = len(others) - torch.searchsorted(others, own)
    ranks = 1 + (above + not_below).double() / 2
    hits = [int((own > others[-k]).sum()) if len(others) >= k else len(own) for k in HITS]
    reciprocal = int((STEPS / ranks).round().sum())
    return torch.tensor([len(own), *hits, reciprocal])


def hits_of(ranks: Tensor) -> dict[str, float]:
    """Return Hits@K and the mean reciprocal rank from sums of ``rank_counts``."""
    total, *hits, reciprocal = ranks.tolist()
    shares = [value / total if total else math.nan for value in (*hits, reciprocal / STEPS)]
    return dict(zip([*(f"hits@{k}" for k in HITS), "mrr"], shares, strict=True))
