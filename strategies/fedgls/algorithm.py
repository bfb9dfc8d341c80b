"""FedGLS: federated graph learning with graphless clients.

Fu et al., "Federated Graph Learning with Graphless Clients", TMLR 2024. Every client has node
features; some, the *graphless* ones, have no edges. All train a GNN ``H = GNN(X, A; theta)`` and a
feature encoder ``Z = MLP(X; omega)`` that learns the GNN's output without edges. A graphless client
also has a graph learner ``A^ = P(Gen(X; phi))`` and uses ``A^`` for ``A``. Theta and omega together
carry knowledge of structure from client to client.

Round ``t``:

1. server -> clients: ``theta``, ``omega``;
2. graphless client: one step of phi (appendix C: once a round) on ``L_c``, NT-Xent between ``h_i``
   and ``z_i`` of each node (equations 8 and 9); phi never leaves the client. Then ``A^`` is made
   anew and stays for the round (``ClientModels.learn``);
3. client, ``E`` times: theta steps on the cross-entropy of its labelled nodes (equation 10), omega
   on ``KL(softmax(H) || softmax(Z))`` with ``H`` fixed (equation 11; ``ClientModels.loss``);
4. SuperNode -> server: its clients' mean of theta and omega, weighted by nodes, and their number of
   nodes; a client without training nodes does not train and has weight 0;
5. server: the mean weighted by nodes (equation 12), which is Flower's ``FedAvg``;
6. server -> clients: the new means, to be measured (``ClientModels.logits``).

*Baselines*, by ``strategy.name``: Fed-GNN_k (``fed-gnn-knn``; ``graph.knn_on`` chooses features or
the hidden layer of the server's last model), Local-GNN_k (``local-gnn-knn``), Fed-GNN
(``fed-gnn``), Fed-MLP (``fed-mlp``) and Fed-GNNMLP (``fed-gnn-mlp``) are the same program with
other graphs: ``GRAPHS`` in ``config.py``. FedProto is ``strategies/fed_proto.py`` on these
clients.

*Unlike the paper*, which calls ``H`` and ``Z`` embeddings, ``H`` and ``Z`` are logits here. The
paper's ``k`` most similar nodes (equation 16) include the node itself; here ``similar_graph``
chooses ``k`` others. ``LearnedGraph.of`` makes ``A^`` of them: ReLU and the mean with the transpose
(equation 17), a self-loop of weight 1 for each node, then normalisation (equation 18).

*Where to change* the loss: ``ClientModels.loss`` and ``ClientModels.contrast``; the model:
``two_layers``, ``ClientModels.network``, and the shapes in ``StructureModel`` (``modules.py``);
what travels: ``shared_by`` (``strategy.py``); the mean: ``StructureFedAvg.combine``
(``strategy.py``). ``ModuleClient._train`` (``flower_graph/client/module_client.py``) loops over
local epochs.

*Names and shapes.* A two-layer MLP is a two-layer GCN on a graph without edges. So theta
(``gnn-…``), omega (``encoder-…``) and the baselines' models are networks of one form. The clients
of a SuperNode are a *group*, and train as one program: ``c`` clients with ``n`` nodes together,
``f`` features, ``h`` hidden units, ``k`` classes. Their graphs are one block-diagonal graph, and
each parameter is a stack with a part for each client. First layers are stored by active rows ``r``:
the rows of the features that a client has. ``ptr`` has the bounds of the clients' nodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.engine.cohort import GraphOnDevice
from flower_graph.ops.adam import Adam
from flower_graph.ops.contrast import nt_xent
from flower_graph.ops.dropout import DropoutMask, with_dropout
from flower_graph.ops.graph import Adjacency, entries, gcn_adjacency, propagate, with_part
from flower_graph.ops.graph_learner import LearnedGraph, attentive_encode, mlp_encode
from flower_graph.ops.grouped import group_sizes, grouped_add, grouped_linear
from flower_graph.ops.similarity import (
    Rows,
    SparseRows,
    comparable,
    kept_similarity,
    nearest,
    split_rows,
)
from flower_graph.strategies.fedgls.config import ENCODER, KNN, LEARNED, OWN, GraphSection

GNN, MLP, LEARNER = "gnn", "encoder", "learner"  # theta, omega and phi in the names of arrays
SHARE = "share"  # of the clients that have one of Fed-GNNMLP's two models
NO_DROPS = DropoutMask(None, None)

# Formulas ----------------------------------------------------------------------------------------


class Network(NamedTuple):
    """Two layers of each client, of a GCN or of an MLP."""

    first: Tensor  # [r, h]
    bias: Tensor  # [c, h]
    second: Tensor  # [c, h, k]
    last: Tensor  # [c, k]


def two_layers(
    network: Network,
    x: Adjacency,
    graph: Adjacency | LearnedGraph | None,
    ptr: list[int],
    dropped: Tensor | None = None,
) -> Tensor:
    """Return ``A' ReLU(A' X W_1 + b_1) W_2 + b_2``, ``[n, k]``; without a graph there is no A'."""

    # x [n, r], dropped [n, h] the factors of dropout
    def around(rows: Tensor) -> Tensor:
        if graph is None:
            return rows
        return propagate(graph, rows) if isinstance(graph, Adjacency) else graph.propagate(rows)

    hidden = F.relu_(grouped_add(around(propagate(x, network.first)), network.bias, ptr))
    hidden = hidden if dropped is None else hidden * dropped
    # Multiplying by W_2 after summing neighbours gives the same result, and b_2 is added with it
    return grouped_linear(around(hidden), network.second, network.last, ptr)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits ``[n, k]``, transposed: ``[k, n]``."""
    # A log-softmax over a few neighbouring numbers takes PyTorch ten times as long
    return logits.T.contiguous().log_softmax(0)


def cross_entropy(own: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Add up the nodes' weighted cross-entropies: theta's loss (equation 10)."""
    # own [k, n] of H, y [n], weights [n]: 1 / the client's number of training nodes; 0 for other
    # nodes
    losses = own.gather(0, y.clamp(min=0)[None])[0]
    return -(losses * weights).sum()


