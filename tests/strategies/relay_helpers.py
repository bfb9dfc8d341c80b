"""Small graphs, and runs in process."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context
from graph_helpers import CLASSES, Outcome
from torch import Tensor
from torch_geometric.data import Data

from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.models import build_server_model
from flower_graph.outputs.client import ClientOutputs
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator
from flower_graph.simulation import InProcessGrid


def assigned(data: Data, context: Context, left: Any = ()) -> tuple[Tensor, Tensor]:
    """Deal users in turn, unlike ``apps.common.share``: the numbers of a client have gaps."""
    part, parts = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    users = torch.tensor([u for u in range(part, data.num_nodes, parts) if u not in left])
    return data.x[users], users


def client_app(
    data: Data, *, left: Any = (), train_mods: Any = None, out: Any = None, **options: Any
) -> Any:
    def client_fn(context: Context) -> NodeClient:
        outputs = ClientOutputs(context, out)
        return NodeClient(context, *assigned(data, context, left), outputs=outputs, **options)

    return make_client_app(client_fn, train_mods=train_mods)


def strategy_for(data: Data, model: str = "gcn", **options: Any) -> Any:
    settings: dict[str, Any] = {"reg_weight": 1.0, "learning_rate": 0.05, "seed": 3, **options}
    dropout = settings.pop("dropout", 0.5)
    server = build_server_model(
        model, hidden=4, heads=2, classes=CLASSES, dropout=dropout, seed=settings["seed"]
    )
    return SplitGradientRelay(data, server, latent_size=server.latent_size, **settings)


def run(
    data: Data,
    *,
    rounds: int = 5,
    supernodes: int = 2,
    grid: InProcessGrid | None = None,
    model: str = "gcn",
    strategy: SplitGradientRelay | None = None,
    folder: Path | None = None,
    of_client: dict[str, Any] | None = None,
    start: dict[str, Any] | None = None,
    stop_at: int = 0,
    resume: bool = False,
    **options: Any,
) -> Outcome:
    """Run the strategy; `options` are its arguments, others are of the clients and of its start.

    With a `folder` every second round is saved. `stop_at` presses Ctrl-C after that round.
    """
    if folder is not None:
        options = {"checkpoint_dir": folder, "checkpoint_every": 2, **options}
    app = client_app(data, checkpoint_dir=folder, **(of_client or {}))
    grid = grid or InProcessGrid(app, num_supernodes=supernodes)
    outcome = Outcome(strategy or strategy_for(data, model, **options), grid)

    def on_round(report: RoundReport) -> None:
        outcome.reports.append(report)
        if report.round == stop_at:
            raise KeyboardInterrupt

    how = {"on_round": on_round, "resume": resume, **(start or {})}
    with nullcontext() if not stop_at else pytest.raises(KeyboardInterrupt):
        outcome.run(rounds, **how)
    return outcome


def same_run(left: Outcome, right: Outcome) -> bool:
    """Whether each round of one gave the same bits as one of the other, of all or of the last."""
    first = len(right.reports) - len(left.reports)
    return (
        torch.equal(left.figures, right.figures[first:])
        and left.answered == (right.answered[first:])
    )


def same_weights(left: Outcome, right: Outcome) -> bool:
    return left.weights.keys() == right.weights.keys() and all(
        torch.equal(left.weights[name], right.weights[name]) for name in left.weights
    )


def asked_users(n: int, participation: float, seed: int, server_round: int) -> Tensor:
    if participation == 1:
        return torch.arange(n)
    draw = generator(seed, "participants", server_round)
    return torch.randperm(n, generator=draw)[: max(1, round(participation * n))].sort().values
