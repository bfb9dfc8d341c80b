"""Clients with graphs of their own: a folder with one saved PyG ``Data`` per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flower_graph.data.graph import dense_features, prepare_features, to_undirected
from flower_graph.data.partition.client_graphs import ClientGraph, check_client_graph, split_nodes
from flower_graph.data.sources.files import read_file
from flower_graph.data.validate import PARTS, check_client, mask_of
from flower_graph.errors import DataError

RATIOS = (0.6, 0.2, 0.2)  # the paper's


def load_folder(
    path: Path,
    ratios: Sequence[float],
    seed: int,
    *,
    presence: bool = False,
    normalize: bool = False,
) -> list[ClientGraph]:
    """Load one client from each file ``*.pt`` of a folder, in the order of the files' names."""
    # The files may come from anybody: nothing in them is executed.
    files = client_files(path)
    graphs = [_load(client, file, ratios, seed) for client, file in enumerate(files)]
    check_widths(files, [graph.x for graph in graphs])
    how = {"presence": presence, "normalize": normalize}
    return [replace(graph, x=prepare_features(graph.x, **how)) for graph in graphs]


def client_files(path: Path) -> list[Path]:
    """List the files of a folder of clients, in the order of their names."""
    folder = path.expanduser()
    if not folder.is_dir():
        raise DataError(f"data.name = {str(path)!r}: there is no such folder")
    files = sorted(folder.glob("*.pt"))
    if not files:
        raise DataError(f"data.name = {str(path)!r}: the folder has no file *.pt, one per client")
    return files


def check_widths(files: Sequence[Path], features: Sequence[Tensor]) -> None:
    """Check that all clients have equally many features."""
    width = features[0].size(1)
    for file, x in zip(files, features, strict=True):
        if x.size(1) != width:
            raise DataError(
                f"file {file}: x has {x.size(1)} features, but that of {files[0]} has "
                f"{width}: all clients need the same features"
            )


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
    try:
        check_client(data)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
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


def _load(client: int, file: Path, ratios: Sequence[float], seed: int) -> ClientGraph:
    values = SimpleNamespace(**read_file(file))
    try:
        if getattr(values, "x", None) is not None:
            values.x = dense_features(values.x, str(file))
        return client_graph_from_data(client, values, ratios=ratios, seed=seed)
    except DataError as error:
        raise DataError(f"file {file}: {error}") from error
