"""Graphs as people and programs write them: read as they mean them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import igraph
import networkx as nx
import pandas as pd
import pytest
import scipy.sparse
import torch
from partition_helpers import tables
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import from_networkx

from flower_graph.config.common import DataConfig
from flower_graph.data import as_graph
from flower_graph.data.folders.client_folder import RATIOS, clients_path, load_folder
from flower_graph.data.gaps import Gaps, Uses
from flower_graph.data.given import with_saved_graphs
from flower_graph.data.graph import Graph
from flower_graph.data.labels import read_labels
from flower_graph.data.new_graph import DataForm, read_new_graph
from flower_graph.data.sources.datasets import load_graph
from flower_graph.data.sources.names import file_path, folder_path, located, pyg_name
from flower_graph.data.sources.pyg import load_file, read_file
from flower_graph.errors import DataError, FractionalLabelsError

PEOPLE = ("anna", "bert", "cora", "dora")
LABELS = ["cat", "dog", "cat", "dog"]
AGES, INCOMES = [30.0, 40.0, 50.0, 60.0], [1.5, 2.0, -3.0, 0.0]
X = [[age, income] for age, income in zip(AGES, INCOMES, strict=True)]
EDGES = "source,target\nanna,bert\nbert,cora\n"


def frame(columns: Sequence[str] = ("name", "label", "age", "income")) -> pd.DataFrame:
    whole = {"name": PEOPLE, "label": LABELS, "age": AGES, "income": INCOMES}
    return pd.DataFrame(whole)[list(columns)]


def network(columns: Sequence[str] = ("label", "age", "income")) -> Any:
    """Make the graph of the tables, its nodes' attributes in an order."""
    graph, whole = nx.Graph(), frame()
    for row, name in enumerate(PEOPLE):
        graph.add_node(name, **{key: whole[key].tolist()[row] for key in columns})
    graph.add_edges_from(pairwise(PEOPLE), weight=2.0)
    return graph


def saved(path: Path, graph: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".graphml":
        nx.write_graphml(graph, path)
    else:
        path.write_text(json.dumps(nx.node_link_data(graph)), encoding="utf-8")
    return path


def said(call: Any, *words: str) -> None:
    """Assert that a call is refused in one line with these words."""
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


# Features have names ------------------------------------------------------------------------------

TURNED = ("name", "income", "label", "age")
KINDS = ("tables", "g.graphml", "g.json")


def with_order(folder: Path, kind: str, columns: Sequence[str]) -> Path:
    if kind == "tables":
        return tables(folder / kind, frame(columns).to_csv(index=False), EDGES)
    return saved(folder / kind, network([key for key in columns if key != "name"]))


@pytest.mark.parametrize("kind", KINDS)
def test_another_clients_columns_are_found_by_name(kind: str, tmp_path: Path) -> None:
    with_order(tmp_path / "clients" / "a", "tables", frame().columns)
    (tmp_path / "clients" / "a" / "tables").rename(tmp_path / "clients" / "first")
    other = with_order(tmp_path, kind, TURNED)
    other.rename(tmp_path / "clients" / f"second{other.suffix}")
    clients = load_folder(tmp_path / "clients", RATIOS, 0)
    assert [one.x.tolist() for one in clients] == [X, X]


def form_of(graph: Graph, config: DataConfig) -> DataForm:
    """Return the form of a run's new graphs, by way of its file."""
    assert graph.treatment is not None
    form = DataForm(graph.treatment, graph.num_classes, graph.classes, Gaps.of(config))
    return DataForm.from_json(json.loads(json.dumps(form.to_json())))


def test_new_files_are_read_as_the_runs_own(tmp_path: Path) -> None:
    rows = f"{COMMAS}dora;dog;1\n".replace("label", "group")
    path = tables(tmp_path, rows, "source;target;v\nanna;bert;2,5\n")
    own = {"label": "group", "weight": "v", "decimal": "comma"}
    config = DataConfig(str(path), split="auto", features="as-is", **own)
    form = form_of(load_graph(config, uses=WEIGHTED), config)._replace(weights=True)
    new = read_new_graph(path, form)
    assert new.x.tolist() == [[1.5], [-2], [0.25], [1]] and new.y.tolist() == [0, 1, 0, 1]
    assert new.edge_weight is not None and new.edge_weight.tolist() == [2.5, 2.5]


def test_features_without_names_are_taken_by_place_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_order(tmp_path / "clients", "g.json", ("label", "age", "income"))
    torch.save(Data(x=torch.tensor(X), edge_index=torch.tensor([[0], [1]]), y=LABELS),
               tmp_path / "clients" / "z.pt")  # fmt: skip
    assert load_folder(tmp_path / "clients", RATIOS, 0)[1].x.tolist() == X
    assert "z.pt: its features have no names" in caplog.text and "age, income" in caplog.text
    config = DataConfig(str(tmp_path / "clients" / "z.pt"), split="auto", features="as-is")
    new = read_new_graph(tmp_path / "clients" / "g.json", form_of(load_graph(config), config))
    assert new.x.tolist() == X and "g.json: the run's features have no names" in caplog.text


def test_names_go_along_with_a_graph_that_is_saved(tmp_path: Path) -> None:
    first = DataConfig(str(with_order(tmp_path, "g.json", TURNED)), split="auto", features="as-is")
    settings = with_saved_graphs({"data.name": load_graph(first).to_data()}, tmp_path)
    again = DataConfig(str(settings["data.name"]), split="auto", features="as-is")
    new = with_order(tmp_path, "tables", frame().columns)
    found = read_new_graph(new, form_of(load_graph(again), again))
    assert found.x.tolist() == [row[::-1] for row in X]


# Data frames --------------------------------------------------------------------------------------


# Labels, names and numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["1", "1.0", "nan", "3"], [1, 1, -1, 3]),
        ([1, 1.0, float("nan"), 3], [1, 1, -1, 3]),
        (["NA", "None", "", "null"], None),
        (["007", "7", "7.0", None], ["007", "7", "7", None]),
        (["cat", "1.0", "NaN", "N/A"], ["cat", "1", None, None]),
        (["1e+05", "100000", "-1", "-1.0"], [100000, 100000, -1, -1]),
        (["1.5e3x", "1_0", "\u200bcat\ufeff", " cat "], ["1.5e3x", "1_0", "cat", "cat"]),
    ],
)
def test_one_rule_for_labels_in_files_and_in_python(
    given: list[Any], wanted: Any, tmp_path: Path
) -> None:
    graph = nx.Graph()
    for row, label in enumerate(given):
        graph.add_node(row, label=label, a=row)
    path = saved(tmp_path / "g.json", graph)
    if wanted is None:
        said(lambda: read_file(path), "no label")
        return
    for found in (read_labels(given, 4, []), read_labels(read_file(path)["y"], 4, [])):
        assert (found.tolist() if isinstance(found, torch.Tensor) else found) == wanted


