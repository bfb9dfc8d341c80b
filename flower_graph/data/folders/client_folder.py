"""Clients with graphs of their own, such as PyG's ``Data``: one by one, or from a folder.

The files of a folder may come from anybody: nothing in them is executed. Clients are numbered in
the order of the files' names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flower_graph.config.common import AS_IS, ONE_HOT
from flower_graph.data.description import (
    Caution,
    Described,
    by_place,
    check_parts,
    describe_graph,
    saying,
    tell,
)
from flower_graph.data.features import prepare_features
from flower_graph.data.folders.client_files import client_graphs, is_one_graph
from flower_graph.data.folders.identities import Identities, Named, identities_in, named_by
from flower_graph.data.gaps import NO_GAPS, Gaps, align, common_columns, fill_missing
from flower_graph.data.graph import PARTS, Graph, HeldGraph, Treatment
from flower_graph.data.labels import Labels, check_entries, declared_classes, number_classes
from flower_graph.data.partition.client_graphs import (
    ClientGraph,
    check_client_graph,
    fewer_trained,
    graphless_clients,
    split_nodes,
    without_edges,
)
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.data.splits import Masks
from flower_graph.data.uses import PLAIN, Uses
from flower_graph.errors import DataError

RATIOS = (0.6, 0.2, 0.2)  # FedGLS's
T = TypeVar("T")
G = TypeVar("G", bound=HeldGraph)


class Clients(list[T]):
    """All clients of a run, with their classes and notes in common."""

    def __init__(
        self,
        clients: Iterable[T],
        num_classes: int,
        classes: tuple[str, ...] | None = None,  # by number; None: the numbers are the names
        notes: Sequence[str] = (),  # notes on what was done to the data
        treatment: Treatment | None = None,  # treatment of the features, for other nodes
        whole: Graph
        | None = None,  # the graph that was divided among the clients; None: each has its own
    ) -> None:
        super().__init__(clients)
        self.num_classes, self.classes, self.notes = num_classes, classes, tuple(notes)
        self.treatment, self.whole = treatment, whole

    @classmethod
    def cut(cls, clients: Iterable[T], whole: Graph) -> Clients[T]:
        """Return clients with the classes of the graph that was divided among them."""
        common = (whole.num_classes, whole.classes, whole.notes, whole.treatment)
        return cls(clients, *common, whole)

    @classmethod
    def of(cls, graphs: Sequence[G]) -> Clients[G]:
        """Return clients as ``Clients``; for a plain list the highest label gives the classes."""
        if isinstance(graphs, Clients):
            return graphs
        return Clients(graphs, 1 + max(int(graph.y.max()) for graph in graphs))

    def as_graph(self: Clients[G]) -> Graph:
        """Return all clients as one graph: the original one, or their disjoint union.

        A node is in a mask if it is in that mask at any client.
        """
        if self.whole is not None:
            n = self.whole.num_nodes
            masks = {part: torch.zeros(n, dtype=torch.bool) for part in PARTS}
            for graph in self:
                for part, mask in masks.items():
                    mask[graph.nodes[getattr(graph, part)]] = True
            train, val, test = masks.values()
            return replace(self.whole, train_mask=train, val_mask=val, test_mask=test)
        ends, start = [torch.empty(2, 0, dtype=torch.int64)], 0
        for graph in self:
            if graph.edge_index is not None:
                ends.append(graph.edge_index + start)
            start += graph.y.numel()
        x, y, train, val, test = (
            torch.cat([getattr(graph, part) for graph in self]) for part in ("x", "y", *PARTS)
        )
        given = (getattr(graph, "targets", None) for graph in self)
        numbers = [one for one in given if one is not None]
        return Graph(
            x,
            torch.cat(ends, 1),
            y,
            self.num_classes,
            train,
            val,
            test,
            classes=self.classes,
            notes=self.notes,
            targets=torch.cat(numbers) if numbers else None,
        )


class ClientFile(NamedTuple):
    """The content of one file, in canonical form."""

    where: str  # what errors call it: `file x.pt`, or `file x.pt, client 3`
    values: SimpleNamespace
    found: Described


def load_folder(
    path: Path | str,
    ratios: Sequence[float],
    seed: int,
    *,
    train_share: float | None = None,
    graphless_ratio: float = 0.0,
    features: str = AS_IS,
    gaps: Gaps = NO_GAPS,
    uses: Uses = PLAIN,
) -> Clients[ClientGraph]:
    """Load one client from each graph of a folder, or of a file whose nodes name their client.

    ``graphless_ratio`` removes edges from clients of one graph; in a folder, files without edges
    make graphless clients. ``uses``: whether labels are numbers to learn, and edges have weights.
    """
    files = read_clients(path, features, gaps, needs_edges=False, uses=uses)
    drawn = graphless_clients(len(files), graphless_ratio, seed) if is_one_graph(path) else set()
    graphs = []
    for client, file in enumerate(files):
        with saying(file.where):
            graph = _client_graph(client, file.found, ratios, seed)
            graph = without_edges(graph) if client in drawn else graph
            check_client_graph(graph, files.treatment)
            graphs.append(fewer_trained(graph, train_share, seed))
    return told(path, files, graphs)


def read_clients(
    path: Path | str, features: str, gaps: Gaps, *, needs_edges: bool = True, uses: Uses = PLAIN
) -> Clients[ClientFile]:
    """Read the clients' graphs, their labels numbered and features prepared together."""
    files = _read_files(path, gaps, needs_edges=needs_edges, uses=uses)
    columns = files[0].found.columns
    labels = _labels_of(path, files)
    with saying(f"folder {path}"):
        filled = fill_missing([each.found.x for each in files], gaps.missing, columns)
        done = prepare_features(filled.features, features)
    described = [
        each._replace(found=replace(each.found, x=x, labels=y))
        for each, x, y in zip(files, done.features, labels.y, strict=True)
    ]
    notes = (*labels.notes, *filled.notes, *done.notes)
    treatment = done.treatment._replace(fill=filled.fill, columns=columns)
    return Clients(described, labels.num_classes, labels.classes, notes, treatment)


