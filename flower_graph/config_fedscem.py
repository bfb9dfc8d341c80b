"""Settings of FedSCem and its baselines: one ego-network per client."""

from __future__ import annotations

from dataclasses import dataclass, field

from flower_graph.config_base import CommonConfig, DataConfig
from flower_graph.config_checks import (
    above_zero,
    are_ratios,
    at_least,
    choice,
    is_dropout,
    is_seed,
    is_share,
    require,
)
from flower_graph.config_robust import NO_DEFENCE, Robust

APP = "fedscem"
SPLITS = ("per-client", "global")
FEDSCEM = "masked-embedding-averaging"
SAGE = ("local-sage", "fed-sage")
AVERAGING = ("fedavg", "fedprox")  # whose clients send weights in the clear
STRATEGIES = (FEDSCEM, "self-training", *AVERAGING, *SAGE)
# What has no average of single clients' weights to replace
NOT_ROBUST = {
    FEDSCEM: "the server sees sums alone",
    "self-training": "nothing is averaged",
    "local-sage": "nothing is averaged",
    "fed-sage": "hostile clients could still spoil the generators",
}
VARIANTS = ("full", "iter", "minus")
MODEL_SHARING = ("none", "fedavg", "fedprox")
ALIGNMENTS = ("psi", "polynomial", "plain")
AGGREGATIONS = ("masked", "plain")


@dataclass
class PartitionConfig:
    """Which ego-networks are the clients, and which of a client's nodes train."""

    hops: int = 2  # distance from the ego up to which nodes belong to its network
    clients: int = 100  # egos drawn from the graph
    min_nodes: int = 15  # nodes that an ego-network has at least
    seed: int | None = None  # seed of the draw and of the splits; null: the run's
    split: str = "per-client"  # per-client | global: a node has one role at all its clients
    ratios: list[float] = field(default_factory=lambda: [0.6, 0.2, 0.2])  # train, val, test

    def validate(self) -> None:
        """Refuse values that no partition can have; ``ConfigError`` names key and value."""
        at_least("partition.hops", self.hops, 1)
        at_least("partition.clients", self.clients, 1)
        at_least("partition.min_nodes", self.min_nodes, 1)
        if self.seed is not None:
            is_seed("partition.seed", self.seed)
        choice("partition.split", self.split, SPLITS)
        are_ratios("partition.ratios", self.ratios)


@dataclass
class ModelConfig:
    """Every client's model: two GCN layers, a linear classifier and a projection head."""

    hidden: int = 64  # numbers in an embedding
    projection: int = 32  # numbers that the projection head gives

    def validate(self) -> None:
        """Refuse values that no model can have; ``ConfigError`` names key and value."""
        at_least("model.hidden", self.hidden, 1)
        at_least("model.projection", self.projection, 1)


@dataclass
class StrategyConfig:
    """How the clients train, and what they share."""

    # masked-embedding-averaging | self-training | fedavg | fedprox | local-sage | fed-sage
    name: str = FEDSCEM
    variant: str = "full"  # full | iter | minus: how the two losses are trained
    model_sharing: str = "none"  # none | fedavg | fedprox: weights shared besides embeddings
    proximal: float = 0.01  # weight of FedProx's proximal term, >= 0; fedprox only
    mu: float = 5.0  # weight of the contrastive loss, >= 0
    tau: float = 10.0  # temperature of the contrastive loss, > 0
    local_epochs: int = 1  # epochs that a client trains in a round
    learning_rate: float = 0.0005  # Adam's step size
    weight_decay: float = 5e-5  # Adam's L2 weight
    participation: float = 1.0  # share of the clients asked each round, 0 < participation <= 1
    alignment: str = "psi"  # psi | polynomial | plain: how nodes of several clients are found
    aggregation: str = "masked"  # masked | plain: how embeddings are summed
    limit: float = 32.0  # largest size of a number in an embedding that the masked sum takes
    resolution: float = 2.0**-12  # their step; where models are shared, at most 2^-20
    dropout: float = 0.3  # share of the clients that may vanish in a round, 0 <= dropout < 1
    robust: str = "none"  # none | krum | trimmed-mean | median: what stands for the mean
    num_malicious: int = 1  # krum: SuperNodes that may be hostile
    beta: float = 0.2  # trimmed-mean: share of the SuperNodes cut off at each end, < 0.5
    timeout: float = 600.0  # seconds that an exchange may take
    min_nodes: int = 1  # SuperNodes to wait for before the first round

    @property
    def average(self) -> Robust:
        """What stands for the mean of the clients' weights."""
        return Robust(self.robust, self.num_malicious, self.beta)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("strategy.name", self.name, STRATEGIES)
        choice("strategy.variant", self.variant, VARIANTS)
        choice("strategy.model_sharing", self.model_sharing, MODEL_SHARING)
        choice("strategy.alignment", self.alignment, ALIGNMENTS)
        choice("strategy.aggregation", self.aggregation, AGGREGATIONS)
        at_least("strategy.proximal", self.proximal, 0)
        at_least("strategy.mu", self.mu, 0)
        above_zero("strategy.tau", self.tau)
        at_least("strategy.local_epochs", self.local_epochs, 1)
        above_zero("strategy.learning_rate", self.learning_rate)
        at_least("strategy.weight_decay", self.weight_decay, 0)
        is_share("strategy.participation", self.participation)
        self.average.validate(self.name, NOT_ROBUST)
        above_zero("strategy.limit", self.limit)
        good = 0 < self.resolution <= self.limit
        allowed = f"above 0 and at most {self.limit} (strategy.limit)"
        require(good, "strategy.resolution", self.resolution, allowed)
        is_dropout("strategy.dropout", self.dropout)
        above_zero("strategy.timeout", self.timeout)
        at_least("strategy.min_nodes", self.min_nodes, 1)


def _any_graph() -> DataConfig:
    """Give settings under which a graph without a public split loads too.

    The graph's own split plays no part: every client splits its nodes by ``partition``.
    """
    return DataConfig(split="random", ratios=[0.6, 0.2, 0.2])


@dataclass
class FedSCemConfig(CommonConfig):
    """Everything that a run of FedSCem or one of its baselines needs to be repeated."""

    app: str = APP
    rounds: int = 400  # rounds of training
    data: DataConfig = field(default_factory=_any_graph)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("app", self.app, (APP,))
        super().validate()
        self.partition.validate()
        self.model.validate()
        self.strategy.validate()
        if self.strategy.name == FEDSCEM and self.strategy.aggregation == "masked":
            # The sum over one client is that client's embedding, whatever masks it wore.
            at_least("partition.clients", self.partition.clients, 2, " for a masked sum")
        self._validate_privacy()

    def _validate_privacy(self) -> None:
        """Refuse a budget where something leaves clients that gets no noise, or nothing does."""
        how = self.strategy
        self.privacy.require_averaging(how.name, AVERAGING)
        if self.strategy.robust != NO_DEFENCE and self.privacy.is_central:
            why = "the noise is for a mean, and one client can move this average further"
            self.privacy.refuse_with(f"strategy.robust={self.strategy.robust}", why)
        if how.name not in (FEDSCEM, *AVERAGING):
            why = "noise is for embeddings or weights, and it sends neither, or more than these"
            self.privacy.refuse_with(f"strategy.name={how.name}", why)
        if how.name == FEDSCEM and how.model_sharing != "none":
            why = "the weights that are shared get no noise"
            self.privacy.refuse_with(f"strategy.model_sharing={how.model_sharing}", why)
