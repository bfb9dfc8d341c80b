"""The reference row: the same network trained in one place, with all features at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from flower_graph.models import CentralModel, build_server_model
from flower_graph.relay import resolve_device
from flower_graph.rng import seeded

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from flower_graph.config import NFedGNNConfig

# The step size of Kipf and Welling (2017). The split GCN's 0.1 is for users with one node each.
LEARNING_RATE = 0.01


@dataclass
class Epoch:
    """Training loss and accuracies after one epoch."""

    cross_entropy: float
    val_accuracy: float
    test_accuracy: float


def train_centralised(config: NFedGNNConfig, data: Data) -> list[Epoch]:
    """Train a GCN, GAT or GraphSAGE with shared weights on the whole graph.

    Parameters
    ----------
    config : NFedGNNConfig
        Model, weight decay, seed, device; ``rounds`` counts epochs.
    data : Data
        Graph with features, labels and masks.

    Returns
    -------
    list of Epoch
        One entry an epoch.
    """
    device, model = resolve_device(config.device), config.model
    server = build_server_model(
        model.name,
        hidden=model.hidden,
        heads=model.heads,
        classes=int(data.num_classes),
        dropout=model.dropout,
        seed=config.seed,
    )
    with seeded(torch.device("cpu"), config.seed, "user-model"):
        network = CentralModel(data.x.shape[1], server, model.dropout).to(device)
    optimizer = torch.optim.Adam(
        network.parameters(), lr=LEARNING_RATE, weight_decay=config.strategy.weight_decay
    )
    data = data.clone().to(str(device))
    epochs = []
    for number in range(1, config.rounds + 1):
        network.train()
        with seeded(device, config.seed, "centralised-dropout", number):
            logits = network(data.x, data.edge_index)
        loss = functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        network.eval()
        with torch.no_grad():
            right = network(data.x, data.edge_index).argmax(1) == data.y
        val, test = (
            int(right[mask].sum()) / int(mask.sum()) for mask in (data.val_mask, data.test_mask)
        )
        epochs.append(Epoch(loss.item(), val, test))
    return epochs
