"""Clients of one's own whose graphs overlap: a folder with one saved PyG ``Data`` per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.data.folders.client_folder import check_widths, client_files
from flower_graph.data.graph import dense_features, prepare_features, to_undirected
from flower_graph.data.partition.overlapping import OverlappingGraph, noisy_labels
from flower_graph.data.sources.files import read_file
from flower_graph.data.splits import ROLES, Masks, check_roles, stratified_split
from flower_graph.data.validate import PARTS, check_client, check_tensor, mask_of
from flower_graph.errors import DataError
from flower_graph.rng import generator

NO_ROLE = -1


class _Held(NamedTuple):
    """What one file holds, its nodes in the order of their ids; ``[n]`` each but edges and x."""

    file: Path
    ids: Tensor
    x: Tensor
    y: Tensor
    edges: Tensor
    public: Tensor | None
    masks: Masks | None


def load_overlapping_folder(
    path: Path,
    ratios: Sequence[float],
    seed: int,
    label_noise: float = 0.0,
    *,
    presence: bool = False,
    normalize: bool = False,
) -> list[OverlappingGraph]:
    """Load one client from each file ``*.pt`` of a folder, in the order of the files' names."""
    # The files may come from anybody: nothing in them is executed.
    held = [_read(file) for file in client_files(path)]
    check_widths([each.file for each in held], [each.x for each in held])
    if not any(each.edges.numel() for each in held):
        raise DataError(f"data.name = {str(path)!r}: no client has an edge, so none can embed")
    every = torch.cat([each.y for each in held])
    classes = every[every >= 0].unique()
    graphs, how = [], {"presence": presence, "normalize": normalize}
    publics, roles = _publics(held), _roles(held, ratios, seed)
    for client, (mine, public, masks) in enumerate(zip(held, publics, roles, strict=True)):
        _check_roles(mine, client, masks, ratios)
        rng = generator(seed, "label-noise", client)
        noisy = noisy_labels(mine.y, masks.train, classes, label_noise, generator=rng)
        x = prepare_features(mine.x, **how)
        graphs.append(
            OverlappingGraph(client, mine.ids, public, x, mine.y, noisy, mine.edges, *masks)
        )
    return graphs


def _read(file: Path) -> _Held:
    """Read and check one file, and put its nodes in the order of their ids."""
    values = SimpleNamespace(**read_file(file))
    try:
        if getattr(values, "x", None) is not None:
            values.x = dense_features(values.x, str(file))
        check_tensor(values, "edge_index")
        check_client(values)
        ids, public = _checked_ids(values), _checked_public(values)
    except DataError as error:
        raise DataError(f"file {file}: {error}") from error
    order = ids.argsort()
    named = any(getattr(values, part, None) is not None for part in PARTS)
    return _Held(
        file=file,
        ids=ids[order],
        x=values.x[order],
        y=values.y[order],
        edges=to_undirected(order.argsort()[values.edge_index], ids.numel()),
        public=None if public is None else public[order],
        masks=Masks(*(mask_of(values, part)[order] for part in PARTS)) if named else None,
    )


def _checked_ids(values: SimpleNamespace) -> Tensor:
    """Give ``n_id`` if it names every node, each by an id of its own."""
    check_tensor(values, "n_id")
    ids: Tensor = values.n_id
    wanted = f"must be int64 [{values.y.numel()}], the same id for a node at all clients"
    if ids.shape != values.y.shape or ids.dtype != torch.int64:
        raise DataError(f"n_id is {ids.dtype} {list(ids.shape)}: {wanted}")
    result, counts = ids.unique(return_counts=True)
    if int(result[0]) < 0:
        raise DataError(f"n_id has {int(result[0])}: ids must be at least 0")
    if result.numel() < ids.numel():
        raise DataError(f"n_id has {int(result[counts > 1][0])} more than once: {wanted}")
    return ids


def _checked_public(values: SimpleNamespace) -> Tensor | None:
    """Give ``public`` if it is there."""
    public = getattr(values, "public", None)
    if public is None:
        return None
    check_tensor(values, "public")
    if public.shape != values.y.shape or public.dtype != torch.bool:
        wanted = f"must be bool [{values.y.numel()}]"
        raise DataError(f"public is {public.dtype} {list(public.shape)}: {wanted}")
    return torch.as_tensor(public)


def _publics(held: Sequence[_Held]) -> list[Tensor]:
    """Say which nodes each client sends; refuse a client that has none in common with others."""
    # A node that one client holds back is not public at another that says nothing about it.
    offered = [each.ids if each.public is None else each.ids[each.public] for each in held]
    result, counts = torch.cat(offered).unique(return_counts=True)
    common, publics = result[counts >= 2], []
    for each in held:
        shared = torch.isin(each.ids, common)
        public = shared if each.public is None else each.public
        if not (public & shared).any():
            raise DataError(
                f"file {each.file}: no public nodes: of its {each.ids.numel()} nodes (n_id) none "
                "is public at another client too"
            )
        publics.append(public)
    return publics


def _roles(held: Sequence[_Held], ratios: Sequence[float], seed: int) -> list[Masks]:
    """Take the masks of clients that have some; draw a role for each node of the others."""
    every = torch.cat([each.ids for each in held]).unique()
    places = [torch.searchsorted(every, each.ids) for each in held]
    role, y = torch.full(every.shape, NO_ROLE), torch.full(every.shape, -1)
    for each, place in zip(held, places, strict=True):
        if each.masks is not None:
            _note_roles(role, place, each)
    for each, place in zip(held, places, strict=True):
        if each.masks is None:
            # Drawn by the label that the first client gives the node.
            y[place] = torch.where((y[place] < 0) & (role[place] == NO_ROLE), each.y, y[place])
    for number, mask in enumerate(stratified_split(y, ratios, generator=generator(seed, "roles"))):
        role[mask] = number
    return [
        each.masks or Masks(*((role[place] == number) & (each.y >= 0) for number in range(3)))
        for each, place in zip(held, places, strict=True)
    ]


def _note_roles(role: Tensor, place: Tensor, held: _Held) -> None:
    """Write a client's masks into the roles of all nodes, in place."""
    for number, mask in enumerate(held.masks or ()):
        before = role[place[mask]]
        clash = (before != NO_ROLE) & (before != number)
        if clash.any():
            node, other = int(held.ids[mask][clash][0]), int(before[clash][0])
            raise DataError(
                f"file {held.file}: node {node} (n_id) is for {ROLES[number]}, but at an earlier "
                f"client for {ROLES[other]}; a node must have one role everywhere, or a label "
                "that is learnt at one client is judged at another"
            )
        role[place[mask]] = number


def _check_roles(held: _Held, client: int, masks: Masks, ratios: Sequence[float]) -> None:
    """Refuse a client without nodes in a role that is to have some."""
    if held.masks is None:
        try:
            check_roles(client, masks, ratios)
        except DataError as error:
            raise DataError(f"file {held.file}: {error}") from error
    elif ratios[0] > 0 and not masks.train.any():
        raise DataError(
            f"file {held.file}: train_mask has no node; clients that need none have 0 as the "
            f"first of partition.ratios = {list(ratios)}"
        )
