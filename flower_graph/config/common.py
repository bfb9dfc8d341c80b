"""Settings that every method has, and sections that several share."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    RATIOS,
    SEED,
    SHARE,
    Rule,
    at_least,
    choice,
    require,
    require_library,
    show,
)
from flower_graph.config.schema import check_settings, section, setting
from flower_graph.errors import ConfigError
from flower_graph.wire import keys

# What a run saves, and of which round
ALL, ONLY_PREDICTIONS, NOTHING = SAVE = ("all", "predictions", "none")
LAST, BEST = KEEP = ("last", "best")
OWN = "own"  # nodes of a client, beside those of ALL
AUTO, AUTO_DENSE, AS_IS, ROW, PRESENCE, STANDARDISE = FEATURES = (
    "auto", "auto-dense", "as-is", "row", "presence", "standardise",
)  # fmt: skip
REFUSE, MEAN, ONE_HOT = "refuse", "mean", "one-hot"
POINT, COMMA = "point", "comma"
NAME = Rule("a name, of a data set, a file or a column", lambda name: bool(name.strip()))
LOCAL_FORM, CENTRAL_FORM = FORMS = ("local", "central")
WITHHOLD, REPORT = MEASUREMENTS = ("withhold", "report")
NO_DEFENCE, KRUM, TRIMMED_MEAN, MEDIAN = ROBUST = ("none", "krum", "trimmed-mean", "median")
CHECKPOINTS = "checkpoints"
STEADYING = ("learning_rate", "local_epochs")  # settings of most methods that steady the training
TRACKERS = ("tensorboard", "mlflow", "wandb")  # each also the module, and the extra that has it
DEVICES = ("auto", "cpu", "cuda")
DEVICE = Rule(
    f"one of {', '.join(DEVICES)} or cuda:N",
    lambda name: name in DEVICES or bool(re.fullmatch(r"cuda:\d+", name)),
    DEVICES,
)


def some_of(allowed: Sequence[str], *, least: int) -> Rule:
    """Make the rule of a list of different words."""

    def admits(names: Sequence[str]) -> bool:
        return least <= len(set(names) & {*allowed}) == len(names)

    return Rule(f"some of {', '.join(allowed)}, none twice", admits)


# The metrics that a run reports, and the counts that they need
NODES, LINKS, VALUES = TASKS = ("nodes", "links", "values")

SCORES_OF = {NODES: keys.NODE_SCORES, LINKS: keys.LINK_SCORES, VALUES: keys.VALUE_SCORES}
SOME_METRICS = some_of(keys.SCORES, least=1)


def counting_of(metrics: Sequence[str]) -> str:
    """Return the kind of counts for some metrics: none for the accuracy alone."""
    asked = {*metrics}
    if asked & {*keys.VALUE_SCORES}:
        return keys.ERRORS
    if asked & {*keys.RANKED}:
        return keys.RANKS
    if asked & {keys.AUC, keys.AP}:
        return keys.HISTOGRAMS
    return keys.CONFUSION if asked - {keys.ACCURACY} else ""


@dataclass
class DataConfig:
    """The graph, the nodes that train, and for ``csbm`` the graph to generate."""

    name: str = setting("cora-linqs", NAME)
    """a known set, `Class/name` of PyG, `csbm`, or a path: `flower-graph docs own-data`"""
    root: str | None = setting(None)
    """folder of the raw data; null: `$FLOWER_GRAPH_DATA`, else a download"""
    split: str = setting("public", choice("auto", "public", "geom-gcn", "random"))
    """the whole graph's split; `auto`: the graph's own masks, else drawn by `ratios`, by default
    0.6, 0.2, 0.2, of the labelled nodes"""
    split_seed: int | None = setting(0, SEED)
    """seed of a random split and of `csbm`'s graph; null: the run's"""
    train_per_class: int = setting(20, at_least(1))
    """training nodes of each class; `random` only"""
    num_val: int = setting(500, at_least(0), help="validation nodes; `random` only")
    num_test: int = setting(1000, at_least(0), help="test nodes; `random` only")
    ratios: list[float] | None = setting(None, RATIOS)
    """shares of a random split; they replace the counts"""
    features: str = setting(ROW, choice(*FEATURES))
    """`row`: each node's sum to one; `presence`: those that are not 0 become 1; `standardise`: each
    has mean 0 and deviation 1 over all nodes; `auto`: `as-is` for 0/1, `presence` for sparse ones
    without negative, else `standardise`, also where a node has more than 64 that are not 0 in the
    mean and the graph at most 50 million numbers; `auto-dense`: `auto`, but `standardise` for all
    but 0/1 in such graphs"""
    feature_noise: float = setting(0.0, FRACTION)
    """chance of each of a node's features that is not 0 to move to another one, drawn by
    `data.split_seed`; not of clients' own graphs"""
    no_features: str = setting(REFUSE, choice(REFUSE, "degree", ONE_HOT))
    """what stands for features that a graph lacks: its nodes' degrees, or their numbers"""
    missing: str = setting(REFUSE, choice(REFUSE, MEAN))
    """what stands for a number that a node lacks (an empty cell of a table, NaN in `x`): the
    feature's mean over all nodes of all clients that have it"""
    categories: str = setting(REFUSE, choice(REFUSE, ONE_HOT))
    """what stands for the words of a column of a table, GraphML or JSON: a feature for each word, 1
    at the nodes that have it"""
    label: str | None = setting(None, NAME)
    """column or attribute with a node's class; null: `label`, in saved graphs `y`"""
    weight: str | None = setting(None, NAME)
    """column or attribute with an edge's weight; null: `weight`, in saved graphs `edge_weight`"""
    decimal: str = setting(POINT, choice(POINT, COMMA))
    """decimal sign of the numbers in tables, GraphML and JSON"""
    nodes: int = setting(10000, help="`csbm`: number of nodes, at least one for each class")
    classes: int = setting(7, at_least(2), help="`csbm`: number of classes")
    degree: float = setting(10.0, ABOVE_ZERO, help="`csbm`: mean number of neighbours")
    num_features: int = setting(512, help="`csbm`: number of features, at least `data.active`")
    active: int = setting(32, at_least(1), help="`csbm`: features of a node that are not 0")
    homophily: float = setting(0.8, FRACTION, help="`csbm`: share of the edges inside a class")
    signal: float = setting(0.1, FRACTION)
    """`csbm`: how much features tell: the chance of each of a node's to be the one that its class
    prefers"""

    def draws(self, seed: int) -> int:
        """Return the seed of splits and graphs in a run with this seed."""
        return seed if self.split_seed is None else self.split_seed

    def validate(self) -> None:
        if Path(self.name).is_dir():
            allowed = "0 where clients have their own graphs"
            require(not self.feature_noise, "data.feature_noise", self.feature_noise, allowed)
        for key, other in (("nodes", "classes"), ("num_features", "active")):
            value, least = getattr(self, key), getattr(self, other)
            require(value >= least, f"data.{key}", value, f"at least {least} (data.{other})")