def _read_files(path: Path | str, gaps: Gaps, *, needs_edges: bool, uses: Uses) -> list[ClientFile]:
    if gaps.no_features == ONE_HOT:
        raise DataError(
            f"data.no_features='one-hot' with data.name={str(path)!r}: numbers of nodes mean "
            "nothing to other clients; set data.no_features=degree"
        )
    files = []
    for where, content in client_graphs(path, gaps):
        with saying(where):
            values = SimpleNamespace(**content)
            check_entries(values, ("n_id", "identity", "public"))
            found = describe_graph(values, gaps=gaps, needs_edges=needs_edges, uses=uses)
            files.append(ClientFile(where, values, found))
    files = _with_common_columns(files)
    width = files[0].found.x.size(1)
    for each in files:
        if each.found.x.size(1) != width:
            raise DataError(
                f"{each.where}: x has {each.found.x.size(1)} features, but that of "
                f"{files[0].where} has {width}: all clients need the same features"
            )
    return files


def _with_common_columns(files: list[ClientFile]) -> list[ClientFile]:
    own = [each.found.columns for each in files if each.found.columns is not None]
    if not own:
        return files
    common = common_columns(own)
    result = []
    for each in files:
        x, columns = each.found.x, each.found.columns
        with saying(each.where):
            if columns is not None:
                x = align(x, columns, common)
            else:
                tell(each.where, [by_place(common)])
        result.append(each._replace(found=replace(each.found, x=x, columns=common)))
    return result


def _labels_of(path: Path | str, files: Sequence[ClientFile]) -> Labels:
    declared = []
    if files[0].found.targets is not None:
        with saying(f"folder {path}"):
            return number_classes([each.found.labels for each in files], 1)
    for each in files:
        with saying(each.where):
            declared.append(declared_classes(getattr(each.values, "num_classes", None)) or 0)
    numbers = [each.where for each in files if isinstance(each.found.labels, Tensor)]
    words = [each.where for each in files if each.where not in numbers]
    if numbers and words:
        note = f"labels are numbers at {numbers[0]}, but words at {words[0]}: all taken as words"
        tell(f"folder {path}", [note], logging.WARNING)
    with saying(f"folder {path}"):
        return number_classes([each.found.labels for each in files], max(declared) or None)


def told(path: Path | str, files: Clients[ClientFile], graphs: list[T]) -> Clients[T]:
    """Return the clients of a folder; log the changes to all data, and to single clients'."""
    clients = Clients(graphs, files.num_classes, files.classes, files.notes, files.treatment)
    done = [[*getattr(each.values, "notes", ()), *each.found.notes] for each in files]
    cautions = {note: None for each in done for note in each if isinstance(note, Caution)}
    tell(f"data {path}", [*clients.notes, *cautions])  # one line, however many clients there are
    for each, notes in zip(files, done, strict=True):
        tell(each.where, [note for note in notes if note not in cautions])
    return clients


