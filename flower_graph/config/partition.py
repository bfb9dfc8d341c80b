"""The section ``partition`` of methods whose clients hold a part of one graph each."""

from __future__ import annotations

from dataclasses import dataclass

from flower_graph.config.checks import require
from flower_graph.config.rules import ABOVE_ZERO, RATIOS, SEED, SHARE, at_least, choice
from flower_graph.config.schema import setting

PARTITIONS = ("louvain", "metis", "dirichlet", "random", "metis-overlapping")


@dataclass
class PartitionSection:
    """How one graph is cut into clients, and which of a client's nodes train."""

    method: str = setting("louvain", choice(*PARTITIONS), help="how the graph is cut")
    clients: int = setting(
        8, at_least(1), help="the largest communities (`louvain`), or parts of the whole graph"
    )
    resolution: float = setting(
        1.0, ABOVE_ZERO, help="above 1 gives smaller communities; `louvain` only"
    )
    every_node: bool = setting(
        False, help="smaller communities too, each to the smallest client; `louvain` only"
    )
    alpha: float = setting(
        0.5, ABOVE_ZERO, help="the smaller, the fewer classes has a client; `dirichlet` only"
    )
    draws: int = setting(
        5,
        at_least(1),
        help="clients of each METIS part, of which `partition.clients` is a multiple; "
        "`metis-overlapping` only",
    )
    drawn_share: float = setting(
        0.5, SHARE, help="share of a part's nodes that each client draws; `metis-overlapping` only"
    )
    seed: int | None = setting(
        None, SEED, help="of the cut, the graphless clients and the splits; null: the run's"
    )
    ratios: list[float] = setting([0.6, 0.2, 0.2], RATIOS, help="shares of train, val and test")

    def validate(self) -> None:
        """Refuse clients that METIS parts do not give; ``ConfigError`` names key and value."""
        if self.method == "metis-overlapping":
            good = self.clients % self.draws == 0
            allowed = f"a multiple of partition.draws = {self.draws}"
            require(good, "partition.clients", self.clients, allowed)
