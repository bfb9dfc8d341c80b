"""nFedGNN from a config: builds the server's and the clients' half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import Context

from flower_graph.apps.common import CHECKPOINTS, cached_data, checkpoint_settings, share
from flower_graph.config import NFedGNNConfig
from flower_graph.models import build_server_model
from flower_graph.strategies.split_gradient_relay import ACTIONS, NodeClient, SplitGradientRelay

__all__ = ["ACTIONS", "build_client", "build_strategy", "final_figures", "num_clients"]


def build_strategy(config: NFedGNNConfig, out: Path | None) -> SplitGradientRelay:
    """Build the server's half.

    Parameters
    ----------
    config : NFedGNNConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    data = cached_data(config)
    model = build_server_model(
        config.model.name,
        hidden=config.model.hidden,
        heads=config.model.heads,
        classes=int(data.num_classes),
        dropout=config.model.dropout,
        seed=config.seed,
    )
    how = config.strategy
    return SplitGradientRelay(
        data,
        model,
        latent_size=model.latent_size,
        user_bias=config.model.user_bias,
        reg_weight=how.reg_weight,
        learning_rate=how.learning_rate,
        weight_decay=how.weight_decay,
        participation=how.participation,
        average_every=how.average_every,
        average_over=how.average_over,
        seed=config.seed,
        device=config.device,
        min_nodes=how.min_nodes,
        **checkpoint_settings(config, out),
    )


def build_client(config: NFedGNNConfig, context: Context, out: Path | None) -> NodeClient:
    """Build the client of one SuperNode: its share of the users, dealt by its partition.

    Parameters
    ----------
    config : NFedGNNConfig
        The run.
    context : Context
        The ClientApp's; ``partition-id`` and ``num-partitions`` say which users are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    x = cached_data(config).x
    here = share(context, x.shape[0])
    return NodeClient(
        context,
        x[here],
        torch.arange(here.start, here.stop),
        device=config.device,
        checkpoint_dir=None if out is None else out / CHECKPOINTS,
    )


def num_clients(config: NFedGNNConfig) -> int:
    """Count the users: every node is one."""
    return int(cached_data(config).num_nodes)


def final_figures(config: NFedGNNConfig, strategy: SplitGradientRelay) -> dict[str, Any]:
    """Give the payload with the last gradients, which travel after the last round's report."""
    return {"bytes": strategy.book.ledger.payload}
