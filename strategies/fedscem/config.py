"""Settings of FedSCem and its baselines: one ego-network per client."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flower_graph.config import common
from flower_graph.config.rules import (
    ABOVE_ZERO,
    NOT_NEGATIVE,
    RATIOS,
    SEED,
    Rule,
    at_least,
    choice,
    require,
)
from flower_graph.config.schema import section, setting
from flower_graph.method.trust import OpenedSums, check_trust
from flower_graph.secure.node_config import FEWEST_PARTIES

APP = "fedscem"
FEDSCEM = "masked-embedding-averaging"
SAGE = ("local-sage", "fed-sage")
AVERAGING = ("fedavg", "fedprox")  # methods whose clients send weights in the clear
STRATEGIES = (FEDSCEM, "self-training", *AVERAGING, *SAGE)
# Methods without an average of single clients' weights
NOT_ROBUST = {
    FEDSCEM: "the server sees sums alone",
    "self-training": "nothing is averaged",
    "local-sage": "nothing is averaged",
    "fed-sage": "hostile clients could still spoil the generators",
}
# Settings with which a server that deviates could read no client's data
UNREADABLE = {
    "name": FEDSCEM,
    "aggregation": "masked",
    "alignment": "psi",
    "model_sharing": "none",
    "participation": 1.0,
}
VARIANTS = ("full", "iter", "minus")
MODEL_SHARING = ("none", "fedavg", "fedprox")
ALIGNMENTS = ("psi", "plain")
AGGREGATIONS = ("masked", "plain")
# With a tenth that may collude, no number of clients allows more
BORNE = Rule("at least 0 and below 0.45", lambda value: 0 <= value < 0.45)
MOST_BITS = 61  # of limit / resolution: two clients need three more in a word of a sum


@dataclass
class PartitionConfig(common.EgoSection):
    """The ego-networks of the clients, and the split of their nodes."""

    method: ClassVar[str] = common.EGO_NETWORKS
    train_share: ClassVar[float | None] = None
    clients: int = setting(100, at_least(1))
    """egos drawn from the graph; masked sums need at least two"""
    seed: int | None = setting(None, SEED, help="seed of draw and splits; null: the run's")
    ratios: list[float] = setting([0.6, 0.2, 0.2], RATIOS, help="shares of train, val and test")


@dataclass(kw_only=True)
class ModelConfig:
    """Every client's model: two GCN layers, a linear classifier, a projection head."""

    hidden: int = setting(64, at_least(1), help="numbers in an embedding")
    projection: int = setting(32, at_least(1), help="numbers that the projection head gives")


@dataclass(kw_only=True)
class TrainingConfig:
    """How clients train; part of the section ``strategy``."""

    proximal: float = setting(0.01, NOT_NEGATIVE)
    """weight of FedProx's proximal term; `fedprox` only"""
    mu: float = setting(5.0, NOT_NEGATIVE, help="weight of the contrastive loss")
    tau: float = setting(10.0, ABOVE_ZERO, help="temperature of the contrastive loss")
    local_epochs: int = setting(1, at_least(1), help="epochs that a client trains in a round")
    batch_size: int | None = setting(None, at_least(1))
    """nodes of a client that a step is on; null: all at once"""
    learning_rate: float = setting(0.0005, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-5, NOT_NEGATIVE, help="Adam's L2 weight")


@dataclass
class EgoSettings(ModelConfig, TrainingConfig):
    """The model and the training of all clients: the config's sections, and what the data gives."""

    num_features: int
    num_classes: int
    seed: int = 0  # of the run: all clients start from the same weights
    # Weight of FedProx's term, ``proximal / 2 ||w - w_global||^2``; 0 without
    proximal: float = field(default=0.0, kw_only=True)

    @property
    def training(self) -> common.TrainingSection:
        return common.TrainingSection(
            local_epochs=self.local_epochs,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
        )


