"""Settings of nFedGNN: one node per client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flower_graph.config.common import LINKS, NODES, TASK_HELP, DataConfig, LinksSection, RunConfig
from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    NOT_NEGATIVE,
    SHARE,
    at_least,
    choice,
)
from flower_graph.config.schema import section, setting
from flower_graph.method.trust import TrustSection, check_trust

APP = "nfedgnn"
STRATEGIES = ("split-gradient-relay",)
MODELS = ("gcn", "gat", "sage")
# What users have of each other's first layers: nothing, means every few rounds, or one for all
OWN, AVERAGED, SUMMED = SHARES = ("own", "averaged", "summed")
AVERAGE_OVER = ("holders", "all")
MEMORY, FILE = STATES = ("memory", "file")  # where users' weights are
PLAIN, MASKED = AGGREGATIONS = ("plain", "masked")
SMOOTHNESS = 100.0  # the paper's lambda
STEADYING = ("strategy.learning_rate", "strategy.reg_weight")  # less of them when training diverges
SCHEDULES = ("constant", "cosine", "warmup-cosine")
# By validation AUC; with the values for classes, edges add nothing to the features
FOR_LINKS = {
    "model.hidden": 64,
    "strategy.learning_rate": 0.01,
    "strategy.reg_weight": 0.0,
    "strategy.weight_decay": 0.0,
}


@dataclass
class UserData(DataConfig):
    """The graph of the users; users may come and go when a run goes on."""

    add: str | None = setting(None)
    """the grown graph (`flower-graph docs own-data#users-that-come-and-go`)"""
    remove: list[str] = setting([], help="names or numbers of all users who have left")


@dataclass
class ModelConfig:
    """The split model: users have the first transform, the server has the rest."""

    name: str = setting("gcn", choice(*MODELS), help="the graph neural network")
    hidden: int = setting(16, at_least(1), help="numbers in a latent vector; `gat`: of each head")
    heads: int = setting(8, at_least(1), help="attention heads; `gat` only")
    dropout: float = setting(0.5, BELOW_ONE, help="share of entries dropped in training")
    user_bias: bool = setting(False, help="whether a user's transform has a bias")


@dataclass
class StrategyConfig(TrustSection):
    """Settings of the server's training, and of its exchanges with users."""

    name: str = setting("split-gradient-relay", choice(*STRATEGIES), help="the only one")
    participation: float = setting(1.0, SHARE, help="share of the users asked each round")
    reg_weight: float | None = setting(None, NOT_NEGATIVE)
    """weight λ of neighbours' likeness; null: 100, with `summed` 0"""
    learning_rate: float = setting(0.1, ABOVE_ZERO, help="Adam's step size, on both sides")
    schedule: str = setting("constant", choice(*SCHEDULES))
    """`cosine`: the step size falls to about 0; `warmup-cosine`: it rises in a tenth first"""
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight, on both sides")
    gradient_norm: float = setting(0.0, NOT_NEGATIVE)
    """largest L2 norm of the gradient, of server and users; 0: any"""
    server_average: float = setting(0.0, BELOW_ONE)
    """share that the server's average of its weights keeps a round; 0: none"""
    share: str = setting(OWN, choice(*SHARES))
    """`own`: each user has a first layer of its own; `averaged`: their means, too, every
    `average_every` rounds; `summed`: all have the same, as one network in one place"""
    average_every: int = setting(0, at_least(0), help="rounds between averages; `averaged` only")
    average_over: str = setting("holders", choice(*AVERAGE_OVER))
    """who counts in a feature row's mean; `averaged` only"""
    aggregation: str = setting(PLAIN, choice(*AGGREGATIONS))
    """`masked`: the server sees neither the sums of gradients nor the layer; `summed` only"""
    limit: float = setting(64.0, ABOVE_ZERO)
    """largest L2 norm of a SuperNode's sum of gradients; `summed` only"""
    sketch: int | None = setting(None, at_least(1))
    """numbers into which users hash their features; `summed` only"""
    evaluate_every: int = setting(1, at_least(1))
    """rounds between evaluations; the last round has one always"""
    state: str = setting(MEMORY, choice(*STATES))
    """where users' weights are; `file`: on the disk; `own` only"""
    newcomers_alone: int = setting(0, at_least(0))
    """rounds in which only the users that `data.add` brings train"""

    @property
    def smoothness(self) -> float:
        """The weight λ that this form uses."""
        if self.reg_weight is not None:
            return self.reg_weight
        return 0.0 if self.share == SUMMED else SMOOTHNESS


@dataclass
class NFedGNNConfig(RunConfig):
    """Everything that a run of nFedGNN needs to be repeated."""

    app: str = APP
    task: str = setting(
        NODES,
        choice(NODES, LINKS),
        help=f"{TASK_HELP}. `{LINKS}` sets "
        f"{' '.join(f'{key}={value:g}' for key, value in FOR_LINKS.items())} unless told otherwise",
    )
    data: UserData = section(UserData)
    links: LinksSection = section(LinksSection)
    model: ModelConfig = section(ModelConfig)
    strategy: StrategyConfig = section(StrategyConfig)

    @property
    def masks_sums(self) -> bool:
        return self.strategy.aggregation == MASKED

    needs_own_nodes = False  # the noise is each user's own

    @property
    def steadying(self) -> Sequence[str]:
        return STEADYING if self.strategy.smoothness else STEADYING[:1]

    def local_steps(self, graphs: object) -> float:
        return 1

    of_task: ClassVar = {LINKS: FOR_LINKS}
    server_measures = True  # the noisy vectors that it has
    takes_sparse = True

    def validate(self) -> None:
        super().validate()
        how, share = self.strategy, self.strategy.share
        of_form = {
            "average_every": (0, AVERAGED),
            "average_over": (AVERAGE_OVER[0], AVERAGED),
            "sketch": (None, SUMMED),
            "aggregation": (PLAIN, SUMMED),
            "state": (MEMORY, OWN),
        }
        for key, (unused, form) in of_form.items():
            good = share == form or getattr(how, key) == unused
            self.need(good, f"strategy.{key}", f"{unused} without strategy.share={form}")
        good = share != AVERAGED or how.average_every > 0
        self.need(good, "strategy.average_every", f"above 0 with strategy.share={AVERAGED}")
        good = how.average_over != "all" or how.participation == 1
        self.need(good, "strategy.participation", "1 with strategy.average_over=all")
        # Newcomers have the layer of all others.
        good = share != SUMMED or not how.newcomers_alone
        self.need(good, "strategy.newcomers_alone", f"0 with strategy.share={SUMMED}")
        why = "the server would see how each user's vector is made, or each SuperNode's sum"
        sums = {"share": SUMMED, "aggregation": MASKED}
        check_trust(self, {key: why for key, form in sums.items() if getattr(how, key) != form})
        stay = self.data.add is None and not self.data.remove
        self.need(stay or self.task != LINKS, "task", f"{NODES} where users come and go")
        good = stay or how.state != FILE
        self.need(good, "strategy.state", f"{MEMORY} where users come and go")
        self.check_averages((), noised=STRATEGIES)
        for form, sent in ((AVERAGED, "the weights"), (SUMMED, "the sums of gradients")):
            why = f"{sent} that users then send get no noise"
            self.refuse_noise(share == form, "strategy.share", why)
