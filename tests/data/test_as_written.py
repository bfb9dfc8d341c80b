"""Graphs as people and programs write them: read as they mean them, or refused by name."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import igraph
import networkx as nx
import pytest
import scipy.sparse
import torch
from partition_helpers import SPLIT, tables
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import from_networkx

from flower_graph.config.common import DataConfig, PartitionSection
from flower_graph.data import as_graph, to_undirected
from flower_graph.data.description import DataForm, read_labels
from flower_graph.data.features import PLAIN, Treatment
from flower_graph.data.features import ReadOptions as How
from flower_graph.data.folders.client_folder import (
    client_graphs,
    clients_path,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.folders.party import graph_tensors, read_graph
from flower_graph.data.graph import Graph, called
from flower_graph.data.partition.client_graphs import partition_graph
from flower_graph.data.sources.datasets import (
    load_file,
    load_graph,
    read_file,
    read_new_graph,
    with_saved_graphs,
)
from flower_graph.data.sources.names import file_path, folder_path, located, pyg_name
from flower_graph.errors import DataError, FractionalLabelsError
from flower_graph.strategies.ppfl.config import PartitionConfig

PEOPLE = ("anna", "bert", "cora", "dora")
LABELS = ["cat", "dog", "cat", "dog"]
X = [[30.0, 1.5], [40.0, 2.0], [50.0, -3.0], [60.0, 0.0]]
EDGES = "source,target\nanna,bert\nbert,cora\n"
COLUMNS = {
    "name": PEOPLE,
    "label": LABELS,
    "age": [age for age, _ in X],
    "income": [i for _, i in X],
}
COMMA, WEIGHTED, VALUED = (
    How(decimal="comma"),
    How(weights=True),
    How(targets=True),
)


def people(columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """Write the table of nodes, with its columns in an order."""
    rows = zip(*(COLUMNS[key] for key in columns), strict=True)
    return "".join(f"{','.join(map(str, row))}\n" for row in (columns, *rows))


def network(columns: Sequence[str] = ("label", "age", "income")) -> Any:
    """Make the graph of the tables, its nodes' attributes in an order."""
    graph = nx.Graph()
    for row, name in enumerate(PEOPLE):
        graph.add_node(name, **{key: COLUMNS[key][row] for key in columns})
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


def with_order(folder: Path, kind: str, columns: Sequence[str]) -> Path:
    if kind == "tables":
        return tables(folder / kind, people(columns), EDGES)
    return saved(folder / kind, network([key for key in columns if key != "name"]))


@pytest.mark.parametrize("kind", ["tables", "g.graphml", "g.json"])
def test_another_clients_columns_are_found_by_name(kind, tmp_path):
    first = with_order(tmp_path, "tables", tuple(COLUMNS)).rename(tmp_path / "first")
    other = with_order(tmp_path, kind, TURNED)
    (tmp_path / "clients").mkdir()
    for path in (first, other):
        path.rename(tmp_path / "clients" / path.name)
    assert [one.x.tolist() for one in load_folder(tmp_path / "clients", SPLIT, 0)] == [X, X]


def form_of(graph: Graph, config: DataConfig) -> DataForm:
    """Return the form of a run's new graphs, by way of its file."""
    assert graph.treatment is not None
    form = DataForm(graph.treatment, graph.num_classes, graph.classes, How.of(config))
    return DataForm.from_json(json.loads(json.dumps(form.to_json())))


COMMAS = "name;label;age\nanna;cat;1,5\nbert;dog;-2\ncora;cat;,25\n"


def test_new_files_are_read_as_the_runs_own(tmp_path):
    rows = f"{COMMAS}dora;dog;1\n".replace("label", "group")
    path = tables(tmp_path, rows, "source;target;v\nanna;bert;2,5\n")
    own = {"label": "group", "weight": "v", "decimal": "comma"}
    config = DataConfig(str(path), split="auto", features="as-is", **own)
    form = form_of(load_graph(config, how=How.of(config)._replace(weights=True)), config)._replace(
        weights=True
    )
    new = read_new_graph(path, form)
    assert new.x.tolist() == [[1.5], [-2], [0.25], [1]] and new.y.tolist() == [0, 1, 0, 1]
    assert new.edge_weight is not None and new.edge_weight.tolist() == [2.5, 2.5]


def test_features_without_names_are_taken_by_place_and_this_is_said(tmp_path, caplog):
    with_order(tmp_path / "clients", "g.json", ("label", "age", "income"))
    torch.save(Data(x=torch.tensor(X), edge_index=torch.tensor([[0], [1]]), y=LABELS),
               tmp_path / "clients" / "z.pt")  # fmt: skip
    assert load_folder(tmp_path / "clients", SPLIT, 0)[1].x.tolist() == X
    assert "z.pt: its features have no names" in caplog.text and "age, income" in caplog.text
    config = DataConfig(str(tmp_path / "clients" / "z.pt"), split="auto", features="as-is")
    new = read_new_graph(tmp_path / "clients" / "g.json", form_of(load_graph(config), config))
    assert new.x.tolist() == X and "g.json: the run's features have no names" in caplog.text


