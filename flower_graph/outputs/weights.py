"""Saved models of clients: shared tensors once, and each client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.foreign import NOBODY, Trust
from flower_graph.errors import OutputError
from flower_graph.storage.reading import Tree

KINDS = ("shared", "own", "rows")  # of the tensors' names if models have several forms


class SparseRows(NamedTuple):
    """The rows of one weight matrix in which clients differ: those of their features.

    Attributes
    ----------
    name : str
        The weight's name in the ``state_dict``.
    values : Tensor
        ``[R, h]`` the rows of all clients, concatenated.
    feature : Tensor
        ``[R]`` int64, which feature each row is of.
    ptr : Tensor
        ``[c + 1]`` int64, where each client's rows begin.
    transposed : bool
        Whether the weight has features in columns, ``[h, f]``, as a ``Linear`` has.
    """

    name: str
    values: Tensor
    feature: Tensor
    ptr: Tensor
    transposed: bool = False

    def check(self, shared: Mapping[str, Tensor], count: int) -> None:
        matrix, whole = shared[self.name], (torch.int64, torch.int32)
        if matrix.dim() != 2 or self.values.dim() != 2 or type(self.transposed) is not bool:
            raise ValueError(f"rows of {self.name}: are of no matrix")
        width, height = matrix.shape if self.transposed else matrix.T.shape
        if self.values.shape != (len(self.feature), width) or self.ptr.shape != (count + 1,):
            raise ValueError(f"rows of {self.name}: are not {len(self.feature)} of width {width}")
        if self.feature.dim() != 1 or {self.feature.dtype, self.ptr.dtype} - {*whole}:
            raise ValueError(f"rows of {self.name}: feature and ptr are no whole numbers")
        if bool(((self.feature < 0) | (self.feature >= height)).any()):
            raise ValueError(f"rows of {self.name}: a feature is not below {height}")
        ends = int(self.ptr[0]), int(self.ptr[-1])
        if ends != (0, len(self.feature)) or bool((self.ptr.diff() < 0).any()):
            raise ValueError(f"rows of {self.name}: ptr goes from {ends[0]} to {ends[1]}")

    @classmethod
    def join(cls, parts: Sequence[SparseRows]) -> SparseRows:
        counts = torch.cat([one.ptr.diff() for one in parts])
        return parts[0]._replace(
            values=torch.cat([one.values for one in parts]),
            feature=torch.cat([one.feature for one in parts]),
            ptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        )


@dataclass
class SavedModels:
    """Models of one form, of some clients.

    Attributes
    ----------
    module : str
        The dotted name of the module's class.
    arguments : dict
        The module's arguments, which JSON can hold.
    clients : list of int
        The clients' numbers; -1 for a server's.
    shared : dict of str to Tensor
        Entries of the ``state_dict`` that all clients share.
    own : dict of str to Tensor
        The others, stacked: ``[c, ...]``.
    rows : SparseRows or None
        The rows of ``shared[rows.name]`` in which each client differs.
    trust : Trust
        Whether the class may be one that the user does not have.
    """

    module: str
    arguments: Tree
    clients: list[int]
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    rows: SparseRows | None = None
    trust: Trust = NOBODY

    def check(self) -> None:
        if type(self.module) is not str or type(self.arguments) is not dict:
            raise ValueError("module and arguments are not a name and a mapping")
        numbers = self.clients
        if type(numbers) is not list or any(type(one) is not int or one < -1 for one in numbers):
            raise ValueError("clients are not a list of numbers")
        if len(set(numbers)) < len(numbers):
            raise ValueError("clients are not different numbers")
        for name, value in self.own.items():
            if value.dim() < 1 or len(value) != len(numbers):
                raise ValueError(f"{name} is {list(value.shape)} for {len(numbers)} clients")
        if self.rows is not None:
            self.rows.check(self.shared, len(numbers))

    def state_dict(self, client: int) -> dict[str, Tensor]:
        """Return one client's dense weights, as its module takes them."""
        if client not in self.clients:
            raise OutputError(f"client {client}: no model of it; there are {_some(self.clients)}")
        index = self.clients.index(client)
        state = dict(self.shared) | {name: value[index] for name, value in self.own.items()}
        if self.rows is not None:
            name, values, feature, ptr, transposed = self.rows
            begin, end = int(ptr[index]), int(ptr[index + 1])
            dense = state[name].clone()
            # A view: writing into it changes `dense`.
            by_feature = dense.T if transposed else dense
            by_feature[feature[begin:end].long()] = values[begin:end].to(dense.dtype)
            state[name] = dense
        return state

    @classmethod
    def join(cls, parts: Sequence[SavedModels]) -> list[SavedModels]:
        """Join models of one form that share the same weights, which are stored once."""
        groups: list[list[SavedModels]] = []
        for one in parts:
            same = next((group for group in groups if group[0].is_like(one)), None)
            if same is None:
                groups.append([one])
            else:
                same.append(one)
        return [cls._joined(group) for group in groups]

    @classmethod
    def _joined(cls, parts: Sequence[SavedModels]) -> SavedModels:
        own = {name: torch.cat([one.own[name] for one in parts]) for name in parts[0].own}
        alike = {name: value[0] for name, value in own.items() if bool((value == value[0]).all())}
        rows = [one.rows for one in parts if one.rows is not None]
        return replace(
            parts[0],
            clients=[client for one in parts for client in one.clients],
            shared=parts[0].shared | alike,
            own={name: value for name, value in own.items() if name not in alike},
            rows=SparseRows.join(rows) if rows else None,
        )

    def is_like(self, other: SavedModels) -> bool:
        """Whether the two differ only in clients, their own entries and rows."""
        rows = [None if one.rows is None else one.rows[::4] for one in (self, other)]
        return (
            (self.module, self.arguments) == (other.module, other.arguments)
            and rows[0] == rows[1]
            and self.shared.keys() == other.shared.keys()
            and all(torch.equal(value, other.shared[n]) for n, value in self.shared.items())
        )


def saved_models(entries: list[Tree], tensors: dict[str, Tensor]) -> list[SavedModels]:
    """Join the models of several forms that files have."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, kind, own = name.split("/", 2)
        parts.setdefault(f"{number}/{kind}", {})[own] = tensor
    models = []
    for index, entry in enumerate(entries):
        shared, local, in_rows = (parts.get(f"{index}/{kind}", {}) for kind in KINDS)
        rows = None if entry.get("rows") is None else SparseRows(**{**entry["rows"], **in_rows})
        wanted = entry["module"], entry["arguments"], entry["clients"]
        models.append(SavedModels(*wanted, shared, local, rows))
    return models


def _some(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:5]))
    return shown + (", ..." if len(clients) > 5 else "")
