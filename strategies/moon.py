"""MOON: each client's hidden vectors are drawn to the common model's, away from its own last ones.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021. Round ``t`` (algorithm 1):

1. server -> client ``i``: the model ``w^t``;
2. client: ``E`` steps of Adam from ``w^t`` on the cross-entropy of its training nodes plus ``mu``
   times the mean of ``-log(exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau)
   + exp(cos(z, z_prev) / tau)))`` (equation 3) over these nodes, with the hidden vectors ``z`` of
   the model that it trains, ``z_glob`` of ``w^t`` and ``z_prev`` of the model that it trained last;
3. client -> server: its weights; server: their mean, weighted by training nodes, as in FedAvg;
4. server -> client ``i``: the mean, to be measured.

At ``mu = 0`` that is FedAvg. ``z`` is a network's hidden layer, before dropout; the paper has two
more layers there. A client's first ``z_prev`` is of the run's first model. The paper sets ``tau``
to 0.5 and chooses ``mu`` of 0.1, 1, 5 and 10.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from flower_graph.client.learner import classified, hidden
from flower_graph.client.module_client import GraphOnDevice, Learner, ModuleClient
from flower_graph.config.common import NODES, VALUES, WITH_HIDDEN, ModuleRunConfig, TrainingSection
from flower_graph.config.rules import ABOVE_ZERO, NOT_NEGATIVE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleMethod
from flower_graph.models import Wrapped, frozen, network_of

APP = "moon"


@dataclass
class MoonSection(TrainingSection):
    """Settings of the clients' training and of the contrast."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 0.0
    contrast: float = setting(1.0, NOT_NEGATIVE, help="weight of the contrast, mu")
    temperature: float = setting(0.5, ABOVE_ZERO, help="temperature of the contrast, tau")


@dataclass
class MoonConfig(ModuleRunConfig):
    """Everything that a run of MOON needs to be repeated."""

    networks, tasks = WITH_HIDDEN, (NODES, VALUES)
    app: str = APP
    strategy: MoonSection = section(MoonSection)


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """Return equation 3 of each node: small if ``z`` is nearer to ``z_glob`` than to ``z_prev``."""
    # all [n, h], result [n]; -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
    near, far = (functional.cosine_similarity(z, other) for other in (z_glob, z_prev))
    return functional.softplus((far - near) / temperature)


class WithLast(Wrapped):
    """A network, and beside it the client's own after its last round."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.last = frozen(net)


class MoonClient(ModuleClient):
    """A client that contrasts its model with two others."""

    how: MoonSection
    fixed: list[Tensor]  # z_glob and z_prev [n, h] of the round

    def begin(self, learner: Learner, server_round: int) -> None:
        nets = map(learner.module.get_submodule, ("net", "last"))
        self.fixed = [hidden(net, learner.graph).detach() for net in nets]

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add the contrast of the training nodes (step 2)."""
        net, train = network_of(module), graph.masks["train"]
        z, (z_glob, z_prev) = hidden(net, graph), self.fixed
        apart = contrast(z[train], z_glob[train], z_prev[train], self.how.temperature)
        loss = self.task.loss(lambda _: classified(net, z, graph), graph)
        return loss + self.how.contrast * graph.sum_of_means(apart, train)

    def finish(self, learner: Learner) -> None:
        last, net = learner.module.get_submodule("last"), network_of(learner.module)
        last.load_state_dict(net.state_dict())


class MoonMethod(ModuleMethod[MoonConfig]):
    """MOON for the command line and the apps; its server is FedAvg's."""

    name, schema, client_class = APP, MoonConfig, MoonClient
    wrapper, own_entries = WithLast, ("last.*",)
    tables = ("personalised",)


METHOD = MoonMethod()
