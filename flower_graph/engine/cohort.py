"""Clients' graphs and modules on a device, one by one or as a group: what training changes.

In a group, modules of one form, one a client, are one module over the clients' block-diagonal
graph. Every parameter and buffer gets an axis of clients in front: a *stack* ``[c, ...]``. A linear
layer multiplies each client's rows with the client's own matrix; a module that has other parameters
finds a row of them for each node. So no layer needs another ``forward``: no edge joins two clients,
and the graph convolutions of PyTorch Geometric never notice. A first layer may be stored by active
rows, ``[r, h]``.

Not every module can be grouped: one that pools over all nodes would mix clients. So a step of a
group is compared with the steps of its clients before the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flower_graph.ops.adam import MOMENTS, in_memory_order, moments_of
from flower_graph.ops.dropout import kept_of
from flower_graph.ops.graph import Adjacency, both_ways, entries, pointers, propagate
from flower_graph.ops.grouped import group_sum, grouped_linear
from flower_graph.ops.links import LinkSplit
from flower_graph.rng import generator
from flower_graph.wire.keys import MAX_CLASSES, ROLES

Tensors = dict[str, Tensor]
ALIKE = 1e-3  # how far, relative to the largest, a gradient may differ between group and client
RAW = nn.ParameterDict | nn.ParameterList  # whose parameters are read as stacks
BEGUN = "/begun"  # behind the name of a first layer by rows: the matrix that the round began with


@dataclass(frozen=True)
class Layout:
    """The rows of each client in a block-diagonal graph."""

    ptr: list[int]  # c + 1 bounds of the clients' nodes
    edge_ptr: list[int]  # ... and of their edges
    owner: Tensor  # [n] place of the client that owns a node
    rows: FeatureRows | None = None  # of first layers, if these are stored by active rows

    def rows_of(self, count: int) -> Sequence[Tensor | slice]:
        """Return each client's rows of a tensor with a row for each node, or for each edge."""
        n, e = self.ptr[-1], self.edge_ptr[-1]
        ends = self.edge_ptr if count == e and n != e else self.ptr
        rows = [slice(*both) for both in pairwise(ends)]
        if count in (n, e):
            return rows
        if count == n + e:  # layers of PyG add a loop at each node after all edges
            edges = [torch.arange(*both) for both in pairwise(self.edge_ptr)]
            loops = [torch.arange(*both) + e for both in pairwise(self.ptr)]
            return [torch.cat(both) for both in zip(edges, loops, strict=True)]
        raise ValueError(f"{count} rows: neither the {n} nodes' nor the {e} edges'")


# First layers by active rows ----------------------------------------------------------------------


class FeatureRows(NamedTuple):
    """The active rows of the clients' first layers: row ``k`` if a client's node has feature ``k``.

    The other rows never touch a client's output. They stay as they were when the round began: in a
    dense layer weight decay alone would move them by Adam's full step, against the clients that
    have the feature.
    """

    feature: Tensor  # [r] the feature that a row is of
    owner: Tensor  # [r] place of the client that has the row
    ptr: list[int]  # c + 1 bounds of the clients' rows

    def at(self, places: Sequence[int]) -> Tensor:
        """Return which rows some clients have."""
        return torch.cat([torch.arange(self.ptr[one], self.ptr[one + 1]) for one in places])

    def to(self, device: torch.device | str) -> FeatureRows:
        return FeatureRows(self.feature.to(device), self.owner.to(device), self.ptr)


def feature_rows(features: Sequence[Tensor]) -> tuple[Adjacency, FeatureRows]:
    """Concatenate clients' features ``[n_i, f]``: a sparse ``[n, r]``, a column an active row."""
    bounds, width = accumulate((len(x) for x in features), initial=0), features[0].shape[1]
    parts = []
    for place, (x, start) in enumerate(zip(features, bounds, strict=False)):
        node, feature, value = entries(x)
        parts.append((node + start, feature + place * width, value.float()))
    row, key, value = map(torch.cat, zip(*parts, strict=True))
    active, column = torch.unique(key, return_inverse=True)
    matrix = both_ways(row, column, value, sum(map(len, features)), active.numel())
    owner = active // width
    return matrix, FeatureRows(active % width, owner, pointers(owner, len(features)).tolist())