def test_several_labels_a_node_are_refused(tmp_path: Path) -> None:
    graph = network()
    graph.nodes["bert"]["label"] = ["cat", "dog"]
    said(lambda: load_file(saved(tmp_path / "g.json", graph)), "node 1: label", "'cat', 'dog'")
    said(lambda: read_labels(["cat", ["dog"]], 2, []), "y[1]", "['dog']")


def test_words_stay_as_they_are_written_in_classes_and_in_new_labels(tmp_path: Path) -> None:
    rows = "".join(f"n{row},{('007', '7', 'NA')[row % 3]},{row}\n" for row in range(12))
    path = tables(tmp_path / "old", f"name,label,a\n{rows}", "source,target\nn0,n1\n")
    config = DataConfig(str(path), split="auto", features="as-is")
    graph = load_graph(config)
    assert graph.classes == ("007", "7") and graph.y.tolist() == [0, 1, -1] * 4
    new = tables(tmp_path / "new", "name,label,a\nx,7,1\ny,7.0,2\n", "source,target\nx,y\n")
    assert read_new_graph(new, form_of(graph, config)).y.tolist() == [1, 1]
    (tmp_path / "new" / "nodes.csv").write_text("name,label,a\nx,1,1\ny,1,2\n")
    mixed = form_of(graph, config)._replace(classes=("1", "cat", "dog"), num_classes=3)
    assert read_new_graph(new, mixed).y.tolist() == [0, 0]  # by name, not by place


def test_names_of_nodes_are_the_same_whole_or_as_floats(tmp_path: Path) -> None:
    nodes = "id,label,a\n1,x,1\n2,y,2\n007,x,3\n"  # with an empty cell pandas writes floats
    path = tables(tmp_path, nodes, "source,target\n1.0,2.0\n2.0,007\n")
    assert read_file(path)["edge_index"].tolist() == [[0, 1], [1, 2]]
    assert read_file(path)["names"] == ("1", "2", "007")
    said(lambda: read_file(tables(tmp_path, nodes, "source,target\n1,7\n")), "'7' is no node")


COMMAS = "name;label;age\nanna;cat;1,5\nbert;dog;-2\ncora;cat;,25\n"


