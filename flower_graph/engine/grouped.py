"""Modules of one form, one a client, as one module over the clients' block-diagonal graph.

Every parameter and buffer gets an axis of clients in front: a *stack* ``[c, ...]``. A linear layer
multiplies each client's rows with the client's own matrix; a module that has other parameters finds
a row of them for each node. So no layer needs another ``forward``: no edge joins two clients, and
the graph convolutions of PyTorch Geometric never notice. A first layer may be stored by active
rows, ``[r, h]``.

Not every module can be grouped: one that pools over all nodes would mix clients. So a step of a
group is compared with the steps of its clients before the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flower_graph.ops.dropout import kept_of
from flower_graph.ops.graph import Adjacency, both_ways, entries, pointers, propagate
from flower_graph.ops.grouped import grouped_linear

Tensors = dict[str, Tensor]
ALIKE = 1e-3  # how far, relative to the largest, a gradient may differ between group and client
RAW = nn.ParameterDict | nn.ParameterList  # whose parameters are read as stacks


@dataclass(frozen=True)
class Layout:
    """The rows of each client in a block-diagonal graph.

    Attributes
    ----------
    ptr, edge_ptr : list of int
        ``c + 1`` bounds of the clients' nodes and of their edges.
    owner : Tensor
        ``[n]`` place of the client that owns a node.
    rows : FeatureRows or None
        The rows of first layers, if these are stored by active rows.
    """

    ptr: list[int]
    edge_ptr: list[int]
    owner: Tensor
    rows: FeatureRows | None = None

    @classmethod
    def of(cls, nodes: Sequence[int], edges: Sequence[int], device: torch.device) -> Layout:
        ptr, edge_ptr = (list(accumulate(sizes, initial=0)) for sizes in (nodes, edges))
        owner = torch.arange(len(nodes)).repeat_interleave(torch.tensor(nodes))
        return cls(ptr, edge_ptr, owner.to(device))

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
    """Concatenate clients' features as a sparse matrix with a column for each active row.

    Parameters
    ----------
    features : sequence of Tensor
        Each client's, ``[n_i, f]``, dense or in CSR form.

    Returns
    -------
    tuple of Adjacency and FeatureRows
        The matrix ``[n, r]`` with its transpose, and the rows.
    """
    bounds, width = accumulate((len(x) for x in features), initial=0), features[0].shape[1]
    parts = []
    for place, (x, start) in enumerate(zip(features, bounds, strict=False)):
        node, feature, value = entries(x)
        parts.append((node + start, feature + place * width, value))
    row, key, value = map(torch.cat, zip(*parts, strict=True))
    active, column = torch.unique(key, return_inverse=True)
    matrix = both_ways(row, column, value, sum(map(len, features)), active.numel())
    owner = active // width
    return matrix, FeatureRows(active % width, owner, pointers(owner, len(features)).tolist())


# Stacks -------------------------------------------------------------------------------------------


def stack_of(value: Tensor, clients: int) -> Tensor:
    """Return a stack of equal values."""
    return torch.stack([value.detach()] * clients)


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


def can_group(module: nn.Module) -> bool:
    """Whether each parameter is of a linear layer, or a row that each node can have.

    A module for which this holds may still mix clients.
    """
    return all(
        is_linear(part) or isinstance(part, RAW) or _is_row(parameter)
        for part in module.modules()
        for parameter in part._parameters.values()
        if parameter is not None
    )


def group_modules(module: nn.Module, stacks: Mapping[str, Tensor], layout: Layout) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are stacks.

    Parameters
    ----------
    module : nn.Module
        A client's module, each of whose buffers is in its state.
    stacks : mapping of str to Tensor
        Under the names of its ``state_dict``, ``[c, ...]``. Parameters share their memory.
    layout : Layout
        The rows of the clients; shared by all parts of the module.
    """
    result = deepcopy(module)
    for prefix, part in result.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, value in part._parameters.items():
            if value is not None:
                stack = stacks[start + name]
                part._parameters[name] = nn.Parameter(stack, requires_grad=value.requires_grad)
        for name, value in part._buffers.items():
            if value is not None:
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
        if value is None or not is_held or not _is_row(value[0]):
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
    return type(kind.__name__, (_Linear if _is_linear_class(kind) else _Rows, kind), {})


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: its weight has features as columns."""
    return _is_linear_class(type(module))


def _is_linear_class(kind: type[nn.Module]) -> bool:
    """Whether it is PyTorch's linear layer or PyG's, which need not be installed."""
    is_pyg = kind.__module__ == "torch_geometric.nn.dense.linear" and kind.__name__ == "Linear"
    return is_pyg or issubclass(kind, nn.Linear)


def _is_row(parameter: Tensor) -> bool:
    is_lazy = isinstance(parameter, nn.UninitializedParameter)
    return not is_lazy and (parameter.dim() < 2 or parameter.shape[0] == 1)


# Dropout ------------------------------------------------------------------------------------------


class ClientDropout(TorchFunctionMode):
    """Draws each client's rows from a stream of its own, as PyTorch would for the client alone.

    Parameters
    ----------
    layout : Layout
        The rows of the clients.
    chances : sequence of torch.Generator
        A stream a client, for the device of the modules.
    """

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
            if isinstance(rows, slice):
                kept[rows].bernoulli_(1 - p, generator=chance)
            else:
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
