"""Runs whose parties each have a folder of their own data, and nothing else."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from federation import tried
from folder_helpers import (
    YAML,
    MakeConfig,
    folders_of,
    partition,
    plain,
    run_from,
    small_config,
)
from safetensors.torch import load_file

from flower_graph import method
from flower_graph.apps.run import simulate_whole
from flower_graph.config.registry import method_of
from flower_graph.data import cached
from flower_graph.data.cached import cached_data
from flower_graph.data.folders.party import server_folder
from flower_graph.strategies.masked_embedding_averaging import method as fedscem
from flower_graph.strategies.procrustes_alignment import method as ppfl
from flower_graph.strategies.structure_fedavg import method as fedgls
from flower_graph.strategies.structure_fedavg.config import FedGLSConfig

RUNS: dict[str, tuple[str, list[str], int, list[str]]] = {
    "nfedgnn": ("nfedgnn", ["strategy.average_every=2"], 90, []),
    "nfedgnn, three SuperNodes": ("nfedgnn", [], 3, []),
    "fedscem": ("fedscem", [], 5, []),
    "fedscem, two SuperNodes": ("fedscem", [], 2, []),
    "fedscem, fedavg": ("fedscem", ["strategy.name=fedavg"], 5, []),
    "fedscem, fed-sage": ("fedscem", ["strategy.name=fed-sage"], 5, []),
    "fedgls": ("fedgls", [], 4, []),
    "fedgls, three SuperNodes": ("fedgls", ["seed=3"], 3, []),
    "fedgls, true edges": ("fedgls", [], 4, ["--true-edges"]),
    "fedgls, fed-gnn": ("fedgls", ["strategy.name=fed-gnn"], 4, ["--true-edges"]),
    "fedgls, fedproto": ("fedgls", ["strategy.name=fedproto"], 4, []),
    "ppfl": ("ppfl", [], 3, []),
    "ppfl, deepwalk": ("ppfl", ["model.name=deepwalk", "deepwalk.walks=2"], 2, []),
}
LEARNED = ("fedgls", "fedgls, three SuperNodes", "fedgls, true edges")  # runs that learn graphs


@pytest.fixture
def config_of(tmp_path: Path) -> MakeConfig:
    return partial(small_config, tmp_path)


def forbid_whole_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a party read the whole data")

    monkeypatch.setattr(cached, "_cached_data", refuse)
    for module in (fedgls, ppfl, method):
        monkeypatch.setattr(module, "cached_clients", refuse)


@pytest.mark.parametrize("name", tried(RUNS, fast=YAML))
def test_results_are_those_of_the_simulation(
    name: str,
    config_of: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, overrides, supernodes, words = RUNS[name]
    config = config_of(app, *overrides)
    wanted, figures = simulate_whole(config, supernodes=supernodes)
    out = partition(config, tmp_path / "out", "--supernodes", str(supernodes), *words)
    assert len(folders_of(out)) == supernodes
    assert method_of(config).num_clients(config, server_folder(config, str(out / "server"))) == (
        method_of(config).num_clients(config)
    )
    forbid_whole_data(monkeypatch)
    found, found_figures = run_from(config, out)
    assert plain(found) == plain(wanted)
    for one in (figures, found_figures):
        one.pop("setup-seconds", None)
    assert repr(found_figures) == repr(figures)
    if app == "fedgls":
        # What is learnt is compared with the true edges, which only a simulation has.
        has_edges = "--true-edges" in words
        assert all(one.structure for one in wanted) == (name in LEARNED)
        assert [one.structure for one in found] == [
            one.structure if has_edges else {} for one in wanted
        ]


# What is in a folder -----------------------------------------------------------------------------


def test_a_user_has_its_own_features_and_the_server_none(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of("nfedgnn")
    data = cached_data(config)
    out = partition(config, tmp_path / "out", "--supernodes", "90")
    for user, path in enumerate(folders_of(out)):
        tensors = load_file(path / "data.safetensors")
        assert set(tensors) == {"users", "x", "x.pointers", "x.columns", "x.form"}
        assert tensors["users"].tolist() == [user]
        assert torch.equal(tensors["x.columns"], data.x[user].nonzero().flatten())
        assert torch.equal(tensors["x"], data.x[user][data.x[user] != 0])
    server = load_file(out / "server" / "data.safetensors")
    assert set(server) == {"edge_index", "y", "train_mask", "val_mask", "test_mask"}


@pytest.mark.parametrize("app", ["fedscem", "fedgls", "ppfl"])
def test_a_client_has_its_own_graph_and_the_server_counts(
    app: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(app)
    everyone = {"fedscem": fedscem, "fedgls": fedgls, "ppfl": ppfl}[app].METHOD.graphs(config)
    out = partition(config, tmp_path / "out")
    for graph, path in zip(everyone, folders_of(out), strict=True):
        assert sorted(file.name for file in path.iterdir()) == ["data.safetensors", "manifest.json"]
        tensors = load_file(path / "data.safetensors")
        assert {name.partition(".")[0] for name in tensors} == {str(graph.client)}
        # Rows: nothing has more of them than the client has nodes, but edges and features.
        assert torch.equal(tensors[f"{graph.client}.nodes"], graph.nodes)
        edges = tensors.get(f"{graph.client}.edge_index")
        if edges is not None:
            assert torch.equal(edges, graph.edge_index)
        assert (edges is None) == (graph.edge_index is None)
        assert f"{graph.client}.hidden_edges" not in tensors
        assert int(tensors[f"{graph.client}.x.form"][0]) == graph.nodes.numel()
    assert [file.name for file in (out / "server").iterdir()] == ["manifest.json"]


def test_true_edges_are_there_if_they_are_asked_for_and_said_to_be_needed(
    config_of: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = config_of("fedgls", "strategy.name=fed-gnn"), "; fed-gnn needs --true-edges wh"
    assert isinstance(config, FedGLSConfig)
    partition(config, tmp_path / "out")
    assert said in capsys.readouterr().out
    out = partition(config, tmp_path / "edges", "--true-edges")
    assert said not in capsys.readouterr().out
    for graph, path in zip(fedgls.METHOD.graphs(config), folders_of(out), strict=True):
        found = load_file(path / "data.safetensors").get(f"{graph.client}.hidden_edges")
        assert (found is None) == (not graph.is_graphless)
        assert found is None or torch.equal(found, graph.hidden_edges)  # type: ignore[arg-type]


def test_only_the_server_learns_who_is_graphless(config_of: MakeConfig, tmp_path: Path) -> None:
    out = partition(config_of("fedgls"), tmp_path / "out")
    details = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))["details"]
        for path in out.glob("*/manifest.json")
    }
    graphless = details.pop("server").pop("graphless")
    assert len(graphless) == 2
    assert all(each == {"graphless-clients": 2} for each in details.values())


def test_graphs_of_ones_own_go_to_folders_too(config_of: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for client in range(3):
        x = torch.rand(12, 4, generator=torch.Generator().manual_seed(client)).round()
        content = {"x": x + torch.eye(12, 4), "y": torch.arange(12) % 2}
        edges = torch.tensor([[0, 1, 2, 3], [2, 5, 7, 9]])
        torch.save(
            content | ({"edge_index": edges} if client else {}), tmp_path / f"mine/{client}.pt"
        )
    config = config_of("fedgls", f"data.name={tmp_path / 'mine'}/", "data.presence=true")
    wanted, _ = simulate_whole(config, supernodes=3)
    out = partition(config, tmp_path / "out")
    (tmp_path / "mine").rename(tmp_path / "gone")
    found, _ = run_from(config, out)
    assert plain(found) == plain(wanted)