# Ways to cut one graph into clients -------------------------------------------------------------

PARTITIONS = (
    "louvain", "metis", "dirichlet", "random", "metis-overlapping", "ego-networks", "overlapping",
)  # fmt: skip
LOUVAIN, METIS, DIRICHLET, RANDOM, METIS_OVERLAPPING, EGO_NETWORKS, OVERLAPPING = PARTITIONS
PER_CLIENT, GLOBAL = EGO_SPLITS = ("per-client", "global")
PUBLIC = ("random", "degree", "cover")


@dataclass
class EgoSection:
    """The clients' ego-networks, and the whole of which training nodes are a share."""

    hops: int = setting(2, at_least(1))
    """distance from the ego up to which nodes belong to its network"""
    min_nodes: int = setting(15, at_least(1), help="nodes that an ego-network has at least")
    split: str = setting(PER_CLIENT, choice(*EGO_SPLITS))
    """`global`: a node has one role at all its clients; ego-networks only"""


@dataclass
class OverlapSection:
    """The nodes that all clients hold, and the number of each client's own."""

    public: str = setting("random", choice(*PUBLIC))
    """how nodes are chosen that all clients hold"""
    public_share: float = setting(0.4, SHARE)
    """share of all nodes that every client holds, where clients overlap"""
    private_share: float = setting(0.15, FRACTION)
    """share of all nodes that each client holds alone; with the public share at most 1 over all
    clients"""

    def refuse_shares(self, clients: int) -> None:
        whole = self.public_share + clients * self.private_share
        if whole > 1 + 1e-9:
            most = (1 - self.public_share) / clients
            allowed = f"at most {most:g}, with partition.public_share = {self.public_share}"
            require(False, "partition.private_share", self.private_share, allowed)


