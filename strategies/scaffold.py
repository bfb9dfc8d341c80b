"""SCAFFOLD: control variates take the drift of a client's own data out of its steps.

Karimireddy et al., ICML 2020, algorithm 1, option II. The server has a model ``x`` and a variate
``c``, client ``i`` has a variate ``c_i``; both variates begin at 0. Round ``t``:

1. server -> clients in ``S``, drawn of ``N``: ``x``, ``c``;
2. client: ``K`` steps of SGD from ``y = x``, ``y <- y - eta (g_i(y) - c_i + c)``, ``g_i`` its own;
3. client: ``c_i' = c_i - c + (x - y) / (K eta)``, which it keeps;
4. client -> server: ``y``, ``c_i' - c_i``;
5. server: ``x`` is the mean of ``y`` over ``S``, and ``c <- c + |S| / N mean(c_i' - c_i)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_graph.client.module_client import ModuleClient
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.schema import section
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import GraphOnDevice, Learner
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.server.averaging import ClientReply, Combined

APP = "flower_graph.strategies.scaffold"


@dataclass
class ScaffoldConfig(ModuleRunConfig):
    """Everything that a run of SCAFFOLD needs to be repeated."""

    app: str = APP
    strategy: TrainingSection = section(
        TrainingSection, local_epochs=3, learning_rate=0.5, weight_decay=0.0, optimiser="reset"
    )


class WithVariates(nn.Module):
    """A network, the server's variate ``c`` and the client's ``c_i``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        zeros = [(n.replace(".", "-"), torch.zeros_like(p)) for n, p in net.named_parameters()]
        pair = ([(n, nn.Parameter(zero.clone(), False)) for n, zero in zeros] for _ in range(2))
        self.net, (self.common, self.own) = net, map(nn.ParameterDict, pair)

    def forward(self, x: Tensor, edge_index: Tensor, *edge_weight: Tensor) -> Tensor:
        return self.net(x, edge_index, *edge_weight)  # type: ignore[no-any-return]

    def each(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Yield name, value, and part of ``c`` and of ``c_i`` of each parameter."""
        for name, value in self.net.named_parameters():
            key = name.replace(".", "-")
            yield name, value, self.common[key], self.own[key]


class ScaffoldClient(ModuleClient):
    """A client that corrects its steps."""

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add ``<c - c_i, y>``, whose gradient is the correction (step 2)."""
        assert isinstance(module, WithVariates)
        corrections = [((c - own) * value).sum() for _, value, c, own in module.each()]
        return super().loss(module, graph) + torch.stack(corrections).sum()

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        rate, decay = self.how.learning_rate, self.how.weight_decay
        return torch.optim.SGD(module.parameters(), rate, weight_decay=decay)

    def finish(self, learner: Learner) -> None:
        """Renew the own variate; what is sent as ``common`` is its change (steps 3 and 4)."""
        assert isinstance(learner.module, WithVariates)
        steps = self.how.local_epochs * self.how.learning_rate
        for name, value, c, own in learner.module.each():
            change = (self.received[f"net.{name}"] - value) / steps - c
            own += change
            c.copy_(change)

    def examples(self, graph: ClientGraph) -> int:
        return min(1, super().examples(graph))  # all count alike

    def exported(self, module: nn.Module) -> nn.Module:
        return module.get_submodule("net")


class Scaffold(ModuleFedAvg):
    """The server's half; arguments as of its parent."""

    weighted_sum = True

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average the models, and add the changes to the variate (step 5)."""
        enrolled = sum(map(len, self.session.members.clients.values()))
        share = sum(reply.num_examples for reply in replies) / enrolled
        mean = super().combine(replies)
        assert isinstance(mean, ArrayRecord)
        means = {name: array.numpy() for name, array in mean.items()}
        changed = {n: v for n, v in means.items() if n.startswith("common.")}
        return means | {n: self.arrays[n].numpy() + share * v for n, v in changed.items()}


class ScaffoldMethod(ModuleMethod[ScaffoldConfig]):
    """SCAFFOLD for the command line and the apps."""

    name, schema = APP, ScaffoldConfig
    strategy_class, client_class = Scaffold, ScaffoldClient
    wrapper, own_entries = WithVariates, ("own.*",)


METHOD = ScaffoldMethod()
