"""Settings of PPFL-GNN: clients whose graphs overlap, and the alignment of what they embed."""

from __future__ import annotations

from dataclasses import dataclass, field

from flower_graph.config_base import CommonConfig, DataConfig
from flower_graph.config_checks import (
    above_zero,
    at_least,
    choice,
    is_dropout,
    is_seed,
    is_share,
    require,
)
from flower_graph.errors import ConfigError

APP = "ppfl"
ALIGNED, LOCAL = "procrustes-alignment", "local"
METHODS = (ALIGNED, LOCAL)
MODELS = ("deepwalk", "gat")
DEEPWALK, GAT = MODELS
PUBLIC = ("random", "degree", "cover")
FORMS = ("pairs", "consensus", "secure")
PAIRS, CONSENSUS, SECURE = FORMS
ABSENT = ("leave-out", "last")
LEAVE_OUT, LAST = ABSENT


@dataclass
class PartitionConfig:
    """Which nodes all clients hold, which are one client's own, and which are judged."""

    clients: int = 4
    public: str = "random"  # random | degree | cover: how public nodes are chosen
    public_share: float = 0.4  # share of all nodes that every client holds
    private_share: float = 0.15  # share of all nodes that each client holds alone
    label_noise: float = 0.0  # share of the training nodes whose label is another class's
    seed: int | None = None  # seed of public and private nodes, roles and noise; null: the run's
    # train, val, test: a node has one role at all clients
    ratios: list[float] = field(default_factory=lambda: [0.6, 0.2, 0.2])

    def validate(self) -> None:
        """Refuse values that no partition can have; ``ConfigError`` names key and value."""
        at_least("partition.clients", self.clients, 1)
        choice("partition.public", self.public, PUBLIC)
        is_share("partition.public_share", self.public_share)
        good = 0 <= self.private_share <= 1
        require(good, "partition.private_share", self.private_share, "at least 0 and at most 1")
        whole = self.public_share + self.clients * self.private_share
        if whole > 1 + 1e-9:
            raise ConfigError(
                f"partition.private_share: {self.private_share} for each of {self.clients} clients "
                f"and partition.public_share: {self.public_share} make {whole:g} of the nodes; "
                f"at most {(1 - self.public_share) / self.clients:g} is left for each client"
            )
        good = 0 <= self.label_noise < 1
        require(good, "partition.label_noise", self.label_noise, "at least 0 and below 1")
        if self.seed is not None:
            is_seed("partition.seed", self.seed)
        good = len(self.ratios) == 3 and min(self.ratios) >= 0 and 0 < sum(self.ratios) <= 1 + 1e-9
        require(good, "partition.ratios", self.ratios, "three shares that add up to at most 1")
        good = good and self.ratios[2] > 0
        require(good, "partition.ratios", self.ratios, "shares with test nodes: the last above 0")


@dataclass
class DeepWalkConfig:
    """Random walks and skip-gram, as ``model.name: deepwalk`` trains it in each round."""

    walks: int = 10  # walks from each node
    length: int = 40  # nodes of a walk
    window: int = 5  # nodes on each side that a node predicts
    negative: int = 5  # drawn nodes for each predicted one
    epochs: int = 1  # passes over a round's walks
    learning_rate: float = 0.025  # step size at the beginning of a round
    final_learning_rate: float = 0.0001  # step size at its end
    decay: float = 1.0  # each round's step sizes are the last round's times this

    def validate(self) -> None:
        """Refuse values that no training can have; ``ConfigError`` names key and value."""
        for name in ("walks", "window", "negative", "epochs"):
            at_least(f"deepwalk.{name}", getattr(self, name), 1)
        good = 2 <= self.length <= 10_000  # gensim cuts longer ones off
        require(good, "deepwalk.length", self.length, "at least 2 and at most 10000")
        above_zero("deepwalk.learning_rate", self.learning_rate)
        above_zero("deepwalk.final_learning_rate", self.final_learning_rate)
        is_share("deepwalk.decay", self.decay)


@dataclass
class GATConfig:
    """The two-layer GAT, as ``model.name: gat`` trains it in each round."""

    heads: int = 1  # heads of the hidden layer; they share model.dimension
    epochs: int = 20  # epochs in a round
    learning_rate: float = 0.005  # Adam's step size
    weight_decay: float = 5e-4  # Adam's L2 weight
    dropout: float = 0.6  # on features, hidden layer and attention, 0 <= dropout < 1
    beta: float = 1.0  # weight of the cosine distance to the aligned means, >= 0

    def validate(self) -> None:
        """Refuse values that no training can have; ``ConfigError`` names key and value."""
        at_least("gat.heads", self.heads, 1)
        at_least("gat.epochs", self.epochs, 1)
        above_zero("gat.learning_rate", self.learning_rate)
        at_least("gat.weight_decay", self.weight_decay, 0)
        is_dropout("gat.dropout", self.dropout)
        at_least("gat.beta", self.beta, 0)