@dataclass
class CutSection:
    """How the graph is cut, and into how many clients."""

    method: str = setting(LOUVAIN, choice(*PARTITIONS), help="how the graph is cut")
    clients: int = setting(8, at_least(1))
    """the largest communities (`louvain`), parts of the whole graph, or nodes that are drawn
    (`ego-networks`)"""
    resolution: float | None = setting(1.0, ABOVE_ZERO)
    """above 1 gives smaller communities; null: 1, doubled until there are enough; `louvain` only"""
    every_node: bool = setting(False)
    """smaller communities too, each to the smallest client; `louvain` only"""
    alpha: float = setting(0.5, ABOVE_ZERO)
    """the smaller, the fewer classes has a client; `dirichlet` only"""
    draws: int = setting(5, at_least(1))
    """clients of each METIS part, of which `partition.clients` is a multiple; `metis-overlapping`
    only"""


@dataclass
class PartitionSection(OverlapSection, EgoSection, CutSection):
    """How one graph is cut into clients, in any way, and which of a client's nodes train."""

    seed: int | None = setting(None, SEED)
    """seed of the cut, the graphless clients and the splits; null: the run's"""
    ratios: list[float] = setting([0.6, 0.2, 0.2], RATIOS, help="shares of train, val and test")
    train_share: float | None = setting(None, SHARE)
    """share of a client's labelled nodes that train, whoever validates and tests; null: all that
    `partition.ratios` gives"""

    def validate(self) -> None:
        if self.train_share is not None:
            good, most = self.train_share <= self.ratios[0], f"{self.ratios[0]:g}"
            allowed = f"at most {most} (the first of partition.ratios)"
            require(good, "partition.train_share", self.train_share, allowed)
        if self.method == METIS_OVERLAPPING:
            good = self.clients % self.draws == 0
            allowed = f"a multiple of partition.draws = {self.draws}"
            require(good, "partition.clients", self.clients, allowed)
        if self.method == OVERLAPPING:
            self.refuse_shares(self.clients)


def keys_of_others(method: object) -> set[str]:
    """Name the keys of ``partition`` that have no effect with this method."""
    ways = {EGO_NETWORKS: fields(EgoSection), OVERLAPPING: fields(OverlapSection)}
    keys = {one.name for way, own in ways.items() if way != method for one in own}
    return keys if method == METIS_OVERLAPPING else keys | {"draws"}


# Privacy, robustness, and a run ------------------------------------------------------------------


@dataclass
class PrivacyConfig:
    """Differential privacy of what clients send, by Flower's functions and accountant."""

    epsilon: float | None = setting(None, ABOVE_ZERO)
    """budget of the whole run, for all data of a client; null: no noise"""
    delta: float = setting(1e-5, Rule("above 0 and below 1", lambda delta: 0 < delta < 1))
    """chance, over the whole run, that the promise of epsilon fails"""
    clipping_norm: float = setting(10.0, ABOVE_ZERO)
    """longest vector that a client sends in a round: a user's latent vector, an ego-network's
    shared embeddings together, the change of a client's weights or of its public embeddings"""
    form: str = setting(LOCAL_FORM, choice(*FORMS))
    """`local`: clients add noise; `central`: the server does, to averaged weights"""
    measurements: str = setting(WITHHOLD, choice(*MEASUREMENTS))
    """whether clients send what they measure on their own data, without noise"""

    @property
    def is_on(self) -> bool:
        return self.epsilon is not None

    @property
    def is_central(self) -> bool:
        return self.is_on and self.form == CENTRAL_FORM

    @property
    def is_local(self) -> bool:
        return self.is_on and self.form == LOCAL_FORM

    @property
    def withholds(self) -> bool:
        """Whether clients send no measurements of their own data."""
        return self.is_on and self.measurements == WITHHOLD


