"""Clients with graphs of their own: one by one, from a folder, or from one graph.

The files of a folder may come from anybody: nothing in them is executed. Clients are numbered in
the order of the files' names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_graph.config.common import GLOBAL, MEAN, ONE_HOT, DataConfig
from flower_graph.data.description import (
    WITHOUT,
    Caution,
    NewGraph,
    by_columns,
    declared_classes,
    describe_graph,
    listed,
    made_features,
    number_classes,
    read_mask,
    saying,
    tell,
)
from flower_graph.data.features import (
    PLAIN,
    ReadOptions,
    Treatment,
    common_columns,
    prepare_features,
)
from flower_graph.data.graph import (
    PARTS,
    ClientGraph,
    Graph,
    check_roles,
    joined_edges,
    joined_masks,
    node_numbers,
    picked,
    stratified_split,
    to_undirected,
)
from flower_graph.data.partition.client_graphs import (
    check_features,
    finished,
    noisy_labels,
    split_nodes,
)
from flower_graph.data.sources.datasets import DRAWN, describe_file, once, read_file, saved_at
from flower_graph.data.sources.names import (
    EDGES,
    GRAPH_FILES,
    NODES,
    absent,
    check_ending,
    file_path,
    folder_path,
    graphs_in,
)
from flower_graph.data.sources.tables import CLIENT, names_clients
from flower_graph.errors import DataError
from flower_graph.rng import generator
from flower_graph.wire.keys import ROLES


class Clients(list[ClientGraph]):
    """All clients of a run, with their classes and notes in common."""

    def __init__(
        self,
        clients: Iterable[ClientGraph],
        num_classes: int,
        classes: tuple[str, ...] | None = None,  # by number; None: the numbers are the names
        notes: Sequence[str] = (),  # on what was done to the data
        treatment: Treatment | None = None,  # of the features, for other nodes
        whole: Graph | None = None,  # what was divided among the clients; None: each has its own
        is_identified: bool = False,  # whether nodes' identities are the same at all clients
    ) -> None:
        super().__init__(clients)
        self.num_classes, self.classes, self.notes = num_classes, classes, tuple(notes)
        self.treatment, self.whole, self.is_identified = treatment, whole, is_identified

    @classmethod
    def cut(
        cls, clients: Iterable[ClientGraph], whole: Graph, *, is_identified: bool = False
    ) -> Clients:
        """Return clients with the classes of the graph that was divided among them."""
        common = (whole.num_classes, whole.classes, whole.notes, whole.treatment)
        return cls(clients, *common, whole, is_identified)

    def replaced(self, clients: Iterable[ClientGraph]) -> Clients:
        """Return other clients with what all of these have in common."""
        return Clients(clients, *vars(self).values())

    @classmethod
    def of(cls, graphs: Sequence[ClientGraph]) -> Clients:
        """Return clients as ``Clients``; for a plain list the highest label gives the classes."""
        if isinstance(graphs, Clients):
            return graphs
        return Clients(graphs, 1 + max(int(graph.y.max()) for graph in graphs))

    def as_graph(self) -> Graph:
        """Return all clients as one graph: the original one, or their disjoint union.

        A node is in a mask if it is in that mask at any client.
        """
        if self.whole is not None:
            masks = torch.zeros(len(PARTS), self.whole.num_nodes, dtype=torch.bool)
            for graph in self:
                for mask, own in zip(masks, graph.masks.values(), strict=True):
                    mask[graph.nodes[own]] = True
            return self.whole.with_masks(masks)
        keys = ("x", "y", "targets", *PARTS)
        held = {key: [one for g in self if (one := getattr(g, key)) is not None] for key in keys}
        joined: dict[str, Any] = {key: torch.cat(each) for key, each in held.items() if each}
        own = {"num_classes": self.num_classes, "classes": self.classes, "notes": self.notes}
        return Graph(edge_index=joined_edges(self), **joined, **own)


# Any: the section `partition` of a method
def load_folder(
    path: Path | str,
    partition: Any,
    seed: int,
    how: ReadOptions = PLAIN,
    graphless_ratio: float = 0.0,
    *,
    identified: bool = False,
) -> Clients:
    """Load one client from each graph of a folder, or of a file whose nodes name their client.

    Clients without masks are split as ``partition`` says; ``seed`` is the run's.
    ``graphless_ratio`` removes edges from clients of one graph; in a folder, files without edges
    make graphless clients. ``identified``: all have edges, and nodes an ``identity`` (words, or
    int64), an ``n_id`` (int64) or ``names``, as FedSCem needs them.
    """
    ratios, seed = partition.ratios, seed if partition.seed is None else partition.seed
    how = how._replace(needs_edges=identified)
    clients, files = read_clients(path, how, identified=identified)
    pairs, purpose = zip(clients, files, strict=True), "ego-split" if identified else "split"
    if identified and partition.split == GLOBAL:
        graphs = _with_roles(files, clients, node_numbers(clients), ratios, seed)
    else:
        graphs = [g if f.has_masks else split_nodes(g, ratios, seed, purpose) for g, f in pairs]
    ratio = graphless_ratio if is_one_graph(path) else 0.0
    graphs = finished(graphs, ratio, partition.train_share, seed)
    if identified and len(graphs) > 1 and len((ids := node_numbers(graphs)).unique()) == len(ids):
        note = "no two clients hold the same node (identity): nothing is shared, each trains alone"
        tell(f"data {path}", [Caution(note)])
    return clients.replaced(graphs)


def read_clients(
    path: Path | str, how: ReadOptions, *, identified: bool = False
) -> tuple[Clients, list[NewGraph]]:
    """Read the clients' graphs, their labels numbered and features prepared together.

    Masks are empty where a file has none. ``identified``: nodes have identities, all numbers or
    all words. Logs the changes to all data, and to single clients'.
    """
    if how.no_features == ONE_HOT:
        raise DataError("data.no_features='one-hot': of one graph; set data.no_features=degree")
    files, matrices, graphs = client_graphs(path, how), list[Tensor](), list[ClientGraph]()
    named = [file.columns for file in files if file.columns is not None]
    common, declared = common_columns(named) if named else None, [int(how.targets)]
    for file in files:
        with saying(file.where):
            matrices.append(by_columns(file.where, file.x, file.columns, common))
            if (count := matrices[-1].size(1)) != (width := matrices[0].size(1)):
                raise DataError(f"x has {count} features, {files[0].where} has {width}")
            if not how.targets:
                declared.append(declared_classes(file.values.get("num_classes")) or 0)
    kinds = {isinstance(file.y, Tensor): file.where for file in files}
    if len(kinds) > 1:
        note = f"labels are numbers at {kinds[True]}, but words at {kinds[False]}: all are words"
        tell(f"folder {path}", [Caution(note)])
    with saying(f"folder {path}"):
        labels = number_classes([file.y for file in files], max(declared) or None)
        prepared, notes, treatment = prepare_features(matrices, how.features, how.missing, common)
    for file, x, y in zip(files, prepared, labels.y, strict=True):
        with saying(file.where):
            graph = file.as_client(len(graphs), x, y)
            if identified:
                graph = _named(graph, identities_in(file.values, len(x)))
            graphs.append(graph)
            if (graph.names is None) != (graphs[0].names is None):
                raise DataError(f"identities are words here or at {files[0].where}, not at both")
    # One line of each, however many clients there are
    cautions = {note: None for file in files for note in file.notes if isinstance(note, Caution)}
    changes = [*labels.notes, *notes]
    tell(f"data {path}", [*changes, *cautions])
    for file in files:
        tell(file.where, [note for note in file.notes if note not in cautions])
    common_parts = labels.num_classes, labels.classes, changes, treatment
    return Clients(graphs, *common_parts, is_identified=identified), files


def client_graph_from_data(
    client: int,
    data: object,
    *,
    ratios: Sequence[float] = DRAWN,
    seed: int = 0,
    targets: bool = False,
    weights: bool = False,
) -> ClientGraph:
    """Make a client from its own graph, which is not cut out of a larger one.

    Nodes are in the order of ``data``. ``DataError``, which names the client, if something is
    missing or malformed, or a graphless client has constant features.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    data
        A PyG ``Data`` or anything else with dense ``x`` ``[n, f]`` and ``y`` ``[n]``, int64 and
        below 0 for a node without a label. If ``edge_index`` ``[2, e]`` is missing or None, the
        client is graphless. Masks are boolean ``[n]``; beside a given mask, missing ones are empty.
    ratios
        Shares for training, validation and test of the labelled nodes, if there is no mask.
    seed
        Seed of that draw.
    targets
        Whether ``y`` has numbers to learn, NaN for none, instead of classes.
    weights
        Whether ``edge_weight`` ``[e]``, or ``edge_attr`` of one column, is kept.
    """
    how = ReadOptions(targets=targets, weights=weights, needs_edges=False)
    with saying(f"client {client}"):
        found, graph = _alone(client, data, how)
        graph = graph if found.has_masks else split_nodes(graph, ratios, seed)
        check_features(graph)
    tell(f"client {client}", found.notes)
    return graph


def ego_from_data(client: int, data: object, identities: Identities) -> ClientGraph:
    """Make a client of FedSCem from its own graph, as :func:`client_graph_from_data` does.

    The client needs ``edge_index``, and missing masks are empty (``split_per_client`` draws them).
    ``identities`` are ``n`` integers or ``n`` words, in the order of the rows of ``x``. A node has
    the same identity at every client.
    """
    with saying(f"client {client}"):
        found, graph = _alone(client, data)
        ego = _named(graph, named_by(identities, found.x.size(0)))
    tell(f"client {client}", found.notes)
    return ego


def _alone(client: int, data: object, how: ReadOptions = PLAIN) -> tuple[NewGraph, ClientGraph]:
    """Describe a client without others': words are no labels, -1 is none; features untreated."""
    found = describe_graph(data, how)
    return found, found.as_client(client, found.x.float(), found.numbers)