def distillation(own: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """Add up the nodes' weighted divergences of Z from H: omega's loss (equation 11)."""
    # own [k, n] of H, student [k, n] of Z, weights [n]: 1 / the client's number of nodes. The
    # divergence's other term depends on H alone.
    return -(own.detach().exp() * weights * student).sum()


def similar_graph(e: Rows, ptr: list[int], k: int, similarity: str) -> LearnedGraph:
    """Join each node to the ``k`` most similar others of its client (equations 13 and 16)."""
    # e [n, d]; ``LearnedGraph.of`` does equations 17 and 18
    if similarity == "cosine":  # the inner product of unit vectors, made for all at once
        e, similarity = comparable(e, similarity), "inner"
    neighbours, similarities = [], []
    for start, own in zip(ptr, split_rows(e, ptr), strict=False):
        found = nearest(own, k, similarity)
        neighbours.append(found.neighbours + start)
        similarities.append(kept_similarity(own, found.neighbours, similarity, found.products))
    return LearnedGraph.of(torch.cat(neighbours), torch.cat(similarities))


# Client ------------------------------------------------------------------------------------------


def networks_of(kind: str) -> tuple[str, ...]:
    """Return the networks that a client trains: theta, and with FedGLS omega."""
    return (GNN, MLP) if kind == LEARNED else (GNN,)


class Graphless(NamedTuple):
    """The clients of a group that make a graph of their features."""

    data: GraphOnDevice  # of these clients alone
    places: list[int]  # among the group's clients
    rows: Tensor  # their active rows among the group's
    nodes: Tensor  # their nodes among the group's


class ClientModels(nn.ParameterDict):
    """The client's half: theta, omega and phi of a group's clients, and the graphs they use."""

    kind: str  # which graph a graphless client uses: see ``GRAPHS`` in ``config.py``
    how: GraphSection
    widths: list[int]  # numbers of a first bias, a second layer and its bias in ``<name>-rest``
    data: GraphOnDevice  # of the group
    given: Adjacency  # its clients' own edges, normalised
    graphless: Graphless | None = None  # the clients whose graphs are made
    has_edges: Tensor  # [c]
    # [n] a node's weight in its client's mean over all nodes, or over the training nodes
    shares: Tensor
    train_shares: Tensor
    turn: Tensor  # [z] the order of the features' entries in their transpose

    # What a step computes

    def learn(self, adam: Adam) -> dict[int, Tensor]:
        """Step phi on ``L_c``; return each graphless client's loss, by place (step 2)."""
        adam.zero_grad()
        losses = self.contrast()
        if losses:
            torch.stack([*losses.values()]).sum().backward()
            of_networks = adam.lr, adam.weight_decay
            adam.lr, adam.weight_decay = self.how.learning_rate, 0.0
            adam.step()
            adam.lr, adam.weight_decay = of_networks
        return losses

    def loss(self, drops: Sequence[DropoutMask]) -> Tensor:
        """Return the sum of the clients' losses of theta and omega (step 3)."""
        own = log_probabilities(self._output(GNN, self.graph(), drops[0]))
        loss = cross_entropy(own, self.data.y, self.train_shares)
        if self.kind == LEARNED:
            student = log_probabilities(self._output(MLP, None, drops[1]))
            loss = loss + distillation(own, student, self.shares)
        return loss

    def logits(self) -> Tensor:
        """Return ``H``, ``[n, k]``."""
        return self._output(GNN, self.graph(), NO_DROPS)

    def contrast(self) -> dict[int, Tensor]:
        """Return ``L_c`` of each graphless client (equations 8 and 9); its gradient is phi's."""
        if self.kind != LEARNED or self.graphless is None:
            return {}
        (data, places, *_), graph = self.graphless, self.made_graph(self.graphless)
        h = two_layers(self.network(GNN, self.graphless), data.x, graph, data.ptr)
        z = two_layers(self.network(MLP, self.graphless), data.x, None, data.ptr)
        every = torch.arange(data.ptr[-1], device=h.device)
        sums = nt_xent(h, z, every, data.ptr, data.ptr, self.how.tau)
        each = zip(sums.unbind(), group_sizes(data.ptr), strict=True)
        return {at: one / n for at, (one, n) in zip(places, each, strict=True)}

    def _output(
        self, part: str, graph: Adjacency | LearnedGraph | None, drops: DropoutMask
    ) -> Tensor:
        x = self.data.x
        x = x if drops.inputs is None else with_dropout(x, self.turn, drops.inputs)
        return two_layers(self.network(part), x, graph, self.data.ptr, drops.hidden)

    def network(self, part: str, graphless: Graphless | None = None) -> Network:
        """Return a network of all clients, or of the graphless ones without its gradient."""
        first, rest = self[f"{part}-first"], self[f"{part}-rest"]
        if graphless is not None:
            first = first.detach().index_select(0, graphless.rows)
            rest = rest.detach()[graphless.places]
        elif self.kind == OWN:  # each client has one of the two
            has = self.has_edges[:, None]
            first = torch.where(has[self.data.rows.owner], first, self[f"{MLP}-first"])
            rest = torch.where(has, rest, self[f"{MLP}-rest"])
        bias, second, last = rest.split(self.widths, dim=1)
        return Network(first, bias, second.unflatten(1, (self.widths[0], self.widths[2])), last)

    # Graphs, which ``modules.py`` keeps until phi has stepped

    def graph(self) -> Adjacency:
        """Return the normalised graph of all clients, made graphs among the given ones."""
        if self.graphless is None:
            return self.given
        made, n = self.made_graph(self.graphless), self.graphless.data.ptr[-1]
        part = gcn_adjacency(made.edges(), n) if self.kind == KNN else made.adjacency()
        return with_part(self.given, self.graphless.nodes, part)

    def made_graph(self, graphless: Graphless) -> LearnedGraph:
        """Return the made graph: FedGLS's ``A^`` with its gradient, KNN's nearest neighbours."""
        k, similarity = self.how.neighbours, self.how.similarity
        return similar_graph(self._compared(graphless), graphless.data.ptr, k, similarity)

    def _compared(self, graphless: Graphless) -> Rows:
        """Return each node's features, encoded (equations 14 and 15), or its hidden layer."""
        data, places, rows, _ = graphless
        if self.kind == KNN and self.how.knn_on == ENCODER:  # without neighbours
            first, bias, *_ = self.network(GNN, graphless)
            return F.relu(grouped_add(propagate(data.x, first), bias, data.ptr))
        row, column, value = entries(data.x.matrix)
        e = SparseRows(row, column, value, (data.ptr[-1], max(group_sizes(data.rows.ptr))))
        if self.kind == LEARNED:
            first = self[f"{LEARNER}-first"].index_select(0, rows)
            if self.how.encoder == "mlp":
                w = self.how.width
                deeper = self[f"{LEARNER}-rest"][places].view(len(places), -1, w, w)
                return mlp_encode(data.x, first, deeper, data.ptr)
            e = attentive_encode(e, first.T)
        # Each client numbers its columns from 0, since no node is compared across clients
        starts = torch.tensor(data.rows.ptr, device=row.device)[data.owner[row]]
        return e._replace(col=column - starts)

    # Fed-GNNMLP: clients with edges have a GNN alone, graphless ones an MLP

    def tell_shares(self) -> None:
        """Write 1 for the model that a client has, 0 for the other (step 4)."""
        if self.kind == OWN:
            for part, has in ((GNN, self.has_edges), (MLP, ~self.has_edges)):
                self[f"{part}-{SHARE}"].copy_(has[:, None])


# Server ------------------------------------------------------------------------------------------


# Any: of the types of arrays
def mean_of_holders(
    means: Mapping[str, NDArray[Any]], last: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Average each model over the clients that have it (step 5, Fed-GNNMLP only)."""
    # ``means`` are over all clients, with 0 for a model that a client does not have. A model that
    # nobody has stays as it was.
    result = {}
    for name, mean in means.items():
        share = means[f"{name.partition('-')[0]}-{SHARE}"]
        if not name.endswith(SHARE):
            mean = mean / share if share > 0 else last[name]
        result[name] = mean.astype(np.float32)
    return result
