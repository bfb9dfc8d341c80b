"""Ways to cut one graph into clients: the keys of each way, and a section with the keys of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from flower_graph.config.rules import (
    ABOVE_ZERO,
    FRACTION,
    RATIOS,
    SEED,
    SHARE,
    at_least,
    choice,
    require,
)
from flower_graph.config.schema import setting
from flower_graph.errors import ConfigError

PARTITIONS = (
    "louvain", "metis", "dirichlet", "random", "metis-overlapping", "ego-networks", "overlapping",
)  # fmt: skip
LOUVAIN, METIS, DIRICHLET, RANDOM, METIS_OVERLAPPING, EGO_NETWORKS, OVERLAPPING = PARTITIONS
PER_CLIENT, GLOBAL = EGO_SPLITS = ("per-client", "global")
PUBLIC = ("random", "degree", "cover")


@dataclass
class EgoSection:
    """The clients' ego-networks, and the whole of which training nodes are a share."""

    hops: int = setting(
        2, at_least(1), help="distance from the ego up to which nodes belong to its network"
    )
    min_nodes: int = setting(15, at_least(1), help="nodes that an ego-network has at least")
    split: str = setting(
        PER_CLIENT,
        choice(*EGO_SPLITS),
        help="`global`: a node has one role at all its clients; ego-networks only",
    )


@dataclass
class OverlapSection:
    """The nodes that all clients hold, and the number of each client's own."""

    public: str = setting(
        "random", choice(*PUBLIC), help="how nodes are chosen that all clients hold"
    )
    public_share: float = setting(
        0.4, SHARE, help="share of all nodes that every client holds, where clients overlap"
    )
    private_share: float = setting(
        0.15,
        FRACTION,
        help="share of all nodes that each client holds alone; with the public share at most 1 "
        "over all clients",
    )

    def refuse_shares(self, clients: int) -> None:
        whole = self.public_share + clients * self.private_share
        if whole > 1 + 1e-9:
            raise ConfigError(
                f"partition.private_share: {self.private_share} for each of {clients} clients "
                f"and partition.public_share: {self.public_share} make {whole:g} of the nodes; "
                f"at most {(1 - self.public_share) / clients:g} is left for each client"
            )


@dataclass
class DrawnSection:
    """The nodes of METIS parts that a client holds, if clients share some."""

    GONE: ClassVar[dict[str, str]] = {
        "drawn_share": "each client draws half of a part's nodes; leave the key out"
    }

    draws: int = setting(
        5,
        at_least(1),
        help="clients of each METIS part, of which `partition.clients` is a multiple; "
        "`metis-overlapping` only",
    )


@dataclass
class CutSection:
    """How the graph is cut, and into how many clients."""

    method: str = setting(LOUVAIN, choice(*PARTITIONS), help="how the graph is cut")
    clients: int = setting(
        8,
        at_least(1),
        help="the largest communities (`louvain`), parts of the whole graph, or nodes that are "
        "drawn (`ego-networks`)",
    )
    resolution: float | None = setting(
        1.0,
        ABOVE_ZERO,
        help="above 1 gives smaller communities; null: 1, doubled until there are enough; "
        "`louvain` only",
    )
    every_node: bool = setting(
        False, help="smaller communities too, each to the smallest client; `louvain` only"
    )
    alpha: float = setting(
        0.5, ABOVE_ZERO, help="the smaller, the fewer classes has a client; `dirichlet` only"
    )


@dataclass
class PartitionSection(OverlapSection, EgoSection, DrawnSection, CutSection):
    """How one graph is cut into clients, in any way, and which of a client's nodes train."""

    seed: int | None = setting(
        None, SEED, help="of the cut, the graphless clients and the splits; null: the run's"
    )
    ratios: list[float] = setting([0.6, 0.2, 0.2], RATIOS, help="shares of train, val and test")
    train_share: float | None = setting(
        None,
        SHARE,
        help="share of a client's labelled nodes that train, whoever validates and tests; null: "
        "all that `partition.ratios` gives",
    )

    def validate(self) -> None:
        if self.train_share is not None:
            good, most = self.train_share <= self.ratios[0], f"{self.ratios[0]:g}"
            allowed = f"at most {most} (the first of partition.ratios)"
            require(good, "partition.train_share", self.train_share, allowed)
        if self.method == METIS_OVERLAPPING:
            good = self.clients % self.draws == 0
            allowed = f"a multiple of partition.draws = {self.draws}"
            require(good, "partition.clients", self.clients, allowed)
        if self.method == OVERLAPPING:
            self.refuse_shares(self.clients)


def keys_of_others(method: object) -> set[str]:
    """Name the keys of ``partition`` that have no effect with this method."""
    return {key for way, keys in _KEYS.items() if way != method for key in keys}


def _keys(section: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(section))


_KEYS: Mapping[str, tuple[str, ...]] = {
    METIS_OVERLAPPING: _keys(DrawnSection),
    EGO_NETWORKS: _keys(EgoSection),
    OVERLAPPING: _keys(OverlapSection),
}