# Stacks -------------------------------------------------------------------------------------------


@torch.no_grad()
def spread_(stacks: Iterable[Tensor]) -> None:
    """Give the clients of equal stacks numbers of their own, near those that they have."""
    chance = torch.Generator().manual_seed(0)
    for stack in stacks:
        if stack.is_floating_point():
            drawn = torch.randn(stack.shape, generator=chance).to(stack.device)
            stack.mul_(1 + drawn / 10).add_(drawn, alpha=0.05)


def laid_out(stack: Tensor) -> Tensor:
    """Return a stack whose matrices lie transposed, ``[c, in, out]``, for a sparse product."""
    return stack.transpose(1, 2).contiguous().transpose(1, 2) if stack.dim() == 3 else stack


# Modules ------------------------------------------------------------------------------------------


def group_modules(module: nn.Module, stacks: Mapping[str, Tensor], layout: Layout) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are stacks ``[c, ...]``.

    Stacks have the names of the module's ``state_dict``, which has all of its buffers.
    """
    result = deepcopy(module)
    for prefix, part in result.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, value in part._parameters.items():
            if value is not None:
                stack = stacks[start + name]
                part._parameters[name] = nn.Parameter(stack, requires_grad=value.requires_grad)
        for name in [name for name, value in part._buffers.items() if value is not None]:
            part._buffers[name] = stacks[start + name]
        if part._parameters or part._buffers:
            kind: Any = type(part)  # mypy: a type is hashable
            part.__class__ = _grouped(kind)
            part.__dict__["_layout"] = layout
    if any(value.data_ptr() != stacks[n].data_ptr() for n, value in result.state_dict().items()):
        raise ValueError(f"{type(module).__name__}: its state is no view of its parameters")
    return result


class _Rows(nn.Module):
    """Gives each node its client's row of a parameter."""

    _layout: Layout

    def __getattr__(self, name: str) -> Any:  # as of ``nn.Module``
        value: Any = super().__getattr__(name)
        is_held = name in self._parameters or name in self._buffers
        if value is None or not is_held or (value.dim() > 2 and value.shape[1] > 1):
            return value
        rows = value.index_select(0, self._layout.owner)
        if rows.dim() == 1:
            return rows[:, None]
        return rows.squeeze(1) if rows.dim() > 2 else rows  # [n, 1, H, C] to [n, H, C]

    # Any: as of ``nn.Module``; PyG's linear layer has another
    def _save_to_state_dict(self, *to: Any, **how: Any) -> None:
        nn.Module._save_to_state_dict(self, *to, **how)


class _Linear(_Rows):
    """Multiplies each client's rows with the client's own matrix."""

    def __getattr__(self, name: str) -> Any:  # as of ``nn.Module``
        return self._parameters["weight"] if name == "weight" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiplied(x, self._parameters["bias"])

    def product(self, x: Tensor | Adjacency) -> Tensor:
        if isinstance(x, Tensor):
            return self._multiplied(x, None)
        if self.weight.dim() == 2:  # by active rows, of which the features have a column each
            return propagate(x, self.weight)
        blocks = self._blocks(x)
        weight: Tensor = self.weight.transpose(1, 2)
        return propagate(blocks, weight.reshape(-1, weight.shape[2]))

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() != 2 or len(x) != self._layout.ptr[-1]:
            raise ValueError(f"a linear layer of a group takes a row a node, not {[*x.shape]}")
        return grouped_linear(x, self.weight.transpose(1, 2), bias, self._layout.ptr)

    def _blocks(self, x: Adjacency) -> Adjacency:
        """Return sparse features ``[n, f]`` with columns of each client, ``[n, c f]``."""
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] is not x:
            (n, f), (row, column, value) = x.matrix.shape, entries(x.matrix)
            column, width = column + f * self._layout.owner[row], f * (len(self._layout.ptr) - 1)
            kept = self.__dict__["_kept"] = x, both_ways(row, column, value, n, width)
        return kept[1]


@cache
def _grouped(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, RAW):
        return kind
    return type(kind.__name__, (_Linear if is_linear(kind) else _Rows, kind), {})


