"""What tests of data share: graphs, who has which role, and when clients are the same."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_graph.config.common import PartitionSection
from flower_graph.data import Graph, csbm, to_undirected

RATIOS = [0.6, 0.2, 0.2]
SPLIT = PartitionSection()  # by these ratios
# 0 - 1 - 2 - 3 - 4, with 1 - 3 as well; 5 has no neighbour.
ONE_WAY = [[0, 1, 2, 3, 1], [1, 2, 3, 4, 3]]
EDGES = to_undirected(torch.tensor(ONE_WAY), 6)


def large(nodes: int = 200, seed: int = 0, **changes: Any) -> Graph:
    """Make a graph that is large enough for many clients."""
    made = csbm(nodes, 3, degree=6.0, features=40, active=5, homophily=0.8, seed=seed)
    return replace(made, **changes)


def tables(folder: Path, nodes: str, edges: str | None = None) -> Path:
    """Write a graph in tables; without edges, a path of its nodes, whose names come first."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [line.partition(",")[0] for line in nodes.splitlines()[1:]]
    pairs = "".join(f"{a},{b}\n" for a, b in pairwise(names))
    (folder / "nodes.csv").write_text(nodes, encoding="utf-8")
    written = f"source,target\n{pairs}" if edges is None else edges
    (folder / "edges.csv").write_text(written, encoding="utf-8")
    return folder


def mask(*places: int, size: int = 6) -> Tensor:
    """Make a boolean mask of some places."""
    return torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(places).long(), True)


def chance(seed: int = 0) -> torch.Generator:
    """Make a generator of its own."""
    return torch.Generator().manual_seed(seed)


def roles(client: Any) -> list[list[int]]:
    """Give a client's nodes for training, validation and test."""
    masks = (client.train_mask, client.val_mask, client.test_mask)
    return [client.nodes[mask].tolist() for mask in masks]


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Compare clients field by field, to the bit."""
    return all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b
        for one, other in zip(some, others, strict=True)
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )
