"""Clients whose graphs share nodes, from a folder of files: ids, public nodes, common roles.

Clients are numbered in the order of the files' names, and a client's nodes in that of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import AS_IS
from flower_graph.data.description import read_mask, saying
from flower_graph.data.folders.client_folder import (
    ClientFile,
    Clients,
    identities_of,
    masks_of_client,
    read_clients,
    told,
)
from flower_graph.data.gaps import NO_GAPS, Gaps
from flower_graph.data.graph import to_undirected
from flower_graph.data.partition.overlapping import OverlappingGraph, noisy_labels
from flower_graph.data.splits import ROLE_WORDS, Masks, check_roles, stratified_split
from flower_graph.errors import DataError
from flower_graph.rng import generator

NO_ROLE = -1


class Holder(NamedTuple):
    """A client as the split needs it: its nodes' numbers and classes, and masks or None."""

    where: str
    ids: Tensor
    y: Tensor
    masks: Masks | None
    shown: Sequence[object]  # what errors call the nodes


class _Held(NamedTuple):
    """The content of one file, its nodes ordered by their ids; ``[n]`` each but edges and x."""

    where: str
    ids: Tensor
    x: Tensor
    y: Tensor
    edges: Tensor
    public: Tensor | None
    masks: Masks | None
    called: tuple[str, ...] | None


def load_overlapping_folder(
    path: Path | str,
    ratios: Sequence[float],
    seed: int,
    label_noise: float = 0.0,
    *,
    features: str = AS_IS,
    gaps: Gaps = NO_GAPS,
) -> Clients[OverlappingGraph]:
    """Load one client, whose graph overlaps with others', from each graph of a folder."""
    files = read_clients(path, features, gaps)
    every_id, words = _ids(files)
    held = [_held(*each) for each in zip(files, every_id, strict=True)]
    if not any(each.edges.numel() for each in held):
        raise DataError(f"data.name = {str(path)!r}: no client has an edge, so none can embed")
    every = torch.cat([each.y for each in held])
    classes = every[every >= 0].unique()
    graphs: list[OverlappingGraph] = []
    publics = _publics(path, held)
    holders = [Holder(one.where, one.ids, one.y, one.masks, one.ids.tolist()) for one in held]
    roles = common_roles(holders, ratios, seed)
    for client, (mine, public, masks) in enumerate(zip(held, publics, roles, strict=True)):
        _check_roles(mine, client, masks, ratios)
        rng = generator(seed, "label-noise", client)
        noisy = noisy_labels(mine.y, masks.train, classes, label_noise, generator=rng)
        called = tuple(words[number] for number in mine.ids.tolist()) if words else mine.called
        parts = (mine.ids, public, mine.x, mine.y, noisy, mine.edges, *masks)
        graphs.append(OverlappingGraph(client, *parts, called))
    return told(path, files, graphs)


def _ids(files: Sequence[ClientFile]) -> tuple[list[Tensor], list[str]]:
    """Return the nodes' ids, int64 ``[n]`` each, and, if they are words, the words in order."""
    who = identities_of(files)
    words_of_all = sorted({word for _, words in who for word in words or ()})
    number = {word: index for index, word in enumerate(words_of_all)}
    result = []
    for file, (ids, words) in zip(files, who, strict=True):
        if words is None and int(ids.min()) < 0:
            raise DataError(f"{file.where}: identities have {int(ids.min())}: must be at least 0")
        result.append(torch.tensor([number[word] for word in words]) if words else ids)
    return result, words_of_all


