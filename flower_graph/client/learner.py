"""One client of a ``ModuleClient``: its module, optimiser, graph and task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.module import DOT, MLP
from flower_graph.data.description import Caution, tell
from flower_graph.data.graph import ClientGraph, Scale, called
from flower_graph.engine.grouped import FeatureRows, Group, Layout, Tensors, feature_rows
from flower_graph.errors import ConfigError, DataError
from flower_graph.ops.adam import MOMENTS, in_memory_order
from flower_graph.ops.counts import Counts, Errors
from flower_graph.ops.graph import values_at
from flower_graph.ops.grouped import group_sum
from flower_graph.ops.links import (
    LinkSplit,
    both_directions,
    dot_products,
    draw_absent,
    ends,
    split_links,
    undirected,
)
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import (
    Embeddings,
    KnownLinks,
    Predictions,
    SavedModels,
    Snapshot,
    SparseRows,
    predictions_from,
)
from flower_graph.rng import generator, seeded
from flower_graph.wire.counts import added, counted
from flower_graph.wire.keys import ROLES

LocalGraph = ClientGraph
BEGUN = "/begun"  # behind the name of a first layer by rows: the matrix that the round began with
UNUSED = "its forward takes no edge_weight, so all edges count the same"


class GraphOnDevice(NamedTuple):
    """A client's graph on its module's device, or the graphs of several clients as one."""

    clients: tuple[int, ...]
    x: Tensor  # [n, f], dense; or in CSR form ``[n, r]``, where a first layer has active rows
    edge_index: Tensor  # [2, e]; without edges at a graphless client
    y: Tensor  # [n]; below 0 without a label
    masks: dict[str, Tensor]  # [n] bool by role: train, val, test
    edge_weight: Tensor | None = None  # [e]; None: all edges count alike
    pairs: Tensor | None = None  # [2, m] of which the module is to give logits; None: of the nodes
    targets: Tensor | None = None  # [n] numbers to learn, standardised; NaN for none
    links: LinkSplit | None = None  # where links are learnt; ``edge_index`` has none held out
    layout: Layout | None = None  # of several clients' rows
    moves: Tensor | None = None  # [c] which clients take the step; None: all

    @property
    def client(self) -> int:
        """The number of the graph's only client; ``ValueError`` if it has several."""
        if len(self.clients) > 1:
            raise ValueError("the graph is of several clients: their numbers are `clients`")
        return self.clients[0]

    @property
    def ptr(self) -> list[int]:
        """The bounds of the clients' nodes, ``c + 1``."""
        return [0, self.y.numel()] if self.layout is None else self.layout.ptr

    @property
    def owner(self) -> Tensor:
        """The place among ``clients`` of each node's client, ``[n]``."""
        return torch.zeros_like(self.y) if self.layout is None else self.layout.owner

    def sum_of_means(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over clients of each client's mean over its nodes in a mask.

        ``values`` ``[m]`` are of these nodes alone; ``mask`` is ``[n]``.
        """
        if self.layout is None:
            return values.mean()
        owner = self.layout.owner[mask]
        return (values / torch.bincount(owner, minlength=len(self.clients))[owner]).sum()


@dataclass
class Learner:
    """One client, or several as a group: module, optimiser, graph."""

    module: nn.Module
    optimiser: Any  # of PyTorch or of this library
    graph: GraphOnDevice


def first_module(make_module: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make the initial module, the same for every client."""
    with seeded(torch.device("cpu"), seed, "module"):
        return make_module()


def weighed(module: nn.Module, graph: GraphOnDevice) -> tuple[Tensor, ...]:
    """Return a module's arguments: features, edges and, if ``forward`` takes them, edge weights."""
    if graph.edge_weight is None:
        return graph.x, graph.edge_index
    if not takes_weights(module):
        tell(f"{type(module).__name__}", [Caution(UNUSED)])
        return graph.x, graph.edge_index
    return graph.x, graph.edge_index, graph.edge_weight


def asked(module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
    """Return the pairs that the module must decode, if any; ``ConfigError`` if it takes none."""
    if graph.pairs is None:
        return {}
    if "pairs" not in inspect.signature(module.forward).parameters:
        kind = type(module).__name__
        raise ConfigError(f"links.decoder: mlp is not for {kind}, whose forward takes no pairs")
    return {"pairs": graph.pairs}


def takes_weights(module: nn.Module) -> bool:
    """Whether a module's third argument is the edges' weights."""
    return "edge_weight" in inspect.signature(module.forward).parameters


def dense(x: Tensor) -> Tensor:
    """Return features ``[n, f]`` as a dense matrix."""
    return x if x.layout == torch.strided else x.to_dense()


def placed_on(graph: LocalGraph, device: torch.device, *, is_dense: bool = True) -> GraphOnDevice:
    """Move a client's graph to its module's device."""
    edges = graph.edge_index
    if edges is None:
        edges = torch.zeros((2, 0), dtype=torch.int64)
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
    weight = graph.edge_weight
    return GraphOnDevice(
        (graph.client,),
        (dense(graph.x) if is_dense else graph.x).to(device),
        edges.to(device),
        graph.y.to(device),
        {role: mask.to(device) for role, mask in masks.items()},
        None if weight is None else weight.to(device),
    )


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


# Several clients ---------------------------------------------------------------------------------


def joined(graphs: Sequence[GraphOnDevice], *, by_rows: bool = False) -> GraphOnDevice:
    """Return several clients' graphs as one block-diagonal graph."""
    first, device = graphs[0], graphs[0].x.device
    nodes = [graph.y.numel() for graph in graphs]
    layout = Layout.of(nodes, [graph.edge_index.shape[1] for graph in graphs], device)
    edges = [graph.edge_index + start for graph, start in zip(graphs, layout.ptr, strict=False)]
    weights = [graph.edge_weight for graph in graphs]
    if by_rows:
        features, rows = feature_rows([graph.x.cpu() for graph in graphs])
        x, layout = features.matrix.to(device), replace(layout, rows=rows.to(device))
    else:
        x = torch.cat([graph.x for graph in graphs])
    return GraphOnDevice(
        tuple(graph.client for graph in graphs),
        x,
        torch.cat(edges, 1),
        torch.cat([graph.y for graph in graphs]),
        {role: torch.cat([graph.masks[role] for graph in graphs]) for role in first.masks},
        None if first.edge_weight is None else torch.cat(weights),  # type: ignore[arg-type]
        targets=None if first.targets is None else torch.cat([graph.targets for graph in graphs]),  # type: ignore[misc]
        layout=layout,
    )


class Cohort:
    """The modules of several clients, which train as one group or one by one.

    Of the first layers in ``by_rows`` a client keeps the active rows (``FeatureRows``).

    Parameters
    ----------
    module : nn.Module
        A client's first module.
    graphs : sequence of GraphOnDevice
        The clients' graphs.
    tensors : dict
        Stacks ``[c, ...]`` of what the modules' ``state_dict`` has and, as ``<name>/<moment>``, of
        what optimisers keep. Training changes them in place. Of a first layer by active rows
        ``[r, h]``, and as ``<name>/begun`` the matrix ``[f, h]`` that the round began with.
    optimiser : callable
        Makes an optimiser of a module.
    is_grouped : bool
        Whether they train as a group.
    by_rows : sequence of str
        The weights that are stored by active rows, of a group.
    """

    def __init__(
        self,
        module: nn.Module,
        graphs: Sequence[GraphOnDevice],
        tensors: Tensors,
        optimiser: Callable[[nn.Module], Any],
        is_grouped: bool = False,
        by_rows: Sequence[str] = (),
    ) -> None:
        self.tensors, self._is_grouped, self.by_rows = tensors, is_grouped, by_rows
        self._module, self._optimiser = module, optimiser
        self._graphs = {graph.client: graph for graph in graphs}
        self._places = {client: place for place, client in enumerate(self._graphs)}
        self._alone: dict[int, Learner] = {}
        self._together: dict[tuple[int, ...], tuple[Group, Learner]] = {}

    @property
    def rows(self) -> FeatureRows:
        """The active rows of all clients."""
        layout = self.group([*self._graphs])[1].graph.layout
        assert layout is not None and layout.rows is not None
        return layout.rows

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Learner]:
        """Go through the clients one by one."""
        return map(self.alone, self._graphs)

    def alone(self, client: int) -> Learner:
        """Return one client; its module and moments are views of the stacks."""
        if client not in self._alone:
            place, module = self._places[client], deepcopy(self._module)
            own = {
                name: self._dense(name, place) if name in self.by_rows else stack[place]
                for name, stack in self.tensors.items()
                if not name.endswith(BEGUN)
            }
            module.load_state_dict({name: own[name] for name in module.state_dict()}, assign=True)
            learner = Learner(module, self._adam(module, own), self._graphs[client])
            if self.by_rows:
                return learner  # a copy
            self._alone[client] = learner
        return self._alone[client]

    def _dense(self, name: str, place: int) -> Tensor:
        """Return a client's first layer with all rows, ``[h, f]``."""
        weight, at = self.tensors[name + BEGUN].clone(), self.rows.at([place])
        weight[self.rows.feature[at]] = self.tensors[name][at]
        return weight.T

    @property
    def names(self) -> list[str]:
        """The names of what a client's ``state_dict`` has."""
        return list(self._module.state_dict())

    @property
    def graphs(self) -> list[GraphOnDevice]:
        return [*self._graphs.values()]

    def begin(self, name: str, weight: Tensor) -> Tensor:
        """Note the first layer ``[h, f]`` that the clients begin with; return it ``[f, h]``."""
        begun = self.tensors[name + BEGUN]
        return begun.copy_(weight.T)

    def saved(self, make: Callable[[], nn.Module]) -> SavedModels:
        """Return the clients' models; only the rows of a client's features are its own."""
        (name,), clients = self.by_rows, [*self._graphs]
        own = {one: self.tensors[one].detach() for one in self.names if one != name}
        weight, rows = self.tensors[name].detach(), self.rows
        by_row = SparseRows(name, weight, rows.feature, torch.tensor(rows.ptr), transposed=True)
        shared = {name: self.tensors[name + BEGUN].T}
        form = form_of(self._module, make, clients[0])
        return replace(form, clients=clients, shared=shared, own=own, rows=by_row)

    def finite(self, more: Iterable[str] = ()) -> set[int]:
        """Return the clients of whose parameters, and of what is named, all numbers are finite."""
        names = {name for name, _ in self._module.named_parameters()}.union(more)
        totals = []
        for name in names:
            stack = in_memory_order(self.tensors[name].detach())
            total = stack.reshape(len(stack), -1).sum(1) if stack.numel() else stack.new_zeros(1)
            if name in self.by_rows:
                total = total.new_zeros(len(self)).index_add_(0, self.rows.owner, total)
            totals.append(total.expand(len(self)))
        good: list[bool] = torch.stack([t.isfinite() for t in totals], 1).all(1).tolist()
        return {client for client, is_good in zip(self._graphs, good, strict=True) if is_good}

    def restart(self, clients: Sequence[int], start: Callable[[], Tensors]) -> None:
        """Let some clients have the tensors again that they began with."""
        places = [self._places[client] for client in clients]
        for name, first in start().items() if places else ():
            if not name.endswith(BEGUN):
                at = self._index(name, places)
                self.tensors[name].detach()[at] = first[at].to(self.tensors[name])

    def sums(self, names: Iterable[str], weights: Mapping[int, int]) -> Tensors:
        """Add up some clients' part of some stacks by weight, in float64, client by client."""
        result: Tensors = {}
        for name in names:
            stack = self.tensors[name].detach()
            if name in self.by_rows:
                result[name] = self._sum_of_rows(name, weights).T
                continue
            result[name] = torch.zeros_like(stack[0], dtype=torch.float64)
            for client, weight in weights.items():
                result[name].add_(stack[self._places[client]], alpha=weight)
        return {name: total.cpu() for name, total in result.items()}

    def _sum_of_rows(self, name: str, weights: Mapping[int, int]) -> Tensor:
        """Add up first layers, the active rows and for the others those of before, ``[f, h]``."""
        (feature, owner, _), active = self.rows, self.tensors[name].detach()
        begun = self.tensors[name + BEGUN].double()
        share = begun.new_tensor([weights.get(client, 0) for client in self._graphs])[owner]
        holders = share.new_zeros(len(begun)).index_add_(0, feature, share)
        kept = share > 0  # of the others the numbers may not be finite
        if not bool(kept.all()):
            active, feature, share = active[kept], feature[kept], share[kept]
        without = sum(weights.values()) - holders
        total = begun.mul_(without[:, None])
        return total.index_add_(0, feature, active * share[:, None])

    @contextmanager
    def learners(self, clients: Sequence[int]) -> Iterator[list[Learner]]:
        """Yield some clients, as a group or one by one; the stacks then have their changes."""
        if not self._is_grouped or len(clients) < (1 if self.by_rows else 2):
            yield [self.alone(client) for client in clients]
            return
        group, learner = self.group(clients)
        group.read()
        yield [learner]
        group.write()

    def group(self, clients: Sequence[int]) -> tuple[Group, Learner]:
        """Return some clients as a group, which is kept until another one than all is wanted."""
        if (group := self._together.get(tuple(clients))) is None:
            graph = joined([self._graphs[one] for one in clients], by_rows=bool(self.by_rows))
            assert graph.layout is not None
            tensors = {n: one for n, one in self.tensors.items() if not n.endswith(BEGUN)}
            index = None
            if list(clients) != list(self._graphs):
                places = [self._places[client] for client in clients]
                index = {name: self._index(name, places) for name in tensors}
            made = Group(self._module, tensors, graph.layout, index)
            adam = self._adam(made.module, made.stacks, len(clients))
            if graph.layout.rows is not None:
                parameters = dict(made.module.named_parameters())
                adam.bounds = {parameters[name]: graph.layout.rows.ptr for name in self.by_rows}
            kept = {
                key: one for key, one in self._together.items() if len(key) == len(self._graphs)
            }
            group = made, Learner(made.module, adam, graph)
            self._together = kept | {tuple(clients): group}
        return group

    def _index(self, name: str, places: Sequence[int]) -> Tensor:
        """Return where some clients are in a stack."""
        weight, _, moment = name.partition("/")
        at = torch.tensor(places)
        return self.rows.at(places) if weight in self.by_rows and moment != MOMENTS[2] else at

    # Any: an optimiser of PyTorch or of this library
    def _adam(self, module: nn.Module, tensors: Mapping[str, Tensor], *clients: int) -> Any:
        adam = self._optimiser(module)
        adam.clients = clients
        for name, parameter in trained_parameters(module):
            if f"{name}/{MOMENTS[0]}" in tensors:
                adam.state[parameter] = {each: tensors[f"{name}/{each}"] for each in MOMENTS}
        return adam


# What is learnt: classes of nodes, numbers, or links -------------------------------------------

Forward = Callable[[GraphOnDevice], Tensor]  # what a module gives for a graph's nodes, [n, k]


class Judged(NamedTuple):
    """Predictions for examples (nodes or pairs of nodes) of clients, and the true values."""

    logits: Tensor  # [m, k]
    y: Tensor  # [m]
    masks: dict[str, Tensor]  # [m] bool by role
    ptr: list[int]  # c + 1 bounds of the clients' examples

    def means(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return each client's mean over its examples in a mask, ``[c]``; NaN without any."""
        # values, mask [m]
        total = group_sum(torch.where(mask, values.double(), 0.0), self.ptr)
        return total / group_sum(mask.double(), self.ptr)

    def each(self) -> list[Judged]:
        """Return the same of each client alone."""
        rows = [slice(*both) for both in pairwise(self.ptr)]
        masks = [{role: mask[at] for role, mask in self.masks.items()} for at in rows]
        parts = zip(rows, masks, strict=True)
        return [
            Judged(self.logits[at], self.y[at], own, [0, at.stop - at.start]) for at, own in parts
        ]


class Seen(NamedTuple):
    """A client's graph, the predictions of its examples, and its module's outputs."""

    local: LocalGraph
    graph: GraphOnDevice
    judged: Judged
    forward: Forward


class NodeTask:
    """Learns the classes of nodes."""

    def place(self, graph: LocalGraph, device: torch.device) -> GraphOnDevice:
        return placed_on(graph, device)

    def weight(self, graph: LocalGraph) -> int:
        return int(graph.train_mask.sum())

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        out, mask = forward(graph), graph.masks["train"]
        losses = functional.cross_entropy(out[mask], graph.y[mask], reduction="none")
        return graph.sum_of_means(losses, mask)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        return Judged(forward(graph), graph.y, graph.masks, graph.ptr)

    def training_loss(self, judged: Judged) -> Tensor:
        """Return each client's loss, ``[c]``; NaN without training examples."""
        y = judged.y.clamp(min=0)  # of nodes without a label, which do not train
        losses = functional.cross_entropy(judged.logits, y, reduction="none")
        return judged.means(losses, judged.masks["train"])

    def shares(self, judged: Judged) -> list[Tensor]:
        """Return each client's accuracy by role, ``[c]`` each; NaN without examples."""
        right = judged.logits.argmax(1) == judged.y
        return [judged.means(right, judged.masks[role]) for role in ROLES]

    def count(self, judged: Judged, counting: str) -> Counts | Errors | None:
        return counted(judged.logits, judged.y, judged.masks, counting)

    def measure(self, judged: Judged) -> Tensor:
        """Return each client's loss and accuracy by role, ``[c, 4]``; NaN without examples."""
        result = torch.stack([loss := self.training_loss(judged), *self.shares(judged)], 1)
        return torch.where(self.has_diverged(judged, loss)[:, None], torch.nan, result).cpu()

    def count_all(self, judged: Sequence[Judged], counting: str) -> Counts | Errors | None:
        """Count the predictions of all clients, except diverged ones, if counts are asked for."""
        parts = []
        for one in judged if counting else ():
            sizes = torch.tensor(one.ptr, device=one.y.device).diff()
            good = ~self.has_diverged(one).repeat_interleave(sizes)
            masks = {role: mask & good for role, mask in one.masks.items()}
            parts.append(self.count(one._replace(masks=masks), counting))
        return added(parts)

    def has_diverged(self, judged: Judged, loss: Tensor | None = None) -> Tensor:
        """Return whether a client has a training loss that is not finite, ``[c]``."""
        trains = group_sum(judged.masks["train"].long(), judged.ptr) > 0
        return trains & ~(self.training_loss(judged) if loss is None else loss).isfinite()

    def snapshot(
        self, seen: Sequence[Seen], models: list[SavedModels], classes: Sequence[str] | None
    ) -> Snapshot:
        parts = [self.predictions(one, classes) for one in seen]
        return Snapshot(Predictions.join(parts) if parts else None, models)

    def predictions(self, seen: Seen, classes: Sequence[str] | None) -> Predictions:
        return predictions_from([seen.local], seen.judged.logits, classes)


@dataclass
class ValueTask(NodeTask):
    """Learns a number of each node: one output of the module, standardised.

    Parameters
    ----------
    scale : Scale
        Mean and deviation of the training nodes' numbers, the same at all clients.
    """

    scale: Scale = field(default_factory=Scale)

    def place(self, graph: LocalGraph, device: torch.device) -> GraphOnDevice:
        if (targets := graph.targets) is None:
            raise DataError(f"client {graph.client}: its nodes have no numbers (task: values)")
        placed, scaled = placed_on(graph, device), self.scale.apply(targets).to(device)
        # No classes, so that a loss about classes fails
        return placed._replace(y=torch.full_like(placed.y, -1), targets=scaled)

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        assert graph.targets is not None
        out, mask = forward(graph), graph.masks["train"]
        return graph.sum_of_means((out[mask, 0] - graph.targets[mask]).square(), mask)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        assert graph.targets is not None
        return Judged(forward(graph), graph.targets, graph.masks, graph.ptr)

    def training_loss(self, judged: Judged) -> Tensor:
        apart = judged.logits[:, 0] - judged.y
        return judged.means(apart.square(), judged.masks["train"])

    def shares(self, judged: Judged) -> list[Tensor]:
        """Return NaN: a regression has no accuracy."""
        return [torch.full_like(self.training_loss(judged), torch.nan)] * len(ROLES)

    def count(self, judged: Judged, counting: str) -> Errors:
        """Add up errors in the numbers' own unit."""
        apart = (judged.logits[:, 0] - judged.y).double() * self.scale.deviation
        return Errors.of(apart, judged.masks)

    def predictions(self, seen: Seen, classes: Sequence[str] | None) -> Predictions:
        values = self.scale.undo(seen.judged.logits[:, 0].double())
        return predictions_from([seen.local], values)


@dataclass
class LinkTask(NodeTask):
    """Learns which nodes are linked, from the two rows of a pair.

    Parameters
    ----------
    val, test : float
        Shares of each client's edges that are held out.
    seed : int
        Seed, with the client, of the held-out edges and of as many pairs without an edge.
    decoder : str
        ``dot``: the logit of a pair is the rows' product. ``mlp``: the module computes it.
    """

    val: float = 0.1
    test: float = 0.2
    seed: int = 0
    decoder: str = DOT
    _splits: dict[int, LinkSplit] = field(default_factory=dict)
    _weights: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # edges, and theirs

    def split(self, graph: LocalGraph) -> LinkSplit:
        """Return the client's held-out edges, always the same."""
        if graph.client not in self._splits:
            edges = graph.edge_index
            if edges is None or not edges.shape[1]:
                raise DataError(f"client {graph.client} has no edges, and links are to be learnt")
            rng = generator(self.seed, "links", graph.client)
            self._splits[graph.client] = split_links(
                edges, graph.y.numel(), self.val, self.test, rng
            )
        return self._splits[graph.client]

    def place(self, graph: LocalGraph, device: torch.device) -> GraphOnDevice:
        """Move the graph without its held-out edges and labels."""
        split, placed = self.split(graph), placed_on(graph, device)
        if placed.edge_weight is not None:
            self._weights[graph.client] = placed.edge_index, placed.edge_weight
        nobody = torch.zeros_like(placed.y, dtype=torch.bool)
        return self.over(placed, split.messages.to(device))._replace(
            y=torch.full_like(placed.y, -1),
            masks=dict.fromkeys(ROLES, nobody),
            links=LinkSplit(*(part.to(device) for part in vars(split).values())),
        )

    def over(self, graph: GraphOnDevice, edges: Tensor) -> GraphOnDevice:
        if graph.client not in self._weights:
            return graph._replace(edge_index=edges)
        weight = values_at(edges, *self._weights[graph.client], graph.y.numel())
        return graph._replace(edge_index=edges, edge_weight=weight)

    def weight(self, graph: LocalGraph) -> int:
        return self.split(graph).messages.shape[1] // 2

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        """Return the cross-entropy of training edges and as many drawn pairs without an edge."""
        rows = None if self.decoder == MLP else forward(graph)  # whose dropout is drawn first
        n, edges = graph.y.numel(), graph.edge_index
        own = undirected(edges.cpu(), n)
        # By PyTorch's own generator, which is seeded for the round as for dropout
        absent = ends(draw_absent(own, n, len(own), None), n).to(edges.device)
        pairs = torch.cat([ends(own, n).to(edges.device), absent], 1)
        score = self.scores(forward, graph, pairs) if rows is None else dot_products(rows, pairs)
        truth = (torch.arange(pairs.shape[1], device=edges.device) < len(own)).to(score.dtype)
        return functional.binary_cross_entropy_with_logits(score, truth)

    def scores(self, forward: Forward, graph: GraphOnDevice, pairs: Tensor) -> Tensor:
        if self.decoder == MLP:
            return forward(graph._replace(pairs=pairs))
        return dot_products(forward(graph), pairs)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        """Return the logits of all pairs; test pairs use the validation edges too."""
        split = graph.links
        assert split is not None
        early = self.scores(forward, graph, split.pairs)
        later = self.scores(forward, self.over(graph, split.later), split.pairs)
        score = torch.where(split.role == len(ROLES) - 1, later, early)
        logits = torch.stack([torch.zeros_like(score), score], 1)
        masks = {role: split.role == number for number, role in enumerate(ROLES)}
        return Judged(logits, split.is_edge.long(), masks, [0, len(score)])

    def snapshot(
        self, seen: Sequence[Seen], models: list[SavedModels], classes: Sequence[str] | None
    ) -> Snapshot:
        rows, known = [], []
        for local, graph, _, forward in seen:
            assert graph.links is not None
            edges = both_directions(graph.links.pairs[:, graph.links.is_edge])  # held-out ones too
            names = _named(local)
            client = np.full(len(names), local.client)
            out = forward(self.over(graph, edges)).float().cpu().numpy()
            nobody = np.zeros(len(names), bool)
            rows.append(Embeddings(client, names, np.arange(len(names)), nobody, out))
            one, other = names[edges.cpu().numpy()]
            known.append(KnownLinks(np.full(len(one), local.client), one, other))
        if not rows:
            return Snapshot(None, models)
        return Snapshot(None, models, Embeddings.join(rows), KnownLinks.join(known))


def _named(graph: LocalGraph) -> NDArray[np.generic]:
    names = called([graph])
    return names.numpy() if isinstance(names, Tensor) else np.asarray(names)


NODES = NodeTask()
