"""SCAFFOLD: control variates take the drift of a client's own data out of its steps.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
algorithm 1, option II. The server has a model ``x`` and a variate ``c``, client ``i`` has a variate
``c_i``; both variates begin at 0. Round ``t``:

1. server -> clients in ``S``, drawn of ``N``: ``x``, ``c``;
2. client: ``K`` steps of SGD from ``y = x``, ``y <- y - eta (g_i(y) - c_i + c)``, ``g_i`` its own;
3. client: ``c_i' = c_i - c + (x - y) / (K eta)``, which it keeps;
4. client -> server: ``y``, ``c_i' - c_i``;
5. server: ``x`` is the mean of ``y`` over ``S``, and ``c <- c + |S| / N mean(c_i' - c_i)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flower_graph.client.module_client import GraphOnDevice, Learner, ModuleClient
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.schema import section
from flower_graph.data.graph import ClientGraph
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.models import Wrapped, frozen
from flower_graph.server.averaging import ClientReply, Combined

APP = "scaffold"


@dataclass
class ScaffoldConfig(ModuleRunConfig):
    """Everything that a run of SCAFFOLD needs to be repeated."""

    no_noise = "noise is for weights, and it sends variates too"
    app: str = APP
    strategy: TrainingSection = section(
        TrainingSection, name=APP, local_epochs=3, learning_rate=0.5, weight_decay=0.0
    )


class WithVariates(Wrapped):
    """A network, the server's variate ``c`` and the client's ``c_i``, each in its form."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.common, self.own = frozen(net), frozen(net)
        for variate in (*self.common.parameters(), *self.own.parameters()):
            variate.zero_()


class ScaffoldClient(ModuleClient):
    """A client that corrects its steps; all clients count alike."""

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add ``<c - c_i, y>``, whose gradient is the correction (step 2)."""
        parts = (module.get_submodule(one).parameters() for one in ("net", "common", "own"))
        corrections = [((c - own) * y).sum() for y, c, own in zip(*parts, strict=True)]
        return super().loss(module, graph) + torch.stack(corrections).sum()

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        rate, decay = self.how.learning_rate, self.how.weight_decay
        return torch.optim.SGD(module.parameters(), rate, weight_decay=decay)

    def finish(self, learner: Learner) -> None:
        """Renew the own variate; what is sent as ``common`` is its change (steps 3 and 4)."""
        module, steps = learner.module, self.how.local_epochs * self.how.learning_rate
        assert isinstance(module, WithVariates)
        parts = module.net.named_parameters(), module.common.parameters(), module.own.parameters()
        for (name, y), c, own in zip(*parts, strict=True):
            c.copy_((self.received[f"net.{name}"] - y) / steps - c)
            own.add_(c)

    def examples(self, graph: ClientGraph) -> int:
        return min(1, super().examples(graph))


class Scaffold(ModuleFedAvg):
    """The server's half; arguments as of its parent."""

    weighted_sum = True

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average the models, and add the changes to the variate (step 5)."""
        share = sum(reply.num_examples for reply in replies) / len(self.session.members.bound)
        mean = self.average(replies)
        changed = {name: one for name, one in mean.items() if name.startswith("common.")}
        return mean | {name: self.arrays[name].numpy() + share * v for name, v in changed.items()}


class ScaffoldMethod(ModuleMethod[ScaffoldConfig]):
    """SCAFFOLD for the command line and the apps."""

    name, schema = APP, ScaffoldConfig
    strategy_class, client_class = Scaffold, ScaffoldClient
    wrapper, own_entries = WithVariates, ("own.*",)
    tables = ("personalised",)


METHOD = ScaffoldMethod()