def test_names_go_along_with_a_graph_that_is_saved(tmp_path):
    first = DataConfig(str(with_order(tmp_path, "g.json", TURNED)), split="auto", features="as-is")
    settings = with_saved_graphs({"data.name": load_graph(first).to_data()}, tmp_path)
    again = DataConfig(str(settings["data.name"]), split="auto", features="as-is")
    new = with_order(tmp_path, "tables", tuple(COLUMNS))
    found = read_new_graph(new, form_of(load_graph(again), again))
    assert found.x.tolist() == [row[::-1] for row in X]


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
        (["18446744073709551616", "2", "3", "3"], ["18446744073709551616", "2", "3", "3"]),
        (["1.5e3x", "1_0", "\u200bcat\ufeff", " cat "], ["1.5e3x", "1_0", "cat", "cat"]),
    ],
)
def test_one_rule_for_labels_in_files_and_in_python(given, wanted, tmp_path):
    graph = nx.Graph()
    for row, label in enumerate(given):
        graph.add_node(row, label=label, a=row)
    path = saved(tmp_path / "g.json", graph)
    if wanted is None:
        said(lambda: read_file(path), "no label")
        return
    for found in (read_labels(given, 4, []), read_labels(read_file(path)["y"], 4, [])):
        assert (found.tolist() if isinstance(found, torch.Tensor) else found) == wanted


def test_words_stay_as_they_are_written_in_classes_and_in_new_labels(tmp_path):
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


def test_numbers_keep_their_digits_until_they_are_standardised(tmp_path):
    exact = 1_700_000_000 + torch.arange(12).double()
    rows = "".join(f"n{row},{row % 2},{int(one)}\n" for row, one in enumerate(exact))
    path = tables(tmp_path / "t", f"name,label,time\n{rows}", "source,target\nn0,n1\n")
    wanted = ((exact - exact.mean()) / exact.std(correction=0)).float()[:, None]
    torch.save({"x": exact[:, None], "edge_index": torch.tensor([[0], [1]]), "y": exact.long() % 2},
               tmp_path / "g.pt")  # fmt: skip
    for file in (path, tmp_path / "g.pt"):
        config = DataConfig(str(file), split="auto", features="standardise")
        graph = load_graph(config)
        torch.testing.assert_close(graph.x, wanted)
        torch.testing.assert_close(read_new_graph(file, form_of(graph, config)).x, wanted)


def test_weights_that_from_networkx_makes_are_weights_and_no_feature(tmp_path):
    data = from_networkx(network())
    data.x, data.y = data.age[:, None], data.label
    assert as_graph(data, weights=True).edge_weight.tolist() == [2.0] * 6
    ring = nx.DiGraph()  # with as many edges as nodes
    ring.add_nodes_from((node, {"label": node % 2}) for node in range(5))
    ring.add_edges_from((node, (node + 1) % 5, {"weight": 3.0}) for node in range(5))
    settings = with_saved_graphs({"data.name": from_networkx(ring)}, tmp_path)
    path = Path(str(settings["data.name"]))
    said(lambda: load_file(path), "no x")
    assert load_file(path, How("degree", weights=True)).edge_weight.tolist() == [3.0] * 10
    nx.set_node_attributes(ring, 1.0, "age")
    said(lambda: with_saved_graphs({"data.name": from_networkx(ring)}, tmp_path), "age")


# Graphs from Python -------------------------------------------------------------------------------


def given(graph: object, folder: Path, **how: Any) -> Graph:
    """Give a graph to a run, and read it as the run does."""
    settings = with_saved_graphs({"data": {"name": graph}, **how}, folder)
    name = settings["data"]["name"]
    return load_file(Path(name), How(label=how.get("data.label"), weights=True))


def test_graphs_of_networkx_and_igraph_are_read_as_their_files(tmp_path):
    graph = network()
    theirs = igraph.Graph.from_networkx(graph)
    theirs.write_graphml(str(tmp_path / "igraph.graphml"))
    back = theirs.to_networkx()
    found = [given(one, tmp_path) for one in (graph, theirs, back, nx.MultiGraph(graph))]
    directed = nx.DiGraph(pairwise(PEOPLE))
    nx.set_node_attributes(directed, dict(graph.nodes(data=True)))
    nx.set_edge_attributes(directed, 2.0, "weight")
    files = [saved(tmp_path / name, back) for name in ("g.graphml", "g.json")]
    files += [tmp_path / "igraph.graphml", saved(tmp_path / "d.json", directed)]
    for one in [*found, *(load_file(path, how=WEIGHTED) for path in files)]:
        assert one.x.tolist() == X and one.names == PEOPLE
        assert one.classes == ("cat", "dog") and one.y.tolist() == [0, 1] * 2
        assert one.columns is not None and one.columns.words == {"age": [], "income": []}
        assert one.edge_weight is not None and one.edge_weight.tolist() == [2.0] * 6
    grid = nx.grid_2d_graph(2, 2)
    nx.set_node_attributes(grid, {node: node[0] for node in grid}, "group")
    nx.set_node_attributes(grid, 1.0, "height")
    assert given(grid, tmp_path, **{"data.label": "group"}).names[1] == "(0, 1)"
    grid.nodes[0, 0]["group"] = object()
    said(lambda: given(grid, tmp_path), "data.name", "object")