def is_linear(kind: type[nn.Module]) -> bool:
    """Whether it is PyTorch's linear layer or PyG's: its weight has features as columns."""
    # By name: PyG need not be installed
    is_pyg = kind.__module__ == "torch_geometric.nn.dense.linear" and kind.__name__ == "Linear"
    return is_pyg or issubclass(kind, nn.Linear)


# Dropout ------------------------------------------------------------------------------------------


class ClientDropout(TorchFunctionMode):
    """Draws each client's rows from a stream of its own, as PyTorch would for the client alone."""

    def __init__(self, layout: Layout, chances: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._layout, self.chances = layout, chances

    # Any: as of PyTorch
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.dropout or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return self._dropout(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0 < p < 1:
            return functional.dropout(input, p, training)
        kept = torch.empty_like(input, dtype=torch.bool)
        rows_of = self._layout.rows_of(len(input))
        for rows, chance in zip(rows_of, self.chances, strict=True):
            kept[rows] = kept[rows].bernoulli_(1 - p, generator=chance)
        return kept_of(input, kept, p)


# Whether a group does what its clients do --------------------------------------------------------


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Raise ``ValueError`` if the block draws from PyTorch's global stream."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise ValueError("it draws from the global stream, which the clients would share")


def same_numbers(
    of_group: Mapping[str, Tensor], of_clients: Sequence[Mapping[str, Tensor]]
) -> bool:
    """Whether a group's numbers ``[c, ...]`` are its clients'; an unused parameter has none."""
    for name, stack in of_group.items():
        alone = torch.stack([one[name] for one in of_clients])
        largest = float(alone.abs().max()) if alone.numel() else 0.0
        if not torch.allclose(stack, alone, rtol=ALIKE, atol=ALIKE * largest, equal_nan=True):
            return False
    return all(one.keys() == of_group.keys() for one in of_clients)


# Graphs and modules ------------------------------------------------------------------------------


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
        (client,) = self.clients
        return client

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

    def judged(self, logits: Tensor) -> Judged:
        """Set predictions ``[n, k]`` beside the labels."""
        return Judged(logits, self.y, self.masks, self.ptr)

    def sum_of_means(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sum each client's mean of ``values`` ``[m]``, of its nodes in ``mask`` ``[n]``."""
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
    # Of a group: its part of a cohort's stacks, and its places in each; none if it has all clients
    stacks: Tensors = field(default_factory=dict)
    places: Tensors = field(default_factory=dict)


# Any: a ``ClientGraph`` or what has its fields
def placed_on(graph: Any, device: torch.device, *, is_dense: bool = True) -> GraphOnDevice:
    """Move a client's graph to its module's device."""
    edges, weight = graph.edge_index, graph.edge_weight
    return GraphOnDevice(
        (graph.client,),
        (graph.x.to_dense() if is_dense else graph.x).to(device),
        (torch.zeros((2, 0), dtype=torch.int64) if edges is None else edges).to(device),
        graph.y.to(device),
        {role: getattr(graph, f"{role}_mask").to(device) for role in ROLES},
        None if weight is None else weight.to(device),
    )


def check_classes(num_classes: int) -> None:
    """Refuse more classes than a run can have, before weights are made for them."""
    if not 1 <= num_classes <= MAX_CLASSES:
        raise ValueError(f"num_classes is {num_classes}, must be from 1 to {MAX_CLASSES}")


# Any: as for ``placed_on``
def check_sizes(graph: Any, num_features: int, num_classes: int) -> None:
    """Refuse a client whose features or classes differ from the run's; name the client."""
    client, found = graph.client, graph.x.shape[1]
    if found != num_features:
        raise ValueError(f"client {client} has {found} features, the run has {num_features}")
    if graph.y.numel() and (largest := int(graph.y.max())) >= num_classes:
        raise ValueError(f"client {client} has class {largest}, allowed: 0 to {num_classes - 1}")


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def by_feature(module: nn.Module, name: str, matrix: Tensor) -> Tensor:
    """Return a first layer with features as rows, ``[f, h]``; or such a matrix as the layer's."""
    return matrix.T if is_linear(type(module.get_submodule(name.rpartition(".")[0]))) else matrix


# Several clients ---------------------------------------------------------------------------------


def joined(graphs: Sequence[GraphOnDevice], *, by_rows: bool = False) -> GraphOnDevice:
    """Return several clients' graphs as one block-diagonal graph."""
    nodes, edges = [one.y.numel() for one in graphs], [one.edge_index for one in graphs]
    device, owner = graphs[0].y.device, torch.arange(len(graphs))
    ptr, edge_ptr = list(accumulate(nodes, initial=0)), [0, *accumulate(e.shape[1] for e in edges)]

    def together(name: str) -> Any:  # a field of all graphs, or None
        parts = [getattr(graph, name) for graph in graphs]
        return None if parts[0] is None else torch.cat(parts)

    if by_rows:
        x, rows = feature_rows([graph.x.cpu() for graph in graphs])
    layout = Layout(
        ptr,
        edge_ptr,
        owner.repeat_interleave(torch.tensor(nodes)).to(device),
        rows.to(device) if by_rows else None,
    )
    return GraphOnDevice(
        tuple(graph.client for graph in graphs),
        x.to(device) if by_rows else together("x"),
        torch.cat([one + start for one, start in zip(edges, ptr, strict=False)], 1),
        together("y"),
        {role: torch.cat([one.masks[role] for one in graphs]) for role in graphs[0].masks},
        together("edge_weight"),
        targets=together("targets"),
        layout=layout,
    )


class Cohort:
    """The modules of several clients, which train as one group or one by one.

    Parameters
    ----------
    module : nn.Module
        A client's first module.
    graphs : sequence of GraphOnDevice
        The clients' graphs; the attribute has them by the clients' numbers.
    tensors : dict, optional
        Stacks ``[c, ...]`` of what the modules' ``state_dict`` has and, as ``<name>/<moment>``, of
        what optimisers keep; by default of clients that have not trained yet. The attribute has
        them on the graphs' device, and training changes it in place. Of a first layer by active
        rows ``[r, h]``, and as ``<name>/begun`` the matrix ``[f, h]`` that the round began with.
    optimiser : callable
        Makes an optimiser of a module.
    is_grouped, keeps_moments : bool
        Whether they train as a group; whether new tensors have what an ``Adam`` keeps.
    by_rows : sequence of str
        The weights that are stored by active rows; such clients train as a group.
    """

    # Any: an optimiser of PyTorch or of this library
    def __init__(
        self,
        module: nn.Module,
        graphs: Sequence[GraphOnDevice],
        tensors: Tensors | None,
        optimiser: Callable[[nn.Module], Any],
        *,
        is_grouped: bool = False,
        by_rows: Sequence[str] = (),
        keeps_moments: bool = True,
    ) -> None:
        self._is_grouped, self.by_rows = is_grouped or bool(by_rows), by_rows
        device = graphs[0].y.device
        self.module, self._optimiser = module.to(device), optimiser
        self.graphs = {graph.client: graph for graph in graphs}
        self._keeps_moments = keeps_moments
        self.tensors = Tensors()
        for name, value in (self._first() if tensors is None else tensors).items():
            one = value if name.endswith("/step") else value.to(device)  # counted on the CPU
            self.tensors[name] = laid_out(one) if self._is_grouped else one
        self._places = {client: place for place, client in enumerate(self.graphs)}
        self._alone: dict[int, Learner] = {}
        self._together: dict[tuple[int, ...], Learner] = {}

    def _first(self) -> Tensors:
        """Return the stacks of clients that have not trained yet."""
        of_each, result = dict(self.module.state_dict()), Tensors()
        for name, parameter in trained_parameters(self.module) if self._keeps_moments else ():
            of_each |= {f"{name}/{moment}": one for moment, one in moments_of(parameter).items()}
        for name, value in of_each.items():
            weight, _, moment = name.partition("/")
            if weight not in self.by_rows or moment == MOMENTS[2]:
                result[name] = torch.stack([value.detach()] * len(self))
                continue
            matrix = by_feature(self.module, weight, value.detach())
            result[name] = matrix[self.rows.feature]
            if not moment:
                result[name + BEGUN] = matrix.clone()
        return result

    @cached_property
    def _joined(self) -> GraphOnDevice:
        return joined([*self.graphs.values()], by_rows=bool(self.by_rows))

    @property
    def rows(self) -> FeatureRows:
        """The active rows of all clients."""
        return self._joined.rows

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Iterator[Learner]:
        """Go through the clients one by one."""
        return map(self.alone, self.graphs)

    def alone(self, client: int) -> Learner:
        """Return one client; its module and moments are views of the stacks."""
        if client in self._alone:
            return self._alone[client]
        place, module = self._places[client], deepcopy(self.module)
        names = [n for n in self.tensors if n.partition("/")[0] not in self.by_rows]
        own = {name: self.tensors[name][place] for name in names}
        own |= {name: self._dense(name, place) for name in self.by_rows}
        module.load_state_dict({name: own[name] for name in module.state_dict()}, assign=True)
        learner = Learner(module, self._adam(module, own), self.graphs[client])
        if not self.by_rows:  # else it is a copy
            self._alone[client] = learner
        return learner

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
        """Let clients begin with a weight, one for all or each; return it as they hold it."""
        layout = learner.graph.layout
        if name in self.by_rows and layout is not None and layout.rows is not None:
            begun = self.tensors[name + BEGUN].copy_(by_feature(self.module, name, value))
            value = begun.index_select(0, layout.rows.feature)
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

    def restart(self, clients: Sequence[int]) -> None:
        """Let some clients have the tensors again that they began with."""
        places = [self._places[client] for client in clients]
        for name, first in self._first().items() if places else ():
            if not name.endswith(BEGUN):
                at = self._index(name, places)
                self.tensors[name].detach()[at] = first[at].to(self.tensors[name])

    def total(
        self,
        name: str,
        weights: Mapping[int, int],
        read: Callable[[Tensor], Tensor] = Tensor.double,
    ) -> Tensor:
        """Add up some clients' part of a stack by weight, in the form that ``read`` gives."""
        if name in self.by_rows:
            return by_feature(self.module, name, self._sum_of_rows(name, weights, read)).cpu()
        stack, at = self.tensors[name].detach(), [self._places[client] for client in weights]
        total = torch.zeros_like(read(stack[0]))
        for part, weight in zip(read(stack[at]), weights.values(), strict=True):
            total.add_(part, alpha=weight)
        return total.cpu()

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
            for name, at in group.places.items():
                group.stacks[name].copy_(self.tensors[name][at])
        yield [group]
        self.write(group)

    @torch.no_grad()
    def write(self, group: Learner) -> None:
        """Put a group's changes into the stacks of all."""
        for name, at in group.places.items():
            self.tensors[name][at] = group.stacks[name]

    def group(self, clients: Sequence[int]) -> Learner:
        """Return some clients as a group, which is kept until another one than all is wanted."""
        if (group := self._together.get(tuple(clients))) is not None:
            return group
        is_all, graph, names = list(clients) == self.clients, self._joined, self.names
        index = dict[str, Tensor]()
        stacks = {
            name: stack
            for name, stack in self.tensors.items()
            if name.partition("/")[0] in names and not name.endswith(BEGUN)
        }
        if not is_all:
            graph = joined([self.graphs[one] for one in clients], by_rows=bool(self.by_rows))
            places = [self._places[client] for client in clients]
            index = {name: self._index(name, places) for name in stacks}
            stacks = {name: laid_out(stacks[name][at]) for name, at in index.items()}
        assert graph.layout is not None
        module = group_modules(self.module, stacks, graph.layout)
        adam = self._adam(module, stacks, len(clients))
        if graph.layout.rows is not None:
            parameters = dict(module.named_parameters())
            adam.bounds = {parameters[name]: graph.layout.rows.ptr for name in self.by_rows}
        kept = {key: one for key, one in self._together.items() if len(key) == len(self.graphs)}
        group = Learner(module, adam, graph, stacks, index)
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


class Cohorts(Cohort):
    """Clients whose modules differ in form: a cohort for each form, used as one.

    Parameters
    ----------
    makes : dict of str to callable
        Makes, by the name of a form, the cohort of its clients from their tensors.
    tensors : dict, optional
        Those of all, as ``<name of the form>:<name>``; by default of clients that have not trained.
    """

    def __init__(
        self, makes: Mapping[str, Callable[[Tensors | None], Cohort]], tensors: Tensors | None
    ) -> None:
        self.tensors, self.by_rows, self._parts = Tensors(), (), list[Cohort]()
        for form, make in makes.items():
            start, every = f"{form}:", (tensors or {}).items()
            own = {n.removeprefix(start): one for n, one in every if n.startswith(start)}
            self._parts.append(part := make(own or None))
            self.tensors |= {start + name: one for name, one in part.tensors.items()}
        self.module = self._parts[0].module  # whose shared entries are all modules'
        every_graph = (one for part in self._parts for one in part.graphs.items())
        self.graphs = dict(sorted(every_graph, key=lambda one: one[0]))

    def alone(self, client: int) -> Learner:
        (part,) = (one for one in self._parts if client in one.graphs)
        return part.alone(client)

    def finite(self, more: Iterable[str] = ()) -> set[int]:
        names = [*more]
        return {client for part in self._parts for client in part.finite(names)}

    def restart(self, clients: Sequence[int]) -> None:
        for part, own in self._each(clients):
            part.restart(own)

    def total(
        self,
        name: str,
        weights: Mapping[int, int],
        read: Callable[[Tensor], Tensor] = Tensor.double,
    ) -> Tensor:
        own = [(part, {one: weights[one] for one in some}) for part, some in self._each([*weights])]
        return torch.stack([part.total(name, weight, read) for part, weight in own]).sum(0)

    @contextmanager
    def learners(self, clients: Sequence[int]) -> Iterator[list[Learner]]:
        """Yield some clients, those of each form as a group or one by one."""
        with ExitStack() as stack:
            each = [stack.enter_context(part.learners(own)) for part, own in self._each(clients)]
            yield [learner for learners in each for learner in learners]

    def _each(self, clients: Sequence[int]) -> list[tuple[Cohort, list[int]]]:
        each = [(part, [one for one in clients if one in part.graphs]) for part in self._parts]
        return [(part, own) for part, own in each if own]


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


def judged_pairs(split: LinkSplit, early: Tensor, later: Tensor) -> Judged:
    """Judge logits of pairs ``[m]``; ``later``: with the validation edges, for test pairs."""
    score = torch.where(split.role == len(ROLES) - 1, later, early)
    logits = torch.stack([torch.zeros_like(score), score], 1)
    masks = {role: split.role == number for number, role in enumerate(ROLES)}
    return Judged(logits, split.is_edge.long(), masks, [0, len(score)])


# Mini-batches -------------------------------------------------------------------------------------


class MiniBatch(NamedTuple):
    """The nodes of one step; None: all nodes, and every client takes the step."""

    nodes: Tensor | None = None  # [n] whether a node is in its client's batch
    moves: Tensor | None = None  # [c] whether a client has such a batch


def epochs_of(
    graph: GraphOnDevice,
    among: Tensor,
    size: int | None,
    epochs: int,
    seed: int,
    purpose: str,
    server_round: int,
) -> Iterator[list[MiniBatch]]:
    """Divide the nodes ``among`` ``[n]`` into batches, anew in every epoch; yield its steps.

    Step ``s`` of all clients is one tensor program; a client with fewer batches skips the last
    steps. ``size`` is the nodes of a client's batch; None: all at once. A client without such nodes
    has one empty batch: it takes the first step as it does without batches. The order of a client's
    nodes depends on seed, purpose, round and its number, not on the other clients.
    """
    if size is None:
        yield from ([MiniBatch()] for _ in range(epochs))
        return
    chances = [generator(seed, "batches", purpose, one, server_round) for one in graph.clients]
    here = among.cpu()
    nodes = [first + here[first:last].nonzero().flatten() for first, last in pairwise(graph.ptr)]
    steps = torch.tensor([max(1, -(-own.numel() // size)) for own in nodes])
    for _ in range(epochs):
        number = torch.full(among.shape, -1)
        for own, chance in zip(nodes, chances, strict=True):
            drawn = torch.randperm(own.numel(), generator=chance)
            number[own[drawn]] = torch.arange(own.numel()) // size
        number = number.to(among.device)
        yield [MiniBatch(number == s, steps > s) for s in range(int(steps.max()))]
