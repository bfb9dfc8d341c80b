"""Settings of PPFL-GNN: clients whose graphs overlap, and the alignment of their embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass

from flower_graph.config.common import DataConfig, OverlapSection, RunConfig
from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    NOT_NEGATIVE,
    SEED,
    SHARE,
    Rule,
    at_least,
    choice,
    require,
    require_library,
)
from flower_graph.config.schema import section, setting
from flower_graph.method.trust import OpenedSums, check_trust
from flower_graph.wire.keys import AUC

APP = "ppfl"
ALIGNED, LOCAL = METHODS = ("procrustes-alignment", "local")
DEEPWALK, GAT = MODELS = ("deepwalk", "gat")
PAIRS, CONSENSUS, SECURE = FORMS = ("pairs", "consensus", "secure")
LONGEST_WALK = 10_000  # gensim truncates longer walks
LEAVE_OUT, LAST = ABSENT = ("leave-out", "last")
SVC, MLP = CLASSIFIERS = ("svc", "mlp")  # that judge embeddings
JUDGED = ("val", "test")  # roles of nodes that are judged
# Embeddings among whose nearest ones a node's own is counted, P@k, by name
PRECISIONS = {"precision-1": 1, "precision-5": 5, "precision-10": 10}


@dataclass
class PartitionConfig(OverlapSection):
    """Public and private nodes of the clients, and the split of nodes."""

    clients: int = setting(4, at_least(1), help="clients")
    label_noise: float = setting(0.0, BELOW_ONE, help="share of wrong labels in training")
    seed: int | None = setting(None, SEED, help="seed of nodes, roles and noise; null: the run's")
    ratios: list[float] = setting(
        [0.6, 0.2, 0.2],
        Rule(
            "three shares that add up to at most 1, the last above 0",
            lambda given: len(given) == 3 and min(given) >= 0 < given[2] and sum(given) <= 1 + 1e-9,
        ),
    )
    """shares of train, val and test; a node has one role at all clients. The first may be 0 for
    `deepwalk`, the second for both"""

    def validate(self) -> None:
        self.refuse_shares(self.clients)


@dataclass
class DeepWalkConfig:
    """Random walks and skip-gram of ``model.name: deepwalk``, which trains in each round."""

    walks: int = setting(10, at_least(1), help="walks from each node in a round")
    length: int = setting(
        40, Rule("at least 2 and at most 10000", lambda nodes: 2 <= nodes <= LONGEST_WALK)
    )
    """nodes of a walk"""
    window: int = setting(5, at_least(1), help="nodes on each side that a node predicts")
    negative: int = setting(5, at_least(1), help="drawn nodes for each predicted one")
    epochs: int = setting(1, at_least(1), help="passes over a round's walks")
    learning_rate: float = setting(0.025, ABOVE_ZERO, help="step size at the first round's start")
    final_learning_rate: float = setting(0.0001, ABOVE_ZERO, help="step size at its end")
    decay: float = setting(1.0, SHARE, help="factor of the step sizes from round to round")


@dataclass
class GATConfig:
    """The two-layer GAT of ``model.name: gat``, which trains in each round."""

    heads: int = setting(1, at_least(1), help="hidden heads, which share `model.dimension`")
    epochs: int = setting(20, at_least(1), help="epochs in a round")
    learning_rate: float = setting(0.005, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight")
    dropout: float = setting(
        0.6, BELOW_ONE, help="share dropped of features, hidden layer, attention"
    )
    beta: float = setting(1.0, NOT_NEGATIVE, help="weight of the pull to the means; 0: none")


@dataclass
class ModelConfig:
    """The embedding model."""

    name: str = setting(DEEPWALK, choice(*MODELS), help="`deepwalk` needs the extra of this name")
    dimension: int = setting(16, at_least(1), help="numbers of an embedding")


@dataclass
class JudgeConfig:
    """The evaluation of embeddings: scikit-learn's classifiers, cross-validated at each client."""

    folds: int = setting(5, at_least(2), help="folds of the cross-validation")
    every: int = setting(1, at_least(1), help="rounds between evaluations; the last has one")
    mlp: bool = setting(True, help="whether an MLP, too, judges the last round; it takes longest")


