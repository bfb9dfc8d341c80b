"""A run's data, assigned to the folders of its parties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flower_graph import __version__
from flower_graph.data.folders.run_folder import CLIENTS, SERVER, Manifest, write_folder
from flower_graph.data.folders.tensors import Tensors, graph_tensors, matrix_tensors
from flower_graph.data.graph import Graph, take_rows
from flower_graph.errors import ConfigError

USERS = "users"


@dataclass(frozen=True)
class RunData:
    """What the parties of a run hold."""

    num_clients: int  # Of the whole run
    features: int
    classes: int
    # Gives the tensors of some clients, which a range of their numbers names
    part: Callable[[range], Tensors]
    server: Tensors = field(default_factory=dict)  # The tensors of the server
    # What the method's app needs besides
    server_details: dict[str, Any] = field(default_factory=dict)
    client_details: dict[str, Any] = field(default_factory=dict)


def node_data(graph: Graph) -> RunData:
    """Give each client one node's features, and the server edges, labels and masks."""
    held = {"edge_index": graph.edge_index, "y": graph.y}
    masks = {part: getattr(graph, part) for part in ("train_mask", "val_mask", "test_mask")}

    def part(users: range) -> Tensors:
        rows = torch.arange(users.start, users.stop)
        return {USERS: rows, **matrix_tensors("x", take_rows(graph.x, rows))}

    n, f = (int(size) for size in graph.x.shape)
    return RunData(n, f, graph.num_classes, part, held | masks)


def graph_data(
    graphs: Sequence[Any],
    classes: int,
    *,
    server_details: Mapping[str, Any] | None = None,
    client_details: Mapping[str, Any] | None = None,
) -> RunData:
    """Give each client its graph, and the server nothing but counts."""

    def part(clients: range) -> Tensors:
        return {
            f"{client}.{name}": tensor
            for client in clients
            for name, tensor in graph_tensors(graphs[client]).items()
        }

    return RunData(
        num_clients=len(graphs),
        features=int(graphs[0].x.shape[1]),
        classes=classes,
        part=part,
        server_details=dict(server_details or {}),
        client_details=dict(client_details or {}),
    )


def assigned(part: int, parts: int, count: int) -> range:
    """Say which of `count` clients the SuperNode `part` of `parts` hosts: neighbouring numbers."""
    return range(part * count // parts, (part + 1) * count // parts)


def check_supernodes(supernodes: int, clients: int) -> None:
    """Refuse fewer than one SuperNode, and more SuperNodes than clients."""
    if not 1 <= supernodes <= clients:
        raise ConfigError(
            f"num-supernodes: {supernodes} SuperNodes for {clients} clients; at most one each, "
            "and at least 1 in all"
        )


def write_run(out: Path, settings: dict[str, Any], data: RunData, supernodes: int) -> None:
    """Write the folder of every party: ``server``, and one for each SuperNode."""
    check_supernodes(supernodes, data.num_clients)
    counts = (data.num_clients, data.features, data.classes)
    versions = {"flower-graph": __version__, "torch": torch.__version__}
    server = Manifest(SERVER, settings, [], *counts, data.server_details, versions=versions)
    write_folder(out / "server", server, data.server)
    for number in range(supernodes):
        clients = assigned(number, supernodes, data.num_clients)
        manifest = Manifest(
            CLIENTS, settings, [*clients], *counts, data.client_details, versions=versions
        )
        write_folder(out / folder_name(clients, data.num_clients), manifest, data.part(clients))


def folder_name(clients: range, count: int) -> str:
    """Name a folder by its clients: ``client-0000``, or ``clients-0000-0676``."""
    width = max(4, len(str(count - 1)))
    first, last = (f"{number:0{width}}" for number in (clients[0], clients[-1]))
    return f"client-{first}" if len(clients) == 1 else f"clients-{first}-{last}"
