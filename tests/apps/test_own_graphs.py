"""Graphs of one's own in every method, by every door; clients to which a driver hands them over."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import COMPARED, METHODS, PERSONAL, one_fast
from flwr.app import Context, RecordDict
from own_graphs import ALIKE, OTHERS, alike
from torch import nn
from torch_geometric.data import Data

from flower_graph import SplitGradientRelay, handed
from flower_graph.apps.cli.main import main
from flower_graph.data import csbm
from flower_graph.data.sources import datasets
from flower_graph.errors import DataError
from flower_graph.flower_compat import NumPyClient
from flower_graph.handed import noted, take_over
from flower_graph.method.load import list_configs, to_yaml
from flower_graph.method.permits import configured
from flower_graph.method.registry import known_apps, method_of
from flower_graph.storage.files import IN_PROCESS


def settings_of(method: str) -> list[str]:
    few = [] if method in ("nfedgnn", "lpgnn") else ["partition.clients=3"]
    if method in ("deepwalk", "gat"):  # nodes of each class in each fold
        few += ["partition.public_share=0.6", "partition.private_share=0.13"]
        few += ["partition.ratios=[0.4,0.3,0.3]"]
    return ["rounds=2", "data.split=auto", "data.features=as-is", *few]


def half_labelled(**changes: Any) -> dict[str, Any]:
    """Give a graph with edges in one direction, half of its labels, and these are 0, 5 and 100."""
    graph = csbm(150, 3, degree=8.0, features=24, active=6, homophily=0.9, seed=3)
    y = torch.tensor([0, 5, 100])[graph.y]
    y[torch.arange(150) % 2 == 0] = -1
    edges = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    return {"x": graph.x, "edge_index": edges, "y": y, **changes}


@pytest.mark.parametrize("method", one_fast(METHODS, "fedscem"))
def test_unlabelled_nodes_and_gaps_run_in_every_method(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(half_labelled(), tmp_path / "graph.pt")
    setup = METHODS[method]
    name = f"data.name={tmp_path}/graph.pt"
    words = [setup.config, *setup.overrides, name, *settings_of(method)]
    assert main(["run", *words, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["classes"] == ["0", "5", "100"]
    assert 0 <= result["test-accuracy"] <= 1
    assert main(["partition", *words, "--out", str(tmp_path / "parts")]) == 0
    figures = json.loads((tmp_path / "parts/partition.json").read_text())
    assert "-1" not in json.dumps(figures.get("distributions", {}))
    manifest = json.loads((tmp_path / "parts/server/manifest.json").read_text())
    assert (manifest["classes"], manifest["details"]["class-names"]) == (3, ["0", "5", "100"])


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edge_index": torch.tensor([[0, 1], [1, 150]])}, r"edge_index\[1, 1\] is 150"),
        ({"y": torch.full((150,), 0.5)}, r"y\[0\] is 0.5"),
        ({"train_mask": torch.ones(150, dtype=torch.bool)}, "train_mask: node 0"),
        ({"test_mask": torch.ones(150, dtype=torch.bool)}, "test_mask: node 0"),
    ],
)
def test_a_strategy_refuses_in_the_words_of_the_command_line(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = torch.zeros(150, dtype=torch.bool)
    val, test, train = (nobody.clone() for _ in range(3))
    train[1], val[3], test[5] = True, True, True
    masks = {"train_mask": train, "val_mask": val, "test_mask": test}
    content = half_labelled(**masks | changes)
    with pytest.raises(DataError, match=f"^{words}"):
        SplitGradientRelay(SimpleNamespace(**content), Logits(), latent_size=3)
    torch.save(content, tmp_path / "graph.pt")
    words_of_a_run = ["nfedgnn/cora", f"data.name={tmp_path}/graph.pt"]
    assert main(["run", *words_of_a_run, "--out", str(tmp_path / "out")]) == 2
    assert words.replace("\\", "") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


GRAPHS = {**ALIKE, **OTHERS}
CONFIGS = [name for name in list_configs() if name.endswith("/own-graph")]
# Of methods that cut and train as FedGLS does: one graph of each kind says what all do
FEW = [f"{name}/own-graph" for name in (*PERSONAL, *COMPARED)]
SOME = ("counts", "no features")
CASES = [
    pytest.param(
        config,
        name,
        marks=pytest.mark.slow if name in SOME and config not in FEW else pytest.mark.release,
    )
    for config in CONFIGS
    for name in (SOME if config in FEW else GRAPHS)
]
REGRESSION, WORDS = "logistic-regression", "not better than"
Captured = pytest.CaptureFixture[str]


def test_every_method_has_one() -> None:
    assert {name.partition("/")[0] for name in CONFIGS} == {*known_apps()}


@pytest.mark.parametrize(("config", "name"), CASES)
def test_a_method_beats_features_alone_where_neighbours_are_alike_and_else_says_so(
    config: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    save(GRAPHS[name], tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["data.name=graph.pt", "device=cpu", *quick(config)]
    assert main(["run", config, *words, "--out", "out", "--quiet"]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    accuracy, alone = result["test-accuracy-at-best-val"], result["baselines"][REGRESSION]["test"]
    if name in ALIKE:
        assert accuracy > alone and "not better than logistic regression" not in said
    else:
        assert WORDS in said, (accuracy, result["baselines"])


def quick(config: str) -> list[str]:
    """Leave the last evaluation by an MLP out, which takes the longest and decides nothing here."""
    return ["judge.mlp=false"] if config.startswith("ppfl") else []


def save(make: Callable[[], Data], folder: Path) -> None:
    torch.save(make(), folder / "graph.pt")


def _client(context: Context) -> NumPyClient:
    config, _ = configured(context)
    return method_of(config).build_client(config, context, None)


@pytest.mark.parametrize("method", ["nfedgnn", "fedscem", "fedgls", "gat", "fedavg"])
def test_clients_need_no_file_of_the_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed, "_TAKEN", {})
    graph, yaml = tmp_path / "graph.pt", tmp_path / "mine.yaml"
    torch.save(alike().to_dict(), graph)
    config = METHODS[method].load(f"data.name={graph}", *settings_of(method))
    yaml.write_text(to_yaml(config), encoding="utf-8")
    node = {"partition-id": 1, "num-partitions": 2, "state-dir": IN_PROCESS}
    context = Context(5, 6, node, RecordDict(), {"config": str(yaml)})
    with noted() as made:
        config, _ = configured(context)
        method_of(config).num_clients(config)
    things = pickle.dumps(made)
    datasets._made.clear()
    graph.unlink()
    with pytest.raises(DataError):  # as on another machine
        _client(context)
    yaml.unlink()
    take_over(pickle.loads(things))
    for partition in (0, 1):
        node["partition-id"] = partition
        assert isinstance(
            _client(Context(5, partition, node, RecordDict(), context.run_config)), NumPyClient
        )
