"""Graphs of one's own, as a new user brings them: what failed before there was a description."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import COMPARED, PERSONAL, one_fast
from torch import nn

from flower_graph import SplitGradientRelay
from flower_graph.apps.cli.main import main
from flower_graph.data import csbm
from flower_graph.errors import DataError

SETTINGS = ("rounds=2", "device=cpu", "data.split=auto", "data.features=as-is")
# A config of each method, and settings under which it is small
METHODS = {
    "nfedgnn": ("nfedgnn/cora", "model.hidden=4"),
    "fedscem": ("fedscem/cora", "partition.clients=4", "partition.min_nodes=5", "model.hidden=4",
                "model.projection=4", "strategy.aggregation=plain", "strategy.alignment=plain"),
    "fedgls": ("fedgls/cora", "partition.clients=3", "graph.neighbours=4", "model.hidden=4"),
    "ppfl": ("ppfl/cora-gat", "partition.clients=3", "gat.epochs=1", "judge.mlp=false",
             "judge.folds=2", "partition.public_share=0.6", "partition.private_share=0.13",
             "partition.ratios=[0.4,0.3,0.3]"),
    **{name: (f"{name}/cora", "partition.clients=3", "model.hidden=4")
       for name in (*PERSONAL, *COMPARED)},
}  # fmt: skip


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
    config, *small = METHODS[method]
    words = [config, f"data.name={tmp_path}/graph.pt", *SETTINGS, *small]
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
