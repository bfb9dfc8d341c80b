"""A round of nFedGNN in process, messages included, beside an epoch of PyG's centralised GCN.

After every round one epoch of the centralised model is run and timed, so that both meet the same
state of the machine. Run alone: ``python -m benchmarks.rounds [--quick]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from benchmarks.bandwidth import step_beside_triad
from benchmarks.measure import say, summary
from flower_graph.apps.run import client_app
from flower_graph.data import load_data
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import DataError
from flower_graph.method.load import load_config
from flower_graph.ops.active_rows import pack
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig
from flower_graph.strategies.split_gradient_relay.method import METHOD
from flower_graph.strategies.split_gradient_relay.users import LinearCohort

TARGETS = {"nfedgnn/cora": 0.3, "nfedgnn/cora-linqs": 0.3, "nfedgnn/pubmed": 0.6}
WARM_UP = 3  # rounds that are not counted: packing, first touch of memory


class CentralGCN(nn.Module):
    """The ordinary two-layer GCN of PyG, as its Cora example has it."""

    def __init__(self, num_features: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = GCNConv(num_features, hidden, cached=True)
        self.second = GCNConv(hidden, classes, cached=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, c]``."""
        x = functional.dropout(x, self.dropout, self.training)
        x = functional.relu(self.first(x, edge_index))
        x = functional.dropout(x, self.dropout, self.training)
        return self.second(x, edge_index)  # type: ignore[no-any-return]


def central_epoch(config: NFedGNNConfig, data: Data) -> Callable[[], float]:
    """Build the centralised model; return a function that trains an epoch and times it."""
    model = CentralGCN(
        data.x.shape[1], config.model.hidden, int(data.num_classes), config.model.dropout
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.01, weight_decay=config.strategy.weight_decay
    )

    def epoch() -> float:
        started = time.perf_counter()
        model.train()
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        loss = functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - started

    return epoch


def compare(config: NFedGNNConfig, data: Data, supernodes: int) -> dict[str, Any]:
    """Time rounds and epochs in turn."""
    epoch, rounds, epochs = central_epoch(config, data), [], []

    def on_round(report: RoundReport) -> None:
        rounds.append(report.seconds)
        epochs.append(epoch())

    grid = InProcessGrid(client_app(config, None), num_supernodes=supernodes)
    strategy = METHOD.build_strategy(config, None)
    strategy.start(grid, num_rounds=config.rounds, on_round=on_round)
    round_, epoch_ = summary(rounds[WARM_UP:]), summary(epochs[WARM_UP:])
    ratio = round_["median"] / epoch_["median"]
    return {"supernodes": supernodes, "round": round_, "epoch": epoch_, "ratio": ratio}


def user_step(config: NFedGNNConfig, data: Data, repeats: int) -> dict[str, Any]:
    """Hold the users' step against the memory bandwidth."""
    settings = METHOD.build_strategy(config, None).users.settings
    cohort = LinearCohort(pack(data.x, bias=settings.bias), settings)
    gradient = torch.randn(data.num_nodes, settings.latent_size)
    return step_beside_triad(cohort, gradient, config.strategy.learning_rate, repeats)


def measure(name: str, rounds: int, *, with_step: bool) -> dict[str, Any]:
    """Measure one configuration, or say why it cannot be."""
    config = load_config(name, [f"rounds={rounds}", "device=cpu"])
    try:
        load_data(config.data, seed=config.seed, download=False)
    except DataError:
        return {"config": name, "skipped": f"{config.data.name} is not on this machine"}
    say(f"round: {name}")
    data = cached_data(config)
    result = {
        "config": name,
        "data": config.data.name,
        "users": int(data.num_nodes),
        "target": TARGETS[name],
        "runs": [compare(config, data, supernodes) for supernodes in (1, 2)],
    }
    if with_step:
        result["user-step"] = user_step(config, data, max(3, rounds // 2))
    return result


def main() -> None:
    """Print the result as JSON."""
    if "--quick" in sys.argv:
        entries = [measure("nfedgnn/cora-linqs", WARM_UP + 3, with_step=True)]
    else:
        entries = [measure("nfedgnn/cora", 100, with_step=False)]
        if "skipped" in entries[0]:
            entries.append(measure("nfedgnn/cora-linqs", 100, with_step=False))
        entries.append(measure("nfedgnn/pubmed", 40, with_step=True))
    result = {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "entries": entries}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