# Identities, by which clients recognise common nodes --------------------------------------------

# Keys of nodes' identities, in the order in which they are tried
IDENTITIES = ("identity", "n_id", "names")
Identities = Tensor | Sequence[int] | Sequence[str]
Named = tuple[Tensor, tuple[str, ...] | None]  # numbers of nodes, and their names if they have some


# Any: what a user's file holds; ``named_by`` checks it
def identities_in(values: Mapping[str, Any], count: int) -> Named:
    """Return the identities of one graph's nodes, from the first key that it has."""
    for key in IDENTITIES:
        if values.get(key) is not None:
            return named_by(values[key], count, key)
    raise DataError("has no identities of nodes: give it identity, n words, or n_id, int64")


def named_by(identities: Identities, count: int, key: str = "identities") -> Named:
    """Return the nodes' numbers, and their names if they have any."""
    given: list[Any] = listed(key, identities)
    kinds = {type(one) for one in given}
    if kinds not in ({int}, {str}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"identities are {named}: must be all int or all str")
    if len(given) != count:
        raise DataError(f"{len(given)} identities for {count} nodes: must be one a node")
    # The error has the number only, since a server that reads it must not learn identities.
    if twice := sum(times > 1 for times in Counter(given).values()):
        raise DataError(f"{twice} identities are there more than once: must be all different")
    is_words = kinds == {str}
    return (torch.arange(count), tuple(given)) if is_words else (torch.tensor(given).long(), None)


