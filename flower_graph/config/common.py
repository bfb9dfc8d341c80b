"""Settings that every method has."""

from __future__ import annotations

from dataclasses import dataclass

from flower_graph.config.checks import require
from flower_graph.config.privacy import PrivacyConfig
from flower_graph.config.rules import (
    ABOVE_ZERO,
    FRACTION,
    RATIOS,
    SEED,
    SHARE,
    Rule,
    at_least,
    choice,
)
from flower_graph.config.schema import check_settings, section, setting

SPLITS = ("public", "geom-gcn", "random")
DEVICES = ("auto", "cpu", "cuda")


@dataclass
class DataConfig:
    """Which graph, which nodes train, and for ``csbm`` what to generate."""

    name: str = setting(
        "cora-linqs",
        Rule("the name of a data set or a file", lambda name: bool(name.strip())),
        help="a known set, `Class/name` of PyG, `csbm`, or the path of a file",
    )
    root: str | None = setting(
        None, help="folder of the raw data; null: `$FLOWER_GRAPH_DATA`, else a download"
    )
    split: str = setting("public", choice(*SPLITS), help="the whole graph's split")
    split_index: int | None = setting(
        None, at_least(0), help="which of several fixed splits; null: seed modulo their number"
    )
    split_seed: int = setting(0, SEED, help="seed of a random split")
    train_per_class: int = setting(
        20, at_least(1), help="training nodes of each class; `random` only"
    )
    num_val: int = setting(500, at_least(0), help="validation nodes; `random` only")
    num_test: int = setting(1000, at_least(0), help="test nodes; `random` only")
    ratios: list[float] | None = setting(
        None, RATIOS, help="shares of a random split; they replace the counts"
    )
    normalize: bool = setting(True, help="scale each node's features to sum to one")
    presence: bool = setting(False, help="before that, make every feature that is not 0 a 1")
    nodes: int = setting(10000, help="`csbm`: number of nodes, at least one for each class")
    classes: int = setting(7, at_least(2), help="`csbm`: number of classes")
    degree: float = setting(10.0, ABOVE_ZERO, help="`csbm`: mean number of neighbours")
    features: int = setting(512, help="`csbm`: number of features, at least `data.active`")
    active: int = setting(32, at_least(1), help="`csbm`: features of a node that are not 0")
    homophily: float = setting(0.8, FRACTION, help="`csbm`: share of the edges inside a class")

    def validate(self) -> None:
        """Refuse graphs that cannot be generated; ``ConfigError`` names key and value."""
        self._require_at_least("nodes", "classes")
        self._require_at_least("features", "active")

    def _require_at_least(self, key: str, other: str) -> None:
        value, least = getattr(self, key), getattr(self, other)
        require(value >= least, f"data.{key}", value, f"at least {least} (data.{other})")


@dataclass
class StrategySection:
    """What the section ``strategy`` of every method has; a method's own adds its keys."""

    name: str = setting("", help="what server and clients do")
    participation: float = setting(1.0, SHARE, help="share of the SuperNodes asked each round")
    timeout: float = setting(600.0, ABOVE_ZERO, help="seconds that an exchange may take")
    min_nodes: int = setting(1, at_least(1), help="SuperNodes to wait for before the first round")


@dataclass
class PatientSection(StrategySection):
    """The same, for methods on ``ReportedFedAvg``, which may end before the last round."""

    patience: int = setting(
        0,
        at_least(0),
        help="rounds without a better validation accuracy after which the run ends; 0: never",
    )


@dataclass
class RunConfig:
    """What the schemas of all methods start with."""

    app: str = setting("", help="the method, which decides what keys there are")
    seed: int = setting(0, SEED, help="of weights, dropout, sampling and splits")
    rounds: int = setting(200, at_least(1), help="rounds of training")
    device: str = setting(
        "auto",
        choice(*DEVICES, also="cuda:N", pattern=r"cuda:\d+"),
        help="where tensors live; `auto`: on a GPU if there is one",
    )
    checkpoint_every: int = setting(
        0, at_least(0), help="rounds between checkpoints, of which the last two are kept; 0: none"
    )
    data: DataConfig = section(DataConfig)
    privacy: PrivacyConfig = section(PrivacyConfig)
    strategy: StrategySection = section(StrategySection)  # shown last

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        check_settings(self)
        self.privacy.refuse_checkpoints(self.checkpoint_every)
