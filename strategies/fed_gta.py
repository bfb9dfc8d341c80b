"""FedGTA: each client gets an average over the clients whose neighbourhoods look like its own.

Li, Wu, Zhang, Zhu, Li and Wang, "FedGTA: Topology-aware Averaging for Federated Graph Learning",
PVLDB 17(1), 2023. Every client has a graph and a GNN. It spreads its predictions over the graph and
sends *moments* of the result: they describe its neighbourhoods without showing one. Round ``t``:

1. server -> client ``i``: its own model (the first round: one for all);
2. client: ``E`` steps of Adam on the cross-entropy of its training nodes;
3. client: *label propagation* of its soft predictions, ``Y_0`` with the labels of training nodes,
   ``Y_l = a Y_0 + (1 - a) D^(-1/2) A D^(-1/2) Y_(l-1)`` for ``l = 1..L`` with self-loops, ``P``
   the softmax of ``Y_L``;
4. client: *mixed moments* ``m_i``, for each class the means of ``P^1..P^K`` and of the powers of
   its deviations from the mean, and the *local smoothing confidence*
   ``h_i = sum_v d_v sum_c (1/e + q_vc log q_vc)`` with ``q`` the softmax of ``Y_L / T``;
5. client -> server: weights, ``m_i``, ``h_i``;
6. server: ``S_i = {j : cos(m_i, m_j) > threshold}`` and the model of ``i`` anew,
   ``sum_{j in S_i} h_j w_j / sum_{j in S_i} h_j``;
7. server -> client ``i``: that model, to be measured.

In 3 and 4 training nodes keep their labels at the end too, as the paper's program has it. Where it
leaves a choice, this one: moments of the last step ``L`` alone, degrees ``d`` with the self-loop (a
client without any edge still has a weight), and the two-layer GCN of FedGLS's baselines, where the
paper's tables have GAMLP and others. Settings of the paper's program: ``L = 5``, ``a = 0.5``,
``T = 20``, 3 epochs a round, 100 rounds, Adam at 0.01 with weight decay 5e-4; order of moments and
threshold are chosen for each data set (citeseer 20 and 0.60, pubmed 13 and 0.65).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.config.common import LINKS, NODES, ModuleRunConfig, TrainingSection
from flower_graph.config.rules import ABOVE_ZERO, FRACTION, Rule, at_least, choice
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.ops.graph import Adjacency, gcn_adjacency, propagate
from flower_graph.ops.peers import cosine_similarities, mixtures
from flower_graph.server.averaging import ClientReply, Combined

APP = "fedgta"
MIXED, CONFIDENCE = "moments", "confidence"  # sent besides the weights
LEAST_CONFIDENCE = 1e-6
MOMENTS = ("raw", "central", "hybrid")

# Settings ----------------------------------------------------------------------------------------


@dataclass
class FedGTASection(TrainingSection):
    """Settings of the clients' training, of the moments and of the choice of peers."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    steps: int = setting(5, at_least(0), help="steps of label propagation, L")
    restart: float = setting(0.5, FRACTION, help="share of the start in each step, a")
    temperature: float = setting(
        20.0, ABOVE_ZERO, help="temperature of the shares behind the confidence, T"
    )
    moments: str = setting(
        "hybrid", choice(*MOMENTS), help="moments of values, of deviations, or both"
    )
    order: int = setting(10, at_least(1), help="the highest power, K")
    threshold: float = setting(
        0.5, Rule("at least -1 and at most 1", lambda value: -1 <= value <= 1)
    )
    """the cosine of moments above which clients are averaged"""


@dataclass
class FedGTAConfig(ModuleRunConfig):
    """Everything that a run of FedGTA needs to be repeated."""

    tasks = (NODES, LINKS)  # it compares shares of classes
    no_noise = "noise is for weights, and it sends moments and a confidence too"
    app: str = APP
    strategy: FedGTASection = section(FedGTASection)


# Formulas ----------------------------------------------------------------------------------------


def propagate_labels(graph: Adjacency, start: Tensor, steps: int, restart: float) -> Tensor:
    """Spread rows over a graph: ``Y <- restart Y_0 + (1 - restart) A Y``, ``steps`` times."""
    # start [n, k]
    rows = start
    for _ in range(steps):
        rows = restart * start + (1 - restart) * propagate(graph, rows)
    return rows