def _named(graph: ClientGraph, named: Named) -> ClientGraph:
    nodes, names = named
    return replace(graph, nodes=nodes, names=names, called=graph.called or names)


# Clients that share nodes -----------------------------------------------------------------------


# Any: the section `partition` of the method
def load_overlapping_folder(
    path: Path | str, partition: Any, seed: int, how: ReadOptions = PLAIN
) -> Clients:
    """Load PPFL-GNN's clients from a folder, each client's nodes in the order of their ids."""
    ratios, seed = partition.ratios, seed if partition.seed is None else partition.seed
    clients, files = read_clients(path, how, identified=True)
    words = sorted({word for graph in clients for word in graph.names or ()})
    number, graphs = {word: index for index, word in enumerate(words)}, list[ClientGraph]()
    for graph, file in zip(clients, files, strict=True):
        n, own = len(graph.y), graph.names
        ids = torch.tensor([number[word] for word in own]) if own else graph.nodes
        with saying(file.where):
            if int(ids.min()) < 0:
                raise DataError(f"identities have {int(ids.min())}: must be at least 0")
            public = read_mask("public", file.values.get("public"), n, [])
            if public is not None and public.dim() > 1:
                raise DataError(f"public is of several splits: must be bool [{n}]")
        order = ids.argsort()
        held = {key: getattr(graph, key)[order] for key in ("x", "y", *PARTS)}
        edges, held["nodes"] = to_undirected(order.argsort()[graph.edges], n), ids[order]
        called, public = picked(own or graph.called, order), picked(public, order)
        graph = replace(graph, **held, edge_index=edges, names=None, called=called)
        graphs.append(replace(graph, public=public))
    nodes, where = [graph.nodes for graph in graphs], f"data.name = {str(path)!r}"
    if not any(graph.edges.numel() for graph in graphs):
        raise DataError(f"{where}: no client has an edge, so none can embed")
    if not _at_two(nodes).numel():
        raise DataError(f"{where}: no identity is at two of {len(graphs)} clients")
    # A node that one client holds back is not public at another that says nothing about it.
    common = _at_two([g.nodes if g.public is None else g.nodes[g.public] for g in graphs])
    every = torch.cat([graph.y for graph in graphs])
    classes = every[every >= 0].unique()
    graphs = _with_roles(files, graphs, torch.cat(nodes), ratios, seed)
    for client, (file, graph) in enumerate(zip(files, graphs, strict=True)):
        shared = torch.isin(graph.nodes, common)
        public = shared if graph.public is None else graph.public
        with saying(file.where):
            if not (public & shared).any():
                raise DataError(f"no node of {len(shared)} is public elsewhere too")
            # Of masks that are given, validation and test may be empty
            if not file.has_masks or (ratios[0] > 0 and not graph.train_mask.any()):
                check_roles(client, graph.masks.values(), ratios)
        noisy = noisy_labels(graph, classes, partition.label_noise, seed)
        graphs[client] = replace(graph, public=public, train_y=noisy)
    return clients.replaced(graphs)