def test_a_decimal_comma_is_named_and_read(tmp_path: Path) -> None:
    edges = "source;target;weight\nanna;bert;0,5\nbert;cora;2\n"
    path = tables(tmp_path, COMMAS, edges)
    for categories in ("refuse", "one-hot"):  # which would make a word of each number
        said(lambda how=categories: load_file(path, Gaps(categories=how)), "line 2", "data.decimal")
    found = read_file(path, Gaps(decimal="comma"))
    assert found["x"].tolist() == [[1.5], [-2], [0.25]]
    assert found["edge_weight"].tolist() == [0.5, 2]
    listed = [{"id": name, "label": name[0], "a": "1,5", "client": name[0]} for name in PEOPLE]
    (tmp_path / "g.json").write_text(json.dumps({"nodes": listed, "links": []}))
    assert clients_path(DataConfig(str(tmp_path / "g.json"), decimal="comma")) is not None
    said(
        lambda: load_file(tables(tmp_path, COMMAS.replace("-2", "2.5")), Gaps(decimal="comma")),
        "line 3",
        "decimal point",
    )
    values = tables(tmp_path, COMMAS.replace("cat", "0,5").replace("dog", "3"), edges)
    graph = load_file(values, Gaps(decimal="comma"), Uses(targets=True))
    assert graph.targets is not None and graph.targets.tolist() == [0.5, 3, 0.5]
    values = tables(
        tmp_path, COMMAS.replace("cat", "0,5").replace(";1,5", ";1").replace(",25", "1")
    )
    (tmp_path / "edges.csv").write_text("source;target\n")
    said(lambda: load_file(values, uses=Uses(targets=True)), "y[0]", "data.decimal")


def test_numbers_keep_their_digits_until_they_are_standardised(tmp_path: Path) -> None:
    seconds = [1_700_000_000 + step for step in range(12)]
    rows = "".join(f"n{row},{row % 2},{one}\n" for row, one in enumerate(seconds))
    path = tables(tmp_path / "t", f"name,label,time\n{rows}", "source,target\nn0,n1\n")
    exact = torch.tensor(seconds).double()
    wanted = ((exact - exact.mean()) / exact.std(correction=0)).float()[:, None]
    torch.save(Data(x=exact[:, None], edge_index=torch.tensor([[0], [1]]), y=exact.long() % 2),
               tmp_path / "g.pt")  # fmt: skip
    for file in (path, tmp_path / "g.pt"):
        config = DataConfig(str(file), split="auto", features="standardise")
        graph = load_graph(config)
        assert graph.x.dtype == torch.float32
        torch.testing.assert_close(graph.x, wanted)
        torch.testing.assert_close(read_new_graph(file, form_of(graph, config)).x, wanted)


# Weights of edges ---------------------------------------------------------------------------------

WEIGHTED = Uses(weights=True)


def weighed(folder: Path, edges: str, **how: Any) -> Any:
    path = tables(folder, frame().to_csv(index=False), edges)
    return load_file(path, Gaps(**how), WEIGHTED).edge_weight


def test_weights_are_read_in_any_case_and_by_a_name_of_their_own(tmp_path: Path) -> None:
    for head, how in (("Weight", {}), ("WEIGHT", {}), ("value", {"weight": "value"})):
        edges = f"Source,Target,{head}\nanna,bert,2\nbert,cora,3\n"
        assert weighed(tmp_path, edges, **how).tolist() == [2, 2, 3, 3]
    said(lambda: weighed(tmp_path, EDGES, weight="value"), "edges.csv: data.weight")
    assert weighed(tmp_path, "source,target,weight\nanna,bert,\nbert,cora,NA\n") is None


@pytest.mark.parametrize("wrong", ["", "NA", '"1,5"', "strong"])
def test_a_weight_that_is_no_number_is_refused_by_its_line(wrong: str, tmp_path: Path) -> None:
    edges = f"source,target,weight\nanna,bert,2\nbert,cora,{wrong}\n"
    said(lambda: weighed(tmp_path, edges), "edges.csv, line 3: weight")


def test_weights_of_json_and_graphml_and_of_edges_without(tmp_path: Path) -> None:
    graph = network()
    for ending in ("json", "graphml"):
        path = saved(tmp_path / f"g.{ending}", graph)
        assert load_file(path, uses=WEIGHTED).edge_weight.tolist() == [2.0] * 6  # type: ignore[union-attr]
    del graph.edges["bert", "cora"]["weight"]
    for ending in ("json", "graphml"):
        path = saved(tmp_path / f"g.{ending}", graph)
        said(lambda path=path: load_file(path, uses=WEIGHTED), "edge 1: weight")


def test_weights_that_from_networkx_makes_are_weights_and_no_feature(tmp_path: Path) -> None:
    data = from_networkx(network())
    data.x, data.y = data.age[:, None], data.label
    assert as_graph(data, weights=True).edge_weight.tolist() == [2.0] * 6  # type: ignore[union-attr]
    ring = nx.DiGraph()  # with as many edges as nodes
    ring.add_nodes_from((node, {"label": node % 2}) for node in range(5))
    ring.add_edges_from((node, (node + 1) % 5, {"weight": 3.0}) for node in range(5))
    settings = with_saved_graphs({"data.name": from_networkx(ring)}, tmp_path)
    path = Path(str(settings["data.name"]))
    said(lambda: load_file(path), "no x")
    assert load_file(path, Gaps("degree"), WEIGHTED).edge_weight.tolist() == [3.0] * 10  # type: ignore[union-attr]
    nx.set_node_attributes(ring, 1.0, "age")
    said(lambda: with_saved_graphs({"data.name": from_networkx(ring)}, tmp_path), "age")


# GraphML, as NetworkX reads it --------------------------------------------------------------------