def test_a_data_is_read_with_gradients_scipys_matrix_or_an_adjacency(tmp_path):
    x, edges = torch.tensor(X), torch.tensor([[0, 1], [1, 2]])
    rest = {"edge_index": edges, "y": LABELS, "edge_weight": torch.tensor([2.0, 3.0])}
    plain = Data(x=x, **rest)
    sparse = torch.sparse_coo_tensor(edges.flip(0), plain.edge_weight, (4, 4))
    several = [
        Data(x=x.clone().requires_grad_(), **rest),
        Data(x=scipy.sparse.csr_matrix(x.numpy()), **rest),
        Data(x=x, y=LABELS, adj_t=sparse.to_sparse_csr()),
        ToSparseTensor(attr="edge_weight")(plain.clone()),
    ]
    for one in several:
        for graph in (as_graph(one, weights=True), given(one, tmp_path)):
            assert graph.x.tolist() == X and not graph.x.requires_grad
            assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
            assert graph.edge_weight.tolist() == [2, 2, 3, 3]
    batch = Batch.from_data_list([plain, plain])
    said(lambda: as_graph(batch), "Batch", "to_data_list")
    said(lambda: given(batch, tmp_path), "data.name", "Batch")


def test_saved_graphs_have_the_named_entries_too(tmp_path):
    torch.save({"x": torch.eye(3), "edge_index": torch.tensor([[0], [1]]), "group": [1, 0, 1],
                "strength": torch.tensor([3.0])}, tmp_path / "g.pt")  # fmt: skip
    graph = load_file(tmp_path / "g.pt", How(label="group", weight="strength", weights=True))
    assert graph.y.tolist() == [1, 0, 1] and graph.edge_weight.tolist() == [3, 3]
    said(lambda: load_file(tmp_path / "g.pt", How(label="club")), "data.label", "strength")


# Programs that draw -------------------------------------------------------------------------------

ANY = '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
NODE_KEYS = "label:string,r:int,g:int,b:int,x:float,y:float,size:float,group:string,age:double"
EDGE_KEYS = "Edge Label:string,weight:double,Edge Id:string"


def keys(domain: str, names: str) -> str:
    """Declare attributes in GraphML."""
    return "".join(
        f'<key attr.name="{name}" attr.type="{kind}" for="{domain}" id="{name.replace(" ", "")}"/>'
        for name, kind in (one.split(":") for one in names.split(","))
    )


def gephi(folder: Path) -> Path:
    """Write a graph as Gephi's exporter of GraphML does."""
    nodes = "".join(
        f'<node id="{name}"><data key="label">{name.title()}</data><data key="group">{label}</data>'
        f'<data key="age">{age}</data><data key="size">10.0</data><data key="r">153</data>'
        f'<data key="g">0</data><data key="b">{age:.0f}</data><data key="x">{age}</data>'
        '<data key="y">-1.0</data></node>'
        for name, label, (age, _) in zip(PEOPLE, LABELS, X, strict=True)
    )
    edges = "".join(
        f'<edge id="{a}" source="{a}" target="{b}"><data key="EdgeId">{a}</data>'
        '<data key="weight">2.0</data></edge>'
        for a, b in pairwise(PEOPLE)
    )
    graph = f'<graph edgedefault="undirected">{nodes}{edges}</graph></graphml>'
    (folder / "gephi.graphml").write_text(
        f"{ANY}{keys('node', NODE_KEYS)}{keys('edge', EDGE_KEYS)}{graph}"
    )
    return folder / "gephi.graphml"


def yed(folder: Path) -> Path:
    """Write a graph as yEd does, with a property of its user's own."""
    space = 'xmlns:y="http://www.yworks.com/xml/graphml">'
    nodes = "".join(
        f'<node id="n{row}"><data key="d4" xml:space="preserve"/><data key="d5"/><data key="d6">'
        '<y:ShapeNode><y:Geometry height="30.0" width="30.0" x="1.0" y="2.0"/>'
        f'<y:NodeLabel>{name}</y:NodeLabel><y:Shape type="rectangle"/></y:ShapeNode></data>'
        f'<data key="d7">{LABELS[row]}</data><data key="d8">{X[row][0]}</data></node>'
        for row, name in enumerate(PEOPLE)
    )
    (folder / "yed.graphml").write_text(
        f"{ANY[:-1]} {space}"
        '<key attr.name="url" attr.type="string" for="node" id="d4"/>'
        '<key attr.name="description" attr.type="string" for="node" id="d5"/>'
        '<key for="node" id="d6" yfiles.type="nodegraphics"/>'
        '<key attr.name="group" attr.type="string" for="node" id="d7"><default/></key>'
        '<key attr.name="age" attr.type="double" for="node" id="d8"/>'
        '<key for="graphml" id="d9" yfiles.type="resources"/>'
        '<key for="edge" id="d10" yfiles.type="edgegraphics"/>'
        f'<graph edgedefault="directed" id="G">{nodes}'
        '<edge id="e0" source="n0" target="n1"><data key="d10"><y:PolyLineEdge/></data></edge>'
        '</graph><data key="d9"><y:Resources/></data></graphml>'
    )
    return folder / "yed.graphml"


def gephi_tables(folder: Path) -> Path:
    """Write a graph as Gephi's laboratory of data does."""
    rows = "".join(
        f"{name},{name.title()},,{label},{age}\n"
        for name, label, (age, _) in zip(PEOPLE, LABELS, X, strict=True)
    )
    edges = "Source,Target,Type,Id,Label,timeset,Weight\nanna,bert,Undirected,0,,,2.0\n"
    return tables(folder / "gephi", f"Id,Label,timeset,group,age\n{rows}", edges)


