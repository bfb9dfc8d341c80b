"""Ten graphs such as people have: of six the neighbours are alike and the features weak.

Of the other four edges tell nothing, and features all or nothing: no method can do better than
logistic regression on features, or than a guess.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

N, CLASSES = 600, 3


def _edges(y: Tensor, alike: float, gen: torch.Generator, degree: int = 8) -> Tensor:
    n = y.numel()
    count = n * degree // 2
    source = torch.randint(n, (count,), generator=gen)
    target = torch.randint(n, (count,), generator=gen)
    within = torch.rand(count, generator=gen) < alike
    for label in y.unique().tolist():
        members = (y == label).nonzero().flatten()
        mine = within & (y[source] == label)
        drawn = torch.randint(members.numel(), (int(mine.sum()),), generator=gen)
        target[mine] = members[drawn]
    pairs = torch.stack([source, target])
    return pairs[:, source != target]


def _dense(y: Tensor, strength: float, gen: torch.Generator, features: int = 24) -> Tensor:
    centres = torch.randn(CLASSES, features, generator=gen)
    return strength * centres[y] + torch.randn(y.numel(), features, generator=gen)


def _counts(y: Tensor, strength: float, gen: torch.Generator, features: int, rate: float) -> Tensor:
    """Draw how often each word occurs; every class prefers some of them a little."""
    prefers = (torch.rand(CLASSES, features, generator=gen) < 0.3).float()
    rates = rate * (1 + strength * prefers[y])
    return torch.poisson(rates, generator=gen)


def alike(x: str = "dense", **changes: Any) -> Data:
    """Make a graph whose neighbours are alike and whose features are weak."""
    gen = torch.Generator().manual_seed(7)
    y = torch.randint(CLASSES, (N,), generator=gen)
    edges = _edges(y, 0.85, gen)
    features = {
        "dense": lambda: _dense(y, 0.15, gen),
        "sparse": lambda: _counts(y, 0.6, gen, 200, 0.03).clamp(max=1).to_sparse(),
        "counts": lambda: _counts(y, 0.15, gen, 60, 3.0),
    }[x]()
    both = torch.cat([edges, edges.flip(0)], 1)
    return Data(**{"x": features, "edge_index": both, "y": y, **changes})


def with_edges(kept: Callable[[Tensor, Tensor], Tensor]) -> Data:
    """Keep some of its edges."""
    data = alike()
    data.edge_index = data.edge_index[:, kept(*data.edge_index)]
    return data


def gaps() -> Data:
    data = alike()
    data.y = torch.tensor([0, 5, 100])[data.y]
    return data


def _random(y: Tensor, strength: float, edges: Tensor | None = None) -> Data:
    gen = torch.Generator().manual_seed(11)
    pairs = _edges(y, 0.0, gen) if edges is None else edges
    return Data(x=_dense(y, strength, gen), edge_index=torch.cat([pairs, pairs.flip(0)], 1), y=y)


def dominated() -> Data:
    """Give nine of ten nodes one class; features tell all, edges nothing."""
    gen = torch.Generator().manual_seed(5)
    chance = torch.rand(N, generator=gen)
    return _random((chance > 0.9).long() + (chance > 0.95).long(), 3.0)


def unlabelled() -> Data:
    """Label one node of ten; features tell all, edges nothing."""
    gen = torch.Generator().manual_seed(5)
    data = _random(torch.randint(CLASSES, (3 * N,), generator=gen), 1.5)
    data.y = torch.where(torch.rand(3 * N, generator=gen) < 0.1, data.y, -1)
    return data


def star() -> Data:
    """Link every node with the first one alone; features tell all."""
    n = 200
    y = torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(5))
    return _random(y, 3.0, torch.stack([torch.zeros(n - 1, dtype=torch.int64), torch.arange(1, n)]))


def no_features() -> Data:
    """Leave features out; edges tell nothing, and a guess at the largest class is the best."""
    chance = torch.rand(N, generator=torch.Generator().manual_seed(5))
    data = _random((chance > 0.7).long() + (chance > 0.85).long(), 0.0)
    data.x = None
    return data


ALIKE: dict[str, Callable[[], Data]] = {
    "dense": alike,
    "sparse": lambda: alike("sparse"),
    "counts": lambda: alike("counts"),
    # Without the edges between the first half of the nodes and the second; each edge once
    "two components": lambda: with_edges(lambda s, t: (s < N // 2) == (t < N // 2)),
    "one direction": lambda: with_edges(lambda s, t: torch.arange(len(s)) < len(s) // 2),
    "gaps": gaps,
}
OTHERS: dict[str, Callable[[], Data]] = {
    "dominated": dominated,
    "unlabelled": unlabelled,
    "star": star,
    "no features": no_features,
}


def valued(n: int = 160, **changes: Any) -> Data:
    """Make a graph whose nodes have a number, the mean over neighbours of what features tell."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=gen)
    source = torch.randint(n, (4 * n,), generator=gen)
    target = (source + torch.randint(1, 5, (4 * n,), generator=gen)) % n  # near ones
    near = torch.eye(n)
    near[source, target] = near[target, source] = 1
    own = x @ torch.tensor([1.0, -2.0, 0.5, 0, 0, 0])
    y = 100 + 30 * (near @ own) / near.sum(1) + torch.randn(n, generator=gen)
    y[: n // 20] = torch.nan
    return Data(**{"x": x, "edge_index": torch.stack([source, target]), "y": y, **changes})
