"""nFedGNN from a config: builds the server's and the clients' half."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from flower_graph.apps.common import CHECKPOINTS, cached_data, checkpoint_settings
from flower_graph.apps.data_folders import client_folder, share
from flower_graph.config import NFedGNNConfig
from flower_graph.data.folder_tensors import read_matrix
from flower_graph.data.run_data import USERS
from flower_graph.data.run_folder import RunFolder
from flower_graph.models import build_server_model
from flower_graph.strategies.split_gradient_relay import ACTIONS, NodeClient, SplitGradientRelay

__all__ = ["ACTIONS", "build_client", "build_strategy", "final_figures", "num_clients"]


def build_strategy(
    config: NFedGNNConfig, out: Path | None, folder: RunFolder | None = None
) -> SplitGradientRelay:
    """Build the server's half.

    Parameters
    ----------
    config : NFedGNNConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    folder : RunFolder, optional
        The server's data: edges, labels and masks.
    """
    data = cached_data(config) if folder is None else _server_data(folder)
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
        The ClientApp's; ``data-folder``, or ``partition-id`` and ``num-partitions``, say which
        users are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    x, users = hosted_users(config, context)
    return NodeClient(
        context,
        x,
        users,
        device=config.device,
        checkpoint_dir=None if out is None else out / CHECKPOINTS,
    )


def hosted_users(config: NFedGNNConfig, context: Context) -> tuple[Tensor, Tensor]:
    """Give the features ``[n_c, f]`` and the numbers ``[n_c]`` of a SuperNode's users."""
    folder = client_folder(config, context)
    if folder is not None:
        return read_matrix("x", folder.tensors), folder.tensors[USERS]
    x = cached_data(config).x
    here = share(context, x.shape[0])
    return x[here], torch.arange(here.start, here.stop)


def _server_data(folder: RunFolder) -> SimpleNamespace:
    """Give what a server's folder holds the form of a graph."""
    return SimpleNamespace(**folder.tensors, num_classes=folder.manifest.classes)


def num_clients(config: NFedGNNConfig, folder: RunFolder | None = None) -> int:
    """Count the users: every node is one."""
    return int(cached_data(config).num_nodes) if folder is None else folder.manifest.num_clients


def final_figures(
    config: NFedGNNConfig, strategy: SplitGradientRelay, folder: RunFolder | None = None
) -> dict[str, Any]:
    """Give the payload with the last gradients, which travel after the last round's report."""
    return {"bytes": strategy.book.ledger.payload}