DESCRIBED = """\
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
  <key id="d0" for="node" attr.name="label" attr.type="string">
    <desc>the class of a person</desc>
  </key>
  <key id="d1" for="node" attr.name="age" attr.type="double">
    <desc>in years</desc>
    <default>
      30
    </default>
  </key>
  <key id="d2" for="edge" attr.name="weight" attr.type="double">
    <default>2.5</default>
  </key>
  <key id="d3" attr.name="new" attr.type="boolean"><default>false</default></key>
  <key id="d4" for="node" attr.name="id" attr.type="string"/>
  <graph edgedefault="undirected">
    <desc>people</desc>
    <node id="n0"><desc>first</desc><data key="d0">cat</data><data key="d4">anna</data></node>
    <node id="n1">
      <data key="d0">dog</data><data key="d1">40</data><data key="d3">true</data>
      <data key="d4">bert</data>
    </node>
    <node id="n2"><data key="d4">cora</data></node>
    <edge id="e0" source="n0" target="n1"/>
    <edge source="n1" target="n2"><data key="d2">1</data></edge>
  </graph>
</graphml>
"""


def test_descriptions_are_no_defaults_and_defaults_may_be_indented(tmp_path: Path) -> None:
    (tmp_path / "g.graphml").write_text(DESCRIBED, encoding="utf-8")
    found = read_file(tmp_path / "g.graphml")
    assert found["y"] == ["cat", "dog", None] and found["names"] == ("anna", "bert", "cora")
    assert found["columns"].names == ("age", "new")
    assert found["x"].tolist() == [[30, 0], [40, 1], [30, 0]]
    assert found["edge_weight"].tolist() == [2.5, 1]


def test_many_attributes_that_few_nodes_have_fill_no_memory(tmp_path: Path) -> None:
    nodes = [{"id": node, "label": node % 2, f"a{node}": 1} for node in range(3000)]
    (tmp_path / "g.json").write_text(json.dumps({"nodes": nodes, "links": []}))
    said(lambda: load_file(tmp_path / "g.json", Gaps(missing="mean")), "3,000 attributes")


def test_a_hyperedge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g.graphml").write_text(DESCRIBED.replace("<edge id", "<hyperedge/><edge id"))
    said(lambda: read_file(tmp_path / "g.graphml"), "two ends")


# Programs that draw -------------------------------------------------------------------------------

GEPHI_KEYS = "".join(
    f'<key attr.name="{name}" attr.type="{kind}" for="{domain}" id="{key}"></key>'
    for name, kind, domain, key in (
        ("label", "string", "node", "label"), ("Edge Label", "string", "edge", "edgelabel"),
        ("weight", "double", "edge", "weight"), ("Edge Id", "string", "edge", "edgeid"),
        ("r", "int", "node", "r"), ("g", "int", "node", "g"), ("b", "int", "node", "b"),
        ("x", "float", "node", "x"), ("y", "float", "node", "y"), ("size", "float", "node", "size"),
        ("group", "string", "node", "group"), ("age", "double", "node", "age"),
    )
)  # fmt: skip


def gephi(folder: Path) -> Path:
    """Write a graph as Gephi's exporter of GraphML does."""
    nodes = "".join(
        f'<node id="{name}"><data key="label">{name.title()}</data><data key="group">{label}</data>'
        f'<data key="age">{age}</data><data key="size">10.0</data><data key="r">153</data>'
        f'<data key="g">0</data><data key="b">{row}</data><data key="x">{row}.5</data>'
        '<data key="y">-1.0</data></node>'
        for row, (name, label, age) in enumerate(zip(PEOPLE, LABELS, AGES, strict=True))
    )
    edges = "".join(
        f'<edge id="{row}" source="{a}" target="{b}"><data key="edgeid">{row}</data>'
        '<data key="weight">2.0</data></edge>'
        for row, (a, b) in enumerate(pairwise(PEOPLE))
    )
    head = '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
    (folder / "gephi.graphml").write_text(
        f'<?xml version="1.0" encoding="UTF-8"?>{head}{GEPHI_KEYS}<graph edgedefault="undirected">'
        f"{nodes}{edges}</graph></graphml>",
        encoding="utf-8",
    )
    return folder / "gephi.graphml"