@dataclass
class StrategyConfig(OpenedSums):
    """The server's alignment of public embeddings."""

    name: str = setting(ALIGNED, choice(*METHODS), help="`local`: nothing is shared")
    alignment: str = setting(PAIRS, choice(*FORMS), help="how embeddings are aligned")
    absent: str = setting(LEAVE_OUT, choice(*ABSENT), help="for clients that did not answer")


@dataclass
class PPFLConfig(RunConfig):
    """All settings of a run of PPFL-GNN."""

    # ``data.name`` may also be a folder with one saved PyG ``Data`` per client; ``partition`` then
    # only splits the nodes of clients that come without masks.
    app: str = APP
    rounds: int = 10
    # The graph's own split plays no part: ``partition`` gives the nodes their roles.
    data: DataConfig = section(DataConfig, split="random", ratios=[0.6, 0.2, 0.2], features="as-is")
    partition: PartitionConfig = section(PartitionConfig)
    model: ModelConfig = section(ModelConfig)
    deepwalk: DeepWalkConfig = section(DeepWalkConfig)
    gat: GATConfig = section(GATConfig)
    judge: JudgeConfig = section(JudgeConfig)
    strategy: StrategyConfig = section(StrategyConfig)

    @property
    def steadying(self) -> Sequence[str]:
        other = "epochs" if self.model.name == DEEPWALK else "beta"
        return f"{self.model.name}.learning_rate", f"{self.model.name}.{other}"

    def long_work(self, server_round: int) -> str:
        takes = "an MLP too judges the embeddings: it takes several times as long"
        is_long = server_round >= self.rounds and self.judge.mlp
        return f"the last one, in which {takes} (judge.mlp=false leaves it out)" if is_long else ""

    def local_steps(self, graphs: object) -> float:
        """Return the epochs of a round: a GAT's are steps, DeepWalk's are passes over its walks."""
        return (self.gat if self.model.name == GAT else self.deepwalk).epochs

    @property
    def masks_sums(self) -> bool:
        return self.strategy.name == ALIGNED and self.strategy.alignment == SECURE

    def validate(self) -> None:
        super().validate()
        how, model, is_secure = self.strategy, self.model, self.strategy.alignment == SECURE
        readable = {} if how.name == ALIGNED else {"name": "nothing is summed"}
        clear = {"alignment": "every embedding would be in the clear"}
        check_trust(self, readable | ({} if is_secure else clear), choosing=SECURE)
        self.check_averages((), noised=METHODS)
        require(AUC not in self.metrics, "metrics", AUC, "others: an SVC gives no probabilities")
        is_silent, why = how.name == LOCAL or self.masks_sums, "no embedding is sent in the clear"
        self.refuse_noise(is_silent, "strategy.name", why)
        why = "sums over changing clients could be compared"
        changes = is_secure and how.participation != 1
        self.clash(changes, "strategy.participation", "strategy.alignment", why)
        self.clash(is_secure and how.absent == LAST, "strategy.absent", "strategy.alignment", why)
        is_gat = model.name == GAT
        words = f"a divisor of model.dimension: {model.dimension}"
        self.need(not is_gat or model.dimension % self.gat.heads == 0, "gat.heads", words)
        learns = f"with the first above 0: model.name={GAT} learns from labels"
        self.need(not is_gat or self.partition.ratios[0] > 0, "partition.ratios", learns)


def require_gensim(config: PPFLConfig) -> None:
    """Refuse DeepWalk where gensim, an extra, is not installed."""
    if config.model.name == DEEPWALK:
        require_library("gensim", "model.name", extra=DEEPWALK, otherwise=f"set model.name={GAT}")
