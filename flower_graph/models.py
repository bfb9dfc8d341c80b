"""Graph networks: server halves of split networks, and whole networks of clients with a graph.

A split network runs on the server, from the users' latent vectors ``x``. Each user holds the first
layer's linear map; ``latent_size`` is the number of values that each user sends. Each model is
called as ``model(x, edge_index)``, PyG's convention; any module with that signature works instead.

The first call with an ``edge_index`` builds the matrices of the graph. They are kept until another
tensor is passed, as ``cached=True`` does in PyG's ``GCNConv``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.ops.attention import attend, attention_graph
from flower_graph.ops.graph import (
    Adjacency,
    SortedEdges,
    both_ways,
    columns_of,
    entries,
    gcn_adjacency,
    mean_adjacency,
    propagate,
)
from flower_graph.rng import seeded

T = TypeVar("T")
L = TypeVar("L", bound=nn.Linear)
FEW = 0.1  # share of features that are not 0, up to which their entries alone are multiplied


class _GraphCache(Generic[T]):
    def __init__(self, build: Callable[..., T]) -> None:
        self._build = build
        self._kept: tuple[Tensor | SortedEdges, int, tuple[Tensor, ...], T] | None = None

    def __call__(self, edge_index: Tensor | SortedEdges, n: int, *weight: Tensor) -> T:
        kept = self._kept
        is_same = kept is not None and kept[0] is edge_index and kept[1] == n
        if kept is None or not is_same or [*map(id, kept[2])] != [*map(id, weight)]:
            kept = self._kept = edge_index, n, weight, self._build(edge_index, n, *weight)
        return kept[3]

    def __deepcopy__(self, memo: dict[int, object]) -> _GraphCache[T]:
        return _GraphCache(self._build)  # sparse matrices cannot be copied so


class SplitGCN(nn.Module):
    """Server half of a two-layer GCN.

    ``Z = A' dropout(ReLU(A' dropout(X) + b_1)) W_2 + b_2``, where ``X`` holds the latent vectors
    and ``A'`` is the normalised adjacency (nFedGNN, equation 5).

    Parameters
    ----------
    hidden : int
        Length of the latent vectors, ``h``.
    classes : int
        Number of classes.
    dropout : float
        Dropout on the input of both layers.
    """

    takes_sorted = True  # a graph as `SortedEdges`, too
    takes_nodes = True  # a third argument, too

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.latent_size = hidden
        self.dropout = dropout
        self.arguments = {"hidden": hidden, "classes": classes, "dropout": dropout}
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.linear = _glorot(nn.Linear(hidden, classes))
        self._graph = _GraphCache(gcn_adjacency)

    def forward(
        self, x: Tensor, edge_index: Tensor | SortedEdges, nodes: Tensor | None = None
    ) -> Tensor:
        """Return logits ``[n, c]`` from latent vectors ``x`` ``[n, h]``.

        With a few ``nodes`` ``[m]``, only their logits and gradients are computed, bit-identical to
        those of the whole graph; the logits of other nodes are undefined.
        """
        graph = self._graph(edge_index, x.shape[0])
        near = columns_of(graph.matrix, nodes) if nodes is not None else None
        x = _dropout(x, self.dropout if self.training else 0)
        # In place: a large graph's tensors cost
        x = propagate(graph, x, near).add_(self.bias)
        x = _dropout(x.relu_(), self.dropout if self.training else 0) @ self.linear.weight.T
        return propagate(graph, x, None if near is None else nodes).add_(self.linear.bias)


class SplitGAT(nn.Module):
    """Server half of a two-layer GAT."""

    # The first layer attends over the users' vectors, one per head; its heads are concatenated and
    # passed through ELU. The second layer is an ordinary GAT layer with one head (nFedGNN, appendix
    # D, equation 9).

    def __init__(self, hidden: int, heads: int, classes: int, dropout: float = 0.6) -> None:
        super().__init__()
        self.latent_size = hidden * heads
        self.heads = heads
        self.dropout = dropout
        self.arguments = {"hidden": hidden, "heads": heads, "classes": classes, "dropout": dropout}
        self.source_1, self.target_1 = _attention(heads, hidden), _attention(heads, hidden)
        self.bias_1 = nn.Parameter(torch.zeros(hidden * heads))
        self.linear = _glorot(nn.Linear(hidden * heads, classes, bias=False))
        self.source_2, self.target_2 = _attention(1, classes), _attention(1, classes)
        self.bias_2 = nn.Parameter(torch.zeros(classes))
        self._graph = _GraphCache(attention_graph)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from latent vectors ``x`` ``[n, L h]``, head by head."""
        n = x.shape[0]
        graph = self._graph(edge_index, n)
        drop = partial(functional.dropout, p=self.dropout, training=self.training)
        x = drop(x).view(n, self.heads, -1)
        x = attend(x, self.source_1, self.target_1, graph, drop=drop)
        x = drop(functional.elu(x.reshape(n, -1) + self.bias_1))
        x = self.linear(x).view(n, 1, -1)
        x = attend(x, self.source_2, self.target_2, graph, drop=drop)
        return x.view(n, -1) + self.bias_2