def yed(folder: Path) -> Path:
    """Write a graph as yEd does, with a property of its user's own."""
    space = 'xmlns:y="http://www.yworks.com/xml/graphml"'
    nodes = "".join(
        f'<node id="n{row}"><data key="d4" xml:space="preserve"/><data key="d5"/><data key="d6">'
        '<y:ShapeNode><y:Geometry height="30.0" width="30.0" x="1.0" y="2.0"/>'
        f"<y:NodeLabel>{name}</y:NodeLabel></y:ShapeNode></data>"
        f'<data key="d7">{label}</data><data key="d8">{age}</data></node>'
        for row, (name, label, age) in enumerate(zip(PEOPLE, LABELS, AGES, strict=True))
    )
    (folder / "yed.graphml").write_text(
        f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns" {space}>'
        '<key attr.name="Description" attr.type="string" for="graph" id="d0"/>'
        '<key for="port" id="d1" yfiles.type="portgraphics"/>'
        '<key attr.name="url" attr.type="string" for="node" id="d4"/>'
        '<key attr.name="description" attr.type="string" for="node" id="d5"/>'
        '<key for="node" id="d6" yfiles.type="nodegraphics"/>'
        '<key attr.name="group" attr.type="string" for="node" id="d7"><default/></key>'
        '<key attr.name="age" attr.type="double" for="node" id="d8"/>'
        '<key for="graphml" id="d9" yfiles.type="resources"/>'
        '<key for="edge" id="d10" yfiles.type="edgegraphics"/>'
        f'<graph edgedefault="directed" id="G"><data key="d0"/>{nodes}'
        '<edge id="e0" source="n0" target="n1"><data key="d10"><y:PolyLineEdge/></data></edge>'
        '</graph><data key="d9"><y:Resources/></data></graphml>',
        encoding="utf-8",
    )
    return folder / "yed.graphml"


def gephi_tables(folder: Path) -> Path:
    """Write a graph as Gephi's laboratory of data does."""
    rows = "".join(
        f"{name},{name.title()},,{label},{age}\n"
        for name, label, age in zip(PEOPLE, LABELS, AGES, strict=True)
    )
    edges = "Source,Target,Type,Id,Label,timeset,Weight\nanna,bert,Undirected,0,,,2.0\n"
    return tables(folder / "gephi", f"Id,Label,timeset,group,age\n{rows}", edges)


@pytest.mark.parametrize("write", [gephi, yed, gephi_tables])
def test_a_drawing_programs_captions_and_places_are_no_classes_and_no_features(
    write: Any, tmp_path: Path
) -> None:
    path = write(tmp_path)
    said(lambda: load_file(path), "data.label", "group, age", "yEd" if write is yed else "Gephi")
    graph = load_file(path, Gaps(label="group"), WEIGHTED)
    assert graph.x.tolist() == [[age] for age in AGES] and graph.classes == ("cat", "dog")
    assert graph.edge_weight is None if write is yed else set(graph.edge_weight.tolist()) == {2}  # type: ignore[union-attr]
    assert any("of the nodes left out" in note for note in graph.notes)
    said(lambda: load_file(path, Gaps(label="club")), "data.label", "group")
    assert clients_path(DataConfig(str(path), label="group")) is None
    assert clients_path(DataConfig(str(saved(tmp_path / "g.json", network())))) is None


def test_labels_that_are_all_different_are_captions(tmp_path: Path) -> None:
    graph = nx.path_graph(12)
    nx.set_node_attributes(graph, {node: f"person {node}" for node in graph}, "label")
    nx.set_node_attributes(graph, 1.0, "a")
    said(lambda: load_file(saved(tmp_path / "g.json", graph)), "12 labels", "data.label")
    with pytest.raises(DataError, match=r"data\.label"):
        as_graph(Data(x=torch.eye(12), edge_index=torch.tensor([[0], [1]]), y=torch.arange(12)))


def test_saved_graphs_have_the_named_entries_too(tmp_path: Path) -> None:
    torch.save({"x": torch.eye(3), "edge_index": torch.tensor([[0], [1]]), "group": [1, 0, 1],
                "strength": torch.tensor([3.0])}, tmp_path / "g.pt")  # fmt: skip
    graph = load_file(tmp_path / "g.pt", Gaps(label="group", weight="strength"), WEIGHTED)
    assert graph.y.tolist() == [1, 0, 1] and graph.edge_weight.tolist() == [3, 3]  # type: ignore[union-attr]
    said(lambda: load_file(tmp_path / "g.pt", Gaps(label="club")), "data.label", "strength")


# Graphs from Python -------------------------------------------------------------------------------


def given(graph: object, folder: Path, **how: Any) -> Graph:
    """Give a graph to a run, and read it as the run does."""
    settings = with_saved_graphs({"data": {"name": graph}, **how}, folder)
    name = settings["data"]["name"]  # type: ignore[index]
    return load_file(Path(name), Gaps(label=how.get("data.label")), WEIGHTED)


def test_graphs_of_networkx_and_igraph_are_read_as_their_files(tmp_path: Path) -> None:
    graph = network()
    theirs = igraph.Graph.from_networkx(graph)
    theirs.write_graphml(str(tmp_path / "igraph.graphml"))
    back = theirs.to_networkx()
    found = [given(one, tmp_path) for one in (graph, theirs, back, nx.MultiGraph(graph))]
    found += [load_file(saved(tmp_path / name, back)) for name in ("g.graphml", "g.json")]
    found += [load_file(tmp_path / "igraph.graphml", uses=WEIGHTED)]
    for one in found:
        assert (
            one.x.tolist() == X and one.classes == ("cat", "dog") and one.y.tolist() == [0, 1] * 2
        )
        assert one.columns is not None and one.columns.names == ("age", "income")
        assert one.names == PEOPLE
    for one in (*found[:4], found[-1]):
        assert one.edge_weight.tolist() == [2.0] * 6  # type: ignore[union-attr]
    grid = nx.grid_2d_graph(2, 2)
    nx.set_node_attributes(grid, {node: node[0] for node in grid}, "group")
    nx.set_node_attributes(grid, 1.0, "height")
    assert given(grid, tmp_path, **{"data.label": "group"}).names[1] == "(0, 1)"  # type: ignore[index]
    grid.nodes[0, 0]["group"] = object()
    said(lambda: given(grid, tmp_path), "data.name", "object")


