"""FED-PUB: each client gets an average over the clients whose models are like its own.

Baek, Jeong, Jin, Yoon and Hwang, "Personalized Subgraph Federated Learning", ICML 2023. The server
sees no graph: it compares the outputs of the clients' GNNs on one random graph. A client uses the
part of the average that its sparse mask lets through. Round ``t``:

1. server -> client ``i``: its own average ``w_i`` (the first round: one model for all);
2. client: ``E`` steps of Adam on weights and masks ``mu_i``, with ``theta`` beginning at ``w_i``:
   cross-entropy of a GNN with the matrices ``theta * mu_i``, plus ``l1 |mu_i|_1``, plus
   ``proximal |theta - w_i|^2`` (equation 7). The masks never leave the client;
3. client: the *functional embedding* ``e_i``, the mean over all nodes of what its GNN gives on the
   random graph: a stochastic block model, which is dense inside blocks and empty between them,
   with normal features (equation 5). Where a mask is smaller than ``l1``, it counts as 0 here and
   in 6;
4. client -> server: ``theta``, ``e_i``;
5. server: for each client ``i`` the average ``sum_j a_ij theta_j`` with ``a_i`` the softmax over
   ``j`` of ``norm_scale cos(e_i, e_j)`` (equation 6);
6. server -> client ``i``: that average, to be measured with its own masks.

Server and clients draw the random graph by the run's seed, so that it need not travel. The network
is the two-layer GCN of FedGLS's baselines, where the paper has two layers and a classifier; ``e_i``
are its outputs. Settings of the paper's program: masks begin at 1, ``l1`` and ``proximal`` 1e-3, 5
blocks of 100 nodes with edge probability 0.1, ``norm_scale`` 3 for disjoint and 5 for overlapping
clients, one epoch a round, 100 rounds, Adam at 0.01 with weight decay 1e-6, hidden size 128.
Without masks (``strategy.masks: false``) a row of a table is named "no masks".
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.config.common import GCN, ModelSection, ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE, SHARE, at_least, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.ops.peers import cosine_similarities, mixtures
from flower_graph.rng import generator
from flower_graph.server.averaging import ClientReply, Combined

APP = "fedpub"
EMBEDDING = "embedding"  # sent besides the weights

# Settings ----------------------------------------------------------------------------------------


@dataclass
class FedPUBSection(TrainingSection):
    """Settings of the clients' training, of masks and of the random graph."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    weight_decay: float = 1e-6
    masks: bool = setting(True, help="whether clients learn masks")
    l1: float = setting(1e-3, NOT_NEGATIVE, help="weight of the masks' size; smaller masks are 0")
    proximal: float = setting(1e-3, NOT_NEGATIVE, help="weight of the distance to what came")
    norm_scale: float = setting(3.0, NOT_NEGATIVE, help="factor of the cosines in the softmax")
    blocks: int = setting(5, at_least(1), help="blocks of the random graph")
    block_nodes: int = setting(100, at_least(2), help="nodes of each block")
    block_density: float = setting(0.1, SHARE, help="probability of an edge inside a block")


@dataclass
class FedPUBConfig(ModuleRunConfig):
    """Everything that a run of FED-PUB needs to be repeated."""

    networks = (GCN,)
    no_noise = "noise is for weights, and it sends what they give on a random graph too"
    app: str = APP
    model: ModelSection = section(ModelSection, hidden=128)
    strategy: FedPUBSection = section(FedPUBSection)


