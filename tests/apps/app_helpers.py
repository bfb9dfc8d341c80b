"""A small graph of one's own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch_geometric.data import Data

from flower_graph.config.common import RunConfig

MakeConfig = Callable[..., RunConfig]


def own_graph(**changes: Any) -> Data:
    """30 users, 3 classes, with masks."""
    n = 30
    place = torch.arange(n)
    y = place % 3
    x = torch.rand(n, 6, generator=torch.Generator().manual_seed(0)).round()
    x[place, y] = 1.0
    edge_index = torch.stack([place, (place + 3) % n])
    masks = {
        f"{name}_mask": place // 10 == part for part, name in enumerate(("train", "val", "test"))
    }
    return Data(**{"x": x, "edge_index": edge_index, "y": y, **masks, **changes})


def context_of(node_config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Context:
    return Context(1, 2, node_config, RecordDict(), run_config or {})


class InlinePool(ThreadPoolExecutor):
    """Runs what is submitted one after the other, in this process."""

    def __init__(self, workers: int, context: Any, **how: Any) -> None:
        super().__init__(max_workers=1)