def test_a_data_is_read_with_gradients_scipys_matrix_or_an_adjacency(tmp_path: Path) -> None:
    x, edges = torch.tensor(X), torch.tensor([[0, 1], [1, 2]])
    plain = Data(x=x, edge_index=edges, y=LABELS, edge_weight=torch.tensor([2.0, 3.0]))
    sparse = torch.sparse_coo_tensor(edges.flip(0), plain.edge_weight, (4, 4))
    rest = {"edge_index": edges, "y": LABELS, "edge_weight": plain.edge_weight}
    several = [
        Data(
            x=x.clone().requires_grad_(), edge_index=edges, y=LABELS, edge_weight=plain.edge_weight
        ),
        Data(x=scipy.sparse.csr_matrix(x.numpy()), **rest),
        Data(x=x, y=LABELS, adj_t=sparse.to_sparse_csr()),
        ToSparseTensor(attr="edge_weight")(plain.clone()),
    ]
    for one in several:
        for graph in (as_graph(one, weights=True), given(one, tmp_path)):
            assert graph.x.tolist() == X and not graph.x.requires_grad
            assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
            assert graph.edge_weight.tolist() == [2, 2, 3, 3]  # type: ignore[union-attr]
    trains = torch.tensor([True, False, False, True])
    content = {"x": x, "adj_t": sparse, "y": LABELS, "client": [0, 0, 0, 1], "train_mask": trains}
    torch.save(content, tmp_path / "adjacent.pt")
    client, _ = load_folder(tmp_path / "adjacent.pt", RATIOS, 0, uses=WEIGHTED)
    assert client.edge_weight.tolist() == [2, 2, 3, 3]  # type: ignore[union-attr]
    batch = Batch.from_data_list([plain, plain])
    said(lambda: as_graph(batch), "Batch", "to_data_list")
    said(lambda: given(batch, tmp_path), "data.name", "Batch")


# The small rest -----------------------------------------------------------------------------------


EDGE = "source,target\na,b"


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        ('"age; in years; whole",name,label\n1,a,x\n2,b,y\n', "source,target\na,b\n"),
        ("name,label,age,\na,x,1,\nb,y,2,\n", "source,target,\na,b,\n"),
        ("name,label,age\na,x,1,\nb,y,2,,\n,,\n", "source,target\na,b\n,\n"),
        ("\u200bname,label\ufeff,age\n\u200ba,x,\u00a01\nb,y\u200b,2\n", EDGE + "\u200b\n"),
        ("Name;LABEL;Age\r\na;x;1\r\nb;y;2\r\n", "SOURCE\tTarget\na\tb\n"),
    ],
)  # fmt: skip
def test_small_slips_of_tables_are_read(nodes: str, edges: str, tmp_path: Path) -> None:
    found = read_file(tables(tmp_path, nodes, edges))
    assert found["x"].tolist() == [[1], [2]] and found["names"] == ("a", "b")
    assert found["y"] == ["x", "y"] and found["edge_index"].tolist() == [[0], [1]]
    assert len(found["columns"].names) == 1


def test_hidden_files_are_none_and_capital_endings_are(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    saved(folder / "a.JSON", network())
    tables(folder / "b", frame().to_csv(index=False), EDGES)
    (folder / "b" / "nodes.csv").rename(folder / "b" / "Nodes.CSV")
    nx.write_graphml(network(), folder / "c.GraphML")
    for name in ("._a.json", ".DS_Store", "~$b.json", "__MACOSX", "Thumbs.db"):
        (folder / name).write_bytes(b"\0")
    assert len(load_folder(folder, RATIOS, 0)) == 3
    assert load_file(folder / "b").num_nodes == 4
    said(lambda: load_file(saved(tmp_path / "g.GEXF", network())), "write_graphml")


def test_a_folder_with_other_names_is_refused_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    saved(folder / "a.json", network())
    tables(folder / "b", frame().to_csv(index=False), EDGES)
    (folder / "b" / "nodes.csv").rename(folder / "b" / "people.csv")
    said(lambda: load_folder(folder, RATIOS, 0), "edges.csv, people.csv", "nodes.csv")
    (folder / "a.json").rename(folder / "a.gml")
    said(lambda: load_folder(folder, RATIOS, 0), "a.gml")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "people.txt").touch()
    said(lambda: load_folder(tmp_path / "none", RATIOS, 0), "people.txt")