@dataclass
class StrategyConfig(TrainingConfig, common.RobustSection, OpenedSums):
    """Settings of the clients' training and of what clients share."""

    name: str = setting(FEDSCEM, choice(*STRATEGIES), help="FedSCem or a baseline")
    variant: str = setting("full", choice(*VARIANTS))
    """how losses are trained: FedSCem, FedSCem_iter, FedSCem−"""
    model_sharing: str = setting("none", choice(*MODEL_SHARING))
    """weights that are shared besides embeddings"""
    alignment: str = setting("psi", choice(*ALIGNMENTS))
    """how nodes of several clients are found"""
    aggregation: str = setting("masked", choice(*AGGREGATIONS), help="how embeddings are summed")
    limit: float = setting(32.0, ABOVE_ZERO)
    """largest size of a number that a masked sum takes; longer embeddings are shortened"""
    resolution: float = setting(2.0**-12)
    """step of a masked sum's fixed-point numbers (2^-12), above 0 and at most `strategy.limit`;
    where models are shared at most 2^-20"""
    dropout: float = setting(0.3, BORNE)
    """share of the clients, and of the SuperNodes, that may vanish in a round"""

    def validate(self) -> None:
        finest = self.limit / 2.0**MOST_BITS  # a sum's words have 64 bits
        allowed = f"from {finest:g} (strategy.limit / 2^{MOST_BITS}) to {self.limit}, the limit"
        is_fit = finest <= self.resolution <= self.limit
        require(is_fit, "strategy.resolution", self.resolution, allowed)

    def readable(self) -> dict[str, str]:
        """Return the settings with which a deviating server could read clients' data, and why."""
        why = "the server could read what single clients send"
        return {key: why for key, good in UNREADABLE.items() if getattr(self, key) != good}


@dataclass
class FedSCemConfig(common.RunConfig):
    """All settings of a run of FedSCem or of one of its baselines."""

    app: str = APP
    rounds: int = 400
    # ``data.name`` may also be clients' own graphs; of ``partition`` only ``split``, ``ratios`` and
    # ``seed`` are read then. The graph's own split plays no part: every client splits its nodes by
    # ``partition``. This one is what every graph can have.
    data: common.DataConfig = section(common.DataConfig, split="random", ratios=[0.6, 0.2, 0.2])
    partition: PartitionConfig = section(PartitionConfig)
    model: ModelConfig = section(ModelConfig)
    strategy: StrategyConfig = section(StrategyConfig)

    def validate(self) -> None:
        super().validate()
        how, clients = self.strategy, self.partition.clients
        check_trust(self, how.readable(), choosing="psi")
        # A sum over one client is that client's embedding, masked or not.
        least = FEWEST_PARTIES if how.distrusts else 2
        good = clients >= least or not self.masks_sums
        self.need(good, "partition.clients", f"at least {least} for a masked sum")
        self.check_averages(AVERAGING, [FEDSCEM], NOT_ROBUST)
        is_shared, why = how.model_sharing != "none", "the weights that are shared get no noise"
        self.refuse_noise(how.name == FEDSCEM and is_shared, "strategy.model_sharing", why)

    @property
    def needs_own_nodes(self) -> bool:
        return self.privacy.is_on and self.strategy.name in AVERAGING

    @property
    def steadying(self) -> Sequence[str]:
        return "strategy.learning_rate", "strategy.mu"

    def long_work(self, server_round: int) -> str:
        if server_round > 1 or self.strategy.name != FEDSCEM:
            return ""
        keys = "exchange keys and " if self.masks_sums else ""
        return f"first clients {keys}find the nodes that they share ({self.strategy.alignment})"

    def local_steps(self, graphs: Sequence[Any]) -> float:
        how = self.strategy
        is_ours, size = how.name == FEDSCEM, how.batch_size or sys.maxsize
        sizes = [ego.nodes.numel() for ego in graphs] if is_ours else []
        if not (is_ours and how.variant == "minus"):
            sizes += [max(1, int(ego.train_mask.sum())) for ego in graphs]
        steps = how.local_epochs * sum(-(-nodes // size) for nodes in sizes)
        return float(steps / len(graphs))

    @property
    def masks_sums(self) -> bool:
        return self.strategy.name == FEDSCEM and self.strategy.aggregation == "masked"

    @property
    def sends_singly(self) -> bool:
        """Whether the server reads a SuperNode's vectors, or its clients' identities."""
        return not self.masks_sums or self.strategy.alignment != "psi"
