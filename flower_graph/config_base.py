"""Settings that every method has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flower_graph.config_checks import above_zero, are_ratios, at_least, choice, is_seed, require
from flower_graph.config_privacy import PrivacyConfig

SPLITS = ("public", "geom-gcn", "random")
DEVICES = ("auto", "cpu", "cuda")


@dataclass
class DataConfig:
    """Which graph, which nodes train, and for ``csbm`` what to generate."""

    name: str = "cora-linqs"  # a known set, `Class/name` of PyG, `csbm`, or the path of a file
    root: str | None = None  # folder of the raw data; null: $FLOWER_GRAPH_DATA, else a download
    split: str = "public"  # public | geom-gcn | random
    split_index: int | None = None  # which of several fixed splits; null: seed modulo their number
    split_seed: int = 0  # seed of a random split
    train_per_class: int = 20  # training nodes of each class, random split
    num_val: int = 500  # validation nodes, random split
    num_test: int = 1000  # test nodes, random split
    ratios: list[float] | None = None  # train, val, test shares of a random split; replace counts
    normalize: bool = True  # scale each node's features to sum to one
    presence: bool = False  # before that, make every feature that is not 0 a 1
    nodes: int = 10000  # csbm: number of nodes
    classes: int = 7  # csbm: number of classes
    degree: float = 10.0  # csbm: mean number of neighbours
    features: int = 512  # csbm: number of features
    active: int = 32  # csbm: non-zero features of a node
    homophily: float = 0.8  # csbm: share of edges inside a class, 0 to 1

    def validate(self) -> None:
        """Refuse values that no data set can have; ``ConfigError`` names key and value."""
        require(bool(self.name.strip()), "data.name", self.name, "the name of a data set or a file")
        choice("data.split", self.split, SPLITS)
        if self.split_index is not None:
            at_least("data.split_index", self.split_index, 0)
        is_seed("data.split_seed", self.split_seed)
        at_least("data.train_per_class", self.train_per_class, 1)
        at_least("data.num_val", self.num_val, 0)
        at_least("data.num_test", self.num_test, 0)
        if self.ratios is not None:
            are_ratios("data.ratios", self.ratios)
        at_least("data.classes", self.classes, 2)
        at_least("data.nodes", self.nodes, self.classes, " (data.classes)")
        above_zero("data.degree", self.degree)
        at_least("data.active", self.active, 1)
        at_least("data.features", self.features, self.active, " (data.active)")
        good = 0 <= self.homophily <= 1
        require(good, "data.homophily", self.homophily, "at least 0 and at most 1")


@dataclass
class CommonConfig:
    """What the schemas of all methods start with."""

    app: str = "nfedgnn"  # nfedgnn | fedscem | fedgls | ppfl: the method and its keys
    seed: int = 0  # seed of weights, dropout, sampling and, by default, the split's index
    rounds: int = 200  # rounds of training
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    checkpoint_every: int = 0  # rounds between checkpoints; 0: none. The last two are kept
    data: DataConfig = field(default_factory=DataConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        if not re.fullmatch(r"cuda:\d+", self.device):
            choice("device", self.device, DEVICES, also=" or cuda:N")
        is_seed("seed", self.seed)
        at_least("rounds", self.rounds, 1)
        at_least("checkpoint_every", self.checkpoint_every, 0)
        self.data.validate()
        self.privacy.validate()
        self.privacy.refuse_checkpoints(self.checkpoint_every)