def test_links_and_edges_of_json(tmp_path: Path) -> None:
    content = nx.node_link_data(network(), edges="edges")
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"links": [], **content}))
    assert read_file(path)["edge_index"].shape == (2, 3)
    path.write_text(json.dumps({**content, "links": content["edges"][:1]}))
    said(lambda: read_file(path), "`links` and `edges`")
    for node in content["nodes"]:
        node["name"] = node.pop("id")
    path.write_text(json.dumps(content))
    assert read_file(path)["names"] == PEOPLE


# Tables as programs write them, with what becomes of each -----------------------------------------

HEAD = "name,label,age,income\n"
ROWS = "anna,cat,30.0,1.5\nbert,dog,40.0,2.0\ncora,cat,50.0,-3.0\ndora,dog,60.0,0.0\n"
QUOTED = (
    '"name","label","age","income"\n"anna","cat",30,1.5\n"bert","dog",40,2\n'
    '"cora","cat",50,-3\n"dora","dog",60,0\n'
)
COMMA = Gaps(decimal="comma")
TABLES = {
    "pandas, index=False": (HEAD + ROWS, EDGES, Gaps(), None),
    "pandas, tabs": ((HEAD + ROWS).replace(",", "\t"), EDGES, Gaps(), None),
    "pandas, decimal=','": ((HEAD + ROWS).replace(",", ";").replace(".", ","), EDGES, COMMA, None),
    "pandas": (
        ",name,label\n0,anna,cat\n", EDGES, Gaps(), "index=False"
    ),
    "pandas, saved twice": ("Unnamed: 0,name,label\n0,anna,cat\n", EDGES, Gaps(), "index=False"),
    "pandas, of edges": (HEAD + ROWS, ",source,target\n0,anna,bert\n", Gaps(), "edges.csv, line 1"),
    "NetworkX, to_pandas_edgelist": (
        HEAD + ROWS, "source,target,weight\nanna,bert,1\nbert,cora,1\n", Gaps(), None
    ),
    "igraph, get_vertex_dataframe": (
        "vertex ID,name,label,age,income\n0,anna,cat,30,1\n1,bert,dog,40,2\n",
        "edge ID,source,target\n0,0,1\n", Gaps(), "'0' is no node"
    ),
    "R, write.csv": ('"","name","label"\n"1","anna","cat"\n', EDGES, Gaps(), "row.names = FALSE"),
    "R, write.csv(row.names = FALSE)": (
        QUOTED, '"from","to","weight"\n"anna","bert",2\n"bert","cora",1e+05\n', Gaps(), None
    ),
    "R, write.csv2(row.names = FALSE)": (
        QUOTED.replace(",", ";").replace("1.5", "1,5"),
        '"from";"to";"weight"\n"anna";"bert";2\n"bert";"cora";0,5\n', COMMA, None
    ),
    "R, write.table(sep = ',')": (
        QUOTED.replace('"anna"', '"1","anna"', 1), EDGES, Gaps(), "row.names"
    ),
    "R, write.table": ('"name" "label"\n"1" "anna" "cat"\n', EDGES, Gaps(), "nodes.csv"),
    "Excel, CSV UTF-8, German": (
        ("\ufeff" + HEAD + ROWS).replace(",", ";").replace(".", ",").replace("\n", ";;\r\n")
        + ";;;;;\r\n",
        "\ufeff" + EDGES.replace(",", ";").replace("\n", "\r\n") + ";\r\n", COMMA, None
    ),
    "Excel, CSV UTF-8, with #N/A": (
        "\ufeff" + (HEAD + ROWS).replace("40.0", "#N/A"), EDGES, Gaps(), "line 3: age"
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", TABLES)
def test_tables_of_programs(program: str, tmp_path: Path) -> None:
    nodes, edges, gaps, refusal = TABLES[program]
    path = tables(tmp_path, nodes, edges)
    if refusal is not None:
        said(lambda: load_file(path, gaps), refusal)
        return
    graph = load_file(path, gaps)
    assert graph.x.tolist() == X and graph.classes == ("cat", "dog") and graph.names == PEOPLE
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]


@pytest.mark.parametrize("program", ["NetworkX", "igraph", "Gephi", "by hand"])
def test_graphml_says_what_networkx_reads(program: str, tmp_path: Path) -> None:
    path = tmp_path / "g.graphml"
    if program == "by hand":
        path.write_text(DESCRIBED, encoding="utf-8")
    elif program == "igraph":
        igraph.Graph.from_networkx(network()).write_graphml(str(path))
    else:
        path = gephi(tmp_path) if program == "Gephi" else saved(path, network())
    how = Gaps(label="label", categories="one-hot")
    theirs, found = nx.read_graphml(path), read_file(path, how)
    for row, (node, label) in enumerate(theirs.nodes(data="label")):
        assert found["y"][row] == label
        age = theirs.nodes[node].get("age")  # it leaves defaults to its user
        assert age is None or found["x"][row, found["columns"].names.index("age")] == age
    places = {node: row for row, node in enumerate(theirs)}
    ends = [(places[a], places[b]) for a, b in theirs.edges]
    assert [(a, b) for a, b in zip(*found["edge_index"].tolist(), strict=True)] == ends
    weights = [2.5 if one is None else one for *_, one in theirs.edges(data="weight")]
    assert found["edge_weight"].tolist() == weights


# One graph in all forms, and what is refused of each ----------------------------------------------

NODES = """\
name,label,split,age,income
anna,cat,train,30,1.5
bert,dog,,40,2
"Cox, C.",,test,50,-3e1
dora,dog,val,60,0
"""
PAIRS = """\
source,target,weight
anna,bert,1
bert,"Cox, C.",2
"""
NUMBERS = [[30.0, 1.5], [40.0, 2.0], [50.0, -30.0], [60.0, 0.0]]
CLASSES_OF = ["cat", "dog", None, "dog"]
NAMES = ("anna", "bert", "Cox, C.", "dora")


def drawn(kind: type[nx.Graph] = nx.Graph) -> Any:
    """Make the same graph as in the tables."""
    graph = kind()
    for name, label, split, (age, income) in zip(
        NAMES, CLASSES_OF, ("train", None, "test", "val"), NUMBERS, strict=True
    ):
        said = {"label": label, "split": split}
        graph.add_node(name, **{k: v for k, v in said.items() if v}, age=age, income=income)
    graph.add_edge("anna", "bert", weight=1)
    graph.add_edge("bert", "Cox, C.", weight=2)
    return graph


@pytest.fixture(params=["csv", "semicolons", "graphml", "json", "directed.json"])
def same(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write one graph in each of the forms."""
    if request.param == "csv":
        return tables(tmp_path / "graph", NODES, PAIRS)
    if request.param == "semicolons":  # as spreadsheets of half of Europe write them
        nodes = "\ufeff" + NODES.replace('"Cox, C."', "Cox~ C.").replace(",", ";").replace("~", ",")
        edges = PAIRS.replace('"Cox, C."', "Cox~ C.").replace(",", ";").replace("~", ",")
        return tables(tmp_path / "graph", nodes.replace("name", "ID"), edges)
    kind = nx.DiGraph if request.param.startswith("directed") else nx.Graph
    return saved(tmp_path / f"graph.{request.param}", drawn(kind))


def test_all_forms_say_the_same_graph(same: Path) -> None:
    found = read_file(same)
    assert found["x"].tolist() == NUMBERS
    assert found["y"] == CLASSES_OF
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
    found = read_file(saved(tmp_path / "g.json", graph))
    assert found["x"].tolist() == [[1, 2, 1], [3, 4, 0]]
    assert found["y"] == ["1", None] and found["names"] == ("An", "Be")
    for node in graph:
        del graph.nodes[node]["x"]
    graph.nodes[1]["Label"] = 0
    found = read_file(saved(tmp_path / "g.graphml", graph))
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
        load_file(tables(tmp_path / "t", NODES.replace(old, new, 1), PAIRS))
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
        load_file(tables(tmp_path / "t", NODES, edges))
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
    path = saved(tmp_path / "g.graphml", drawn())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"g\.graphml"):
        load_file(path)
    tables(tmp_path / "t", NODES, PAIRS)
    (tmp_path / "t" / "nodes.csv").write_bytes("name,label\nJürg,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"nodes\.csv"):
        load_file(tmp_path / "t")


def test_names_of_the_kinds_lead_to_them_and_others_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables(tmp_path / "people", NODES, PAIRS)
    for name in ("people", "people/", "absent.graphml", "absent.json"):
        assert file_path(name) == Path(name) and folder_path(name) is None
    (tmp_path / "clients").mkdir()
    for name, said in (
        ("clients/", r".*nodes\.csv"),
        ("absent/", ".*folder"),
        ("./absent", ".*file"),
    ):
        with pytest.raises(DataError, match=f"data.name = '{name}': {said}"):
            pyg_name(name)
    saved(tmp_path / "clients" / "a.json", drawn())
    with pytest.raises(DataError, match="'clients'"):
        pyg_name("clients")
    for name, said in (
        ("graph.npz", "is not a graph"),
        ("people/nodes.csv", r".*nodes\.csv and edges\.csv"),
        ("g.gpickle", r"is a pickle.*write_graphml"),
        ("g.pkl", "is a pickle"),
    ):
        Path(name).write_bytes(b"any")
        with pytest.raises(DataError, match=said):
            load_file(Path(name))


def test_one_folder_has_one_name_from_wherever_it_is_named(tmp_path: Path) -> None:
    """So that two runs on it are on the same data."""
    tables(tmp_path / "people", NODES, PAIRS)
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    named = located("../../people/", tmp_path / "runs" / "sweep")
    assert named == located("people/", tmp_path.resolve()) == f"{tmp_path.resolve() / 'people'}/"
