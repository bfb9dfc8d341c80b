"""Users' names of nodes reach the clients; a new graph's labels get the run's numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flower_graph.config.partition import PartitionSection
from flower_graph.data.folders.client_folder import (
    load_ego_folder,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.folders.party import graph_tensors, read_graph
from flower_graph.data.gaps import Gaps
from flower_graph.data.graph import Graph, Treatment, called
from flower_graph.data.new_graph import DataForm, read_new_graph
from flower_graph.data.partition.client_graphs import ClientGraph, partition_graph
from flower_graph.errors import DataError

NAMES = tuple("abcdefghijkl")


def whole() -> Graph:
    y = torch.arange(12) % 2
    ring = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
    return Graph(torch.rand(12, 4), torch.cat([ring, ring.flip(0)], 1), y, 2, names=NAMES)


def test_a_cut_graphs_clients_know_their_nodes_names() -> None:
    graphs = partition_graph(whole(), PartitionSection(method="random", clients=2), 0.5, seed=0)
    for graph in graphs:
        assert graph.called == tuple(NAMES[node] for node in graph.nodes.tolist())
        local = {f"0.{key}": value for key, value in graph_tensors(graph).items()}
        assert read_graph(ClientGraph, 0, local, "there").called == graph.called
    assert called(graphs) == [name for graph in graphs for name in graph.called or ()]


def people(folder: Path, names: str) -> None:
    folder.mkdir(parents=True)
    rows = [f"{name},{row % 2},{row},{12 - row}" for row, name in enumerate(names)]
    (folder / "nodes.csv").write_text("name,label,p,q\n" + "\n".join(rows) + "\n")
    edges = [f"{a},{b}" for a, b in pairwise(names)]
    (folder / "edges.csv").write_text("source,target\n" + "\n".join(edges) + "\n")


def test_clients_of_folders_know_their_nodes_names(tmp_path: Path) -> None:
    people(tmp_path / "one", "zebcda")
    people(tmp_path / "two", "bcdefg")
    ratios = [0.4, 0.3, 0.3]
    assert load_folder(tmp_path, ratios, seed=0)[0].called == tuple("zebcda")
    egos = load_ego_folder(tmp_path, "per-client", ratios, seed=0)
    assert egos[0].called == tuple("zebcda")
    # in the order of the identities' numbers
    assert load_overlapping_folder(tmp_path, ratios, 0)[0].called == tuple("abcdez")


FORM = DataForm(Treatment("as-is", 2), 2, ("3", "7"))


def test_labels_get_the_runs_numbers(tmp_path: Path) -> None:
    edges, x = torch.tensor([[0], [1]]), torch.ones(3, 2)
    for form, y, numbers in (
        (FORM, torch.tensor([7, -1, 3]), [1, -1, 0]),  # labels with gaps
        (FORM._replace(classes=None), torch.tensor([1, -5, 0]), [1, -1, 0]),
        (FORM._replace(classes=("cat", "dog")), ["dog", None, "cat"], [1, -1, 0]),
        (FORM._replace(classes=("cat", "dog")), torch.tensor([1, -1, 0]), [1, -1, 0]),
    ):
        torch.save({"x": x, "edge_index": edges, "y": y}, tmp_path / "new.pt")
        assert read_new_graph(tmp_path / "new.pt", form).y.tolist() == numbers
    with pytest.raises(DataError, match=r"'dog'.*3"):
        torch.save({"x": x, "edge_index": edges, "y": ["dog", "7", "3"]}, tmp_path / "new.pt")
        read_new_graph(tmp_path / "new.pt", FORM)


def test_numbers_of_nodes_are_no_features_of_new_ones(tmp_path: Path) -> None:
    torch.save({"edge_index": torch.tensor([[0], [1]]), "y": [1, 0]}, tmp_path / "new.pt")
    with pytest.raises(DataError):
        read_new_graph(tmp_path / "new.pt", FORM._replace(given=Gaps("one-hot")))
    made = read_new_graph(
        tmp_path / "new.pt",
        DataForm(Treatment("as-is", 32), 2, None, Gaps("degree")),
    )
    assert made.x.argmax(1).tolist() == [1, 1]