@pytest.mark.parametrize("write", [gephi, yed, gephi_tables])
def test_a_drawing_programs_captions_and_places_are_no_classes_and_no_features(write, tmp_path):
    path = write(tmp_path)
    said(lambda: load_file(path), "data.label", "group, age", "yEd" if write is yed else "Gephi")
    graph = load_file(path, How(label="group", weights=True))
    assert graph.x.tolist() == [[age] for age, _ in X] and graph.classes == ("cat", "dog")
    assert graph.edge_weight is None if write is yed else set(graph.edge_weight.tolist()) == {2}
    assert any("of the nodes left out" in note for note in graph.notes)
    said(lambda: load_file(path, How(label="club")), "data.label", "group")
    assert clients_path(DataConfig(str(path), label="group")) is None
    assert clients_path(DataConfig(str(saved(tmp_path / "g.json", network())))) is None


# Files as they are written, and what is read ------------------------------------------------------

HEAD = "name,label,age,income\n"
ROWS = "anna,cat,30.0,1.5\nbert,dog,40.0,2.0\ncora,cat,50.0,-3.0\ndora,dog,60.0,0.0\n"
QUOTED = (
    '"name","label","age","income"\n"anna","cat",30,1.5\n"bert","dog",40,2\n'
    '"cora","cat",50,-3\n"dora","dog",60,0\n'
)
SLIP, EDGE = "name,label,age\na,x,1\nb,y,2\n", "source,target\na,b"
NODES = """\
name,label,split,age,income
anna,cat,train,30,1.5
bert,dog,,40,2
"Cox, C.",,test,50,-3e1
dora,dog,val,60,0
"""
PAIRS = 'source,target,weight\nanna,bert,1\nbert,"Cox, C.",2\n'
DESCRIBED = f"""\
{ANY}
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
  <key id="d3" for="node" attr.name="new" attr.type="boolean"><default>false</default></key>
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
IN_JSON = nx.node_link_data(network(), edges="edges")
NAMED = [{("name" if key == "id" else key): v for key, v in n.items()} for n in IN_JSON["nodes"]]
Files = dict[str, str]
WHOLE = {"x": X, "y": LABELS, "names": PEOPLE, "edge_index": [[0, 1], [1, 2]]}
SMALL = {"x": [[1], [2]], "y": ["x", "y"], "names": ("a", "b"), "edge_index": [[0], [1]]}


def two(nodes: str, edges: str = EDGES) -> Files:
    return {"nodes.csv": nodes, "edges.csv": edges}


def with_commas(text: str) -> str:
    return text.replace(",", ";").replace(".", ",")


def both(**more: Any) -> Files:
    return {"g.json": json.dumps({**IN_JSON, **more})}


# What stands in the files, how they are read, and what is found; None: no such entry
READ: dict[str, tuple[Files, How, dict[str, Any]]] = {
    "pandas, index=False": (two(HEAD + ROWS), PLAIN, WHOLE),
    "pandas, tabs": (two((HEAD + ROWS).replace(",", "\t")), PLAIN, WHOLE),
    "pandas, decimal=','": (two(with_commas(HEAD + ROWS)), COMMA, WHOLE),
    "NetworkX, to_pandas_edgelist": (
        two(HEAD + ROWS, "source,target,weight\nanna,bert,1\nbert,cora,1\n"),
        PLAIN, {**WHOLE, "edge_weight": [1, 1]},
    ),
    "R, write.csv(row.names = FALSE)": (
        two(QUOTED, '"from","to","weight"\n"anna","bert",2\n"bert","cora",1e+05\n'),
        PLAIN, {**WHOLE, "edge_weight": [2, 1e5]},
    ),
    "R, write.csv2(row.names = FALSE)": (
        two(QUOTED.replace(",", ";").replace("1.5", "1,5"),
            '"from";"to";"weight"\n"anna";"bert";2\n"bert";"cora";0,5\n'),
        COMMA, {**WHOLE, "edge_weight": [2, 0.5]},
    ),
    "Excel, CSV UTF-8, German": (
        two(with_commas("\ufeff" + HEAD + ROWS).replace("\n", ";;\r\n") + ";;;;;\r\n",
            "\ufeff" + EDGES.replace(",", ";").replace("\n", "\r\n") + ";\r\n"),
        COMMA, WHOLE,
    ),
    "decimal commas": (
        two(COMMAS, "source;target;weight\nanna;bert;0,5\nbert;cora;2\n"),
        COMMA, {"x": [[1.5], [-2], [0.25]], "edge_weight": [0.5, 2]},
    ),
    "semicolons in a name": (
        two(SLIP.replace("age", '"age; in years; whole"'), EDGE), PLAIN, SMALL
    ),
    "commas at the end": (
        two("name,label,age,\na,x,1,\nb,y,2,\n", "source,target,\na,b,\n"), PLAIN, SMALL
    ),
    "empty lines": (two(SLIP[:-1] + ",,\n,,\n", f"{EDGE}\n,\n"), PLAIN, SMALL),
    "unseen blanks": (
        two("\u200bname,label\ufeff,age\n\u200ba,x,\u00a01\nb,y\u200b,2\n", EDGE + "\u200b\n"),
        PLAIN, SMALL,
    ),
    "words with a point where numbers have a comma": (
        two("name;label;age\na;x;St. Gallen\nb;y;a.b\n", EDGE.replace(",", ";")),
        COMMA._replace(categories="one-hot"), {"x": [[1, 0], [0, 1]]},
    ),
    "capitals": (
        two("Name;LABEL;Age\r\na;x;1\r\nb;y;2\r\n", "SOURCE\tTarget\na\tb\n"), PLAIN, SMALL
    ),
    "names whole or as floats": (  # with an empty cell pandas writes floats
        two("id,label,a\n1,x,1\n2,y,2\n007,x,3\n", "source,target\n1.0,2.0\n2.0,007\n"),
        PLAIN, {"names": ("1", "2", "007"), "edge_index": [[0, 1], [1, 2]]},
    ),
    "a weight in any case": (
        two(HEAD + ROWS, "Source,Target,WEIGHT\nanna,bert,2\n"), PLAIN, {"edge_weight": [2]}
    ),
    "a weight of another name": (
        two(HEAD + ROWS, "source,target,value\nanna,bert,2\n"),
        How(weight="value"), {"edge_weight": [2]},
    ),
    "empty weights": (
        two(HEAD + ROWS, "source,target,weight\nanna,bert,\nbert,cora,NA\n"),
        PLAIN, {"edge_weight": None},
    ),
    "quotes, splits and a node without a label": (
        two(NODES, PAIRS),
        PLAIN,
        {"x": [[30.0, 1.5], [40.0, 2.0], [50.0, -30.0], [60.0, 0.0]], "notes": None,
         "y": ["cat", "dog", None, "dog"], "names": ("anna", "bert", "Cox, C.", "dora"),
         "edge_index": [[0, 1], [1, 2]], "edge_weight": [1, 2],
         "train_mask": [True, False, False, False], "val_mask": [False, False, False, True],
         "test_mask": [False, False, True, False]},
    ),
    "neither features nor split nor edges": (
        two("id,label\n7,three\n9,-1\n\n", "source,target\n"), PLAIN,
        {"x": None, "train_mask": None, "notes": None, "y": ["three", "-1"], "names": ("7", "9"),
         "edge_index": [[], []]},
    ),
    "GraphML with defaults and descriptions": (
        {"g.graphml": DESCRIBED}, PLAIN,
        {"x": [[30, 0], [40, 1], [30, 0]], "y": ["cat", "dog", None], "edge_weight": [2.5, 1],
         "names": ("anna", "bert", "cora")},
    ),
    "JSON, of NetworkX's `edges` beside empty `links`": (
        both(links=[]), PLAIN, {"x": X, "edge_index": [[0, 1, 2], [1, 2, 3]]}
    ),
    "JSON whose nodes have a name": (both(nodes=NAMED), PLAIN, {"x": X, "names": PEOPLE}),
}  # fmt: skip


def written(folder: Path, files: Files) -> Path:
    """Write files; return the graph's path, of tables the folder."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder if "nodes.csv" in files else folder / next(iter(files))


