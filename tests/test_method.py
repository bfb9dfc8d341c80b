"""What ``GraphMethod`` gives a method that says little itself."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_graph.apps.cli.check import short_form
from flower_graph.apps.cli.main import main
from flower_graph.apps.run import run
from flower_graph.client.module_client import ALONE
from flower_graph.config.common import NETWORKS, ModuleRunConfig
from flower_graph.data.folders.client_folder import client_graph_from_data
from flower_graph.data.graph import ClientGraph
from flower_graph.method.load import load_config
from flower_graph.method.module_method import ModuleMethod
from flower_graph.method.registry import method_of
from flower_graph.method.run import load_run


@dataclass
class Settings(ModuleRunConfig):
    app: str = __name__


class Matrix(torch.nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features, classes))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class OwnData(ModuleMethod[Settings]):
    """Three clients of five nodes, each on a path, of classes 0 to 2."""

    name, schema = __name__, Settings

    def module(self, config: Settings, features: int, classes: int) -> Any:
        return partial(Matrix, features, classes)

    def load_graphs(self, config: Settings) -> list[ClientGraph]:
        nodes = torch.arange(5)
        path = torch.stack([nodes[:-1], nodes[1:]])
        data = {"x": torch.eye(5), "y": nodes % 3, "edge_index": path}
        return [client_graph_from_data(client, type("Mine", (), data)) for client in range(3)]


METHOD = OwnData()


def test_a_method_with_data_of_its_own_reads_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(f"app: {__name__}\nrounds: 1\n")
    config = load_config("own.yaml", ["data.name=no-such-set", "device=cpu"])
    assert "15 nodes, 12 edges" in short_form(config)[0][0]
    run(config, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["clients"] == 3 and "classes" not in result
    assert method_of(config).partition(config).statistics.figures["nodes-per-client"] == 5
    assert main(["check", "own.yaml", "data.name=cora-linqs", "device=cpu"]) == 0
    assert ALONE in capsys.readouterr().out  # its module has a parameter that no layer groups


@pytest.mark.parametrize("name", ["gcn", *NETWORKS])
def test_a_network_of_pygs_trains_and_predicts_by_its_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flower_graph.client.module_client")
    words = ["data.name=csbm", "data.nodes=90", "data.classes=3", "data.num_features=24"]
    words += ["partition.method=random", "partition.clients=3", f"model.name={name}", "rounds=9"]
    config = load_config("fedavg/cora-linqs", [*words, "data.active=6", "data.signal=0.5"])
    result = run(config, tmp_path / "out", supernodes=1)
    assert result["rejected"] == 0 and result["loss"] < 1.05
    assert ALONE not in caplog.text
    found = load_run(tmp_path / "out").predict(torch.rand(4, 24), torch.tensor([[0, 1], [1, 2]]))
    assert found.shape == (4, 3)
