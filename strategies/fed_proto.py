"""FedProto: clients share the mean hidden vector of each class, and no weights.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022. The *prototype* of a class is the mean hidden vector of its
training nodes. Every client has a network of its own. Round ``t``:

1. server -> clients: for each class ``j`` the prototype ``C_j``, ``[h]``, of all clients;
2. client: ``E`` steps of Adam on the cross-entropy of its training nodes plus ``lambda`` times the
   mean squared distance of their hidden vectors to their classes' prototypes;
3. client -> server: for each class the sum of its hidden vectors and their number, over ``n_i``;
4. server: Flower's ``FedAvg`` of both by training nodes ``n_i``; their quotient is ``C_j`` (eq. 6);
5. server -> clients: ``C_j``. Clients measure, keep and predict with their own networks.

A class that none of the asked clients has gets no prototype. As no weight travels, clients may have
different networks (``model.name``), whose hidden layers before the last are of one length, ``h``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flower_graph.client.learner import classified, hidden
from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.config.common import NODES, WITH_HIDDEN, ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleMethod
from flower_graph.models import GCN, PyGNetwork, Wrapped, network_of
from flower_graph.ops.grouped import distance_to_means, sums_by

APP = "fedproto"


@dataclass
class FedProtoSection(TrainingSection):
    """Settings of the clients' training and of the pull towards the prototypes."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 5e-3  # by validation: docs/compared.md
    prototype_weight: float = setting(1.0, NOT_NEGATIVE, help="weight of that distance, lambda")


@dataclass
class FedProtoConfig(ModuleRunConfig):
    """Everything that a run of FedProto needs to be repeated."""

    networks, tasks, mixes = WITH_HIDDEN, (NODES,), True
    no_noise = "noise is for weights, and it sends prototypes"
    app: str = APP
    strategy: FedProtoSection = section(FedProtoSection)


class WithPrototypes(Wrapped):
    """A network and the server's prototypes, as each class's sum and its share of all nodes."""

    sums: Tensor  # [k, h]; shares [k]
    shares: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        assert isinstance(net, GCN | PyGNetwork)
        k, h = (int(net.arguments[name]) for name in ("classes", "hidden"))
        self.register_buffer("sums", torch.zeros(k, h))
        self.register_buffer("shares", torch.zeros(k))


class FedProtoClient(ModuleClient):
    """A client that trains towards the prototypes and sends its own."""

    how: FedProtoSection

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add the distance of training nodes to their classes' prototypes (step 2)."""
        net, train = network_of(module), graph.masks["train"]
        rows = hidden(net, graph)
        y, logits = graph.y[train], classified(net, rows, graph)[train]
        # [k, h], and NaN of a class that nobody has
        means = self.received["sums"] / self.received["shares"][..., None]
        goal = y + graph.owner[train] * means.shape[-2]  # with several clients [c, k, h]
        apart = distance_to_means(rows[train], goal, means.flatten(0, -2))
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        return graph.sum_of_means(losses + self.how.prototype_weight * apart, train)

    def sent(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return sums of hidden vectors and shares of nodes by class (step 3)."""
        assert isinstance(module, WithPrototypes)
        train, rows = graph.masks["train"], hidden(module.net, graph)
        sums, counts = sums_by(graph.y[train], rows[train], module.shares.numel())
        return {"sums": sums / train.sum(), "shares": counts / train.sum()}


class FedProtoMethod(ModuleMethod[FedProtoConfig]):
    """FedProto for the command line and the apps; its server is FedAvg's."""

    name, schema, client_class = APP, FedProtoConfig, FedProtoClient
    wrapper, own_entries = WithPrototypes, ("net.*",)
    tables = ("personalised", "mixed")


METHOD = FedProtoMethod()