# Formulas ----------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def random_graph(
    features: int, blocks: int, size: int, density: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw the graph on which models are compared: features, edges in both directions."""
    rng = generator(seed, "fed-pub", "random-graph")
    x = torch.randn(blocks * size, features, generator=rng)
    pairs = (torch.rand(blocks, size, size, generator=rng) < density).triu(1)
    block, one, other = pairs.nonzero().t()
    ends = torch.stack([block * size + one, block * size + other])
    return x, torch.cat([ends, ends.flip(0)], 1)


def softmax_weights(embeddings: NDArray[np.generic], scale: float) -> NDArray[np.float64]:
    """Weigh all clients for each client by the likeness of models (step 5); rows sum to 1."""
    # embeddings [c, m], result [c, c]. The largest exponent is the client's own: scale times 1.
    alike = np.exp(scale * (cosine_similarities(embeddings) - 1))
    weights: NDArray[np.float64] = alike / alike.sum(1, keepdims=True)
    return weights


class Masked(nn.Module):
    """A module with a mask for each of its matrices, multiplied entry by entry."""

    def __init__(self, module: nn.Module, threshold: float) -> None:
        super().__init__()
        self.module, self.threshold = module, threshold
        matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
        self.masks = nn.ParameterDict(
            {name.replace(".", "-"): torch.ones_like(p) for name, p in matrices.items()}
        )

    def forward(
        self, x: Tensor, edge_index: Tensor, *edge_weight: Tensor, **pairs: Tensor
    ) -> Tensor:
        given = x, edge_index, *edge_weight
        out: Tensor = functional_call(self.module, self.weights(), given, pairs)
        return out

    def weights(self) -> dict[str, Tensor]:
        """Return the module's parameters with the masks multiplied in."""
        weights: dict[str, Tensor] = dict(self.module.named_parameters())
        for key, mask in self.masks.items():
            kept = mask if self.training else mask.masked_fill(mask.abs() < self.threshold, 0)
            weights[key.replace("-", ".")] = weights[key.replace("-", ".")] * kept
        return weights

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Return a plain module with the masks, as they are evaluated, multiplied in."""
        result = deepcopy(self.eval().module)
        result.load_state_dict(self.weights(), strict=False)
        return result

    def size(self) -> Tensor:
        """Return ``|mu|_1``."""
        return torch.stack([mask.abs().sum() for mask in self.masks.values()]).sum()


# Client ------------------------------------------------------------------------------------------


class FedPUBClient(ModuleClient):
    """A client that trains masks on the weights of its average."""

    how: FedPUBSection

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return cross-entropy, size of the masks and distance to the average (step 2)."""
        total = super().loss(module, graph) + self.how.proximal * self.distance(module)
        return total + self.how.l1 * module.size() if isinstance(module, Masked) else total

    def exported(self, module: nn.Module) -> nn.Module:
        return module.merged() if isinstance(module, Masked) else module

    def extras(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Give the functional embedding (step 3)."""
        how = self.how.blocks, self.how.block_nodes, self.how.block_density
        x, edges = random_graph(graph.x.shape[1], *how, self.shared.seed)
        return {EMBEDDING: module(x.to(self.device), edges.to(self.device)).mean(0)}


# Server ------------------------------------------------------------------------------------------


class FedPUB(ModuleFedAvg):
    """The server's half; arguments as of its parent."""

    personal = True
    how: FedPUBSection

    def extras(self) -> dict[str, tuple[int, ...]]:
        return {EMBEDDING: (self.classes,)}

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average for each client by how alike the models are (step 5)."""
        embeddings = np.stack([reply.extras[EMBEDDING] for reply in replies])
        weights = softmax_weights(embeddings, self.how.norm_scale)
        models = mixtures([reply.arrays for reply in replies], weights)
        return {reply.client: model for reply, model in zip(replies, models, strict=True)}


class FedPUBMethod(ModuleMethod[FedPUBConfig]):
    """FED-PUB for the command line and the apps."""

    name, schema = APP, FedPUBConfig
    strategy_class, client_class = FedPUB, FedPUBClient
    own_entries = ("masks.*",)
    tables = ("personalised", "links")

    def module(self, config: FedPUBConfig, features: int, classes: int) -> Callable[[], nn.Module]:
        make = super().module(config, features, classes)
        return (lambda: Masked(make(), config.strategy.l1)) if config.strategy.masks else make


METHOD = FedPUBMethod()
