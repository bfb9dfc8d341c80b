"""Sections of methods whose clients train a torch module on a graph of their own."""

from dataclasses import dataclass
from typing import ClassVar

from flower_graph.config.common import (
    LINKS,
    NODES,
    TASKS,
    VALUES,
    CutRunConfig,
    DataConfig,
    StrategySection,
)
from flower_graph.config.partition import DIRICHLET, LOUVAIN, METIS, RANDOM, PartitionSection
from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    NOT_NEGATIVE,
    SEED,
    at_least,
    choice,
    require,
)
from flower_graph.config.schema import section, setting

DOT, MLP = "dot", "mlp"
KEEP, RESET = "keep", "reset"
GCN, NETWORKS = "gcn", ("gat", "sage", "gin", "sgc", MLP)
DISJOINT = (LOUVAIN, METIS, DIRICHLET, RANDOM)  # no two clients have one edge
TASK_HELP = "what is learnt: classes of `nodes`, or which are linked: `flower-graph docs links`"


@dataclass
class LinksSection:
    """The held-out edges of link prediction (``task: links``)."""

    val: float = setting(0.1, BELOW_ONE)
    """share of the edges for validation, as in PyG's `RandomLinkSplit`"""
    test: float = setting(0.2, BELOW_ONE, help="share for the test")
    seed: int | None = setting(None, SEED)
    """of which edges, and of the pairs without one; null: the run's"""
    decoder: str = setting(DOT, choice(DOT, MLP))
    """what gives a pair's logit from two rows: their product, an MLP"""

    def validate(self) -> None:
        require(self.val + self.test < 1, "links.test", self.test, "below 1 with links.val")


@dataclass
class GCNSection:
    """A two-layer GCN."""

    hidden: int = setting(16, at_least(1), help="numbers in the hidden layer")
    dropout: float = setting(0.5, BELOW_ONE, help="share of the hidden layer dropped in training")
    input_dropout: float = setting(0.0, BELOW_ONE, help="share of the features dropped in training")


@dataclass
class ModelSection(GCNSection):
    """A two-layer network, by its name."""

    name: str = setting(GCN, choice(GCN, *NETWORKS))
    """the clients' network: `gcn`, or PyG's GAT, GraphSAGE, GIN, SGC or MLP, which read no weights
    of edges"""


@dataclass
class TrainingSection(StrategySection):
    """How clients train; a method adds its own keys."""

    local_epochs: int = setting(1, at_least(1), help="epochs that a client trains in a round")
    learning_rate: float = setting(0.01, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight")
    optimiser: str = setting(KEEP, choice(KEEP, RESET))
    """whether a client's Adam lasts from round to round"""


@dataclass
class ModuleRunConfig(CutRunConfig):
    """The base of such a method's schema, which sets ``app`` and its own ``strategy``."""

    takes_edge_weights = True
    networks: ClassVar[tuple[str, ...]] = (GCN, *NETWORKS)  # that the method takes
    rounds: int = 100
    task: str = setting(
        NODES, choice(*TASKS), help=f"{TASK_HELP}; or `values`: `flower-graph docs own-data`"
    )
    # The graph's own split is not used: clients split their nodes by ``partition``. Features stay
    # as they are: models learn slowly from scaled ones.
    data: DataConfig = section(DataConfig, split="random", ratios=[0.6, 0.2, 0.2], features="as-is")
    partition: PartitionSection = section(PartitionSection, clients=10, every_node=True)
    links: LinksSection = section(LinksSection)
    model: ModelSection = section(ModelSection)
    strategy: TrainingSection = section(TrainingSection)

    def validate(self) -> None:
        super().validate()
        method, of_task = self.partition.method, f"with task={self.task}"
        good = self.task != LINKS or method in DISJOINT  # no two clients may share an edge
        require(good, "partition.method", method, f"one of {', '.join(DISJOINT)} {of_task}")
        choice(*self.networks).check("model.name", self.model.name)
        if self.model.name != GCN and self.task == LINKS:
            good, words = self.links.decoder != MLP, f"{DOT} with model.name={self.model.name}"
            require(good, "links.decoder", self.links.decoder, words)
        good = self.task != VALUES or method != DIRICHLET
        require(good, "partition.method", method, f"another {of_task}: it cuts by class")