def _at_two(ids: Iterable[Tensor]) -> Tensor:
    """Return the ids that at least two clients have."""
    every, counts = torch.cat([*ids]).unique(return_counts=True)
    return torch.as_tensor(every[counts >= 2])


def _with_roles(
    files: Sequence[NewGraph],
    graphs: Sequence[ClientGraph],
    ids: Tensor,
    ratios: Sequence[float],
    seed: int,
) -> list[ClientGraph]:
    """Draw a role for each node of clients without masks, the same at all clients that hold it."""
    sizes = torch.tensor([len(graph.y) for graph in graphs])
    owner = torch.arange(len(graphs)).repeat_interleave(sizes)
    y, given = torch.cat([graph.y for graph in graphs]), torch.full_like(owner, -1)
    for part, mask in enumerate(joined_masks(graphs).values()):
        given[mask] = part
    node = ids.unique(return_inverse=True)[1]  # one number for an identity, at any client
    role = _first(given, node)
    if (wrong := (given >= 0) & (given != role[node])).any():
        at = int(wrong.nonzero()[0])
        client, place = int(owner[at]), int(node[at])
        names = graphs[client].called
        name = names[at - int(sizes[:client].sum())] if names else int(ids[at])
        both = f"{ROLES[given[at]]}, and {ROLES[role[place]]} at an earlier client"
        raise DataError(f"{files[client].where}: node {name!r} has two roles: {both}")
    has_masks = torch.tensor([file.has_masks for file in files])[owner]
    label = _first(torch.where(has_masks | (role[node] >= 0), -1, y), node)
    drawn, rng = (label >= 0).nonzero().flatten(), generator(seed, "roles")
    for part, mask in enumerate(stratified_split(label[drawn], ratios, generator=rng)):
        role[drawn[mask]] = part
    result = list[ClientGraph]()
    for file, graph, own in zip(files, graphs, role[node].split(sizes.tolist()), strict=True):
        if not file.has_masks:
            graph = graph.with_masks((own == part) & (graph.y >= 0) for part in range(len(PARTS)))
        result.append(graph)
    return result


def _first(values: Tensor, node: Tensor) -> Tensor:
    """Return the first value of each node that is not negative; -1 if there is none."""
    rows, none = (values >= 0).nonzero().flatten(), len(values)
    first = torch.full((int(node.max()) + 1,), none).scatter_reduce(0, node[rows], rows, "amin")
    return torch.cat([values, values.new_full((1,), -1)])[first]


# Files of clients ---------------------------------------------------------------------------------


