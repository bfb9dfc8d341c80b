"""Folders as runs leave them, made by hand: two clients, three features, two classes."""

import json
from pathlib import Path
from typing import Any

import torch

from flower_graph.data.description import DataForm
from flower_graph.data.features import Treatment
from flower_graph.method.load import load_config, to_yaml
from flower_graph.models import GCN
from flower_graph.outputs.files import Predictions, SavedModels, Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.files import json_line

CLASSES = ("cat", "dog")
GRAPH: dict[str, Any] = {
    "x": torch.tensor([[2.0, 0, 0], [0, 1, 3], [0, 4, 0]]),
    "edge_index": torch.tensor([[0, 1], [1, 2]]),
}
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "csbm", "nodes": 60, "classes": 2, "num_features": 8, "active": 3},
    "data.split": "random",
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
}
REPORT = RoundReport(1, 0.5, 0.5, 0.0, 1, 1, 0.5, 2, 2, bytes={"up": {"weights": 8}})
MODEL = "flower_graph.models.GCN", {"features": 3, "hidden": 4, "classes": 2}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return GCN(3, 4, 2).state_dict()


def make_run(
    out: Path, *overrides: str, own: bool = True, models: bool = True, names: bool = False
) -> Path:
    """Write a run of two clients on two SuperNodes; `own`: each has weights of its own."""
    out.mkdir(parents=True)
    text = to_yaml(load_config("fedgta/cora-linqs", ["data.features=row", *overrides]))
    (out / "config.yaml").write_text(text, encoding="utf-8")
    (out / "metrics.jsonl").write_bytes(json_line(REPORT.to_record()) + b'{"rou')
    (out / "result.json").write_text('{"seed": 0, "rounds": 1, "test-accuracy": 0.5}')
    form = DataForm(Treatment("row", 3), 2, CLASSES)
    (out / "data.json").write_text(json.dumps(form.to_json()))
    for client in (0, 1):
        nodes = [f"anna-{client}", "b,c"] if names else [2 * client, 2 * client + 1]
        logits = torch.tensor([[0.0, 1], [2, 0]])
        said = Predictions.of(logits, client, nodes, [1, 3], [1, -1], CLASSES)
        saved = SavedModels(*MODEL, [client], weights(client if own else 0), {})
        Snapshot(said, [saved] if models else []).write(out / "clients" / str(client))
    return out
