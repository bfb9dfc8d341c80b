"""Graphs in tables, node-link JSON and GraphML: tensors worked out by hand, each error's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch

from flower_graph.data.gaps import Gaps, Uses
from flower_graph.data.sources.names import check_name, file_path, folder_path, located
from flower_graph.data.sources.pyg import load_file, read_file
from flower_graph.errors import DataError, FractionalLabelsError

NODES = """\
name,label,split,age,income
anna,cat,train,30,1.5
bert,dog,,40,2
"Cox, C.",,test,50,-3e1
dora,dog,val,60,0
"""
EDGES = """\
source,target,weight
anna,bert,1
bert,"Cox, C.",2
"""
X = [[30.0, 1.5], [40.0, 2.0], [50.0, -30.0], [60.0, 0.0]]
LABELS = ["cat", "dog", None, "dog"]
NAMES = ("anna", "bert", "Cox, C.", "dora")


def tables(folder: Path, nodes: str = NODES, edges: str = EDGES) -> Path:
    """Write a graph in tables."""
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text(nodes, encoding="utf-8")
    (folder / "edges.csv").write_text(edges, encoding="utf-8")
    return folder


def drawn(kind: type[nx.Graph] = nx.Graph) -> Any:
    """Make the same graph as in the tables."""
    graph = kind()
    for name, label, split, (age, income) in zip(
        NAMES, LABELS, ("train", None, "test", "val"), X, strict=True
    ):
        said = {"label": label, "split": split}
        graph.add_node(name, **{k: v for k, v in said.items() if v}, age=age, income=income)
    graph.add_edge("anna", "bert", weight=1)
    graph.add_edge("bert", "Cox, C.", weight=2)
    return graph


def written(path: Path, graph: Any) -> Path:
    """Write a graph as NetworkX does."""
    if path.suffix == ".graphml":
        nx.write_graphml(graph, path)
    else:
        path.write_text(json.dumps(nx.node_link_data(graph)), encoding="utf-8")
    return path


@pytest.fixture(params=["csv", "semicolons", "graphml", "json", "directed.json"])
def same(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write one graph in each of the forms."""
    if request.param == "csv":
        return tables(tmp_path / "graph")
    if request.param == "semicolons":  # as spreadsheets of half of Europe write them
        nodes = "\ufeff" + NODES.replace('"Cox, C."', "Cox~ C.").replace(",", ";").replace("~", ",")
        edges = EDGES.replace('"Cox, C."', "Cox~ C.").replace(",", ";").replace("~", ",")
        return tables(tmp_path / "graph", nodes.replace("name", "ID"), edges)
    kind = nx.DiGraph if request.param.startswith("directed") else nx.Graph
    return written(tmp_path / f"graph.{request.param}", drawn(kind))


def test_all_forms_say_the_same_graph(same: Path) -> None:
    found = read_file(same)
    assert found["x"].tolist() == X
    assert found["y"] == LABELS
    assert found["edge_index"].tolist() == [[0, 1], [1, 2]]
    assert found["names"] == NAMES
    masks = [found[part].nonzero().flatten().tolist() for part in ("train_mask", "val_mask")]
    assert masks == [[0], [3]]
    assert found["test_mask"].tolist() == [False, False, True, False]
    assert found["edge_weight"].tolist() == [1, 2] and "notes" not in found


def test_a_graph_without_features_split_and_edges_is_read(tmp_path: Path) -> None:
    found = read_file(tables(tmp_path / "t", "id,label\n7,three\n9,-1\n\n", "source,target\n"))
    assert found["x"] is None and "train_mask" not in found and "notes" not in found
    assert found["y"] == ["three", "-1"] and found["names"] == ("7", "9")
    assert load_file(tmp_path / "t", Gaps("degree")).y.tolist() == [0, -1]
    assert found["edge_index"].shape == (2, 0)


def test_numbers_to_learn_are_read_and_minus_one_is_one_of_them(tmp_path: Path) -> None:
    rows = "name,label,age\na,-1,3\nb,,4\nc,2.5,5\n"
    path = tables(tmp_path / "t", rows, "source,target\na,b\n")
    graph = load_file(path, uses=Uses(targets=True))
    assert graph.targets is not None and graph.num_classes == 1
    expected = torch.tensor([-1, torch.nan, 2.5])
    torch.testing.assert_close(graph.targets, expected, equal_nan=True)
    assert graph.y.tolist() == [0, -1, 0]  # who has one
    with pytest.raises(FractionalLabelsError, match=r"y\[2\] is 2.5"):
        load_file(path)
    (path / "nodes.csv").write_text(rows.replace("2.5", "old"), encoding="utf-8")
    with pytest.raises(DataError, match=r"y\[2\] is 'old'"):
        load_file(path, uses=Uses(targets=True))


