"""Graphs as people and programs write them: read as they mean them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pandas as pd
import pytest
import torch
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.data.folders.client_folder import RATIOS, load_folder
from flower_graph.data.gaps import Gaps
from flower_graph.data.given import with_saved_graphs
from flower_graph.data.graph import Graph
from flower_graph.data.new_graph import DataForm, read_new_graph
from flower_graph.data.sources.datasets import load_graph
from flower_graph.errors import DataError

PEOPLE = ("anna", "bert", "cora", "dora")
LABELS = ["cat", "dog", "cat", "dog"]
AGES, INCOMES = [30.0, 40.0, 50.0, 60.0], [1.5, 2.0, -3.0, 0.0]
X = [[age, income] for age, income in zip(AGES, INCOMES, strict=True)]
EDGES = "source,target\nanna,bert\nbert,cora\n"


def frame(columns: Sequence[str] = ("name", "label", "age", "income")) -> pd.DataFrame:
    whole = {"name": PEOPLE, "label": LABELS, "age": AGES, "income": INCOMES}
    return pd.DataFrame(whole)[list(columns)]


def tables(folder: Path, nodes: str, edges: str = EDGES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nodes.csv").write_text(nodes, encoding="utf-8")
    (folder / "edges.csv").write_text(edges, encoding="utf-8")
    return folder


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
        return tables(folder / kind, frame(columns).to_csv(index=False))
    return saved(folder / kind, network([key for key in columns if key != "name"]))


@pytest.mark.parametrize("kind", KINDS)
def test_another_clients_columns_are_found_by_name(kind: str, tmp_path: Path) -> None:
    with_order(tmp_path / "clients" / "a", "tables", frame().columns)
    (tmp_path / "clients" / "a" / "tables").rename(tmp_path / "clients" / "first")
    other = with_order(tmp_path, kind, TURNED)
    other.rename(tmp_path / "clients" / f"second{other.suffix}")
    clients = load_folder(tmp_path / "clients", RATIOS, 0)
    assert [one.x.tolist() for one in clients] == [X, X]


@pytest.mark.parametrize("kind", KINDS)
def test_other_names_of_columns_are_refused(kind: str, tmp_path: Path) -> None:
    with_order(tmp_path / "clients" / "a", "tables", frame().columns)
    (tmp_path / "clients" / "a" / "tables").rename(tmp_path / "clients" / "first")
    table = frame().rename(columns={"income": "salary"}).to_csv(index=False)
    if kind == "tables":
        tables(tmp_path / "clients" / "second", table)
    else:
        graph = network(("label", "age"))
        nx.set_node_attributes(graph, dict(zip(PEOPLE, INCOMES, strict=True)), "salary")
        saved(tmp_path / "clients" / kind, graph)
    said(lambda: load_folder(tmp_path / "clients", RATIOS, 0), "age, income")


@pytest.mark.parametrize("kind", KINDS)
def test_new_nodes_columns_are_found_by_name_or_refused(kind: str, tmp_path: Path) -> None:
    path = with_order(tmp_path / "old", "tables", frame().columns)
    config = DataConfig(str(path), split="auto", features="standardise")
    form = form_of(load_graph(config), config)
    new = read_new_graph(with_order(tmp_path / "new", kind, TURNED), form)
    torch.testing.assert_close(new.x, load_graph(config).x)
    said(
        lambda: read_new_graph(with_order(tmp_path / "less", kind, TURNED[:3]), form),
        "age",
        "income",
    )


def form_of(graph: Graph, config: DataConfig) -> DataForm:
    """Return the form of a run's new graphs, by way of its file."""
    assert graph.treatment is not None
    form = DataForm(graph.treatment, graph.num_classes, graph.classes, Gaps.of(config))
    return DataForm.from_json(json.loads(json.dumps(form.to_json())))


def test_features_without_names_are_taken_by_place_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_order(tmp_path / "clients", "g.json", ("label", "age", "income"))
    torch.save(Data(x=torch.tensor(X), edge_index=torch.tensor([[0], [1]]), y=LABELS),
               tmp_path / "clients" / "z.pt")  # fmt: skip
    assert load_folder(tmp_path / "clients", RATIOS, 0)[1].x.tolist() == X
    assert "z.pt: its features have no names" in caplog.text and "age, income" in caplog.text


def test_names_go_along_with_a_graph_that_is_saved(tmp_path: Path) -> None:
    first = DataConfig(str(with_order(tmp_path, "g.json", TURNED)), split="auto", features="as-is")
    settings = with_saved_graphs({"data.name": load_graph(first).to_data()}, tmp_path)
    again = DataConfig(str(settings["data.name"]), split="auto", features="as-is")
    new = with_order(tmp_path, "tables", frame().columns)
    found = read_new_graph(new, form_of(load_graph(again), again))
    assert found.x.tolist() == [row[::-1] for row in X]
