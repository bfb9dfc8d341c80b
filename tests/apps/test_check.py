"""What ``flower-graph check`` finds, and that its estimates hold."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from app_helpers import MakeConfig
from graph_helpers import small_graph

from flower_graph.apps import run as runner
from flower_graph.apps.cli import check
from flower_graph.apps.cli.check import short_form
from flower_graph.apps.cli.main import main
from flower_graph.data.baselines import says_one_class
from flower_graph.data.folders import client_folder
from flower_graph.data.graph import PARTS, Graph, to_undirected
from flower_graph.data.partition.statistics import component_sizes, lines, survey_graph
from flower_graph.method.load import load_config
from flower_graph.method.registry import known_apps, method_named, method_of

Captured = pytest.CaptureFixture[str]
# A path of four nodes, and one node alone; node 3 has no label
PATH = to_undirected(torch.tensor([[0, 1, 2], [1, 2, 3]]), 5)


def path_graph(**changes: Any) -> Graph:
    x, y = torch.tensor([[0.0], [2], [0], [0], [-1]]), torch.tensor([0, 0, 1, -1, 1])
    return Graph(**{"x": x, "edge_index": PATH, "y": y, "num_classes": 2, **changes})


def test_figures_of_a_graph_by_hand() -> None:
    found = survey_graph(path_graph(notes=("a note",)))
    assert found.figures == {
        **{"nodes": 5, "edges": 3, "neighbours": 1.2, "most-neighbours": 2, "isolated": 1},
        **{
            "components": 2,
            "largest-component": 4,
            "features": 1,
            "least-feature": -1.0,
            "largest-feature": 2.0,
        },
        **{"non-zero-share": 0.4, "labelled": 4, "classes": {"0": 2, "1": 2}},
        **{"homophily": 0.5, "homophily-by-chance": 0.5},
    }
    assert all(figure in lines(found)[0] for figure in ("3 edges", "1.2", "most 2", "1 nodes "))
    assert not any("parts" in warning for warning in found.warnings)
    assert found.distributions["neighbours of a node"] == {0: 1, 1: 2, 2: 2}
    # Nodes 0 to 2 have labelled neighbours: of node 1 one of two is of its class.
    assert found.distributions["neighbours of its own class (%)"] == {0: 1, 50: 1, 100: 1}
    assert found.notes == ("a note",)


@pytest.mark.parametrize("n", [1, 2, 50])
def test_components_of_paths_and_of_no_edges(n: int) -> None:
    line = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(n))[line]
    assert component_sizes(to_undirected(shuffled, n), n).tolist() == [n]
    assert component_sizes(torch.empty(2, 0, dtype=torch.int64), n).tolist() == [1] * n


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y": torch.tensor([0, 0, 0, 0, 0])}, "class 0 has 100 % of the labelled nodes"),
        ({"y": torch.tensor([0, 1, -1, -1, -1])}, "60 % of the nodes have no label"),
        ({"y": torch.tensor([0, 1, 0, 1, 0])}, "heterophilous"),
        ({"y": torch.tensor([0, 0, 1, -1, 1])}, "hardly more often of one class than chance"),
        ({"x": torch.ones(5, 3)}, "all nodes have the same features"),
        ({}, "5 nodes are few"),
    ],
)
def test_what_to_beware_of(changes: dict[str, torch.Tensor], said: str) -> None:
    found = survey_graph(path_graph(**changes)).warnings
    assert sum(said in warning for warning in found) == 1


def test_check_says_what_each_method_can_do_and_writes_only_what_is_asked(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config_of(small_graph(30))
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.rglob("*")}
    words = ["check", "graph.pt", "device=cpu"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert {*tmp_path.rglob("*")} == before
    assert "30 nodes, 60 edges, 4.0 neighbours a node" in shown
    assert re.search(r"nfedgnn/own-graph\n  clients    30 users", shown)
    assert re.search(r"fedgls/own-graph\n  cannot     .*graph.neighbours: 10", shown)
    assert "warning    30 nodes are few" in shown
    assert main([*words, "--out", "found"]) == 0
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"check.json", "check.png"}
    record = json.loads((tmp_path / "found" / "check.json").read_text())
    assert record["figures"]["classes"] == {"0": 10, "1": 10, "2": 10}
    assert "graph.neighbours" in record["methods"]["fedgls/own-graph"]["refused"]
    mine = record["methods"]["nfedgnn/own-graph"]
    assert mine["clients"] == 30 and mine["config"]["device"] == "cpu"
    assert {*mine["baselines"]} >= {"majority", "logistic-regression"}


def test_a_run_says_first_which_data_it_has(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config_of(small_graph(30))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "own.yaml", "rounds=1", "--out", "a"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("data  the graph: 30 nodes, 60 edges")
    assert "\ndata  clients: 30 users; train " in said
    assert said.index("data  warning: 30 nodes are few") < said.index("round 1/1")
    assert main(["run", "own.yaml", "rounds=1", "--out", "b", "--quiet"]) == 0
    quiet = capsys.readouterr().err.splitlines()
    assert quiet and all(line.startswith("data  warning: ") for line in quiet)


@pytest.mark.parametrize(
    ("app", "changes"),
    [
        ("fedgls", ["data.name=graph.pt", "partition.method=random", "partition.clients=3"]),
        ("fedgls", ["data.name=clients/"]),
        ("fedscem", ["data.name=clients/"]),
    ],
)
def test_a_run_says_first_how_many_nodes_its_clients_train_on(
    app: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(small_graph(30), "graph.pt")
    (tmp_path / "clients").mkdir()
    for client in range(2):
        given = small_graph(30, n_id=torch.arange(30) + 20 * client)
        for part in PARTS:
            del given[part]
        torch.save(given, tmp_path / "clients" / f"{client}.pt")
    graphless = ["strategy.name=fed-gnn"] if app == "fedgls" else []
    ratios = "partition.ratios=[0.2,0.4,0.4]"
    config = load_config(f"{app}/own-graph", [*changes, ratios, *graphless])
    method: Any = method_of(config)
    trained = sum(int(graph.train_mask.sum()) for graph in method.graphs(config))
    monkeypatch.setattr(client_folder, "read_clients", lambda *_, **__: pytest.fail("read again"))
    graph, clients, *_ = short_form(config)[0]
    assert f"; train {trained}, val " in clients and "train" not in graph


def chequered(n: int = 120) -> dict[str, torch.Tensor]:
    """Give a ring in which neighbours are never of one class."""
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    x = torch.rand(n, 8, generator=torch.Generator().manual_seed(0))
    return {"x": x, "edge_index": ring, "y": torch.arange(n) % 2}


def test_of_a_heterophilous_graph_each_method_says_what_it_does_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(chequered(), "ring.pt")
    config = "fedgls/own-graph"
    words = ["data.name=ring.pt", "device=cpu", "partition.method=random", "partition.clients=3"]
    assert main(["check", config, *words]) == 0
    shown = capsys.readouterr().out
    assert "than chance (0 %" in shown and "warning    FedGLS's GCN smooths over" in shown
    for app in known_apps():
        method = method_named(app)
        assert method.heterophily
        if app in ("nfedgnn", "fedgls"):
            own = words if app == "fedgls" else words[:2]
            assert method.heterophily in short_form(load_config(f"{app}/own-graph", own))[1]
    monkeypatch.setattr(type(method_named("fedgls")), "heterophily", "")
    assert not any("smooths" in said for said in short_form(load_config(config, words))[1])


@pytest.mark.parametrize(("own", "is_said"), [(0.85, True), (0.2, False), (float("nan"), False)])
def test_methods_say_on_which_graphs_clients_may_reach_more_alone(own: float, is_said: bool):
    assert bool(says_one_class({"majority-per-client": {"test": own}})) == is_said
    assert not says_one_class({})
    needs = {app for app in known_apps() if method_named(app).needs_variety}
    assert needs == {*known_apps()} - {"nfedgnn", "fedscem", "ppfl", "local", "lpgnn"}


def test_check_estimates_by_later_rounds(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    config_of(small_graph(30))
    monkeypatch.chdir(tmp_path)
    assert len(runner.first_rounds(load_config("own.yaml", ["rounds=100"]))) == runner.TRIED
    slow = [SimpleNamespace(seconds=seconds) for seconds in (5.0, 3.0, 0.1, 0.1, 0.1)]
    monkeypatch.setattr(check, "first_rounds", lambda config: slow)
    assert main(["check", "own.yaml", "rounds=100"]) == 0
    assert "about 15 s for 100 rounds" in capsys.readouterr().out