class SplitSAGE(nn.Module):
    """Server half of a two-layer GraphSAGE with the mean aggregator."""

    # The first layer adds a map of the node itself and a map of its neighbours' mean. Both maps act
    # on ``x_i``, so both are at the user, which sends their two outputs concatenated.

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.latent_size = 2 * hidden
        self.dropout = dropout
        self.arguments = {"hidden": hidden, "classes": classes, "dropout": dropout}
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.own = _glorot(nn.Linear(hidden, classes))
        self.neighbours = _glorot(nn.Linear(hidden, classes, bias=False))
        self._graph = _GraphCache(mean_adjacency)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from latent vectors ``x`` ``[n, 2 h]``: own, then neighbours."""
        graph = self._graph(edge_index, x.shape[0])
        local, sent = functional.dropout(x, self.dropout, self.training).chunk(2, dim=1)
        x = functional.relu(local + propagate(graph, sent) + self.bias)
        x = functional.dropout(x, self.dropout, self.training)
        return self.own(x) + propagate(graph, self.neighbours(x))  # type: ignore[no-any-return]


SplitModel = SplitGCN | SplitGAT | SplitSAGE


class Linear(nn.Linear):
    """PyTorch's linear layer, whose product a graph convolution takes before the bias."""

    def product(self, x: Tensor | Adjacency) -> Tensor:
        """Multiply rows ``[n, f]``, dense or sparse, with the weights, without the bias."""
        return x @ self.weight.T if isinstance(x, Tensor) else propagate(x, self.weight.T)


class GCN(nn.Module):
    """Two-layer GCN of a client that has a graph (Kipf and Welling, ICLR 2017).

    ``Z = A' dropout(ReLU(A' dropout(X) W_1 + b_1)) W_2 + b_2``, ``A'`` the normalised adjacency.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, hidden layer and output.
    dropout, input_dropout : float
        Dropout on the hidden layer and on the features.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout, self.input_dropout = dropout, input_dropout
        self.arguments: dict[str, float] = {"features": features, "hidden": hidden}
        self.arguments |= {"classes": classes, "dropout": dropout, "input_dropout": input_dropout}
        self.first = _glorot(Linear(features, hidden))
        self.second = _glorot(Linear(hidden, classes))
        self._graph, self._entries = _GraphCache(gcn_adjacency), _GraphCache(_few_entries)

    def forward(
        self, x: Tensor | Adjacency, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return logits ``[n, c]`` from features ``x`` ``[n, f]`` and edge weights ``[e]``."""
        weight = () if edge_weight is None else (edge_weight,)
        return self.classify(self.embed(x, edge_index, *weight), edge_index, *weight)

    def embed(self, x: Tensor | Adjacency, edge_index: Tensor, *weight: Tensor) -> Tensor:
        """Return the hidden layer ``[n, h]``, before dropout, from features ``x`` ``[n, f]``."""
        n = (x.matrix if isinstance(x, Adjacency) else x).shape[0]
        graph = self._graph(edge_index, n, *weight)
        return propagate(graph, self._lifted(x)).add_(self.first.bias).relu_()

    def classify(self, hidden: Tensor, edge_index: Tensor, *weight: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from the hidden layer ``[n, h]``."""
        graph = self._graph(edge_index, hidden.shape[0], *weight)
        hidden = functional.dropout(hidden, self.dropout, self.training)
        return propagate(graph, self.second.product(hidden)).add_(self.second.bias)

    def _lifted(self, x: Tensor | Adjacency) -> Tensor:
        if isinstance(x, Adjacency):
            return self.first.product(x)
        if self.training and self.input_dropout:
            x = functional.dropout(x, self.input_dropout)
        else:
            entries = self._entries(x, x.shape[0])
            if entries is not None:
                return self.first.product(entries)
        return self.first.product(x)


class PyGNetwork(nn.Module):
    """A two-layer network of PyG's, or its SGC over two steps; weights of edges are not used.

    Parameters
    ----------
    name : str
        ``"gat"``, ``"sage"``, ``"gin"``, ``"sgc"`` or ``"mlp"``.
    features, hidden, classes, dropout, input_dropout
        As of ``GCN``.
    """

    def __init__(
        self,
        name: str,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.arguments: dict[str, float | str] = {"name": name, "features": features}
        self.arguments |= {"hidden": hidden, "classes": classes}
        self.arguments |= {"dropout": dropout, "input_dropout": input_dropout}
        pyg, self.takes_edges = import_module("torch_geometric.nn"), name != "mlp"
        self.input_dropout = nn.Dropout(input_dropout)
        if name == "sgc":
            self.network = pyg.SGConv(features, classes, K=2)
        elif name == "mlp":
            layers = [nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout)]
            self.network = nn.Sequential(*layers, nn.Linear(hidden, classes))
        else:
            kind = getattr(pyg, {"gat": "GAT", "sage": "GraphSAGE", "gin": "GIN"}[name])
            self.network = kind(features, hidden, 2, classes, dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from features ``x`` ``[n, f]``."""
        given = (edge_index,) if self.takes_edges else ()
        return self.network(self.input_dropout(x), *given)  # type: ignore[no-any-return]

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the hidden layer ``[n, h]``, before dropout; SGC has none."""
        x = self.input_dropout(x)
        if self.takes_edges:
            x = self.network.convs[0](x, edge_index)
            return self.network.act(x)  # type: ignore[no-any-return]
        return self.network[:2](x)  # type: ignore[no-any-return]

    def classify(self, hidden: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from the hidden layer ``[n, h]``."""
        if self.takes_edges:
            hidden = self.network.dropout(hidden)
            return self.network.convs[1](hidden, edge_index)  # type: ignore[no-any-return]
        return self.network[2:](hidden)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A network with what a method keeps beside it; it is called and saved as the network.

    A subclass has more entries: a second model, variates, prototypes.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *given: Tensor, **pairs: Tensor) -> Tensor:
        result: Tensor = self.net(*given, **pairs)
        return result


