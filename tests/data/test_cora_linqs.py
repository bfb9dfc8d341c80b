"""The bundled Cora, how it was packed, and that it is Planetoid's graph."""

from __future__ import annotations

import zipfile
from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from flower_graph.config.common import DataConfig
from flower_graph.data import Graph, describe, load_data, load_graph
from flower_graph.data.cora_linqs import load_cora_linqs, read_packed
from flower_graph.data.cora_linqs.pack import MEMBERS, pack, read_source, to_bytes


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


CONTENT = "31\t1\t0\t1\tTheory\n7\t0\t0\t0\tRules\n19\t0\t1\t1\tTheory\n4\t1\t1\t1\tRules\n"
CITES = "31\t7\n7\t31\n19\t19\n4\t31\n4\t31\n"


def small() -> dict[str, np.ndarray]:
    return pack(CONTENT, CITES, train_per_class=1, num_val=1, num_test=1)


def test_pack_keeps_each_edge_once_and_the_order_of_nodes() -> None:
    arrays = small()
    assert arrays["edges"].tolist() == [[0, 0], [1, 3]]
    assert arrays["words"].tolist() == [2, 0, 2, 3]
    assert arrays["columns"].tolist() == [0, 2, 1, 2, 0, 1, 2]
    assert arrays["class_names"].tolist() == ["Rules", "Theory"]
    assert arrays["labels"].tolist() == [1, 0, 1, 0]
    parts = np.concatenate([arrays[part] for part in ("train", "val", "test")])
    assert sorted(parts.tolist()) == [0, 1, 2, 3]


def test_packed_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    first = to_bytes(small())
    assert to_bytes(small()) == first
    (tmp_path / "small.npz").write_bytes(first)
    with np.load(tmp_path / "small.npz", allow_pickle=False) as read:
        assert {key: read[key].tolist() for key in read} == {
            key: array.tolist() for key, array in small().items()
        }


def test_a_wheel_and_a_folder_are_the_same_source(tmp_path: Path) -> None:
    texts = {"content": CONTENT.encode(), "cites": CITES.encode()}
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        for key, text in texts.items():
            (tmp_path / f"cora.{key}").write_bytes(text)
            wheel.writestr(MEMBERS[key], text)
    assert read_source(tmp_path) == read_source(tmp_path / "some.whl") == texts
