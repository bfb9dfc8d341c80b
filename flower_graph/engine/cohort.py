"""Clients' graphs and modules on a device, one by one or as a group: what training changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_graph.engine.grouped import (
    FeatureRows,
    Layout,
    Tensors,
    feature_rows,
    group_modules,
    is_linear,
    laid_out,
    stack_of,
)
from flower_graph.ops.adam import MOMENTS, in_memory_order, moments_of
from flower_graph.ops.graph import Adjacency
from flower_graph.ops.grouped import group_sum
from flower_graph.ops.links import LinkSplit
from flower_graph.wire.keys import MAX_CLASSES

BEGUN = "/begun"  # behind the name of a first layer by rows: the matrix that the round began with


class GraphOnDevice(NamedTuple):
    """A client's graph on its module's device, or the graphs of several clients as one."""

    clients: tuple[int, ...]
    # Any: [n, f] dense, or an ``Adjacency`` [n, r] where first layers have active rows
    x: Any
    edge_index: Tensor  # [2, e]; without edges at a graphless client
    y: Tensor  # [n]; below 0 without a label
    masks: dict[str, Tensor]  # [n] bool by role: train, val, test
    edge_weight: Tensor | None = None  # [e]; None: all edges count alike
    pairs: Tensor | None = None  # [2, m] of which the module is to give logits; None: of the nodes
    targets: Tensor | None = None  # [n] numbers to learn, standardised; NaN for none
    links: LinkSplit | None = None  # where links are learnt; ``edge_index`` has none held out
    layout: Layout | None = None  # of several clients' rows

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

    @property
    def rows(self) -> FeatureRows:
        """The active rows of the clients' first layers."""
        assert self.layout is not None and self.layout.rows is not None
        return self.layout.rows

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


def dense(x: Tensor) -> Tensor:
    """Return features ``[n, f]`` as a dense matrix."""
    return x if x.layout == torch.strided else x.to_dense()


# Any: a ``ClientGraph`` or what has its fields
def placed_on(graph: Any, device: torch.device, *, is_dense: bool = True) -> GraphOnDevice:
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


def check_classes(num_classes: int) -> None:
    """Refuse more classes than a run can have, before weights are made for them."""
    if not 1 <= num_classes <= MAX_CLASSES:
        raise ValueError(f"num_classes is {num_classes}, must be from 1 to {MAX_CLASSES}")


# Any: as for ``placed_on``
def check_sizes(graph: Any, num_features: int, num_classes: int) -> None:
    """Refuse a client whose features or classes differ from the run's; name the client."""
    check_classes(num_classes)
    if graph.x.shape[1] != num_features:
        given = f"{graph.x.shape[1]} features"
        raise ValueError(f"client {graph.client} has {given}, the run has {num_features}")
    if graph.y.numel() and (largest := int(graph.y.max())) >= num_classes:
        raise ValueError(
            f"client {graph.client} has class {largest}, allowed: 0 to {num_classes - 1}"
        )


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def first_tensors(
    module: nn.Module, features: Sequence[Tensor], by_rows: Sequence[str], *, keeps_moments: bool
) -> Tensors:
    """Return the stacks of clients that have not trained yet, as ``Cohort`` takes them."""
    of_each = dict(module.state_dict())
    for name, parameter in trained_parameters(module) if keeps_moments else ():
        of_each |= {f"{name}/{moment}": value for moment, value in moments_of(parameter).items()}
    rows = feature_rows(features)[1] if by_rows else None
    result = Tensors()
    for name, value in of_each.items():
        weight, _, moment = name.partition("/")
        if rows is None or weight not in by_rows or moment == MOMENTS[2]:
            result[name] = stack_of(value, len(features))
            continue
        matrix = by_feature(module, weight, value.detach())
        result[name] = matrix[rows.feature]
        if not moment:
            result[name + BEGUN] = matrix.clone()
    return result


def by_feature(module: nn.Module, name: str, matrix: Tensor) -> Tensor:
    """Return a first layer with features as rows, ``[f, h]``; or such a matrix as the layer's."""
    return matrix.T if is_linear(module.get_submodule(name.rpartition(".")[0])) else matrix