@pytest.mark.parametrize("files", READ)
def test_files_are_read_as_they_are_meant(files, tmp_path):
    content, gaps, wanted = READ[files]
    found = read_file(written(tmp_path, content), gaps)
    for key, value in wanted.items():
        one = found.get(key)
        assert (one.tolist() if isinstance(one, torch.Tensor) else one) == value, key


def test_numbers_to_learn_are_read_and_minus_one_is_one_of_them(tmp_path):
    rows = "name,label,age\na,-1,3\nb,,4\nc,2.5,5\n"
    for text, gaps in ((rows, PLAIN), (rows.replace(",", ";").replace(".", ","), COMMA)):
        path = tables(tmp_path / "t", text, "source,target\na,b\n")
        graph = load_file(path, gaps._replace(targets=True))
        assert graph.targets is not None and graph.num_classes == 1
        expected = torch.tensor([-1, torch.nan, 2.5])
        torch.testing.assert_close(graph.targets, expected, equal_nan=True)
        assert graph.y.tolist() == [0, -1, 0]  # who has one
    with pytest.raises(FractionalLabelsError, match=r"y\[2\] is 2.5"):
        load_file(tables(tmp_path / "t", rows))
    for wrong, words in (("old", "'old'"), ('"2,5"', "data.decimal")):
        path = tables(tmp_path / "t", rows.replace("2.5", wrong))
        said(lambda path=path: load_file(path, how=VALUED), "y[2]", words)


def test_lists_and_truths_are_features_and_names_of_igraph_count(tmp_path):
    graph = nx.Graph()
    graph.add_node(0, Label=1, x=[1.0, 2.0], new=True, name="An")
    graph.add_node(1, Label=None, x=[3, 4], new=False, name="Be")
    found = read_file(saved(tmp_path / "g.json", graph))
    assert found["x"].tolist() == [[1, 2, 1], [3, 4, 0]]
    assert found["y"] == ["1", None] and found["names"] == ("An", "Be")


# Files that are refused, by file, place and key ---------------------------------------------------


def nodes(old: str, new: str) -> Files:
    assert old in NODES
    return two(NODES.replace(old, new, 1), PAIRS)


def changed(key: str, value: Any, kind: str = "nodes", one: int = 1) -> Files:
    """Give the graph as JSON with one change of its second node or edge."""
    content = json.loads(json.dumps(nx.node_link_data(network(), edges="links")))
    content[kind][one][key] = value
    return {"g.json": json.dumps(content)}


def weight(value: str) -> Files:
    return two(HEAD + ROWS, f"source,target,weight\nanna,bert,2\nbert,cora,{value}\n")


