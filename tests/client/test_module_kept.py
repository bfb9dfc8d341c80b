"""What clients with a torch module leave: predictions as measured, and modules that build again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flwr.app import Context
from structure_helpers import toy_clients
from torch import nn

from flower_graph import models
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.module_client import ModuleClient, ModuleSettings
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.outputs.files import Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

GRAPHS = toy_clients()


def kept(make: Callable[[], nn.Module], settings: ModuleSettings) -> tuple[Any, list[Snapshot]]:
    """Run two rounds over two SuperNodes; what they leave."""

    def client_fn(context: Context) -> ModuleClient:
        own = GRAPHS[int(context.node_config["partition-id"]) :: 2]
        return ModuleClient(context, own, make, settings, classes="abcd")

    grid, reports = InProcessGrid(make_client_app(client_fn), num_supernodes=2), list[RoundReport]()
    ModuleFedAvg(make, settings).start(grid, None, 2, 30.0, on_round=reports.append)
    return reports[-1], [client_fn(context).snapshot() for context in grid.contexts.values()]


def test_who_diverged_has_no_predictions() -> None:
    settings = ModuleSettings(1e30, seed=3, local=("*",))
    report, snapshots = kept(partial(models.GCN, 8, 5, 4), settings)
    assert report.loss != report.loss
    assert [snapshot.predictions for snapshot in snapshots] == [None, None]
