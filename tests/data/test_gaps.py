"""Missing numbers and words in features: how each is filled, at all clients and in new graphs."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from partition_helpers import tables
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.config.partition import PartitionSection
from flower_graph.data import to_undirected
from flower_graph.data.folders.client_folder import (
    RATIOS,
    load_ego_folder,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.folders.party import graph_tensors, read_graph
from flower_graph.data.gaps import Gaps
from flower_graph.data.graph import Graph, Treatment, called
from flower_graph.data.new_graph import DataForm, read_new_graph
from flower_graph.data.partition.client_graphs import ClientGraph, partition_graph
from flower_graph.data.sources.datasets import load_graph
from flower_graph.data.sources.pyg import read_file
from flower_graph.errors import DataError

FILLED = Gaps(missing="mean", categories="one-hot")
NODES = """\
name,label,split,age,town
anna,cat,train,30,bern
bert,dog,val,,genf
cora,cat,test,60,bern
dora,dog,train,60,
"""


def load(path: Path, features: str = "as-is", gaps: Gaps = FILLED) -> Graph:
    """Load a graph as a run does."""
    return load_graph(DataConfig(str(path), split="auto", features=features, **gaps._asdict()))


def table(rows: str, count: int) -> str:
    """Write a table of some nodes of two classes."""
    return "name,label,a\n" + "".join(f"n{i},c{i % 2},{rows.format(i)}\n" for i in range(count))


@pytest.mark.parametrize(
    ("nodes", "gaps", "words"),
    [
        (NODES, FILLED, ""),
        (NODES.replace("30,", ","), FILLED, ""),
        (NODES, Gaps(), r"line 2: town.*data\.categories=one-hot"),
        (NODES, Gaps(categories="one-hot"), r"line 3: age.*data\.missing=mean"),
        (NODES, Gaps(missing="mean"), r"line 2: town.*data\.categories=one-hot"),
        (NODES.replace("30,", "nan,"), Gaps(categories="one-hot"), r"line 2: age"),
        (NODES.replace("60,bern", "60,7"), FILLED, r"line 4: town.*line 2.*'bern'"),
        (NODES.replace("60,bern", "inf,bern"), FILLED, "line 4: age: inf"),
        (table("", 9), FILLED, "a: no node"),
        (table("word{}", 1001), FILLED, "a: has 1001"),
    ],
)
def test_a_missing_number_gets_the_mean_and_a_word_a_feature_or_both_are_refused(
    nodes, gaps, words, tmp_path
):
    path = tables(tmp_path / "t", nodes)
    if words:
        with pytest.raises(DataError, match=words):
            load(path, gaps=gaps)
        return
    graph, first = load(path, gaps=gaps), 30 if "30" in nodes else 60
    mean = (first + 60 + 60) / 3
    expected = [[first, 1, 0], [mean, 0, 1], [60, 1, 0], [60, 2 / 3, 1 / 3]]
    torch.testing.assert_close(graph.x, torch.tensor(expected))
    missing = 3 + ("30" not in nodes)  # a town's two features
    assert any(f"{missing} missing numbers" in note for note in graph.notes)


def test_json_and_graphml_may_lack_attributes(tmp_path):
    graph = nx.Graph()
    graph.add_node("anna", label="cat", town="bern", at=[1, 2])
    graph.add_node("bert", label="dog", age=40, town="genf", at=None)
    graph.add_edge("anna", "bert")
    (tmp_path / "g.json").write_text(json.dumps(nx.node_link_data(graph)), encoding="utf-8")
    found = read_file(tmp_path / "g.json", FILLED)
    assert found["columns"].to_json() == [
        ["town", "bern"], ["town", "genf"], ["at[0]", None], ["at[1]", None], ["age", None],
    ]  # fmt: skip
    nan = torch.nan
    expected = torch.tensor([[1, 0, 1, 2, nan], [0, 1, nan, nan, 40]]).double()
    torch.testing.assert_close(found["x"], expected, equal_nan=True)
    for node in graph:
        del graph.nodes[node]["at"]
    nx.write_graphml(graph, tmp_path / "g.graphml")
    assert read_file(tmp_path / "g.graphml", FILLED)["x"].isnan().sum() == 1


def test_nan_in_a_saved_graph_gets_the_mean(tmp_path):
    x = torch.tensor([[1.0, torch.nan], [3.0, 4.0], [torch.nan, 6.0]])
    edges = torch.tensor([[0, 1], [1, 2]])
    data = Data(x=x, edge_index=edges, y=torch.tensor([0, 1, 0]))
    data.train_mask, data.val_mask, data.test_mask = torch.eye(3, dtype=torch.bool)
    torch.save(data, tmp_path / "g.pt")
    graph = load(tmp_path / "g.pt", "standardise", Gaps(missing="mean"))
    assert graph.x[2, 0] == graph.x[0, 1] == 0  # the mean
    assert graph.treatment is not None
    torch.testing.assert_close(graph.treatment.apply(x), graph.x)
    with pytest.raises(DataError, match=r"x\[0, 1\].*data\.missing=mean"):
        load(tmp_path / "g.pt", gaps=Gaps())


def test_new_nodes_get_the_runs_means_and_words(tmp_path):
    graph = load(tables(tmp_path / "t", NODES))
    assert graph.treatment is not None
    written = json.dumps(DataForm(graph.treatment, graph.num_classes, graph.classes).to_json())
    form = DataForm.from_json(json.loads(written))
    columns = "name,town,age\n"  # in another order, without labels
    new = read_new_graph(tables(tmp_path / "new", f"{columns}eva,genf,\nfinn,,20\n"), form)
    torch.testing.assert_close(new.x, torch.tensor([[50, 0, 1], [20, 2 / 3, 1 / 3]]))
    empty = read_new_graph(tables(tmp_path / "none", f"{columns}eva,,7\n"), form)
    torch.testing.assert_close(empty.x, torch.tensor([[7, 2 / 3, 1 / 3]]))
    for nodes, said in (
        (f"{columns}eva,chur,7\n", "'chur'.*bern, genf"),
        (f"{columns}eva,3,7\n", "town.*bern, genf"),
        (f"{columns}eva,genf,old\n", "age: 'old'"),
        ("name,town\neva,genf\n", "age"),
        ("name,town,age,size\neva,genf,7,3\n", "size"),
    ):
        with pytest.raises(DataError, match=said):
            read_new_graph(tables(tmp_path / "wrong", nodes), form)


def test_all_clients_have_the_same_features(tmp_path):
    tables(tmp_path / "all" / "one", NODES)
    other = "name,label,split,town,age\nanna,cat,train,chur,100\nbert,dog,val,genf,\n"
    tables(tmp_path / "all" / "two", f"{other}cora,cat,test,chur,100\ndora,dog,train,,100\n")
    clients = load_folder(tmp_path / "all", RATIOS, seed=0, gaps=FILLED)
    # Known ages: 30, 60, 60, 100, 100, 100. Of six towns, two each.
    thirds = [1 / 3] * 3
    assert clients.treatment is not None and clients.treatment.columns is not None
    assert clients.treatment.columns.words == (None, "bern", "chur", "genf")
    wanted = ([[75.0, 0, 0, 1], [60.0, *thirds]], [[75.0, 0, 0, 1], [100.0, *thirds]])
    for client, rows in zip(clients, wanted, strict=True):
        torch.testing.assert_close(client.x[[1, 3]], torch.tensor(rows))
    torch.testing.assert_close(clients[1].x[0], torch.tensor([100.0, 0, 1, 0]))


def test_clients_know_their_nodes_names(tmp_path):
    names, ring = "abcdefghijkl", torch.arange(12)
    edges = to_undirected(torch.stack([ring, ring.roll(1)]), 12)
    whole = Graph(torch.rand(12, 4), edges, ring % 2, 2, names=tuple(names))
    graphs = partition_graph(whole, PartitionSection(method="random", clients=2), 0.5, seed=0)
    for graph in graphs:
        assert graph.called == tuple(names[node] for node in graph.nodes.tolist())
        local = {f"0.{key}": value for key, value in graph_tensors(graph).items()}
        assert read_graph(ClientGraph, 0, local).called == graph.called
    assert called(graphs) == [name for graph in graphs for name in graph.called or ()]
    for folder, people in (("one", "zebcda"), ("two", "bcdefg")):
        rows = (f"{name},{row % 2},{row},{12 - row}\n" for row, name in enumerate(people))
        tables(tmp_path / folder, "name,label,p,q\n" + "".join(rows))
    ratios = [0.4, 0.3, 0.3]
    egos = load_ego_folder(tmp_path, "per-client", ratios, seed=0)
    assert load_folder(tmp_path, ratios, 0)[0].called == egos[0].called == tuple("zebcda")
    # in the order of the identities' numbers
    assert load_overlapping_folder(tmp_path, ratios, 0)[0].called == tuple("abcdez")


FORM = DataForm(Treatment("as-is", 2), 2, ("3", "7"))


def test_labels_get_the_runs_numbers(tmp_path):
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
    torch.save({"edge_index": edges, "y": [1, 0]}, tmp_path / "new.pt")
    with pytest.raises(DataError):  # numbers of nodes are no features of new ones
        read_new_graph(tmp_path / "new.pt", FORM._replace(given=Gaps("one-hot")))
    form = DataForm(Treatment("as-is", 32), 2, None, Gaps("degree"))
    assert read_new_graph(tmp_path / "new.pt", form).x.argmax(1).tolist() == [1, 1]
