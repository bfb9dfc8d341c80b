"""Clients with graphs of their own, such as PyG's ``Data``: one by one, or from a folder of files.

The files of a folder may come from anybody: nothing in them is executed. Clients are numbered in
the order of the files' names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.data.graph import (
    PARTS,
    check_client,
    check_mask,
    check_tensor,
    dense_features,
    mask_of,
    prepare_features,
    to_undirected,
)
from flower_graph.data.partition.client_graphs import ClientGraph, check_client_graph, split_nodes
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.data.partition.overlapping import OverlappingGraph, noisy_labels
from flower_graph.data.sources.names import absent
from flower_graph.data.sources.pyg import read_file
from flower_graph.data.splits import ROLES, Masks, check_roles, stratified_split
from flower_graph.errors import DataError
from flower_graph.rng import generator

Identities = Tensor | Sequence[int] | Sequence[str]
RATIOS = (0.6, 0.2, 0.2)  # FedGLS's
NO_ROLE = -1


def load_folder(
    path: Path,
    ratios: Sequence[float],
    seed: int,
    *,
    presence: bool = False,
    normalize: bool = False,
) -> list[ClientGraph]:
    """Load one client from each file ``*.pt`` of a folder."""
    files = _client_files(path)
    graphs = []
    for client, file in enumerate(files):
        values = _read_values(file)
        with _saying(f"file {file}"):
            graphs.append(client_graph_from_data(client, values, ratios=ratios, seed=seed))
    _check_widths(files, [graph.x for graph in graphs])
    how = {"presence": presence, "normalize": normalize}
    return [replace(graph, x=prepare_features(graph.x, **how)) for graph in graphs]


def client_graph_from_data(
    client: int, data: Any, *, ratios: Sequence[float] = RATIOS, seed: int = 0
) -> ClientGraph:
    """Make a client of a graph that is not cut out of a larger one here.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    data
        A PyG ``Data`` or anything else with dense ``x`` ``[n, f]`` and ``y`` ``[n]``, int64 and
        below 0 for a node without a label. Without ``edge_index`` ``[2, e]``, or where it is
        None, the client is graphless; one of no edges is a graph that has none. Its masks are
        boolean ``[n]``; if there is one, those that are missing are empty.
    ratios
        Shares for training, validation and test of the labelled nodes, where there is no mask.
    seed
        Seed of that draw.

    Returns
    -------
    ClientGraph
        The client, its nodes in the order of ``data``.

    Raises
    ------
    DataError
        If something is missing or malformed, no node is for training, or a graphless client has
        constant features; names the client.
    """
    with _saying(f"client {client}"):
        check_client(data)
    n, edges = int(data.y.numel()), getattr(data, "edge_index", None)
    graph = ClientGraph(
        client=client,
        nodes=torch.arange(n),
        x=data.x.float(),
        y=data.y,
        edge_index=None if edges is None else to_undirected(edges, n),
        hidden_edges=None,
        **{part: mask_of(data, part) for part in PARTS},
    )
    if all(getattr(data, part, None) is None for part in PARTS):
        graph = split_nodes(graph, ratios, seed)
    check_client_graph(graph)
    return graph


def ego_from_data(client: int, data: Any, identities: Identities) -> EgoNetwork:
    """Make a client of a graph that is not cut out of a larger one here.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    data
        A PyG ``Data`` or anything else with dense ``x`` ``[n, f]``, ``edge_index`` ``[2, e]`` and
        ``y`` ``[n]``, int64 and below 0 for a node without a label. Its masks are boolean ``[n]``;
        one that is missing is empty (``split_per_client`` draws all three).
    identities
        ``n`` integers or ``n`` words, in the order of the rows of ``x``: the same node has the same
        one at every client.

    Returns
    -------
    EgoNetwork
        The client, its nodes in the order of ``data``. It counts the first one as its ego, which
        plays no part in training.

    Raises
    ------
    DataError
        If something is missing, malformed or there twice; names the client.
    """
    with _saying(f"client {client}"):
        check_tensor(data, "edge_index")
        check_client(data)
        nodes, names = _named(identities, int(data.y.numel()))
    train, val, test = (mask_of(data, part) for part in PARTS)
    edge_index = to_undirected(data.edge_index, nodes.numel())
    x, ego = data.x.float(), int(nodes[0])
    return EgoNetwork(client, ego, nodes, edge_index, x, data.y, train, val, test, names)


def _named(identities: Identities, count: int) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the nodes' numbers, and their names if they have some."""
    given = identities.tolist() if isinstance(identities, Tensor) else list(identities)
    kinds = {type(one) for one in given}
    if kinds not in ({int}, {str}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"identities are of type {named}: must be all int or all str")
    if len(given) != count:
        raise DataError(f"{len(given)} identities for {count} nodes: must be one a node")
    # Says how many, not which: where a server hears of the error, it must not hear identities.
    twice = sum(times > 1 for times in Counter(given).values())
    if twice:
        raise DataError(f"{twice} identities are there more than once: must be all different")
    if kinds == {str}:
        return torch.arange(count), tuple(given)
    return torch.tensor(given, dtype=torch.int64), None


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
    """Load one client, whose graph overlaps with others', from each file ``*.pt`` of a folder."""
    held = [_read(file) for file in _client_files(path)]
    _check_widths([each.file for each in held], [each.x for each in held])
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
    values = _read_values(file)
    with _saying(f"file {file}"):
        check_tensor(values, "edge_index")
        check_client(values)
        ids, public = _checked_ids(values), _checked_public(values)
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
    check_mask("public", public, values.y.numel())
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
        with _saying(f"file {held.file}"):
            check_roles(client, masks, ratios)
    elif ratios[0] > 0 and not masks.train.any():
        raise DataError(
            f"file {held.file}: train_mask has no node; clients that need none have 0 as the "
            f"first of partition.ratios = {list(ratios)}"
        )


def _client_files(path: Path) -> list[Path]:
    """List the files of a folder of clients, in the order of their names."""
    folder = path.expanduser()
    if not folder.is_dir():
        raise absent(str(path), "folder")
    files = sorted(folder.glob("*.pt"))
    if not files:
        raise DataError(f"data.name = {str(path)!r}: the folder has no file *.pt, one per client")
    return files


def _check_widths(files: Sequence[Path], features: Sequence[Tensor]) -> None:
    """Check that all clients have equally many features."""
    width = features[0].size(1)
    for file, x in zip(files, features, strict=True):
        if x.size(1) != width:
            raise DataError(
                f"file {file}: x has {x.size(1)} features, but that of {files[0]} has "
                f"{width}: all clients need the same features"
            )


def _read_values(file: Path) -> SimpleNamespace:
    """Read what one file holds, its features dense."""
    values = SimpleNamespace(**read_file(file))
    if getattr(values, "x", None) is not None:
        with _saying(f"file {file}"):
            values.x = dense_features(values.x, str(file))
    return values


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Name the client or the file that an error is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
