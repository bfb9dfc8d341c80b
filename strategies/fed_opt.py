"""FedOpt: the server takes the mean change of the clients' models as the gradient of its optimiser.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated
Optimization", ICLR 2021 (algorithm 2: FedAdagrad, FedYogi, FedAdam). Round ``t``:

1. server -> client ``i``: the model ``x_t``;
2. client: ``E`` steps of Adam on the cross-entropy of its training nodes, from ``x_t``;
3. client -> server: its weights; the server's ``D_t`` is their mean, weighted by training nodes,
   less ``x_t``;
4. server, elementwise: ``m_t = beta_1 m_(t-1) + (1 - beta_1) D_t``, and ``v_t`` is
   ``v_(t-1) + D_t^2`` (adagrad), ``v_(t-1) - (1 - beta_2) D_t^2 sign(v_(t-1) - D_t^2)`` (yogi) or
   ``beta_2 v_(t-1) + (1 - beta_2) D_t^2`` (adam);
5. server: ``x_(t+1) = x_t + eta m_t / (sqrt(v_t) + tau)``, which it sends to be measured.

Steps 4 and 5 are those of Flower's own ``FedAdagrad``, ``FedYogi`` and ``FedAdam``. These begin
with ``v = 0``, the paper with ``tau^2`` or more; ``FedAdam`` also corrects ``eta`` for the first
rounds; ``FedAdagrad`` has ``beta_1 = 0``. The paper's clients step by SGD. It chooses ``eta`` for
each task, and finds ``tau = 1e-3`` good nearly everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi

from flower_graph.client.learner import SharedModule
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.rules import ABOVE_ZERO, BELOW_ONE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.server.averaging import ClientReply, Combined

APP = "fedopt"
ADAM, YOGI, ADAGRAD = OPTIMISERS = ("adam", "yogi", "adagrad")


@dataclass
class FedOptSection(TrainingSection):
    """Settings of the clients' training and of the server's steps."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 0.0
    server_optimiser: str = setting(ADAM, choice(*OPTIMISERS), help="how the server steps")
    server_learning_rate: float = setting(0.01, ABOVE_ZERO, help="the server's step size, eta")
    beta_1: float = setting(0.9, BELOW_ONE, help="decay of the mean change; not of adagrad")
    beta_2: float = setting(0.99, BELOW_ONE, help="decay of its square; not of adagrad")
    tau: float = setting(1e-3, ABOVE_ZERO, help="the larger, the less the steps adapt")


@dataclass
class FedOptConfig(ModuleRunConfig):
    """Everything that a run of FedOpt needs to be repeated."""

    app: str = APP
    strategy: FedOptSection = section(FedOptSection)

    def validate(self) -> None:
        super().validate()
        why = "the noise is for a mean, and the server's steps make more of it"
        self.refuse_noise(self.privacy.is_central, "privacy.form", why)


class Adaptive(ModuleFedAvg):
    """The server's half beside one of Flower's classes; arguments as of its parent."""

    weighted_sum = True

    # Any: arguments of the parent
    def __init__(self, shared: SharedModule, how: FedOptSection, **more: Any) -> None:
        if how.server_optimiser != ADAGRAD:
            more |= {"beta_1": how.beta_1, "beta_2": how.beta_2}
        super().__init__(shared, how, eta=how.server_learning_rate, tau=how.tau, **more)

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Take Flower's step, in the types of the model, whose messages else grow twofold."""
        return self.average(replies)


SERVERS: dict[str, type[ModuleFedAvg]] = {
    name: type(f"Adaptive{kind.__name__}", (Adaptive, kind), {})
    for name, kind in zip(OPTIMISERS, (FedAdam, FedYogi, FedAdagrad), strict=True)
}


class FedOptMethod(ModuleMethod[FedOptConfig]):
    """FedOpt for the command line and the apps."""

    name, schema = APP, FedOptConfig
    tables = ("personalised",)

    def server(self, config: FedOptConfig) -> type[ModuleFedAvg]:
        return SERVERS[config.strategy.server_optimiser]


METHOD = FedOptMethod()
