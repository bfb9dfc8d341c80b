"""Ways to cut one graph into clients: the keys of each way, and a section with the keys of all."""

from dataclasses import dataclass, fields

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

PARTITIONS = (
    "louvain", "metis", "dirichlet", "random", "metis-overlapping", "ego-networks", "overlapping",
)  # fmt: skip
LOUVAIN, METIS, DIRICHLET, RANDOM, METIS_OVERLAPPING, EGO_NETWORKS, OVERLAPPING = PARTITIONS
PER_CLIENT, GLOBAL = EGO_SPLITS = ("per-client", "global")
PUBLIC = ("random", "degree", "cover")


@dataclass
class EgoSection:
    """The clients' ego-networks, and the whole of which training nodes are a share."""

    hops: int = setting(2, at_least(1))
    """distance from the ego up to which nodes belong to its network"""
    min_nodes: int = setting(15, at_least(1), help="nodes that an ego-network has at least")
    split: str = setting(PER_CLIENT, choice(*EGO_SPLITS))
    """`global`: a node has one role at all its clients; ego-networks only"""


@dataclass
class OverlapSection:
    """The nodes that all clients hold, and the number of each client's own."""

    public: str = setting("random", choice(*PUBLIC))
    """how nodes are chosen that all clients hold"""
    public_share: float = setting(0.4, SHARE)
    """share of all nodes that every client holds, where clients overlap"""
    private_share: float = setting(0.15, FRACTION)
    """share of all nodes that each client holds alone; with the public share at most 1 over all
    clients"""

    def refuse_shares(self, clients: int) -> None:
        whole = self.public_share + clients * self.private_share
        if whole > 1 + 1e-9:
            most = (1 - self.public_share) / clients
            allowed = f"at most {most:g}, with partition.public_share = {self.public_share}"
            require(False, "partition.private_share", self.private_share, allowed)


@dataclass
class CutSection:
    """How the graph is cut, and into how many clients."""

    method: str = setting(LOUVAIN, choice(*PARTITIONS), help="how the graph is cut")
    clients: int = setting(8, at_least(1))
    """the largest communities (`louvain`), parts of the whole graph, or nodes that are drawn
    (`ego-networks`)"""
    resolution: float | None = setting(1.0, ABOVE_ZERO)
    """above 1 gives smaller communities; null: 1, doubled until there are enough; `louvain` only"""
    every_node: bool = setting(False)
    """smaller communities too, each to the smallest client; `louvain` only"""
    alpha: float = setting(0.5, ABOVE_ZERO)
    """the smaller, the fewer classes has a client; `dirichlet` only"""
    draws: int = setting(5, at_least(1))
    """clients of each METIS part, of which `partition.clients` is a multiple; `metis-overlapping`
    only"""


@dataclass
class PartitionSection(OverlapSection, EgoSection, CutSection):
    """How one graph is cut into clients, in any way, and which of a client's nodes train."""

    seed: int | None = setting(None, SEED)
    """of the cut, the graphless clients and the splits; null: the run's"""
    ratios: list[float] = setting([0.6, 0.2, 0.2], RATIOS, help="shares of train, val and test")
    train_share: float | None = setting(None, SHARE)
    """share of a client's labelled nodes that train, whoever validates and tests; null: all that
    `partition.ratios` gives"""

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
    ways = {EGO_NETWORKS: fields(EgoSection), OVERLAPPING: fields(OverlapSection)}
    keys = {one.name for way, own in ways.items() if way != method for one in own}
    return keys if method == METIS_OVERLAPPING else keys | {"draws"}