def test_lists_and_truths_are_features_and_names_of_igraph_count(tmp_path: Path) -> None:
    graph = nx.Graph()
    graph.add_node(0, Label=1, x=[1.0, 2.0], new=True, name="An")
    graph.add_node(1, Label=None, x=[3, 4], new=False, name="Be")
    found = read_file(written(tmp_path / "g.json", graph))
    assert found["x"].tolist() == [[1, 2, 1], [3, 4, 0]]
    assert found["y"] == ["1", None] and found["names"] == ("An", "Be")
    for node in graph:
        del graph.nodes[node]["x"]
    graph.nodes[1]["Label"] = 0
    found = read_file(written(tmp_path / "g.graphml", graph))
    assert found["x"].tolist() == [[1], [0]]
    assert found["y"] == ["1", "0"] and found["names"] == ("An", "Be")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name,", "who,", r"nodes\.csv"),
        ("age,", "n_id,", r"nodes\.csv: n_id"),
        ("age,", "id,", "column"),
        ("income", "AGE", "'age'"),
        (
            "label,",
            "class,",
            "line 2.*'cat'",
        ),
        ("40,2", "40,two", r"nodes\.csv, line 3.*'two'"),
        ("40,2", "40,", "line 3"),
        ("40,2", "40", "line 3: 4.*line 1"),
        ("40,2", "nan,2", "line 3.*nan"),
        ("40,2", "1e39,2", r"line 3.*1e\+39"),
        ("bert,", ",", "line 3"),
        ("bert,", "anna,", "line 3.*'anna'.*line 2"),
        (",val,", ",valid,", "line 5.*'valid'"),
        (NODES, "", r"nodes\.csv"),
        (NODES, "name,label\n", r"nodes\.csv"),
        (NODES, "name,label\nanna,\n", r"nodes\.csv"),
        ("name", '"name', r"nodes\.csv, line \d"),
        ('"Cox, C."', '"Cox, C.', r"nodes\.csv, line \d"),
    ],
)
def test_a_wrong_table_of_nodes_is_refused_by_line_and_column(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert old in NODES
    with pytest.raises(DataError, match=said) as caught:
        load_file(tables(tmp_path / "t", NODES.replace(old, new, 1)))
    assert str(caught.value).startswith(f"file {tmp_path}/t/nodes.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ("source,target\nanna,zoe\n", r"line 2: target: 'zoe'"),
        ("source,target\n,anna\n", r"line 2: source"),
        ("source,target\nanna\n", r"line 2: 1.*2"),
        ("from,target\nanna,bert\n", r"line 1.*source"),
        ("", ""),
    ],
)
def test_a_wrong_table_of_edges_is_refused_by_line_and_column(
    edges: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"^file {tmp_path}/t/edges\.csv.*{said}"):
        load_file(tables(tmp_path / "t", edges=edges))
    (tmp_path / "t" / "edges.csv").unlink()
    with pytest.raises(DataError, match=r"edges\.csv"):
        load_file(tmp_path / "t")


def change(key: str, value: Any, kind: str = "nodes") -> str:
    """Give the graph as JSON with one change of its second node or edge."""
    content = nx.node_link_data(drawn(), edges="links")
    content[kind][1][key] = value
    return json.dumps(content)


WHOLE = change("age", 40)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", ""),
        (WHOLE[: len(WHOLE) // 2], "line 1"),
        ("[1]", "nodes.*links"),
        ('{"nodes": 3, "links": []}', "nodes"),
        ('{"nodes": [3], "links": []}', "node 0: 3"),
        (change("id", "anna"), "node 1: name: 'anna'"),
        (change("age", "old"), "node 1: age: 'old'"),
        (change("age", None), "node 1: age"),
        (change("age", [1, 2]), "node 1: 3.*2"),
        (change("city", 5), "node 0: city"),
        (change("split", "all"), "node 1: split: 'all'"),
        (change("target", "zoe", "links"), "edge 1: target: 'zoe'"),
    ],
)
def test_wrong_json_is_refused_by_entry(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=rf"^file {tmp_path}.*g\.json.*{said}"):
        load_file(tmp_path / "g.json")


def test_wrong_graphml_and_other_text_than_utf8_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "g.graphml", drawn())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"g\.graphml"):
        load_file(path)
    tables(tmp_path / "t")
    (tmp_path / "t" / "nodes.csv").write_bytes("name,label\nJürg,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"nodes\.csv"):
        load_file(tmp_path / "t")


def test_names_of_the_kinds_lead_to_them_and_others_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables(tmp_path / "people")
    for name in ("people", "people/", "absent.graphml", "absent.json"):
        assert file_path(name) == Path(name) and folder_path(name) is None
    check_name("people/")
    (tmp_path / "clients").mkdir()
    for name, said in (
        ("clients/", r".*nodes\.csv"),
        ("absent/", ".*folder"),
        ("./absent", ".*file"),
    ):
        with pytest.raises(DataError, match=f"data.name = '{name}': {said}"):
            check_name(name)
    written(tmp_path / "clients" / "a.json", drawn())
    with pytest.raises(DataError, match="'clients'"):
        check_name("clients")
    for name, said in (
        ("graph.npz", "is not a graph"),
        ("people/nodes.csv", r".*nodes\.csv and edges\.csv"),
        ("g.gpickle", r"is a pickle.*write_graphml"),
        ("g.pkl", "is a pickle"),
    ):
        Path(name).write_bytes(b"any")
        if not name.endswith("npz"):
            with pytest.raises(DataError, match=said):
                check_name(name)
        with pytest.raises(DataError, match=said):
            load_file(Path(name))


def test_one_folder_has_one_name_from_wherever_it_is_named(tmp_path: Path) -> None:
    """So that two runs on it are on the same data."""
    tables(tmp_path / "people")
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    named = located("../../people/", tmp_path / "runs" / "sweep")
    assert named == located("people/", tmp_path.resolve()) == f"{tmp_path.resolve() / 'people'}/"