def _held(file: ClientFile, ids: Tensor) -> _Held:
    found, y = file.found, file.found.labels
    with saying(file.where):
        public, masks = _checked_public(file.values, ids.numel()), masks_of_client(found)
    order, names = ids.argsort(), found.names
    named = any(mask is not None for mask in found.masks.values())
    assert found.edge_index is not None and isinstance(y, Tensor)
    return _Held(
        where=file.where,
        ids=ids[order],
        x=found.x[order],
        y=y[order],
        edges=to_undirected(order.argsort()[found.edge_index], ids.numel()),
        public=None if public is None else public[order],
        masks=Masks(*(mask[order] for mask in masks)) if named else None,
        called=None if names is None else tuple(names[row] for row in order.tolist()),
    )


def _checked_public(values: SimpleNamespace, n: int) -> Tensor | None:
    if getattr(values, "public", None) is None:
        return None
    public = read_mask("public", values.public, n, [])
    if public is None or public.dim() > 1:
        raise DataError(f"public is of several splits: must be bool [{n}]")
    return public


def _at_two(ids: Sequence[Tensor]) -> Tensor:
    every: Tensor
    every, counts = torch.cat(list(ids)).unique(return_counts=True)
    return every[counts >= 2]


def _publics(path: Path | str, held: Sequence[_Held]) -> list[Tensor]:
    """Return the nodes that each client sends; refuse a client without common nodes."""
    # A node that one client holds back is not public at another that says nothing about it.
    offered = [each.ids if each.public is None else each.ids[each.public] for each in held]
    common, publics = _at_two(offered), []
    if not _at_two([each.ids for each in held]).numel():
        raise DataError(
            f"data.name = {str(path)!r}: the clients' graphs must overlap, and no node (identity) "
            f"is at two of the {len(held)}; give a node the same identity wherever it is"
        )
    for each in held:
        shared = torch.isin(each.ids, common)
        public = shared if each.public is None else each.public
        if not (public & shared).any():
            raise DataError(
                f"{each.where}: no public nodes: of its {each.ids.numel()} nodes (identities) none "
                "is public at another client too"
            )
        publics.append(public)
    return publics


def common_roles(held: Sequence[Holder], ratios: Sequence[float], seed: int) -> list[Masks]:
    """Take the masks of clients that have some; draw a role for each node of the others."""
    every = torch.cat([each.ids for each in held]).unique()
    places = [torch.searchsorted(every, each.ids) for each in held]
    role, y = torch.full(every.shape, NO_ROLE), torch.full(every.shape, -1)
    for each, rows in zip(held, places, strict=True):
        if each.masks is not None:
            _note_roles(role, rows, each)
    for each, rows in zip(held, places, strict=True):
        if each.masks is None:
            # Drawn by the label that the first client gives the node.
            y[rows] = torch.where((y[rows] < 0) & (role[rows] == NO_ROLE), each.y, y[rows])
    for number, mask in enumerate(stratified_split(y, ratios, generator=generator(seed, "roles"))):
        role[mask] = number
    return [
        each.masks or Masks(*((role[rows] == number) & (each.y >= 0) for number in range(3)))
        for each, rows in zip(held, places, strict=True)
    ]


def _note_roles(role: Tensor, rows: Tensor, held: Holder) -> None:
    for number, mask in enumerate(held.masks or ()):
        before = role[rows[mask]]
        clash = (before != NO_ROLE) & (before != number)
        if clash.any():
            row, other = int(mask.nonzero().flatten()[clash][0]), int(before[clash][0])
            raise DataError(
                f"{held.where}: node {held.shown[row]!r} is for {ROLE_WORDS[number]}, but at an "
                f"earlier client for {ROLE_WORDS[other]}; a node must have one role everywhere, or "
                "a label that is learnt at one client is judged at another"
            )
        role[rows[mask]] = number


def _check_roles(held: _Held, client: int, masks: Masks, ratios: Sequence[float]) -> None:
    if held.masks is None:
        with saying(held.where):
            check_roles(client, masks, ratios)
    elif ratios[0] > 0 and not masks.train.any():
        raise DataError(
            f"{held.where}: train_mask has no node; clients that need none have 0 as the "
            f"first of partition.ratios = {list(ratios)}"
        )
