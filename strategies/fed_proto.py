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

from flower_graph.client.learner import weighed
from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.config.common import NODES, ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleMethod
from flower_graph.models import GCN, PyGNetwork
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

    networks = ("gcn", "gat", "sage", "gin", "mlp")  # an SGC has no hidden layer
    mixes = True
    app: str = APP
    strategy: FedProtoSection = section(FedProtoSection)

    def validate(self) -> None:
        super().validate()
        self.need(self.task == NODES, "task", f"{NODES} with app={APP}: it shares classes")
        self.refuse_noise(True, "app", "noise is for weights, and it sends prototypes")


class WithPrototypes(nn.Module):
    """A network and the server's prototypes, as each class's sum and its share of all nodes."""

    sums: Tensor  # [k, h]; shares [k]
    shares: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        assert isinstance(net, GCN | PyGNetwork)
        self.net, (k, h) = net, (int(net.arguments[name]) for name in ("classes", "hidden"))
        self.register_buffer("sums", torch.zeros(k, h))
        self.register_buffer("shares", torch.zeros(k))


class FedProtoClient(ModuleClient):
    """A client that trains towards the prototypes and sends its own."""

    how: FedProtoSection

    def logits(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return super().logits(module.get_submodule("net"), graph)

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Add the distance of training nodes to their classes' prototypes (step 2)."""
        assert isinstance(module, WithPrototypes)
        train, (x, *edges) = graph.masks["train"], weighed(module.net, graph)
        hidden = module.net.embed(x, *edges)
        y, logits = graph.y[train], module.net.classify(hidden, *edges)[train]
        # [k, h], and NaN of a class that nobody has
        means = self.received["sums"] / self.received["shares"][..., None]
        goal = y + graph.owner[train] * means.shape[-2]  # with several clients [c, k, h]
        apart = distance_to_means(hidden[train], goal, means.flatten(0, -2))
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        return graph.sum_of_means(losses + self.how.prototype_weight * apart, train)

    def sent(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return sums of hidden vectors and shares of nodes by class (step 3)."""
        assert isinstance(module, WithPrototypes)
        train, hidden = graph.masks["train"], module.net.embed(*weighed(module.net, graph))
        sums, counts = sums_by(graph.y[train], hidden[train], module.shares.numel())
        return {"sums": sums / train.sum(), "shares": counts / train.sum()}

    def exported(self, module: nn.Module) -> nn.Module:
        return module.get_submodule("net")


class FedProtoMethod(ModuleMethod[FedProtoConfig]):
    """FedProto for the command line and the apps; its server is FedAvg's."""

    name, schema, client_class = APP, FedProtoConfig, FedProtoClient
    wrapper, own_entries = WithPrototypes, ("net.*",)
    tables = ("personalised", "mixed")


METHOD = FedProtoMethod()
