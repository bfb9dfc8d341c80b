"""Weights of edges: read, cut with the graph, copied with nodes, used by the GCN; by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from federation import METHODS, Setup
from own_graphs import valued
from torch_geometric.data import Data

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.client.learner import LinkTask, placed_on
from flower_graph.config.partition import PartitionSection
from flower_graph.data import as_graph
from flower_graph.data.description import Caution
from flower_graph.data.folders.client_folder import client_graph_from_data, load_folder
from flower_graph.data.gaps import Uses
from flower_graph.data.partition.client_graphs import partition_graph
from flower_graph.errors import DataError
from flower_graph.models import GCN

WEIGHTED = Uses(weights=True)
# A path 0 - 1 - 2 - 3 whose edges weigh 2, 3 and 5; the last is given both ways
EDGES, WEIGHT = torch.tensor([[1, 1, 3, 2, 0], [0, 2, 2, 3, 0]]), torch.tensor([2.0, 3, 5, 5, 9])


def path(**more: Any) -> Data:
    x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])
    return Data(**{"x": x, "y": y, "edge_index": EDGES, "edge_weight": WEIGHT, **more})


def by_pair(graph: Any, names: torch.Tensor | None = None) -> dict[tuple[int, int], float]:
    """Give the weight of each pair of nodes, by their numbers in the whole graph."""
    ends = graph.edge_index if names is None else names[graph.edge_index]
    pairs = map(tuple, ends.T.tolist())
    return dict(zip(pairs, graph.edge_weight.tolist(), strict=True))


BOTH = {(0, 1): 2, (1, 0): 2, (1, 2): 3, (2, 1): 3, (2, 3): 5, (3, 2): 5}


def test_every_direction_has_the_edges_weight():
    graph = as_graph(path(), weights=True)
    assert by_pair(graph) == BOTH
    column = as_graph(path(edge_weight=None, edge_attr=WEIGHT[:, None].double()), weights=True)
    assert by_pair(column) == BOTH
    differing = torch.tensor([2.0, 3, 4, 6, 9])  # 3 - 2 and 2 - 3 by two weights
    mean = as_graph(path(edge_weight=differing), weights=True)
    assert by_pair(mean) == BOTH and "1 edges have several weights" in str(mean.notes)


def test_what_cannot_be_weights_is_refused_and_what_is_ignored_is_said():
    for weight, words in ((WEIGHT[:3], "number for each edge"), (-WEIGHT, "0 or more"),
                          (WEIGHT / 0, "finite")):  # fmt: skip
        with pytest.raises(DataError, match=f"edge_weight.*{words}"):
            as_graph(path(edge_weight=weight), weights=True)
        as_graph(path(edge_weight=weight))  # of a run that does not use them
    several = path(edge_weight=None, edge_attr=torch.ones(5, 2))
    for data, uses in ((path(), False), (several, True)):
        graph = as_graph(data, weights=uses)
        (said,) = [note for note in graph.notes if isinstance(note, Caution)]
        assert graph.edge_weight is None and "is ignored" in said


@pytest.mark.parametrize(
    "how",
    [
        {"method": "random", "clients": 3},
        {"method": "metis", "clients": 3},
        {"method": "metis-overlapping", "clients": 4, "draws": 4},
        {"method": "ego-networks", "clients": 4, "hops": 2, "min_nodes": 4},
    ],
)
def test_clients_parts_and_copies_keep_the_weights_of_their_edges(how):
    data = valued(60, y=torch.arange(60) % 2)
    weight = 1 + torch.arange(data.edge_index.shape[1]) % 7
    graph = as_graph(Data(**{**data.to_dict(), "edge_weight": weight}), weights=True)
    wanted, seen = by_pair(graph), 0
    for client in partition_graph(graph, PartitionSection(**how), 0.0, 0):
        own = by_pair(client, client.nodes)
        assert own.items() <= wanted.items() and len(own) == client.edge_index.shape[1]
        seen += len(own)
    assert seen


def test_clients_of_one_file_keep_the_weights_of_their_edges(tmp_path):
    data = path(client=[1, 0, 0, 0], train_mask=torch.ones(4) > 0, val_mask=torch.zeros(4) > 1)
    torch.save(data, tmp_path / "g.pt")
    graphs = load_folder(tmp_path / "g.pt", [0.6, 0.2, 0.2], 0, uses=WEIGHTED)
    assert by_pair(graphs[0]) == {(0, 1): 3, (1, 0): 3, (1, 2): 5, (2, 1): 5}
    with_none = load_folder(tmp_path / "g.pt", [0.6, 0.2, 0.2], 0)
    assert all(one.edge_weight is None for one in with_none)


def test_the_gcn_is_as_worked_out_by_hand():
    trained = path(train_mask=torch.ones(4) > 0)
    graph, gcn = client_graph_from_data(0, trained, weights=True), GCN(4, 1, 1)
    with torch.no_grad():
        for one in gcn.parameters():
            one.copy_(torch.ones_like(one) * (one.dim() == 2))
    gcn.eval()
    out = gcn(graph.x, graph.edge_index, graph.edge_weight).flatten().tolist()
    a = np.array([[1, 2, 0, 0], [2, 1, 3, 0], [0, 3, 1, 5], [0, 0, 5, 1.0]])
    root = np.diag(a.sum(1) ** -0.5)
    near = root @ a @ root  # x W of ones is 1 everywhere, and ReLU leaves what is above 0
    np.testing.assert_allclose(out, near @ near @ np.ones(4), rtol=1e-5)


def test_links_are_passed_over_with_their_weights():
    n = 40
    pairs = torch.randint(n, (2, 200), generator=torch.Generator().manual_seed(0))
    weight = 1.0 + pairs.amin(0) * n + pairs.amax(0)  # which says of what edge it is
    data = Data(x=torch.eye(n), y=torch.zeros(n).long(), edge_index=pairs, edge_weight=weight)
    data.train_mask = torch.ones(n) > 0
    task, local = LinkTask(0.2, 0.2, 1), client_graph_from_data(0, data, weights=True)
    seen = []

    def forward(given):
        seen.append(given)
        return given.x

    placed = task.place(local, torch.device("cpu"))
    task.judge(forward, placed)
    for one in (placed, *seen):
        ends = one.edge_index
        torch.testing.assert_close(one.edge_weight, 1.0 + ends.amin(0) * n + ends.amax(0))
    assert placed_on(local, torch.device("cpu")).edge_index.shape != placed.edge_index.shape


EACH = [
    pytest.param(name, marks=() if name == "fedavg" else pytest.mark.slow)
    for name in ("fedavg", "fedprox", "local", "ditto", "fedproto", "fedgta", "fedpub")
]


@pytest.mark.parametrize("name", EACH)
def test_methods_use_them_and_say_the_same_of_their_nodes_as_of_newcomers(name, tmp_path):
    data = valued(90, y=torch.arange(90) % 3)
    data.edge_weight = 1.0 + torch.arange(data.edge_index.shape[1]) % 9
    torch.save(data, tmp_path / "graph.pt")
    data.edge_weight = None
    torch.save(data, tmp_path / "bare.pt")
    small = [one for one in METHODS[name].overrides if not one.startswith("data.")]
    words = (*small, "data.split=auto", "data.features=standardise", "partition.method=metis")
    words = (*words, "partition.ratios=[0.5,0.25,0.25]", "rounds=3")

    def run(file):
        setup = Setup(METHODS[name].config, (*words, f"data.name={tmp_path / file}"), 4)
        return fg.load_run(setup.run(tmp_path / file[:-3], state_dir=None).out)

    weighted, bare = run("graph.pt"), run("bare.pt")
    ours, theirs = (one.predictions(0).probability for one in (weighted, bare))
    assert not np.allclose(ours, theirs, atol=1e-5)
    assert weighted.data.weights and not bare.data.weights
    from flower_graph.method.registry import method_of

    (graph, *_) = method_of(weighted.config).graphs(weighted.config)
    x = data.x[graph.nodes]
    said = weighted.predict(x, graph.edge_index, client=0, edge_weight=graph.edge_weight)
    place = {node: row for row, node in enumerate(graph.nodes.tolist())}
    rows = [place[one] for one in weighted.predictions(0).node]
    np.testing.assert_allclose(said.amax(1)[rows], ours, atol=1e-4)
    words_ = ["predict", str(weighted.path), "--client", "0", "--data", str(tmp_path / "graph.pt")]
    assert main([*words_, "--out", str(tmp_path / "new.csv")]) == 0