def client_graph_from_data(
    client: int,
    data: object,
    *,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    targets: bool = False,
    weights: bool = False,
) -> ClientGraph:
    """Make a client from its own graph, which is not cut out of a larger one.

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
    with saying(f"client {client}"):
        uses = Uses(targets, weights)
        described = _alone(describe_graph(data, needs_edges=False, uses=uses))
        graph = _client_graph(client, described, ratios, seed)
        check_client_graph(graph)
    tell(f"client {client}", described.notes)
    return graph


def _alone(found: Described) -> Described:
    """Refuse words as labels, since other clients' are not known; -1 is no label. Untreated."""
    if not isinstance(found.labels, Tensor):
        word = next(one for one in found.labels if one is not None)
        raise DataError(f"y has {word!r}: must be numbers of classes, the same at all clients")
    return replace(found, x=found.x.float(), labels=found.labels.clamp(min=-1))


def _client_graph(client: int, found: Described, ratios: Sequence[float], seed: int) -> ClientGraph:
    y, masks = found.labels, masks_of_client(found)
    assert isinstance(y, Tensor)
    every = torch.arange(y.numel())
    given = found.x, y, found.edge_index, None, *masks, found.names, found.targets
    graph = ClientGraph(client, every, *given, edge_weight=found.edge_weight)
    if all(mask is None for mask in found.masks.values()):
        graph = split_nodes(graph, ratios, seed)
    return graph


def masks_of_client(found: Described) -> Masks:
    """Return a client's masks, empty ones for those that it lacks."""
    y = found.labels
    assert isinstance(y, Tensor)
    masks = {}
    for part, mask in found.masks.items():
        masks[part] = torch.zeros(y.numel(), dtype=torch.bool) if mask is None else mask
        if masks[part].dim() != 1:
            raise DataError(f"{part} is {list(masks[part].shape)}: must be bool [{y.numel()}]")
    check_parts(masks, y, found.names)
    return Masks(*masks.values())


def ego_from_data(client: int, data: object, identities: Identities) -> EgoNetwork:
    """Make a client from its own graph, which is not cut out of a larger one.

    Parameters
    ----------
    client
        Number of the client; unique over the run.
    data
        A PyG ``Data`` or anything else with dense ``x`` ``[n, f]``, ``edge_index`` ``[2, e]`` and
        ``y`` ``[n]``, int64 and below 0 for a node without a label. Masks are boolean ``[n]``;
        missing ones are empty (``split_per_client`` draws all three).
    identities
        ``n`` integers or ``n`` words, in the order of the rows of ``x``. A node has the same
        identity at every client.

    Returns
    -------
    EgoNetwork
        The client, its nodes in the order of ``data``. Its ego is the first node, which plays no
        part in training.

    Raises
    ------
    DataError
        If something is missing, malformed or there twice; names the client.
    """
    with saying(f"client {client}"):
        described = _alone(describe_graph(data))
        ego = ego_of(client, described, named_by(identities, described.x.size(0)))
    tell(f"client {client}", described.notes)
    return ego


def ego_of(client: int, found: Described, named: Named) -> EgoNetwork:
    """Make a client of a file's content, with labels numbered."""
    nodes, names = named
    edges, y, masks = found.edge_index, found.labels, masks_of_client(found)
    assert edges is not None and isinstance(y, Tensor)
    own = names if found.names is None else found.names
    return EgoNetwork(client, int(nodes[0]), nodes, edges, found.x, y, *masks, names, own)


def identities_of(files: Sequence[ClientFile]) -> list[Named]:
    """Return the identities of all clients' nodes: all numbers, or all words."""
    result: list[Named] = []
    for file in files:
        with saying(file.where):
            result.append(identities_in(vars(file.values), file.found.x.size(0)))
            if (result[-1][1] is None) != (result[0][1] is None):
                kinds = ("numbers", "words") if result[0][1] else ("words", "numbers")
                raise DataError(
                    f"identities are {kinds[0]}, but those of {files[0].where} are {kinds[1]}: all "
                    "clients need the same kind"
                )
    return result