def moments(rows: Tensor, order: int, kind: str = "hybrid") -> Tensor:
    """Give the columns' means of powers 1 to ``order``: of values, of deviations, or both."""
    # rows [n, k]; the result is flat: order times k numbers, twice as many of `hybrid`
    of = {"raw": [rows], "central": [rows - rows.mean(0)]}
    chosen = of["raw"] + of["central"] if kind == "hybrid" else of[kind]
    return torch.cat([(x**power).mean(0) for x in chosen for power in range(1, order + 1)])


def smoothing_confidence(shares: Tensor, degree: Tensor) -> float:
    """Add up ``degree (1/e + p log p)`` over nodes and classes: 0 if every ``p`` is ``1/e``."""
    # shares [n, k] sum to 1 over classes, degree [n]. -p log p is largest, 1/e, at p = 1/e: the
    # surer the nodes, and those with many neighbours most, the more.
    certainty = (1 / math.e + torch.special.xlogy(shares, shares)).sum(1)
    return float((degree * certainty).double().sum())


def spread_predictions(
    logits: Tensor,
    y: Tensor,
    train_mask: Tensor,
    edge_index: Tensor,
    how: FedGTASection,
    edge_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Spread predictions and known labels; return shares at temperature 1 and at ``T``."""
    # logits [n, k]; both results [n, k], rows sum to 1 (step 3)
    one_hot = functional.one_hot(y[train_mask], logits.shape[1]).to(logits.dtype)
    start = logits.softmax(1)
    start[train_mask] = one_hot
    graph = gcn_adjacency(edge_index, y.numel(), edge_weight)
    spread = propagate_labels(graph, start, how.steps, how.restart)
    shares, smooth = spread.softmax(1), (spread / how.temperature).softmax(1)
    shares[train_mask], smooth[train_mask] = one_hot, one_hot
    return shares, smooth


def peer_weights(
    vectors: NDArray[np.generic], confidences: NDArray[np.generic], threshold: float
) -> NDArray[np.float64]:
    """Weigh each client's peers by their confidence (step 6); a client is its own peer."""
    # vectors [c, m], confidences [c], result [c, c]
    alike = cosine_similarities(vectors) > threshold
    np.fill_diagonal(alike, True)
    # What clients say may be anything: a sum of weights must not be 0, nor a weight below it.
    sure = np.maximum(np.asarray(confidences, np.float64), LEAST_CONFIDENCE)
    return np.where(alike, sure, 0.0)


# Client ------------------------------------------------------------------------------------------


class FedGTAClient(ModuleClient):
    """A client that describes its neighbourhoods."""

    how: FedGTASection

    def extras(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Give moments and confidence (steps 3 and 4)."""
        logits, labelled = self.logits(module, graph), graph.masks["train"]
        edges, weight = graph.edge_index, graph.edge_weight
        spread = spread_predictions(logits, graph.y, labelled, edges, self.how, weight)
        shares, smooth = spread
        degree = 1 + torch.bincount(edges[1], weight, graph.y.numel())
        mixed = moments(shares, self.how.order, self.how.moments)
        return {MIXED: mixed, CONFIDENCE: torch.tensor(smoothing_confidence(smooth, degree))}


# Server ------------------------------------------------------------------------------------------


class FedGTA(ModuleFedAvg):
    """The server's half; arguments as of its parent."""

    personal = True
    how: FedGTASection

    def extras(self) -> dict[str, tuple[int, ...]]:
        """Declare moments, ``[K k]`` or twice as many, and confidence."""
        kinds = 2 if self.how.moments == "hybrid" else 1
        return {MIXED: (kinds * self.how.order * self.classes,), CONFIDENCE: ()}

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average, for each client, over clients with similar moments (step 6)."""
        weights = peer_weights(
            np.stack([reply.extras[MIXED] for reply in replies]),
            np.array([reply.extras[CONFIDENCE] for reply in replies]),
            self.how.threshold,
        )
        models = mixtures([reply.arrays for reply in replies], weights)
        return {reply.client: model for reply, model in zip(replies, models, strict=True)}


class FedGTAMethod(ModuleMethod[FedGTAConfig]):
    """FedGTA for the command line and the apps."""

    name, schema = APP, FedGTAConfig
    strategy_class, client_class = FedGTA, FedGTAClient
    tables = ("personalised", "links")


METHOD = FedGTAMethod()
