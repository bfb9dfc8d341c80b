"""Settings of FedGLS and its baselines: one community per client, some of them without edges."""

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

APP = "fedgls"
FEDGLS = "structure-fedavg"
METHODS = (
    FEDGLS,
    "fed-mlp",
    "fed-gnn-mlp",
    "fedproto",
    "local-gnn-knn",
    "fed-gnn-knn",
    "fed-gnn",
)
# Whose replies are one client's weights and nothing else
AVERAGING = (FEDGLS, "fed-mlp", "fed-gnn-knn", "fed-gnn")
SHARES = "what travels are sums and how much of each there is, whose quotient no such average gives"
NOT_ROBUST = {
    "fed-gnn-mlp": SHARES,
    "fedproto": SHARES,
    "local-gnn-knn": "nothing is averaged",
}
PARTITIONS = ("louvain", "metis", "dirichlet", "random")
ENCODERS = ("attentive", "mlp")
SIMILARITIES = ("cosine", "euclidean", "inner")
OPTIMISERS = ("keep", "reset")


@dataclass
class PartitionConfig:
    """How one graph is cut into clients, and which of a client's nodes train."""

    method: str = "louvain"  # louvain | metis | dirichlet | random
    clients: int = 8  # louvain: the largest communities; otherwise parts of the whole graph
    resolution: float = 1.0  # louvain: above 1 gives smaller communities
    alpha: float = 0.5  # dirichlet: the smaller, the fewer classes has a client
    seed: int | None = None  # seed of cut, graphless clients and splits; null: the run's
    ratios: list[float] = field(default_factory=lambda: [0.6, 0.2, 0.2])  # train, val, test

    def validate(self) -> None:
        """Refuse values that no partition can have; ``ConfigError`` names key and value."""
        choice("partition.method", self.method, PARTITIONS)
        at_least("partition.clients", self.clients, 1)
        above_zero("partition.resolution", self.resolution)
        above_zero("partition.alpha", self.alpha)
        if self.seed is not None:
            is_seed("partition.seed", self.seed)
        are_ratios("partition.ratios", self.ratios)


@dataclass
class GraphConfig:
    """Which clients have no edges, and how a graph is made or learnt there."""

    graphless_ratio: float = 0.5  # share of the clients that have no edges
    neighbours: int = 15  # nodes that each node keeps as neighbours, k
    encoder: str = "attentive"  # attentive | mlp: what turns features into what is compared
    layers: int = 2  # layers of the encoder
    width: int = 64  # mlp: numbers in each of its layers
    similarity: str = "cosine"  # cosine | euclidean | inner
    learning_rate: float = 0.001  # Adam's step size of the graph learner, >= 0
    tau: float = 0.2  # temperature of the contrastive loss, > 0

    def validate(self) -> None:
        """Refuse values that no graph learner can have; ``ConfigError`` names key and value."""
        good = 0 <= self.graphless_ratio <= 1
        require(good, "graph.graphless_ratio", self.graphless_ratio, "at least 0 and at most 1")
        at_least("graph.neighbours", self.neighbours, 1)
        choice("graph.encoder", self.encoder, ENCODERS)
        at_least("graph.layers", self.layers, 1)
        at_least("graph.width", self.width, 1)
        choice("graph.similarity", self.similarity, SIMILARITIES)
        at_least("graph.learning_rate", self.learning_rate, 0)
        above_zero("graph.tau", self.tau)


@dataclass
class ModelConfig:
    """The GNN and the feature encoder: two layers each."""

    hidden: int = 16  # numbers in the hidden layer
    dropout: float = 0.5  # dropout on the hidden layer, 0 <= dropout < 1
    input_dropout: float = 0.0  # dropout on the features, 0 <= input_dropout < 1

    def validate(self) -> None:
        """Refuse values that no model can have; ``ConfigError`` names key and value."""
        at_least("model.hidden", self.hidden, 1)
        is_dropout("model.dropout", self.dropout)
        is_dropout("model.input_dropout", self.input_dropout)


@dataclass
class StrategyConfig:
    """How the clients train, and what they share."""

    # structure-fedavg | fed-mlp | fed-gnn-mlp | fedproto | local-gnn-knn | fed-gnn-knn | fed-gnn
    name: str = FEDGLS
    local_epochs: int = 5  # epochs that a client trains in a round, E
    learning_rate: float = 0.01  # Adam's step size of GNN and feature encoder
    weight_decay: float = 5e-4  # Adam's L2 weight
    optimiser: str = "keep"  # keep | reset: whether a client's Adam lasts from round to round
    prototype_weight: float = 1.0  # fedproto: weight of the distance to the prototypes, >= 0
    participation: float = 1.0  # share of the SuperNodes asked each round
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
        choice("strategy.name", self.name, METHODS)
        at_least("strategy.local_epochs", self.local_epochs, 1)
        above_zero("strategy.learning_rate", self.learning_rate)
        at_least("strategy.weight_decay", self.weight_decay, 0)
        choice("strategy.optimiser", self.optimiser, OPTIMISERS)
        at_least("strategy.prototype_weight", self.prototype_weight, 0)
        is_share("strategy.participation", self.participation)
        self.average.validate(self.name, NOT_ROBUST)
        above_zero("strategy.timeout", self.timeout)
        at_least("strategy.min_nodes", self.min_nodes, 1)


def _any_graph() -> DataConfig:
    """Give settings under which a graph without a public split loads too.

    The graph's own split plays no part: every client splits its nodes by ``partition``. Features
    stay as they are: scaled down, they learn slowly, and weight decay wins.
    """
    return DataConfig(split="random", ratios=[0.6, 0.2, 0.2], normalize=False)


@dataclass
class FedGLSConfig(CommonConfig):
    """Everything that a run of FedGLS or one of its baselines needs to be repeated.

    ``data.name`` may also be a folder with one saved PyG ``Data`` per client; ``partition`` then
    only splits the nodes of clients that come without masks.
    """

    app: str = APP
    rounds: int = 100  # rounds of training
    data: DataConfig = field(default_factory=_any_graph)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("app", self.app, (APP,))
        super().validate()
        self.partition.validate()
        self.graph.validate()
        self.model.validate()
        self.strategy.validate()
        if self.strategy.robust != NO_DEFENCE and self.privacy.is_central:
            why = "the noise is for a mean, and one client can move this average further"
            self.privacy.refuse_with(f"strategy.robust={self.strategy.robust}", why)
        self.privacy.require_averaging(self.strategy.name, AVERAGING)
        if self.strategy.name not in AVERAGING:
            why = "noise is for weights, and it sends none, or more than weights"
            self.privacy.refuse_with(f"strategy.name={self.strategy.name}", why)