@dataclass
class RobustSection:
    """The section ``strategy`` of methods that average clients' weights."""

    robust: str = setting(NO_DEFENCE, choice(*ROBUST))
    """what stands for the mean of the clients' weights"""
    num_malicious: int = setting(1, at_least(0), help="clients that may be hostile; `krum` only")
    beta: float = setting(0.2, Rule("at least 0 and less than 0.5", lambda beta: 0 <= beta < 0.5))
    """share of the clients cut off at each end; `trimmed-mean` only"""


@dataclass
class StrategySection:
    """The keys that the section ``strategy`` of every method has; a method adds its own."""

    name: str = setting("", help="what server and clients do")
    participation: float = setting(1.0, SHARE, help="share of the clients asked each round")
    timeout: float = setting(600.0, ABOVE_ZERO, help="seconds that an exchange may take")
    min_nodes: int = setting(1, at_least(1), help="SuperNodes to wait for before the first round")
    most_supernodes: int | None = setting(None, at_least(1))
    """SuperNodes that may enrol; null: any number"""

    @property
    def distrusts(self) -> bool:
        return False

    @property
    def fewest_nodes(self) -> int:
        """SuperNodes to wait for before the first round."""
        return self.min_nodes


@dataclass
class RunConfig:
    """The keys that the schemas of all methods have."""

    app: str = setting("", help="the method, which decides what keys there are")
    seed: int = setting(0, SEED, help="seed of weights, dropout, sampling and splits")
    rounds: int = setting(200, at_least(1), help="rounds of training")
    device: str = setting("auto", DEVICE)
    """where tensors live; `auto`: on a GPU if there is one"""
    checkpoint_every: int = setting(0, at_least(0))
    """rounds between checkpoints, of which the last two are kept; 0: none"""
    patience: int = setting(0, at_least(0))
    """rounds without a better validation after which the run ends; 0: never"""
    metrics: list[str] = setting([keys.ACCURACY], SOME_METRICS)
    """what is reported of predictions; the first decides which round is the best. All but the
    accuracy are those of all clients' predictions together: `flower-graph docs outputs#metrics`"""
    evaluate: list[str] = setting(
        [OWN], Rule(f"[{OWN}] or [{OWN}, {ALL}]", lambda names: names in ([OWN], [OWN, ALL]))
    )
    """whose test nodes models are judged on: each client's `own`; with `all`, after a simulation,
    also all clients' together: `flower-graph docs using-a-run#own-and-all`"""
    save: str = setting(ALL, choice(*SAVE))
    """what clients and server keep, each where it lives, to be used after the run: predictions,
    models and figures of each client; `predictions`: without models"""
    keep: str = setting(LAST, choice(*KEEP))
    """the round that predictions and models are of; `best`: that of the best validation, for which
    each keeps one more on its disk"""
    every: int = setting(0, at_least(0))
    """rounds between points of each client's curves; 0: none are written"""
    track: list[str] = setting([], some_of(TRACKERS, least=0))
    """trackers that the server shows each round to, of `tensorboard`, `mlflow`, `wandb`, each an
    extra of this name: `flower-graph docs using-a-run#trackers`"""
    data: DataConfig = section(DataConfig)
    privacy: PrivacyConfig = section(PrivacyConfig)
    strategy: StrategySection = section(StrategySection)  # shown last

    # Settings that come with a task, by its name, where a user says nothing else
    of_task: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    takes_edge_weights = False  # whether the clients' networks use weights of edges
    takes_sparse = False  # whether a generated graph's features may be sparse
    sends_once = False  # whether clients send once, under noise of the method's own without delta
    server_measures = False  # whether the server has all predictions, so that no client counts any

    @property
    def masks_sums(self) -> bool:
        """Whether clients hide their values under masks."""
        return False

    @property
    def sends_singly(self) -> bool:
        """Whether the server reads the values of a single SuperNode."""
        return not self.masks_sums

    @property
    def needs_own_nodes(self) -> bool:
        """Whether each client needs a SuperNode of its own, since replies get noise."""
        return self.privacy.is_on

    @property
    def steadying(self) -> Sequence[str]:
        """The settings to lower when the loss rises."""
        names = (name for name in STEADYING if hasattr(self.strategy, name))
        return [f"strategy.{name}" for name in names]

    @property
    def judges_all(self) -> bool:
        """Whether a simulation can judge a client's model on the nodes of others."""
        return False

    def local_steps(self, graphs: Sequence[Any]) -> float:
        """Return the number of gradient steps of a client in a round; NaN if unknown."""
        return float(getattr(self.strategy, "local_epochs", math.nan))

    def long_work(self, server_round: int) -> str:
        """Return the work that makes a round longer than others; "" for an ordinary round."""
        return ""

    def validate(self) -> None:
        if own := type(self).app:
            choice(own).check("app", self.app)
        check_settings(self)
        # Repeated rounds would release data a second time
        resumes, why = bool(self.checkpoint_every), "a resumed run sends rounds again"
        self.clash(resumes and self.privacy.is_on, "checkpoint_every", "privacy.epsilon", why)
        is_lost = self.every > 0 and self.save == NOTHING
        self.clash(is_lost, "every", "save", "no figures of clients are kept; set every=0")
        task = getattr(self, "task", NODES)
        allowed = SCORES_OF.get(task, ())
        for name in self.metrics:
            words = f"one of {', '.join(allowed)} with task={task}"
            require(name in allowed, "metrics", name, words)
        asks = ALL in self.evaluate
        words = f"[{OWN}] here: {ALL} is for clients that train a module to tell classes of {NODES}"
        self.need(self.judges_all or not asks, "evaluate", words)
        why = "the models that are saved are judged; set save=all"
        self.clash(asks and self.save != ALL, "evaluate", "save", why)
        why = f"clients withhold what they measure; set evaluate=[{OWN}]"
        self.refuse_noise(asks and self.privacy.withholds, "evaluate", why)
        counts = bool(counting_of(self.metrics)) and not self.server_measures
        remedy = "set metrics=[accuracy] or privacy.measurements=report"
        why = f"clients withhold what they measure; {remedy}"
        self.refuse_noise(counts and self.privacy.withholds, "metrics", why)

    # Rules on several settings together, named by their keys

    def need(self, good: bool, key: str, allowed: str) -> None:
        """Refuse the value of a setting unless it is good."""
        require(good, key, attrgetter(key)(self), allowed)

    def clash(self, bad: bool, key: str, other: str, why: str) -> None:
        """Refuse the value of a setting beside that of another one, if the two are bad."""
        if bad:
            values = (attrgetter(one)(self) for one in (key, other))
            first, second = (one if isinstance(one, str) else show(one) for one in values)
            raise ConfigError(
                f"{key}: {first} is not allowed with {other}={second}: {why}", key=key
            )

    def refuse_noise(self, bad: bool, other: str, why: str) -> None:
        """Refuse a privacy budget beside a setting that is bad for it."""
        remedy = f"{why}; set it to null"
        self.clash(bad and self.privacy.is_on, "privacy.epsilon", other, remedy)

    def check_averages(
        self,
        averaging: Collection[str],
        noised: Collection[str] = (),
        not_robust: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Refuse noise and averages that the method of ``strategy.name`` does not have.

        ``averaging``: methods whose clients send weights in the clear; ``noised``: others whose
        clients add noise; ``not_robust``: those without a robust average, and why.
        """
        key, name, is_central = "strategy.name", self.strategy.name, self.privacy.is_central
        is_robust = getattr(self.strategy, "robust", NO_DEFENCE) != NO_DEFENCE
        why = f"{not_robust.get(name)}; set strategy.robust=none"
        self.clash(is_robust and name in not_robust, "strategy.robust", key, why)
        has_noise = name in averaging or name in noised
        self.refuse_noise(not has_noise, key, "no noise is for what its clients send")
        why = f"there is no mean of weights; set privacy.form={LOCAL_FORM}"
        self.clash(is_central and name not in averaging, "privacy.form", key, why)
        why = "the noise is for a mean, and one client can move this average further"
        self.refuse_noise(is_central and is_robust, "strategy.robust", why)


@dataclass
class CutRunConfig(RunConfig):
    """The schema of methods whose clients' graphs are made by the section ``partition``."""

    partition: PartitionSection = section(PartitionSection)


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed; ``ConfigError`` names the extra."""
    for name in names:
        require_library(name, "track", extra=name, otherwise="leave it out")


def checkpoint_settings(config: RunConfig, out: Path | None) -> dict[str, Any]:
    """Return where and how often a strategy saves; a run without a folder saves nothing."""
    if out is None:
        return {"checkpoint_dir": None, "checkpoint_every": 0}
    return {"checkpoint_dir": out / CHECKPOINTS, "checkpoint_every": config.checkpoint_every}


# Methods whose clients train a torch module on a graph of their own ------------------------------

DOT, MLP = "dot", "mlp"
LASTS, RESET = "keep", "reset"
GCN, NETWORKS = "gcn", ("gat", "sage", "gin", "sgc", MLP)
WITH_HIDDEN = tuple(one for one in (GCN, *NETWORKS) if one != "sgc")  # networks of two layers
DISJOINT = (LOUVAIN, METIS, DIRICHLET, RANDOM)  # no two clients have one edge
TASK_HELP = "what is learnt: classes of `nodes`, or which are linked: `flower-graph docs links`"


@dataclass
class LinksSection:
    """The held-out edges of link prediction (``task: links``)."""

    val: float = setting(0.1, BELOW_ONE)
    """share of the edges for validation, as in PyG's `RandomLinkSplit`"""
    test: float = setting(0.2, BELOW_ONE, help="share for the test")
    seed: int | None = setting(None, SEED)
    """seed of the drawn edges, and of the pairs without one; null: the run's"""
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


def names_networks(value: object) -> bool:
    """Whether a value is the name of a network, or a list of such names."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(one in (GCN, *NETWORKS) for one in names)


@dataclass
class ModelSection(GCNSection):
    """A two-layer network, by its name."""

    # Any: a word, or a list of words, which OmegaConf has no type for
    name: Any = setting(
        GCN,
        Rule(
            f"{choice(GCN, *NETWORKS).words}, or a list of them", names_networks, (GCN, *NETWORKS)
        ),
    )
    """the clients' network: `gcn`, or PyG's GAT, GraphSAGE, GIN, SGC or MLP, which read no weights
    of edges; where clients share no weights also a list: of n networks client i has number i mod n,
    from 0 on"""

    @property
    def names(self) -> list[str]:
        """The networks, which clients have in turn; of one word this one."""
        return self.name if isinstance(self.name, list) else [self.name]


@dataclass
class TrainingSection(StrategySection):
    """How clients train; a method adds its own keys."""

    local_epochs: int = setting(1, at_least(1), help="epochs that a client trains in a round")
    learning_rate: float = setting(0.01, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight")
    optimiser: str = setting(LASTS, choice(LASTS, RESET))
    """whether a client's Adam lasts from round to round"""


@dataclass
class ModuleRunConfig(CutRunConfig):
    """The base of such a method's schema, which sets ``app`` and its own ``strategy``."""

    takes_edge_weights = True
    networks: ClassVar[tuple[str, ...]] = (GCN, *NETWORKS)  # that the method takes
    mixes: ClassVar[bool] = False  # whether clients may have different ones: they share no weights
    tasks: ClassVar[tuple[str, ...]] = TASKS  # that the method learns
    no_noise: ClassVar[str] = ""  # why it refuses a privacy budget, if it does
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

    @property
    def judges_all(self) -> bool:
        return self.task == NODES

    def validate(self) -> None:
        super().validate()
        method, of_task = self.partition.method, f"with task={self.task}"
        good = self.task != LINKS or method in DISJOINT  # no two clients may share an edge
        self.need(good, "partition.method", f"one of {', '.join(DISJOINT)} {of_task}")
        good = self.task != VALUES or method != DIRICHLET
        self.need(good, "partition.method", f"another {of_task}: it cuts by class")
        allowed = choice(*self.networks)
        if isinstance(name := self.model.name, list):
            good = self.mixes and all(map(allowed.admits, name))
            why = ", or a list of them" if self.mixes else f": clients of {self.app} share weights"
            self.need(good, "model.name", allowed.words + why)
        else:
            allowed.check("model.name", name)
        self.need(self.task in self.tasks, "task", f"{' or '.join(self.tasks)} with app={self.app}")
        self.refuse_noise(bool(self.no_noise), "app", self.no_noise)
        if type(self.strategy) is TrainingSection:  # a section of the method's own has names
            choice(type(self)().strategy.name).check("strategy.name", self.strategy.name)
        good = self.task != LINKS or self.model.name == GCN or self.links.decoder != MLP
        self.need(good, "links.decoder", f"{DOT} with model.name={self.model.name}")
