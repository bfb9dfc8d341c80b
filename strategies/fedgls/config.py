"""Settings of FedGLS and its baselines: one community per client; some have no edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from flower_graph.config.common import (
    NODES,
    CutRunConfig,
    DataConfig,
    GCNSection,
    RobustSection,
    StrategySection,
    TrainingSection,
)
from flower_graph.config.rules import ABOVE_ZERO, FRACTION, NOT_NEGATIVE, at_least, choice
from flower_graph.config.schema import section, setting

APP = "fedgls"
FEDGLS, FED_KNN, FEDPROTO, LOCAL = "structure-fedavg", "fed-gnn-knn", "fedproto", "local-gnn-knn"
# The graph of a graphless client: learnt (FedGLS), of nearest neighbours, its true one, or OWN: no
# edges, and a model that graphless clients alone share; NONE takes the edges of all clients away
LEARNED, KNN, TRUE, OWN, NONE = "learned", "knn", "true", "own", "none"
GRAPHS = {
    FEDGLS: LEARNED,
    "fed-mlp": NONE,
    "fed-gnn-mlp": OWN,
    FEDPROTO: OWN,
    LOCAL: KNN,
    FED_KNN: KNN,
    "fed-gnn": TRUE,
}
METHODS = tuple(GRAPHS)
# Methods whose replies are one client's weights only
AVERAGING = (FEDGLS, "fed-mlp", FED_KNN, "fed-gnn")
SHARES = "what travels are sums and how much of each there is, whose quotient no such average gives"
NOT_ROBUST = {"fed-gnn-mlp": SHARES, FEDPROTO: SHARES, LOCAL: "nothing is averaged"}
ENCODERS = ("attentive", "mlp")
FEATURES, ENCODER = KNN_ON = ("features", "encoder")
SIMILARITIES = ("cosine", "euclidean", "inner")


@dataclass
class GraphSection:
    """The clients without edges, and how their graphs are made or learnt."""

    graphless_ratio: float = setting(0.5, FRACTION, help="share of the clients that have no edges")
    neighbours: int = setting(15, at_least(1), help="others that each node keeps as neighbours, k")
    knn_on: str = setting(FEATURES, choice(*KNN_ON))
    """what makes neighbours: a node's features, or its hidden layer in the model that the server
    sent, without edges; `fed-gnn-knn` only"""
    encoder: str = setting("attentive", choice(*ENCODERS))
    """what turns features into what is compared"""
    layers: int = setting(2, at_least(1), help="layers of the encoder")
    width: int = setting(64, at_least(1), help="numbers in each of its layers; `mlp` only")
    similarity: str = setting("cosine", choice(*SIMILARITIES), help="how nodes are compared")
    learning_rate: float = setting(0.001, NOT_NEGATIVE)
    """Adam's step size of the graph learner; 0: it stays as it starts"""
    tau: float = setting(0.2, ABOVE_ZERO, help="temperature of the contrastive loss")


@dataclass
class FedGLSSection(TrainingSection, RobustSection, StrategySection):
    """Settings of the clients' training and of what clients share."""

    name: str = setting(FEDGLS, choice(*METHODS), help="FedGLS or a baseline")
    local_epochs: int = 5
    prototype_weight: float = setting(1.0, NOT_NEGATIVE)
    """weight of the distance to the prototypes; `fedproto` only"""


@dataclass
class FedGLSConfig(CutRunConfig):
    """All settings of a run of FedGLS or of one of its baselines."""

    # ``data.name`` may also be a folder with one saved PyG ``Data`` per client; ``partition`` then
    # only splits the nodes of clients that come without masks.

    task: ClassVar[str] = NODES
    app: str = APP
    rounds: int = 100
    # The graph's own split plays no part: every client splits its nodes by ``partition``. Features
    # stay as they are: scaled down, they learn slowly, and weight decay wins.
    data: DataConfig = section(DataConfig, split="random", ratios=[0.6, 0.2, 0.2], features="as-is")
    graph: GraphSection = section(GraphSection)
    model: GCNSection = section(GCNSection)
    strategy: FedGLSSection = section(FedGLSSection)

    def local_steps(self, graphs: Sequence[object]) -> float:
        """Return the number of steps: one an epoch, and one more a round for graph learners."""
        learns = self.strategy.name == FEDGLS and self.graph.learning_rate > 0
        return self.strategy.local_epochs + learns

    def validate(self) -> None:
        super().validate()
        good = self.graph.knn_on != ENCODER or self.strategy.name == FED_KNN
        self.need(good, "graph.knn_on", f"{FEATURES} without strategy.name={FED_KNN}")
        self.check_averages(AVERAGING, not_robust=NOT_ROBUST)


class StructureSettings(NamedTuple):
    """What server and clients must share: the config's sections, and the sizes of the data.

    Attributes
    ----------
    num_features, num_classes : int
        Widths of the features and of the output, ``f`` and ``k``.
    graph, model, strategy : GraphSection, GCNSection, FedGLSSection
        The sections of this name.
    seed : int
        The run's seed.
    """

    num_features: int
    num_classes: int
    graph: GraphSection = GraphSection()
    model: GCNSection = GCNSection()
    strategy: FedGLSSection = FedGLSSection()
    seed: int = 0

    @property
    def graphs(self) -> str:
        """The graph of a graphless client."""
        return GRAPHS[self.strategy.name]
