"""Settings of nFedGNN: one node per client."""

from __future__ import annotations

from dataclasses import dataclass

from flower_graph.config.common import DataConfig, RunConfig, StrategySection
from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    NOT_NEGATIVE,
    SHARE,
    at_least,
    choice,
)
from flower_graph.config.schema import section, setting
from flower_graph.errors import ConfigError

APP = "nfedgnn"
STRATEGIES = ("split-gradient-relay",)
MODELS = ("gcn", "gat", "sage")
AVERAGE_OVER = ("holders", "all")
STEADYING = ("strategy.learning_rate", "strategy.reg_weight")  # less of both when training diverges
SCHEDULES = ("constant", "cosine", "warmup-cosine")


@dataclass
class UserData(DataConfig):
    """The graph of the users; they may come and go when a run goes on."""

    add: str | None = setting(
        None,
        help="a file, or a folder with tables, of the grown graph: old users by name, or first; "
        "docs/own-data.md",
    )
    remove: list[str] = setting([], help="names or numbers of all users who have left")


@dataclass
class ModelConfig:
    """The split model: the users' first transform and the server's rest."""

    name: str = setting("gcn", choice(*MODELS), help="the graph neural network")
    hidden: int = setting(16, at_least(1), help="numbers in a latent vector; `gat`: of each head")
    heads: int = setting(8, at_least(1), help="attention heads; `gat` only")
    dropout: float = setting(0.5, BELOW_ONE, help="share of entries dropped in training")
    user_bias: bool = setting(False, help="whether a user's transform has a bias")


@dataclass
class StrategyConfig(StrategySection):
    """How the server trains, and how it talks to the users."""

    name: str = setting("split-gradient-relay", choice(*STRATEGIES), help="the only one")
    participation: float = setting(1.0, SHARE, help="share of the users asked each round")
    reg_weight: float = setting(
        100.0, NOT_NEGATIVE, help="weight λ of the smoothness of neighbouring latent vectors"
    )
    learning_rate: float = setting(0.1, ABOVE_ZERO, help="Adam's step size, on both sides")
    schedule: str = setting(
        "constant",
        choice(*SCHEDULES),
        help="how the step size goes on: `cosine`: from `learning_rate` down to nearly 0 in the "
        "last round; `warmup-cosine`: up to it in the first tenth of the rounds before that",
    )
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight, on both sides")
    gradient_norm: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="longer gradients, of the server's weights and all latent vectors together, are "
        "scaled down to this L2 norm; 0: none is",
    )
    server_average: float = setting(
        0.0,
        BELOW_ONE,
        help="how much of the exponential average of its weights the server keeps in a round; "
        "with that it predicts and is evaluated. 0: with the weights themselves",
    )
    average_every: int = setting(
        0, at_least(0), help="rounds between averages of the users' weights; 0: never"
    )
    average_over: str = setting(
        "holders", choice(*AVERAGE_OVER), help="who counts in a feature row's mean"
    )
    newcomers_alone: int = setting(
        0, at_least(0), help="rounds in which those whom `data.add` brings train alone, all frozen"
    )

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        if self.average_every > 0 and self.average_over == "all" and self.participation < 1:
            raise ConfigError(
                f"strategy.participation: {self.participation} is not allowed with "
                "strategy.average_over=all, which averages the weights of all users: set "
                "strategy.participation=1, strategy.average_over=holders or "
                "strategy.average_every=0",
                key="strategy.participation",
            )


@dataclass
class NFedGNNConfig(RunConfig):
    """Everything that a run of nFedGNN needs to be repeated."""

    app: str = APP
    data: UserData = section(UserData)
    model: ModelConfig = section(ModelConfig)
    strategy: StrategyConfig = section(StrategyConfig)

    @property
    def server_measures(self) -> bool:
        """Whether the server has all predictions: it does."""
        return True

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        super().validate()
        self.privacy.require_averaging(self.strategy.name, ())
        if self.strategy.average_every:
            every = self.strategy.average_every
            why = "the weights that users then send get no noise"
            self.privacy.refuse_with(f"strategy.average_every={every}", why)
