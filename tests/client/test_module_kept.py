"""What clients with a torch module leave: predictions as measured, and modules that build again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context
from structure_helpers import built, toy_clients
from torch import Tensor, nn

from flower_graph import models
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.module_client import ModuleClient, ModuleSettings
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.outputs.files import Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

GRAPHS = toy_clients()


class Own(nn.Module):
    """Anybody's module, of which the bias stays at the clients."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def kept(make: Callable[[], nn.Module], settings: ModuleSettings) -> tuple[Any, list[Snapshot]]:
    """Run two rounds over two SuperNodes; what they leave."""

    def client_fn(context: Context) -> ModuleClient:
        own = GRAPHS[int(context.node_config["partition-id"]) :: 2]
        return ModuleClient(context, own, make, settings, classes="abcd")

    grid, reports = InProcessGrid(make_client_app(client_fn), num_supernodes=2), list[RoundReport]()
    ModuleFedAvg(make, settings).start(grid, None, 2, 30.0, on_round=reports.append)
    return reports[-1], [client_fn(context).snapshot() for context in grid.contexts.values()]


@pytest.mark.parametrize("make", [partial(models.GCN, 8, 5, 4), partial(Own, 8, classes=4)])
def test_predictions_are_what_was_measured_and_modules_build_again(make: Any) -> None:
    settings = ModuleSettings(0.05, local_epochs=2, seed=3, local=("*.bias",))
    report, snapshots = kept(make, settings)
    shares = torch.full((len(GRAPHS), 3), torch.nan, dtype=torch.float64)
    for snapshot in snapshots:
        (saved,), found = snapshot.models, snapshot.predictions
        assert found is not None and found.classes == tuple("abcd")
        # Biases are each client's own; all else is there once.
        assert {name.rpartition(".")[2] for name in saved.own} == {"bias"} and saved.shared
        for client in saved.clients:
            graph, own = GRAPHS[client - 20], found.of_client(client)
            edges = torch.zeros((2, 0), dtype=torch.int64)
            edges = edges if graph.edge_index is None else graph.edge_index
            x = graph.x.to_dense() if graph.x.layout != torch.strided else graph.x
            shown = built(saved, client)(x, edges).softmax(1).max(1)
            assert own.predicted.tolist() == shown.indices.tolist()
            assert own.probability == pytest.approx(shown.values.detach().numpy(), abs=1e-5)
            assert own.node.tolist() == graph.nodes.tolist()
            for role in (1, 2, 3):
                right = (own.predicted == own.label)[own.role == role]
                if right.size:
                    shares[client - 20, role - 1] = right.mean()
    wanted = [report.train_accuracy, report.val_accuracy, report.test_accuracy]
    assert shares.nanmean(0).tolist() == pytest.approx(wanted, rel=1e-14)


def test_who_diverged_has_no_predictions() -> None:
    settings = ModuleSettings(1e30, seed=3, local=("*",))
    report, snapshots = kept(partial(models.GCN, 8, 5, 4), settings)
    assert report.loss != report.loss
    assert [snapshot.predictions for snapshot in snapshots] == [None, None]
