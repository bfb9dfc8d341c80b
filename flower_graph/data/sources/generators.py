"""A contextual stochastic block model: graphs of any size that can be learnt.

Classes have equal sizes. Edges are drawn one by one: a source at random, then a target of the same
class with probability ``homophily``, else of another class. Each node has exactly ``active``
features of value 1. The features are cut into ``active`` ranges and a node has one feature of each
range: with probability ``signal`` the one that its class prefers, else any. So indices are distinct
and sorted by construction, and no array has the size nodes x features.
"""

import torch

from flower_graph.data.graph import Graph, check_dense_size, to_undirected
from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor

# Weak enough that features alone do not decide, strong enough that neighbours help.
SIGNAL = 0.1
ROWS = 1 << 16  # nodes at a time; bounds the memory of intermediate tensors


def csbm(
    nodes: int,
    classes: int,
    *,
    degree: float = 10.0,
    features: int = 512,
    active: int = 32,
    homophily: float = 0.8,
    signal: float = SIGNAL,
    seed: int = 0,
    sparse: bool = False,
) -> Graph:
    """Generate a contextual stochastic block model, without masks.

    Parameters
    ----------
    nodes, classes
        Number of nodes, and of classes (at least 2, at most ``nodes``).
    degree
        Mean number of neighbours; a little less in small dense graphs (no double edges).
    features, active
        Number of features, and how many of them each node has. With ``active == features``
        features tell nothing about the class.
    homophily
        Expected share of edges within a class, 0 to 1.
    signal
        Chance, 0 to 1, of each of a node's features to be the one that its class prefers. 0:
        features tell nothing; 1: they are the same in a whole class.
    seed
        The same seed gives the same graph.
    sparse
        Whether features are a sparse CSR matrix; ``DataError`` if dense ones take more than 2 GB.
    """
    if not sparse:
        check_dense_size(nodes, features, "csbm(..., sparse=True) makes sparse features.")
    if not (2 <= classes <= nodes and 1 <= active <= features):
        sizes = f"{nodes} nodes, {classes} classes, {features} features, {active} active"
        raise DataError(f"{sizes}: must be 2 classes to one a node, and 1 active feature to all")
    # Mixed, so that a split with the same seed draws other numbers.
    generator = torch.Generator().manual_seed(seed ^ 0x5EED)
    y = torch.randperm(nodes, generator=generator) % classes
    # Edges: a source, and a target of its class or of another
    order = torch.argsort(y, stable=True)  # nodes of class 0, then of class 1, ...
    class_sizes, count = torch.bincount(y, minlength=classes), round(nodes * degree / 2)
    class_starts = torch.cumsum(class_sizes, 0) - class_sizes
    source = torch.randint(nodes, (count,), generator=generator)
    size, start = class_sizes[y[source]], class_starts[y[source]]
    same = torch.rand(count, generator=generator) < homophily
    # float64: float32 has fewer steps than there may be nodes.
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    inside = start + (share * size).long()
    outside = (share * (nodes - size)).long()
    outside += torch.where(outside >= start, size, torch.zeros_like(size))  # skip the own class
    target = order[torch.where(same, inside, outside)]
    edge_index = to_undirected(torch.stack([source, target]), nodes)
    # Features: one of each range, the class's favourite or any
    bounds = torch.arange(active + 1) * features // active
    starts, widths = bounds[:-1], bounds.diff()
    favourites = (torch.rand(classes, active, generator=generator) * widths).int()
    indices = torch.empty(nodes, active, dtype=torch.int32)
    for first in range(0, nodes, ROWS):
        labels = y[first : first + ROWS]
        drawn = torch.rand(labels.numel(), active, generator=generator)
        favoured = torch.rand(labels.numel(), active, generator=generator) < signal
        # A product with a float32 just below 1 may round up to the width itself.
        chosen = (drawn * widths).int().clamp_(max=widths.int() - 1)
        chosen = torch.where(favoured, favourites[labels], chosen)
        indices[first : first + ROWS] = chosen + starts.int()
    ptr = torch.arange(nodes + 1, dtype=torch.int32) * active
    x = csr_tensor(ptr, indices.flatten(), torch.ones(nodes * active), (nodes, features))
    return Graph(x if sparse else x.to_dense(), edge_index, y, classes)
