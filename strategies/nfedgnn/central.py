"""Reference rows of tables: training in one place, with all features or labels."""

import math

import torch
from torch.nn import functional

from flower_graph.data.baselines import propagate_all_labels
from flower_graph.data.graph import PARTS
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.machine import resolve_device
from flower_graph.models import CentralModel
from flower_graph.ops.adam import Adam
from flower_graph.records.rounds import Epoch
from flower_graph.rng import seeded
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig
from flower_graph.strategies.nfedgnn.method import split_model


def train_centralised(config: NFedGNNConfig) -> list[Epoch]:
    """Train a GCN, GAT or GraphSAGE with shared weights on the whole graph, with its masks."""
    data = cached_data(config)
    device = resolve_device(config.device)
    server = split_model(config, int(data.num_classes))
    with seeded(torch.device("cpu"), config.seed, "user-model"):
        network = CentralModel(data.x.shape[1], server, config.model.dropout).to(device)
    step = config.strategy
    optimizer = Adam(network.parameters(), lr=step.learning_rate, weight_decay=step.weight_decay)
    x, edges, y = (tensor.to(device) for tensor in (data.x, data.edge_index, data.y))
    train, *measured = (getattr(data, part).to(device) for part in PARTS)
    epochs, best = list[Epoch](), 0  # the best epoch
    for number in range(1, config.rounds + 1):
        if config.patience and number > best + config.patience:
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
        best = number if val > max((one.val_accuracy for one in epochs[:-1]), default=-1) else best
    return epochs


def propagate_labels(config: NFedGNNConfig) -> list[Epoch]:
    """Spread the server's labels: the labels for training and for the choice of a round."""
    found = propagate_all_labels(cached_data(config))
    return [Epoch(math.nan, found["val"], found["test"])]