# Several clients ---------------------------------------------------------------------------------


def joined(graphs: Sequence[GraphOnDevice], *, by_rows: bool = False) -> GraphOnDevice:
    """Return several clients' graphs as one block-diagonal graph."""
    first, device = graphs[0], graphs[0].y.device
    nodes = [graph.y.numel() for graph in graphs]
    layout = Layout.of(nodes, [graph.edge_index.shape[1] for graph in graphs], device)
    edges = [graph.edge_index + start for graph, start in zip(graphs, layout.ptr, strict=False)]
    weights = [graph.edge_weight for graph in graphs]
    x: Tensor | Adjacency
    if by_rows:
        features, rows = feature_rows([graph.x.cpu() for graph in graphs])
        x = features.to(device)
        layout = replace(layout, rows=rows.to(device))
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


class Group(NamedTuple):
    """Some clients as one, and their part of a cohort's stacks."""

    learner: Learner
    stacks: Tensors
    index: dict[str, Tensor]  # where they are in each stack; empty: the group has all clients


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

    Attributes
    ----------
    graphs : dict
        The clients' graphs, by the clients' numbers.
    """

    # Any: an optimiser of PyTorch or of this library
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
        self.module, self._optimiser = module, optimiser
        self.graphs = {graph.client: graph for graph in graphs}
        self._places = {client: place for place, client in enumerate(self.graphs)}
        self._alone: dict[int, Learner] = {}
        self._together: dict[tuple[int, ...], Group] = {}

    @property
    def rows(self) -> FeatureRows:
        """The active rows of all clients."""
        return self.group(self.clients).learner.graph.rows

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Iterator[Learner]:
        """Go through the clients one by one."""
        return map(self.alone, self.graphs)

    def alone(self, client: int) -> Learner:
        """Return one client; its module and moments are views of the stacks."""
        if client not in self._alone:
            place, module = self._places[client], deepcopy(self.module)
            names = [n for n in self.tensors if n.partition("/")[0] not in self.by_rows]
            own = {name: self.tensors[name][place] for name in names}
            own |= {name: self._dense(name, place) for name in self.by_rows}
            module.load_state_dict({name: own[name] for name in module.state_dict()}, assign=True)
            learner = Learner(module, self._adam(module, own), self.graphs[client])
            if self.by_rows:
                return learner  # a copy
            self._alone[client] = learner
        return self._alone[client]

    def _dense(self, name: str, place: int) -> Tensor:
        """Return a client's first layer with all rows, ``[h, f]``."""
        weight, at = self.tensors[name + BEGUN].clone(), self.rows.at([place])
        weight[self.rows.feature[at]] = self.tensors[name][at]
        return by_feature(self.module, name, weight).contiguous()

    @property
    def names(self) -> list[str]:
        """The names of what a client's ``state_dict`` has."""
        return list(self.module.state_dict())

    @property
    def clients(self) -> list[int]:
        return [*self.graphs]

    def take_over(
        self, learner: Learner, name: str, held: Tensor, value: Tensor, *, replace: bool = True
    ) -> Tensor:
        """Let clients begin with a weight that came; return it in the form that they hold.

        ``value`` is one for all clients of a group, or has one for each.
        """
        layout = learner.graph.layout
        if name in self.by_rows and layout is not None and layout.rows is not None:
            begun = self.tensors[name + BEGUN].copy_(by_feature(self.module, name, value))
            value = begun[layout.rows.feature]
        if replace:
            held.copy_(value)
        return value.to(held).expand_as(held)

    def finite(self, more: Iterable[str] = ()) -> set[int]:
        """Return the clients of whose parameters, and of what is named, all numbers are finite."""
        names = {name for name, _ in self.module.named_parameters()}.union(more)
        totals = []
        for name in names:
            stack = in_memory_order(self.tensors[name].detach())
            total = stack.flatten(1).sum(1) if stack.dim() > 1 else stack
            if name in self.by_rows:
                total = total.new_zeros(len(self)).index_add_(0, self.rows.owner, total)
            totals.append(total.expand(len(self)))
        good: list[bool] = torch.stack([t.isfinite() for t in totals], 1).all(1).tolist()
        return {client for client, is_good in zip(self.graphs, good, strict=True) if is_good}

    def restart(self, clients: Sequence[int], start: Callable[[], Tensors]) -> None:
        """Let some clients have the tensors again that they began with."""
        places = [self._places[client] for client in clients]
        for name, first in start().items() if places else ():
            if not name.endswith(BEGUN):
                at = self._index(name, places)
                self.tensors[name].detach()[at] = first[at].to(self.tensors[name])

    def sums(
        self,
        names: Iterable[str],
        weights: Mapping[int, int],
        read: Callable[[Tensor], Tensor] = Tensor.double,
    ) -> Tensors:
        """Add up some clients' part of some stacks by weight, client by client.

        ``read`` gives the numbers to add: by default float64.
        """
        at, result = [self._places[client] for client in weights], Tensors()
        for name in names:
            stack = self.tensors[name].detach()
            if name in self.by_rows:
                total = by_feature(self.module, name, self._sum_of_rows(name, weights, read))
            else:
                total = torch.zeros_like(read(stack[0]))
                for part, weight in zip(read(stack[at]), weights.values(), strict=True):
                    total.add_(part, alpha=weight)
            result[name] = total.cpu()
        return result

    def _sum_of_rows(
        self, name: str, weights: Mapping[int, int], read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Add up first layers, the active rows and for the others those of before, ``[f, h]``."""
        (feature, owner, _), active = self.rows, self.tensors[name].detach()
        total = read(self.tensors[name + BEGUN])
        share = total.new_tensor([weights.get(client, 0) for client in self.graphs])[owner]
        holders = share.new_zeros(len(total)).index_add_(0, feature, share)
        kept = share > 0  # of the others the numbers may not be finite
        if not bool(kept.all()):
            active, feature, share = active[kept], feature[kept], share[kept]
        total = total * (sum(weights.values()) - holders)[:, None]
        return total.index_add_(0, feature, read(active).mul_(share[:, None]))

    @contextmanager
    def learners(self, clients: Sequence[int]) -> Iterator[list[Learner]]:
        """Yield some clients, as a group or one by one; the stacks then have their changes."""
        if not self._is_grouped or len(clients) < (1 if self.by_rows else 2):
            yield [self.alone(client) for client in clients]
            return
        group = self.group(clients)
        with torch.no_grad():
            for name, at in group.index.items():
                group.stacks[name].copy_(self.tensors[name][at])
        yield [group.learner]
        self.write(group)

    @torch.no_grad()
    def write(self, group: Group) -> None:
        """Put a group's changes into the stacks of all."""
        for name, at in group.index.items():
            self.tensors[name][at] = group.stacks[name]

    def group(self, clients: Sequence[int]) -> Group:
        """Return some clients as a group, which is kept until another one than all is wanted."""
        if (group := self._together.get(tuple(clients))) is None:
            graph = joined([self.graphs[one] for one in clients], by_rows=bool(self.by_rows))
            assert graph.layout is not None
            held = {n: one for n, one in self.tensors.items() if n.partition("/")[0] in self.names}
            stacks = {n: one for n, one in held.items() if not n.endswith(BEGUN)}
            index = dict[str, Tensor]()
            if list(clients) != self.clients:
                places = [self._places[client] for client in clients]
                index = {name: self._index(name, places) for name in stacks}
                stacks = {name: laid_out(stacks[name][at]) for name, at in index.items()}
            module = group_modules(self.module, stacks, graph.layout)
            adam = self._adam(module, stacks, len(clients))
            if graph.layout.rows is not None:
                parameters = dict(module.named_parameters())
                adam.bounds = {parameters[name]: graph.layout.rows.ptr for name in self.by_rows}
            kept = {key: one for key, one in self._together.items() if len(key) == len(self.graphs)}
            group = Group(Learner(module, adam, graph), stacks, index)
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


# Predictions


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
