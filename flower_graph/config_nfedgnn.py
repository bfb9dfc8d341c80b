"""Settings of nFedGNN: one node per client."""

from __future__ import annotations

from dataclasses import dataclass, field

from flower_graph.config_base import CommonConfig
from flower_graph.config_checks import above_zero, at_least, choice, is_dropout, is_share
from flower_graph.errors import ConfigError

APP = "nfedgnn"
STRATEGIES = ("split-gradient-relay",)
MODELS = ("gcn", "gat", "sage")
AVERAGE_OVER = ("holders", "all")


@dataclass
class ModelConfig:
    """The split model: the users' first transform and the server's rest."""

    name: str = "gcn"  # gcn | gat | sage
    hidden: int = 16  # numbers in a latent; for gat: of each head
    heads: int = 8  # attention heads; gat only
    dropout: float = 0.5  # share of entries dropped in training, 0 <= dropout < 1
    user_bias: bool = False  # whether a user's transform has a bias


@dataclass
class StrategyConfig:
    """How the server trains, and how it talks to the users."""

    name: str = "split-gradient-relay"  # split-gradient-relay
    reg_weight: float = 100.0  # weight lambda of the smoothness of neighbouring latents, >= 0
    learning_rate: float = 0.1  # Adam's step size, on both sides
    weight_decay: float = 5e-4  # Adam's L2 weight, on both sides
    participation: float = 1.0  # share of the users asked each round, 0 < participation <= 1
    average_every: int = 0  # average the users' weights every so many rounds; 0: never
    average_over: str = "holders"  # holders | all: who counts in a feature row's mean
    timeout: float = 600.0  # seconds that an exchange may take
    min_nodes: int = 1  # SuperNodes to wait for before the first round

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("strategy.name", self.name, STRATEGIES)
        at_least("strategy.reg_weight", self.reg_weight, 0)
        at_least("strategy.weight_decay", self.weight_decay, 0)
        above_zero("strategy.learning_rate", self.learning_rate)
        above_zero("strategy.timeout", self.timeout)
        at_least("strategy.min_nodes", self.min_nodes, 1)
        is_share("strategy.participation", self.participation)
        at_least("strategy.average_every", self.average_every, 0)
        choice("strategy.average_over", self.average_over, AVERAGE_OVER)
        if self.average_every > 0 and self.average_over == "all" and self.participation < 1:
            raise ConfigError(
                f"strategy.participation: {self.participation} is not allowed with "
                "strategy.average_over=all, which averages the weights of all users: set "
                "strategy.participation=1, strategy.average_over=holders or "
                "strategy.average_every=0"
            )


@dataclass
class NFedGNNConfig(CommonConfig):
    """Everything that a run of nFedGNN needs to be repeated."""

    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def validate(self) -> None:
        """Refuse values that no run can have; ``ConfigError`` names key and value."""
        choice("app", self.app, (APP,))
        super().validate()
        choice("model.name", self.model.name, MODELS)
        at_least("model.hidden", self.model.hidden, 1)
        at_least("model.heads", self.model.heads, 1)
        is_dropout("model.dropout", self.model.dropout)
        self.strategy.validate()
        self.privacy.require_averaging(self.strategy.name, ())
        if self.strategy.average_every:
            every = self.strategy.average_every
            why = "the weights that users then send get no noise"
            self.privacy.refuse_with(f"strategy.average_every={every}", why)
