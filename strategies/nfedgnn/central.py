"""Reference rows of tables: training in one place, with all features or labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from flower_graph.data.baselines import propagate_all_labels
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.graph_batch import Epoch
from flower_graph.engine.machine import resolve_device
from flower_graph.models import CentralModel, build_server_model
from flower_graph.ops.adam import Adam
from flower_graph.rng import seeded

if TYPE_CHECKING:
    from flower_graph.strategies.nfedgnn.config import NFedGNNConfig


def train_centralised(config: NFedGNNConfig) -> list[Epoch]:
    """Train a GCN, GAT or GraphSAGE with shared weights on the whole graph, with its masks."""
    data = cached_data(config)
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
    step = config.strategy
    optimizer = Adam(network.parameters(), lr=step.learning_rate, weight_decay=step.weight_decay)
    x, edges, y = (tensor.to(device) for tensor in (data.x, data.edge_index, data.y))
    masks = (data.train_mask, data.val_mask, data.test_mask)
    train, *measured = (mask.to(device) for mask in masks if mask is not None)
    epochs: list[Epoch] = []
    best, best_epoch = -1.0, 0
    for number in range(1, config.rounds + 1):
        if config.patience and number > best_epoch + config.patience:
            break  # as a run ends
        network.train()
        with seeded(device, config.seed, "centralised-dropout", number):
            logits = network(x, edges)
        loss = functional.cross_entropy(logits[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        network.eval()
        with torch.no_grad():
            right = network(x, edges).argmax(1) == y
        val, test = (int(right[mask].sum()) / int(mask.sum()) for mask in measured)
        epochs.append(Epoch(loss.item(), val, test))
        if val > best:
            best, best_epoch = val, number
    return epochs


def propagate_labels(config: NFedGNNConfig) -> list[Epoch]:
    """Spread the server's labels: the labels for training and for the choice of a round."""
    found = propagate_all_labels(cached_data(config))
    return [Epoch(math.nan, found["val"], found["test"])]
