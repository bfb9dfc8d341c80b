"""The bundled Cora, and that it is Planetoid's graph."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

import torch

from flower_graph.config.common import DataConfig
from flower_graph.data import Graph, describe, load_data, load_graph
from flower_graph.data.cora_linqs import load_cora_linqs, read_packed


def test_sizes_split_and_words() -> None:
    found = describe(load_graph(DataConfig()))
    assert found == dict(zip(found, (2708, 5278, 1433, 7, 0, 140, 500, 1000), strict=True))
    graph = load_cora_linqs()
    assert graph.train_mask is not None
    assert torch.bincount(graph.y[graph.train_mask]).tolist() == [20] * 7
    assert graph.x.unique().tolist() == [0.0, 1.0]
    assert graph.x.sum() == 49_216


def test_the_copy_for_app_bundles_is_the_same(tmp_path: Path) -> None:
    folder = resources.files("flower_graph.data.cora_linqs")
    (tmp_path / "cora.npz.json").write_bytes(folder.joinpath("cora.npz.json").read_bytes())
    assert read_packed(tmp_path) == folder.joinpath("cora.npz").read_bytes()


def invariants(graph: Graph) -> Counter[tuple[object, ...]]:
    """Describe each node by what does not depend on the order of nodes, words or classes."""
    degree = torch.bincount(graph.edge_index[0], minlength=graph.x.size(0))
    words = graph.x.count_nonzero(dim=1)
    class_size = torch.bincount(graph.y)[graph.y]
    own = list(zip(degree.tolist(), words.tolist(), class_size.tolist(), strict=True))
    neighbours: list[list[tuple[int, ...]]] = [[] for _ in own]
    for source, target in graph.edge_index.t().tolist():
        neighbours[source].append(own[target])
    return Counter(
        (node, tuple(sorted(around))) for node, around in zip(own, neighbours, strict=True)
    )


def test_it_is_the_graph_of_planetoid(data_root: Path, cache: Path) -> None:
    options = {"root": str(data_root), "features": "as-is"}
    planetoid = load_data(DataConfig(name="Cora", **options))
    linqs = load_graph(DataConfig(features="as-is"))
    assert invariants(planetoid) == invariants(linqs)
    # Nodes with each word, and words that pairs of words share, whatever the words' order.
    assert sorted(planetoid.x.sum(0).tolist()) == sorted(linqs.x.sum(0).tolist())
