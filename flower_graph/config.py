"""Settings of a run: typed schemas, the YAML files that ship with the package, and overrides.

Settings are laid over each other in three steps: the defaults written here, one YAML file (and the
parent that it names), and overrides such as ``strategy.reg_weight=10``. Whatever is unknown, of
the wrong type or impossible is refused here, before data are read or a client is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flower_graph.config_checks import known_keys, one_line, refuse_key, show, validate
from flower_graph.config_sources import (
    list_configs,
    parse_overrides,
    read_chain,
    read_override,
)
from flower_graph.errors import ConfigError

__all__ = [
    "DataConfig",
    "ModelConfig",
    "RunConfig",
    "StrategyConfig",
    "list_configs",
    "load_config",
    "parse_overrides",
    "to_dict",
    "to_yaml",
    "validate",
]


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
    nodes: int = 10000  # csbm: number of nodes
    classes: int = 7  # csbm: number of classes
    degree: float = 10.0  # csbm: mean number of neighbours
    features: int = 512  # csbm: number of features
    active: int = 32  # csbm: non-zero features of a node
    homophily: float = 0.8  # csbm: share of edges inside a class, 0 to 1


@dataclass
class ModelConfig:
    """The split model: the users' first transform and the server's rest."""

    name: str = "gcn"  # gcn | gat | sage
    hidden: int = 16  # numbers in a latent; for gat: of each head
    heads: int = 8  # attention heads; gat only
    dropout: float = 0.5  # share of entries dropped in training, 0 <= dropout < 1
    user_bias: bool = False  # whether a user's transform has a bias


@dataclass
class StrategyConfig:
    """How the server trains, and how it talks to the users."""

    name: str = "split-gradient-relay"  # split-gradient-relay
    reg_weight: float = 100.0  # weight lambda of the smoothness of neighbouring latents, >= 0
    learning_rate: float = 0.1  # Adam's step size, on both sides
    weight_decay: float = 5e-4  # Adam's L2 weight, on both sides
    participation: float = 1.0  # share of the users asked each round, 0 < participation <= 1
    average_every: int = 0  # average the users' weights every so many rounds; 0: never
    average_over: str = "holders"  # holders | all: who counts in a feature row's mean
    timeout: float = 600.0  # seconds that an exchange may take
    min_nodes: int = 1  # SuperNodes to wait for before the first round


@dataclass
class RunConfig:
    """Everything that a run needs to be repeated."""

    app: str = "nfedgnn"  # nfedgnn
    seed: int = 0  # seed of weights, dropout, sampling and, by default, the split's index
    rounds: int = 200  # rounds of training
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    checkpoint_every: int = 0  # rounds between checkpoints; 0: none. The last two are kept
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Build the settings of a run from a YAML file and overrides.

    Parameters
    ----------
    name_or_path : str
        A config that ships with the package (``nfedgnn/cora``), or the path of a YAML file of
        your own (it ends in ``.yaml`` or ``.yml``).
    overrides : sequence of str
        Settings as ``key=value`` with dotted keys, laid over the file in this order.

    Returns
    -------
    RunConfig
        Complete, resolved and validated settings.

    Raises
    ------
    ConfigError
        If a config, key or value is unknown, of the wrong type or impossible.
    """
    tree = OmegaConf.structured(RunConfig)
    for source, settings in read_chain(name_or_path):
        _lay_over(tree, settings, f" (in {source})")
    for override in overrides:
        _lay_over(tree, read_override(override), "")
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:  # an interpolation `${...}` that leads nowhere
        key = getattr(error, "full_key", None) or name_or_path
        raise ConfigError(f"{key}: {one_line(error)}") from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Give the settings as nested plain dictionaries."""
    return asdict(config)


def to_yaml(config: RunConfig) -> str:
    """Give the settings as YAML text that `load_config` reads back to the same settings."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _lay_over(tree: DictConfig, settings: dict[str, Any], where: str) -> None:
    """Write settings, given by dotted key, into the typed tree."""
    known = known_keys(RunConfig)
    for key, value in settings.items():
        if key not in known:
            refuse_key(key, list(known), where)
        try:
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {show(value)} is not {known[key]}{where}") from error
