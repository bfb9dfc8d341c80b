"""FedProx: FedAvg in which each client stays near the model that the server sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020. Round ``t``:

1. server -> client ``i``: the model ``w^t``;
2. client: ``E`` steps of Adam on ``F_i(w) + mu / 2 |w - w^t|^2`` (equation 2), ``F_i`` the
   cross-entropy of its training nodes;
3. client -> server: its weights; server: their mean, weighted by training nodes, by Flower's own
   ``FedProx``, whose messages say ``mu`` to the clients;
4. server -> client ``i``: the mean, to be measured.

At ``mu = 0`` that is FedAvg. The paper chooses ``mu`` of 0.001, 0.01, 0.1 and 1 for each data
set. It draws clients by size and weighs them alike; here a client's weight is its size.
"""

from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import FedProx

from flower_graph.client.learner import SharedModule
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod

APP = "fedprox"


@dataclass
class FedProxSection(TrainingSection):
    """Settings of the clients' training and of the proximal term."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 0.0  # by validation: docs/compared.md
    proximal: float = setting(0.01, NOT_NEGATIVE, help="weight of the distance to what came, mu")


@dataclass
class FedProxConfig(ModuleRunConfig):
    """Everything that a run of FedProx needs to be repeated."""

    app: str = APP
    strategy: FedProxSection = section(FedProxSection)


class ProximalAveraging(ModuleFedAvg, FedProx):
    """The server's half; arguments as of its parent."""

    # Any: arguments of the parent
    def __init__(self, shared: SharedModule, how: FedProxSection, **more: Any) -> None:
        super().__init__(shared, how, proximal_mu=how.proximal, **more)


class FedProxMethod(ModuleMethod[FedProxConfig]):
    """FedProx for the command line and the apps."""

    name, schema = APP, FedProxConfig
    strategy_class = ProximalAveraging
    tables = ("personalised",)


METHOD = FedProxMethod()
