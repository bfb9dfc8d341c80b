"""Ditto: each client trains the common model, and a model of its own that stays near it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021. Round ``t`` (algorithm 1):

1. server -> client ``i``: the common model ``w^t``;
2. client: ``E`` steps of Adam on ``F_i(w)`` from ``w^t``, ``F_i`` the cross-entropy of its
   training nodes;
3. client: ``E`` steps on ``F_i(v_i) + lambda / 2 |v_i - w^t|^2`` (equation 1) for its own model
   ``v_i``, which never leaves it;
4. client -> server: ``w``; server: their mean, as in FedAvg;
5. server -> client ``i``: the mean. Clients measure, keep and predict with ``v_i``.

The two models have no parameter in common, so that one step on the sum of 2 and 3 is a step of
each. At ``lambda = 0`` clients train alone; the paper chooses of 0.05, 0.1, 0.2, 1 and 2.
"""

from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor, nn

from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleMethod
from flower_graph.models import Wrapped

APP = "ditto"

# Settings ----------------------------------------------------------------------------------------


@dataclass
class DittoSection(TrainingSection):
    """Settings of the clients' training and of the pull towards the common model."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 0.0  # by validation: docs/compared.md
    pull: float = setting(0.1, NOT_NEGATIVE)
    """weight of the own model's distance to the common one, lambda"""


@dataclass
class DittoConfig(ModuleRunConfig):
    """Everything that a run of Ditto needs to be repeated."""

    app: str = APP
    strategy: DittoSection = section(DittoSection)


# Client ------------------------------------------------------------------------------------------


class TwoModels(Wrapped):
    """A client's own model, which predicts, and the common model; both begin alike."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.common = deepcopy(net)


class DittoClient(ModuleClient):
    """A client that trains the common model and its own."""

    how: DittoSection

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add up both models' cross-entropies and the distance between them (steps 2 and 3)."""
        assert isinstance(module, TwoModels)
        both = super().loss(module.common, graph) + super().loss(module, graph)
        return both + self.how.pull / 2 * self.distance(module.net, "common.")


class DittoMethod(ModuleMethod[DittoConfig]):
    """Ditto for the command line and the apps; its server is FedAvg's."""

    name, schema = APP, DittoConfig
    client_class, wrapper, own_entries = DittoClient, TwoModels, ("net.*",)
    common_part = "common"
    tables = ("personalised",)


METHOD = DittoMethod()