def clients_path(data: DataConfig) -> Path | None:
    """Return the path if ``data.name`` means clients' own graphs, else None.

    That is a folder of graphs, or one graph whose nodes have a ``client``.
    """
    folder, file = folder_path(data.name), file_path(data.name)
    if folder is not None or file is None:
        return folder
    # For this look features may have gaps
    how = ReadOptions.of(data)._replace(missing=MEAN, categories=ONE_HOT)

    def says_clients() -> bool:
        if file.is_dir():
            return names_clients(file)
        return read_file(file, how).get(CLIENT) is not None

    return file if once(f"clients of {file} {how}", saved_at(data.name), says_clients) else None


def is_one_graph(path: Path | str) -> bool:
    """Return whether a path is one graph, a file or tables, and not a folder of graphs."""
    return Path(path).is_file() or Path(path, NODES).is_file()


def client_graphs(path: Path | str, how: ReadOptions = PLAIN) -> list[NewGraph]:
    """Read each client's graph."""
    path = Path(path)
    if not path.exists():
        raise absent(str(path), "folder")
    if is_one_graph(path):
        # A client's degrees are those among its own nodes
        whole = describe_file(path, how._replace(no_features=WITHOUT))
        with saying(whole.where):
            return _parts(whole, how)
    files, others = graphs_in(path)
    for file in others:
        check_ending(file)
        if file.is_dir() and (found := [one.name for one in sorted(file.glob("*.[cC][sS][vV]"))]):
            raise DataError(f"folder {file}: has {', '.join(found)}, not {NODES} and {EDGES}")
    there = f"not read: {', '.join(file.name for file in others):.200}"
    if not files:
        wanted = f"*{', *'.join(GRAPH_FILES)}, or folders with {NODES} and {EDGES}"
        raise DataError(f"data.name = {str(path)!r}: has no {wanted}; {there}")
    tell(f"folder {path}", [there] if others else [])
    return [describe_file(file, how) for file in files]


def _parts(whole: NewGraph, how: ReadOptions) -> list[NewGraph]:
    """Divide one graph into the clients that its nodes name, with the edges within each."""
    n, keys = len(whole.x), (CLIENT, *IDENTITIES, "public")
    given = {key: listed(key, one) for key in keys if (one := whole.values.get(key)) is not None}
    for key, value in given.items():
        if len(value) != n:
            raise DataError(f"{key}: must have {n} entries, one a node")
    given_names = given.pop(CLIENT, [])
    who = ["" if one is None else str(one) for one in given_names]
    # Numbers come first, by their size; 07 and 7 are two clients
    names = sorted(
        {*who} - {""}, key=lambda one: (not one.isdecimal(), one.zfill(20 * one.isdecimal()), one)
    )
    if not names or any(isinstance(one, list) for one in given_names):
        raise DataError(f"{CLIENT} must be a word or a number a node, at least at one")
    number = {name: index for index, name in enumerate(names)}
    owner = torch.tensor([number.get(one, -1) for one in who])
    if not {*IDENTITIES} & {*given}:
        given["n_id"] = [*range(n)]  # every row is a node of its own
    edges = torch.empty(2, 0).long() if whole.edge_index is None else whole.edge_index
    ends = owner[edges]  # the clients of each edge's two nodes
    between, nobody = int((ends[0] != ends[1]).sum()) // 2, int((owner < 0).sum())
    left = {"edges between clients": between, "nodes without a client": nobody}
    left_out = [f"{count} {what} left out" for what, count in left.items() if count]
    tell(whole.where, [*whole.notes, *left_out])
    parts = []
    for client, name in enumerate(names):
        rows, inside = (owner == client).nonzero()[:, 0], (ends == client).all(0)
        of_nodes = ("x", "y", "names", "targets", *PARTS)
        own: dict[str, Any] = {key: picked(getattr(whole, key), rows) for key in of_nodes}
        own["values"] = whole.values | {key: picked(one, rows) for key, one in given.items()}
        own["edge_weight"], notes = picked(whole.edge_weight, inside), list[str]()
        if whole.edge_index is not None:
            own["edge_index"] = torch.searchsorted(rows, edges[:, inside])
        if not whole.x.numel():
            own["x"] = made_features(how.no_features, len(rows), own.get("edge_index"), notes)
        parts.append(replace(whole, **own, notes=(*notes,), where=f"{whole.where}, client {name}"))
    return parts