def network_of(module: nn.Module) -> nn.Module:
    """Return the network that predicts: what is wrapped, or the module itself."""
    return module.net if isinstance(module, Wrapped) else module


def frozen(net: nn.Module) -> nn.Module:
    """Return a copy of a network that is not trained."""
    return deepcopy(net).requires_grad_(False)


class PairDecoder(nn.Module):
    """MLP that predicts from the rows of two nodes, in either order, whether they are linked.

    ``w ReLU(W [z_u * z_v, |z_u - z_v|] + b) + c``, products and differences elementwise.

    Parameters
    ----------
    width : int
        Length of a row, and of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = _glorot(nn.Linear(2 * width, width))
        self.second = _glorot(nn.Linear(width, 1))

    def forward(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """Return logits ``[m]`` of pairs ``[2, m]`` from rows ``[n, h]``."""
        one, other = rows[pairs]
        both = torch.cat([one * other, (one - other).abs()], 1)
        return self.second(self.first(both).relu()).flatten()  # type: ignore[no-any-return]


class PairModel(nn.Module):
    """A network that gives each node a row, and a decoder for pairs of rows."""

    def __init__(self, rows: nn.Module, width: int) -> None:
        super().__init__()
        self.rows, self.decoder = rows, PairDecoder(width)

    def forward(
        self, x: Tensor, edge_index: Tensor, *edge_weight: Tensor, pairs: Tensor | None = None
    ) -> Tensor:
        """Return the rows ``[n, h]``, or the logits ``[m]`` of pairs ``[2, m]``."""
        rows: Tensor = self.rows(x, edge_index, *edge_weight)
        return rows if pairs is None else self.decoder(rows, pairs)


class GCNPairs(PairModel):
    """A ``GCN`` that gives each node a row of ``classes`` numbers; parameters as there."""

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
    ) -> None:
        rows = GCN(features, hidden, classes, dropout, input_dropout)
        super().__init__(rows, classes)
        self.arguments = rows.arguments


def _few_entries(x: Tensor, n: int) -> Adjacency | None:
    """Return features as a sparse matrix if few of them are non-zero, such as a text's words."""
    if int(torch.count_nonzero(x)) > FEW * x.numel():
        return None
    row, column, value = entries(x)
    return both_ways(row, column, value.float(), n, x.shape[1])


def build_server_model(
    name: str, *, hidden: int, heads: int, classes: int, dropout: float, seed: int
) -> SplitModel:
    """Build one of the split models with reproducible initial weights."""
    gat = partial(SplitGAT, heads=heads)
    kinds: dict[str, Callable[..., SplitModel]] = {"gcn": SplitGCN, "gat": gat, "sage": SplitSAGE}
    if name not in kinds:
        raise ValueError(f"model.name: {name!r} is unknown; allowed are {', '.join(kinds)}")
    with seeded(torch.device("cpu"), seed, "server-model"):
        return kinds[name](hidden=hidden, classes=classes, dropout=dropout)


class CentralModel(nn.Module):
    """A split network in one piece: one shared linear map in front of a server model."""

    def __init__(self, num_features: int, server: SplitModel, input_dropout: float) -> None:
        super().__init__()
        self.input_dropout = input_dropout
        self.linear = _glorot(nn.Linear(num_features, server.latent_size, bias=False))
        self.server = server

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]`` from features ``x`` ``[n, f]``."""
        x = functional.dropout(x, self.input_dropout, self.training)
        return self.server(self.linear(x), edge_index)  # type: ignore[no-any-return]


def _dropout(x: Tensor, rate: float) -> Tensor:
    # As ``functional.dropout``, at some rates up to the last bit; but on a CPU it keeps a byte of
    # each number, not four
    return torch.native_dropout(x, rate, True)[0] if rate else x


def _glorot(linear: L) -> L:
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def _attention(heads: int, size: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, size)))
