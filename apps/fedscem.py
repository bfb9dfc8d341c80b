"""FedSCem and its baselines from a config: builds the server's and the clients' half."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Strategy

from flower_graph.apps.common import (
    CHECKPOINTS,
    cached_data,
    checkpoint_settings,
    saved_at,
    share,
)
from flower_graph.config import DataConfig, FedSCemConfig
from flower_graph.config_fedscem import SAGE, PartitionConfig
from flower_graph.data.ego_networks import EgoNetwork, partition_egos
from flower_graph.ego_cohort import EgoSettings
from flower_graph.strategies import ego_baselines, fed_sage
from flower_graph.strategies import masked_embedding_averaging as embedding_averaging

ACTIONS = tuple(sorted({*embedding_averaging.ACTIONS, *fed_sage.ACTIONS}))


def build_strategy(config: FedSCemConfig, out: Path | None) -> Strategy:
    """Build the server's half of the method that ``strategy.name`` names.

    Parameters
    ----------
    config : FedSCemConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    how, settings = config.strategy, ego_settings(config)
    sampling: dict[str, Any] = {"participation": how.participation, "min_nodes": how.min_nodes}
    saving = checkpoint_settings(config, out)
    match how.name:
        case "self-training":
            return ego_baselines.SelfTraining(settings, **sampling, **saving)
        case "fedavg":
            return ego_baselines.EgoFedAvg(settings, **sampling)
        case "fedprox":
            return ego_baselines.EgoFedProx(settings, **sampling)
        case "local-sage":
            return fed_sage.LocalSage(settings, seed=config.seed, **sampling)
        case "fed-sage":
            return fed_sage.FedSage(settings, seed=config.seed, **sampling)
    return embedding_averaging.MaskedEmbeddingAveraging(
        settings,
        variant=how.variant,
        model_sharing=how.model_sharing,
        alignment=how.alignment,
        aggregation=how.aggregation,
        limit=how.limit,
        resolution=how.resolution,
        dropout=how.dropout,
        **sampling,
        **saving,
    )


def build_client(config: FedSCemConfig, context: Context, out: Path | None) -> NumPyClient:
    """Build the client of one SuperNode: its share of the ego-networks, dealt by its partition.

    Parameters
    ----------
    config : FedSCemConfig
        The run.
    context : Context
        The ClientApp's; ``partition-id`` and ``num-partitions`` say which clients are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    everyone = cached_egos(config)
    egos = everyone[share(context, len(everyone))]
    if config.strategy.name in SAGE:
        classes = int(cached_data(config).num_classes)
        return fed_sage.SageClient(context, egos, num_classes=classes, device=config.device)
    if config.strategy.name in ("fedavg", "fedprox"):
        return ego_baselines.EgoModelClient(context, egos, device=config.device)
    return embedding_averaging.EgoNetworkClient(
        context,
        egos,
        device=config.device,
        checkpoint_dir=None if out is None else out / CHECKPOINTS,
    )


def num_clients(config: FedSCemConfig) -> int:
    """Count the ego-networks."""
    return len(cached_egos(config))


def final_figures(config: FedSCemConfig, strategy: Any) -> dict[str, Any]:
    """Give the whole payload, and the seconds that keys and alignment took."""
    figures = {"bytes": strategy.payload}
    if isinstance(strategy, embedding_averaging.MaskedEmbeddingAveraging):
        figures["setup-seconds"] = strategy.session.setup_seconds
    return figures


def cached_egos(config: FedSCemConfig) -> list[EgoNetwork]:
    """Cut the run's ego-networks out of the graph once a process."""
    settings = json.dumps([asdict(config.data), asdict(config.partition)])
    return _cached_egos(settings, config.seed, saved_at(config.data.name))


@lru_cache(maxsize=2)
def _cached_egos(settings: str, seed: int, saved: int) -> list[EgoNetwork]:
    """Cut them out; `saved`, the time of the graph's file, is there to read a new file anew."""
    data, partition = json.loads(settings)
    config = FedSCemConfig(
        seed=seed, data=DataConfig(**data), partition=PartitionConfig(**partition)
    )
    return partition_egos(cached_data(config), config.partition, seed)


def ego_settings(config: FedSCemConfig) -> EgoSettings:
    """Collect what a client needs to know to train; the server sends it along."""
    data, model, how = cached_data(config), config.model, config.strategy
    is_proximal = "fedprox" in (how.name, how.model_sharing)
    return EgoSettings(
        num_features=int(data.x.shape[1]),
        num_classes=int(data.num_classes),
        hidden=model.hidden,
        projection=model.projection,
        learning_rate=how.learning_rate,
        weight_decay=how.weight_decay,
        seed=config.seed,
        local_epochs=how.local_epochs,
        mu=how.mu,
        tau=how.tau,
        proximal=how.proximal if is_proximal else 0.0,
    )