@dataclass
class ModelConfig:
    """What embeds the nodes."""

    name: str = DEEPWALK  # deepwalk | gat
    dimension: int = 16  # numbers of an embedding

    def validate(self) -> None:
        """Refuse values that no model can have; ``ConfigError`` names key and value."""
        choice("model.name", self.name, MODELS)
        at_least("model.dimension", self.dimension, 1)


@dataclass
class JudgeConfig:
    """How embeddings are judged: scikit-learn's classifiers, cross-validated at each client."""

    folds: int = 5
    every: int = 1  # rounds from one judgement by SVC to the next, and after the last
    mlp: bool = True  # whether an MLP judges too after the last round; takes the longest

    def validate(self) -> None:
        """Refuse values that no judgement can have; ``ConfigError`` names key and value."""
        at_least("judge.folds", self.folds, 2)
        at_least("judge.every", self.every, 1)


@dataclass
class StrategyConfig:
    """What the server does with the public embeddings."""

    name: str = ALIGNED  # procrustes-alignment | local
    alignment: str = PAIRS  # pairs | consensus | secure
    rotations_only: bool = False  # leave reflections out
    absent: str = "leave-out"  # leave-out | last: embeddings of clients that did not answer
    participation: float = 1.0  # share of the SuperNodes asked each round
    timeout: float = 600.0  # seconds that an exchange may take
    min_nodes: int = 1  # SuperNodes to wait for before the first round

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("strategy.name", self.name, METHODS)
        choice("strategy.alignment", self.alignment, FORMS)
        choice("strategy.absent", self.absent, ABSENT)
        is_share("strategy.participation", self.participation)
        above_zero("strategy.timeout", self.timeout)
        at_least("strategy.min_nodes", self.min_nodes, 1)


def _any_graph() -> DataConfig:
    """Give settings under which a graph without a public split loads too; ``partition`` splits."""
    return DataConfig(split="random", ratios=[0.6, 0.2, 0.2], normalize=False)


@dataclass
class PPFLConfig(CommonConfig):
    """Everything that a run of PPFL-GNN needs to be repeated.

    ``data.name`` may also be a folder with one saved PyG ``Data`` per client; ``partition`` then
    only splits the nodes of clients that come without masks.
    """

    app: str = APP
    rounds: int = 10  # iterations
    data: DataConfig = field(default_factory=_any_graph)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    deepwalk: DeepWalkConfig = field(default_factory=DeepWalkConfig)
    gat: GATConfig = field(default_factory=GATConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("app", self.app, (APP,))
        super().validate()
        for part in (self.partition, self.model, self.deepwalk, self.gat):
            part.validate()
        for rest in (self.judge, self.strategy):
            rest.validate()
        self._validate_together()

    def _validate_together(self) -> None:
        """Refuse settings that are possible alone and not with each other."""
        how = self.strategy
        self.privacy.require_averaging(how.name, ())
        if self.privacy.epsilon is not None and (how.name == LOCAL or how.alignment == SECURE):
            with_ = f"strategy.name={LOCAL}" if how.name == LOCAL else f"alignment={SECURE}"
            raise ConfigError(
                f"privacy.epsilon: {self.privacy.epsilon:g} adds noise to embeddings that clients "
                f"send in the clear, and with {with_} they send none; set privacy.epsilon=null"
            )
        if how.alignment == SECURE and (how.participation < 1 or how.absent == LAST):
            key = "participation" if how.participation < 1 else "absent"
            raise ConfigError(
                f"strategy.{key}: {getattr(how, key)} is not allowed with "
                f"strategy.alignment={SECURE}: sums over changing clients could be compared"
            )
        good = self.model.dimension % self.gat.heads == 0
        if self.model.name == GAT and not good:
            raise ConfigError(
                f"gat.heads: {self.gat.heads} heads cannot share model.dimension: "
                f"{self.model.dimension} numbers equally"
            )
        if self.model.name == GAT and self.partition.ratios[0] == 0:
            raise ConfigError(
                f"partition.ratios: {self.partition.ratios} leaves no training node, and "
                "model.name=gat learns from labels; the first must be above 0"
            )