HALF = next(iter(changed("age", 40).values()))
MANY = [{"id": node, "label": node % 2, f"a{node}": 1} for node in range(3000)]
CAPTIONS = "name,label\n" + "".join(f"n{row},person {row}\n" for row in range(12))
ONE_HOT = How(categories="one-hot")
REFUSED: list[tuple[Files, How, str]] = [
    (nodes("name,", "who,"), PLAIN, r"nodes\.csv"),
    (nodes("age,income", "val_mask,n_id"), PLAIN, r"nodes\.csv: val_mask"),
    (nodes("age,", "id,"), PLAIN, r"nodes\.csv: one column"),
    (nodes("income", "AGE"), PLAIN, r"nodes\.csv: .*'age'"),
    (nodes("label,", "class,"), PLAIN, "no label.*class"),
    (nodes("40,2", "40,two"), PLAIN, r"nodes\.csv: line 3.*'two'"),
    (nodes("40,2", "40,"), PLAIN, "node 'bert': income is nan"),
    (nodes("40,2", "40"), PLAIN, r"nodes\.csv: line 3: 4.*line 1"),
    (nodes("40,2", "nan,2"), PLAIN, r"node 'bert': age is nan"),
    (nodes("40,2", "1e39,2"), PLAIN, r"node 'bert': age is 1e\+39"),
    (nodes("bert,", ","), PLAIN, r"nodes\.csv: line 3"),
    (nodes("bert,", "anna,"), PLAIN, r"nodes\.csv: line 3: name: 'anna'"),
    (nodes(",val,", ",valid,"), PLAIN, r"nodes\.csv: line 5.*'valid'"),
    (nodes(NODES, ""), PLAIN, r"nodes\.csv: is empty"),
    (nodes(NODES, "name,label\n"), PLAIN, "has no nodes"),
    (nodes('"Cox, C."', '"Cox, C.'), PLAIN, r"nodes\.csv: line \d"),
    (two(COMMAS), PLAIN, r"nodes\.csv: line 2.*data\.decimal"),
    (two(COMMAS), ONE_HOT, r"nodes\.csv: line 2.*data\.decimal"),  # not a word for each number
    (two(COMMAS.replace("-2", "2.5")), COMMA, r"nodes\.csv: line 3.*decimal point"),
    (two(CAPTIONS, "source,target\n"), How("degree"), ".*12 labels.*data.label"),
    (two("Unnamed: 0,name,label\n0,anna,cat\n"), PLAIN, ".*index=False"),
    (two('"","name","label"\n"1","anna","cat"\n'), PLAIN, ".*row.names = FALSE"),
    (two(QUOTED.replace('"anna"', '"1","anna"', 1)), PLAIN, ".*row.names"),
    (two('"name" "label"\n"1" "anna" "cat"\n'), PLAIN, r"nodes\.csv"),
    (two("\ufeff" + (HEAD + ROWS).replace("40.0", "#N/A")), PLAIN, "node 'bert': age"),
    (two(HEAD + ROWS, ",source,target\n0,anna,bert\n"), PLAIN, r"edges\.csv: .*"),
    (two("id,label,a\n007,x,3\n", "source,target\n7,7\n"), PLAIN, ".*'7' is no node"),
    (two(HEAD + ROWS, "source,target\nanna,zoe\n"), PLAIN, r"edges\.csv: line 2: target: 'zoe'"),
    (two(HEAD + ROWS, "source,target\n,anna\n"), PLAIN, r"edges\.csv: line 2: source"),
    (two(HEAD + ROWS, "source,target\nanna\n"), PLAIN, r"edges\.csv: line 2: 1.*2"),
    (two(HEAD + ROWS, "from,target\nanna,bert\n"), PLAIN, r"edges\.csv: .*source"),
    ({"nodes.csv": NODES}, PLAIN, r"edges\.csv: there is no such file"),
    (two(HEAD + ROWS), How(weight="value"), r"data\.weight"),
    (weight(""), How(weights=True), r"edge_weight\[1\] is nan"),
    *((weight(value), PLAIN, r"edges\.csv: line 3: weight") for value in ('"1,5"', "strong")),
    ({"g.json": HALF[: len(HALF) // 2]}, PLAIN, r"g\.json.*line 1"),
    ({"g.json": "[1]"}, PLAIN, r"g\.json.*nodes.*links"),
    ({"g.json": '{"nodes": [3], "links": []}'}, PLAIN, r"g\.json: .*: 3"),
    (both(links=IN_JSON["edges"][:1]), PLAIN, r"g\.json: .*differ"),
    (both(nodes=MANY), How(missing="mean"), ".*attributes"),
    (changed("id", "anna"), PLAIN, r"g\.json: node 1: name: 'anna'"),
    (changed("age", "old"), PLAIN, r"g\.json: node 1: age: 'old'"),
    (changed("age", [1, 2], one=0), PLAIN, r"g\.json: node 1: age.* 2"),
    (changed("city", 5), PLAIN, r"g\.json: node 'anna': city"),
    (changed("split", "all"), PLAIN, r"g\.json: node 1: split: 'all'"),
    (changed("label", ["cat", "dog"]), PLAIN, r"g\.json: node 1: label.*'cat', 'dog'"),
    (changed("target", "zoe", "links"), PLAIN, r"g\.json: edge 1: target: 'zoe'"),
    (changed("weight", None, "links"), How(weights=True), r"g\.json: edge_weight\[1\]"),
    ({"g.graphml": DESCRIBED[: len(DESCRIBED) // 2]}, PLAIN, r"g\.graphml"),
    *(({"g.graphml": DESCRIBED.replace(old, new)}, PLAIN, f".*{words}") for old, new, words in (
        ("<edge id", "<hyperedge/><edge id", "hyperedges"),
        ("</graph>", "</graph><graph/>", "2 graphs"),
        ('id="n1"', 'id="n0"', "'n0'.*once"),
        ('target="n1"', 'target="zoe"', "edge 0: target: 'zoe'"),
        ('"d1" for="node"', '"d1" for="all"', "'d1': for='all'"),
        (ANY, f'<!DOCTYPE g [<!ENTITY e "x">]>{ANY}', "entity e"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("files", "gaps", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_by_place(files, gaps, words, tmp_path):
    path = written(tmp_path, files)
    with pytest.raises(DataError, match=f"^file {tmp_path}(/|: )?{words}") as caught:
        load_file(path, gaps)
    assert "\n" not in str(caught.value)


# Names of files -----------------------------------------------------------------------------------


def test_hidden_files_are_none_and_capital_endings_are(tmp_path):
    folder = tmp_path / "clients"
    saved(folder / "a.JSON", network())
    tables(folder / "b", people(), EDGES)
    nx.write_graphml(network(), folder / "c.GraphML")
    for name in ("._a.json", ".DS_Store", "~$b.json", "__MACOSX", "Thumbs.db"):
        (folder / name).write_bytes(b"\0")
    where = [one.where for one in client_graphs(folder)]
    assert where == [f"file {folder}/{name}" for name in ("a.JSON", "b", "c.GraphML")]
    # A folder with other names is refused with them
    (folder / "b" / "nodes.csv").rename(folder / "b" / "people.csv")
    said(lambda: client_graphs(folder), "edges.csv, people.csv", "nodes.csv")
    (folder / "b" / "people.csv").rename(folder / "b" / "nodes.csv")
    (folder / "e.gml").touch()
    said(lambda: client_graphs(folder), "e.gml", "write_graphml")


def test_names_of_the_kinds_lead_to_them_and_others_are_refused_with_the_remedy(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tables(tmp_path / "people", NODES, PAIRS)
    for name in ("people", "people/", "absent.graphml"):
        assert file_path(name) == Path(name) and folder_path(name) is None
    saved(tmp_path / "clients" / "a.json", network())
    for name, word in (
        ("clients/", "nodes.csv"), ("absent/", "folder"), ("./absent", "file"), ("clients", "/."),
    ):  # fmt: skip
        said(lambda name=name: pyg_name(name), f"data.name = '{name}': ", word)
    for name, word in (
        ("graph.npz", "is not a graph"),
        ("people/nodes.csv", "nodes.csv and edges.csv"),
        ("g.pkl", "write_graphml"),
    ):
        Path(name).write_bytes(b"any")
        said(lambda name=name: load_file(Path(name)), word)
    # One folder has one name from wherever it is named, so that two runs on it have the same data
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    named = located("../../people/", tmp_path / "runs" / "sweep")
    assert named == located("people/", tmp_path.resolve()) == f"{tmp_path.resolve() / 'people'}/"


# Missing numbers and words ------------------------------------------------------------------------

SETTINGS = How._fields[:6]  # of the section `data`
FILLED = How(missing="mean", categories="one-hot")
TOWNS = """\
name,label,split,age,town
anna,cat,train,30,bern
bert,dog,val,,genf
cora,cat,test,60,bern
dora,dog,train,60,
"""


def load(path: Path, features: str = "as-is", gaps: How = FILLED) -> Graph:
    """Load a graph as a run does."""
    own = dict(zip(SETTINGS, gaps, strict=False))
    return load_graph(DataConfig(str(path), split="auto", features=features, **own))


def table(rows: str, count: int) -> str:
    """Write a table of some nodes of two classes."""
    return "name,label,a\n" + "".join(f"n{i},c{i % 2},{rows.format(i)}\n" for i in range(count))


@pytest.mark.parametrize(
    ("nodes", "gaps", "words"),
    [
        (TOWNS, FILLED, ""),
        (TOWNS.replace("30,", ","), FILLED, ""),
        (TOWNS, How(categories="one-hot"), r"'bert': age.*data\.missing=mean"),
        (TOWNS, How(missing="mean"), r"line 2: town.*data\.categories=one-hot"),
        (TOWNS.replace("30,", "nan,"), How(categories="one-hot"), "'anna': age"),
        (TOWNS.replace("60,bern", "60,7"), FILLED, r"line 4: town.* 2 .*'bern'"),
        (TOWNS.replace("60,bern", "inf,bern"), FILLED, "'cora': age is inf"),
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
    found = read_file(saved(tmp_path / "g.json", graph), FILLED)
    rest = ("at[0]", None), ("at[1]", None), ("age", None)
    assert found["columns"] == (("town", "bern"), ("town", "genf"), *rest)
    nan = torch.nan
    expected = torch.tensor([[1, 0, 1, 2, nan], [0, 1, nan, nan, 40]]).double()
    torch.testing.assert_close(found["x"], expected, equal_nan=True)
    for node in graph:
        del graph.nodes[node]["at"]
    found = read_file(saved(tmp_path / "g.graphml", graph), FILLED)
    assert found["x"].isnan().sum() == 1


def test_nan_in_a_saved_graph_gets_the_mean(tmp_path):
    x = torch.tensor([[1.0, torch.nan], [3.0, 4.0], [torch.nan, 6.0]])
    masks = dict(zip(("train_mask", "val_mask", "test_mask"), torch.eye(3).bool(), strict=True))
    edges = torch.tensor([[0, 1], [1, 2]])
    torch.save({"x": x, "edge_index": edges, "y": torch.tensor([0, 1, 0]), **masks},
               tmp_path / "g.pt")  # fmt: skip
    graph = load(tmp_path / "g.pt", "standardise", How(missing="mean"))
    assert graph.x[2, 0] == graph.x[0, 1] == 0  # the mean
    torch.testing.assert_close(graph.treatment.apply(x), graph.x)
    said(lambda: load(tmp_path / "g.pt", gaps=PLAIN), "x[0, 1]", "data.missing=mean")


def test_new_nodes_get_the_runs_means_and_words(tmp_path):
    form = form_of(load(tables(tmp_path / "t", TOWNS)), DataConfig())
    columns = "name,town,age\n"  # in another order, without labels
    new = read_new_graph(tables(tmp_path / "new", f"{columns}eva,genf,\nfinn,,20\n"), form)
    torch.testing.assert_close(new.x, torch.tensor([[50, 0, 1], [20, 2 / 3, 1 / 3]]))
    empty = read_new_graph(tables(tmp_path / "none", f"{columns}eva,,7\n"), form)
    torch.testing.assert_close(empty.x, torch.tensor([[7, 2 / 3, 1 / 3]]))
    for nodes, *words in (
        (f"{columns}eva,chur,7\n", "'chur'", "bern, genf"),
        (f"{columns}eva,3,7\n", "town", "bern, genf"),
        ("name,town\neva,genf\n", "age"),
        ("name,town,age,size\neva,genf,7,3\n", "size"),
    ):
        path = tables(tmp_path / "wrong", nodes)
        said(lambda path=path: read_new_graph(path, form), *words)


def test_all_clients_have_the_same_features(tmp_path):
    tables(tmp_path / "one", TOWNS)
    other = "name,label,split,town,age\nanna,cat,train,chur,100\nbert,dog,val,genf,\n"
    tables(tmp_path / "two", f"{other}cora,cat,test,chur,100\ndora,dog,train,,100\n")
    clients = load_folder(tmp_path, SPLIT, 0, how=FILLED)
    # Known ages: 30, 60, 60, 100, 100, 100. Of six towns, two each.
    assert clients.treatment.columns.words == {"age": [], "town": ["bern", "chur", "genf"]}
    third = 1 / 3
    wanted = (
        [[30.0, 1, 0, 0], [75, 0, 0, 1], [60, 1, 0, 0], [60, third, third, third]],
        [[100.0, 0, 1, 0], [75, 0, 0, 1], [100, 0, 1, 0], [100, third, third, third]],
    )
    for client, rows in zip(clients, wanted, strict=True):
        torch.testing.assert_close(client.x, torch.tensor(rows))


def test_clients_know_their_nodes_names(tmp_path):
    names, ring = "abcdefghijkl", torch.arange(12)
    edges = to_undirected(torch.stack([ring, ring.roll(1)]), 12)
    whole = Graph(torch.rand(12, 4), edges, ring % 2, 2, names=tuple(names))
    graphs = partition_graph(whole, PartitionSection(method="random", clients=2), 0.5, seed=0)
    for graph in graphs:
        assert graph.called == tuple(names[node] for node in graph.nodes.tolist())
        local = {f"0.{key}": value for key, value in graph_tensors(graph).items()}
        assert read_graph(0, local).called == graph.called
    assert called(graphs) == [name for graph in graphs for name in graph.called or ()]
    for folder, people in (("one", "zebcda"), ("two", "bcdefg")):
        rows = (f"{name},{row % 2},{row},{12 - row}\n" for row, name in enumerate(people))
        tables(tmp_path / folder, "name,label,p,q\n" + "".join(rows))
    how = PartitionSection(ratios=[0.4, 0.3, 0.3])
    for identified in (False, True):
        clients = load_folder(tmp_path, how, 0, identified=identified)
        assert clients[0].called == tuple("zebcda")
    shared = load_overlapping_folder(tmp_path, PartitionConfig(ratios=how.ratios), 0)
    assert shared[0].called == tuple("abcdez")  # in the order of the identities' numbers


FORM = DataForm(Treatment("as-is", 2), 2, ("3", "7"))


def test_labels_get_the_runs_numbers(tmp_path):
    path = tmp_path / "new.pt"

    def new(form, **content):
        torch.save({"edge_index": torch.tensor([[0], [1]]), **content}, path)
        return read_new_graph(path, form)

    x = torch.ones(3, 2)
    for classes, y in (
        (("3", "7"), torch.tensor([7, -1, 3])),  # labels with gaps
        (None, torch.tensor([1, -5, 0])),
        (("cat", "dog"), ["dog", None, "cat"]),
        (("cat", "dog"), torch.tensor([1, -1, 0])),
    ):
        assert new(FORM._replace(classes=classes), x=x, y=y).y.tolist() == [1, -1, 0]
    said(lambda: new(FORM, x=x, y=["dog", "7", "3"]), "'dog'", "3")
    # Numbers of nodes are no features of new ones
    said(lambda: new(FORM._replace(given=How("one-hot")), y=[1, 0]), "no_features")
    form = DataForm(Treatment("as-is", 32), 2, None, How("degree"))
    assert new(form, y=[1, 0]).x.argmax(1).tolist() == [1, 1]
