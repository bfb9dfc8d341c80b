"""Small graphs, runs of strategies over their clients, and the memory that a step takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from flwr.app import Context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from flower_graph.client.adaptor import make_client_app
from flower_graph.data.graph import ClientGraph
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.keys import ROLES

CLASSES, FEATURES = 3, 8


def small_graph(n: int = 12, seed: int = 0, **changes: Any) -> Data:
    """A ring with chords inside the classes; a third of the nodes trains, validates or tests."""
    place = torch.arange(n)
    y = place % CLASSES
    x = (torch.rand(n, FEATURES, generator=torch.Generator().manual_seed(seed)) < 0.3).float()
    x[place, y] = 1.0  # no node without features, and something to learn
    one_way = [torch.stack([place, (place + step) % n]) for step in (1, CLASSES)]
    edge_index = torch.cat([*one_way, *(edges.flip(0) for edges in one_way)], 1)
    masks = {f"{role}_mask": place // CLASSES % 3 == part for part, role in enumerate(ROLES)}
    return Data(**{"x": x, "edge_index": edge_index, "y": y, **masks, **changes})


def toy(
    client: int,
    x: Sequence[Sequence[float]],
    y: Sequence[int],
    edges: Sequence[tuple[int, int]] = (),
    roles: str = "",
) -> ClientGraph:
    """Make a client by hand; ``roles`` has a letter a node, ``t``, ``v``, ``e`` (test) or ``-``."""
    roles = roles or "t" * len(y)
    both = sorted(pair for edge in edges for pair in (edge, edge[::-1]))
    index = torch.tensor(both, dtype=torch.long).reshape(-1, 2).T
    masks = [torch.tensor([role == letter for role in roles]) for letter in "tve"]
    return ClientGraph(
        client, torch.arange(len(y)), torch.tensor(x), torch.tensor(y), index, None, *masks
    )


def dealt(make: Any, graphs: Sequence[Any], deal: Any = None, **mods: Any) -> Any:
    """Make an app whose SuperNodes host some clients each: as ``deal`` says by place, or in turn.

    ``make`` takes a context and a SuperNode's graphs.
    """

    def client_fn(context: Context) -> Any:
        part, parts = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
        places = range(part, len(graphs), parts) if deal is None else deal[part]
        return make(context, [graphs[place] for place in places])

    return make_client_app(client_fn, **mods)


@dataclass
class Outcome:
    """A run of a strategy over a grid, and what it leaves."""

    strategy: Any
    grid: InProcessGrid
    reports: list[RoundReport] = field(default_factory=list)

    def run(self, rounds: int = 3, *, timeout: float = 5.0, **how: Any) -> Self:
        how = {"on_round": self.reports.append, **how}
        self.strategy.start(self.grid, num_rounds=rounds, timeout=timeout, **how)
        return self

    @property
    def figures(self) -> Tensor:
        """Everything that the reports say of the models, ``[rounds, 6]``."""
        names = ["loss", "cross_entropy", "regulariser", *(f"{role}_accuracy" for role in ROLES)]
        rows = [[getattr(report, name) for name in names] for report in self.reports]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]

    @property
    def answered(self) -> list[int]:
        return [report.answered for report in self.reports]

    @property
    def weights(self) -> dict[str, Any]:
        return self.strategy.weights()  # type: ignore[no-any-return]


class Largest(TorchDispatchMode):
    """Notes the most numbers that any one result has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                held = one.values() if one.layout == torch.sparse_csr else one
                self.numbers = max(self.numbers, held.numel())
        return out
