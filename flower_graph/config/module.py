"""Sections of methods whose clients train a torch module on a graph of their own."""

from __future__ import annotations

from dataclasses import dataclass

from flower_graph.config.common import CutRunConfig, DataConfig, StrategySection
from flower_graph.config.partition import PartitionSection
from flower_graph.config.rules import ABOVE_ZERO, BELOW_ONE, NOT_NEGATIVE, at_least, choice
from flower_graph.config.schema import section, setting


@dataclass
class GCNSection:
    """A two-layer GCN."""

    hidden: int = setting(16, at_least(1), help="numbers in the hidden layer")
    dropout: float = setting(0.5, BELOW_ONE, help="share of the hidden layer dropped in training")
    input_dropout: float = setting(0.0, BELOW_ONE, help="share of the features dropped in training")


@dataclass
class TrainingSection(StrategySection):
    """How clients train; a method adds its own keys."""

    local_epochs: int = setting(1, at_least(1), help="epochs that a client trains in a round")
    learning_rate: float = setting(0.01, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight")
    optimiser: str = setting(
        "keep", choice("keep", "reset"), help="whether a client's Adam lasts from round to round"
    )


@dataclass
class ModuleRunConfig(CutRunConfig):
    """The base of such a method's schema, which sets ``app`` and its own ``strategy``."""

    rounds: int = 100
    # The graph's own split is not used: clients split their nodes by ``partition``. Features stay
    # as they are: models learn slowly from scaled ones.
    data: DataConfig = section(DataConfig, split="random", ratios=[0.6, 0.2, 0.2], features="as-is")
    partition: PartitionSection = section(PartitionSection, clients=10, every_node=True)
    model: GCNSection = section(GCNSection)
    strategy: TrainingSection = section(TrainingSection)
