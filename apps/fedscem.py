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
)
from flower_graph.apps.data_folders import client_folder, graphs_of, share
from flower_graph.apps.privacy import embedding_noise
from flower_graph.central_privacy import central_noise
from flower_graph.config import DataConfig, FedSCemConfig
from flower_graph.config_fedscem import AVERAGING, SAGE, PartitionConfig
from flower_graph.data.ego_networks import EgoNetwork, partition_egos
from flower_graph.data.run_folder import RunFolder
from flower_graph.ego_cohort import EgoSettings
from flower_graph.local_privacy import require_one_client
from flower_graph.reported_fedavg import ReportedFedAvg
from flower_graph.robust import make_robust
from flower_graph.strategies import ego_baselines, fed_sage
from flower_graph.strategies import masked_embedding_averaging as embedding_averaging

ACTIONS = tuple(sorted({*embedding_averaging.ACTIONS, *fed_sage.ACTIONS}))


def build_strategy(
    config: FedSCemConfig, out: Path | None, folder: RunFolder | None = None
) -> Strategy:
    """Build the server's half of the method that ``strategy.name`` names.

    Parameters
    ----------
    config : FedSCemConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    folder : RunFolder, optional
        The server's data, which are counts alone.
    """
    how, settings = config.strategy, ego_settings(config, folder)
    sampling: dict[str, Any] = {"participation": how.participation, "min_nodes": how.min_nodes}
    saving = checkpoint_settings(config, out)
    match how.name:
        case "self-training":
            return ego_baselines.SelfTraining(settings, **sampling, **saving)
        case "fedavg":
            return _averaging(ego_baselines.EgoFedAvg, config, settings, **sampling, **saving)
        case "fedprox":
            return _averaging(ego_baselines.EgoFedProx, config, settings, **sampling, **saving)
        case "local-sage":
            return fed_sage.LocalSage(settings, seed=config.seed, **sampling, **saving)
        case "fed-sage":
            return fed_sage.FedSage(settings, seed=config.seed, **sampling, **saving)
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


def _averaging(
    kind: type[ReportedFedAvg], config: FedSCemConfig, settings: EgoSettings, **options: Any
) -> ReportedFedAvg:
    """Build a strategy with the average and the noise that the config asks for."""
    strategy = make_robust(kind, config.strategy.average, settings, **options)
    strategy.central_noise = central_noise(config.privacy, config.rounds)
    return strategy


def build_client(config: FedSCemConfig, context: Context, out: Path | None) -> NumPyClient:
    """Build the client of one SuperNode: its share of the ego-networks, dealt by its partition.

    Parameters
    ----------
    config : FedSCemConfig
        The run.
    context : Context
        The ClientApp's; ``data-folder``, or ``partition-id`` and ``num-partitions``, say which
        clients are here.
    out : Path, optional
        Output folder; checkpoints go below it.
    """
    egos, folder = hosted_egos(config, context)
    saved = None if out is None else out / CHECKPOINTS
    if config.strategy.name in SAGE:
        _, classes = _sizes(config, folder)
        return fed_sage.SageClient(
            context, egos, num_classes=classes, device=config.device, checkpoint_dir=saved
        )
    if config.strategy.name in AVERAGING:
        require_one_client(config.privacy, [ego.client for ego in egos])
        return ego_baselines.EgoModelClient(
            context, egos, device=config.device, checkpoint_dir=saved
        )
    return embedding_averaging.EgoNetworkClient(
        context,
        egos,
        device=config.device,
        checkpoint_dir=saved,
        noise=embedding_noise(config) if config.privacy.is_on else None,
    )


def hosted_egos(
    config: FedSCemConfig, context: Context
) -> tuple[list[EgoNetwork], RunFolder | None]:
    """Give the clients of one SuperNode, and the folder that they come from if they do."""
    folder = client_folder(config, context)
    if folder is not None:
        return graphs_of(folder, EgoNetwork), folder
    everyone = cached_egos(config)
    return everyone[share(context, len(everyone))], None


def num_clients(config: FedSCemConfig, folder: RunFolder | None = None) -> int:
    """Count the ego-networks."""
    return len(cached_egos(config)) if folder is None else folder.manifest.num_clients


def final_figures(
    config: FedSCemConfig, strategy: Any, folder: RunFolder | None = None
) -> dict[str, Any]:
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


def ego_settings(config: FedSCemConfig, folder: RunFolder | None = None) -> EgoSettings:
    """Collect what a client needs to know to train; the server sends it along."""
    model, how = config.model, config.strategy
    features, classes = _sizes(config, folder)
    is_proximal = "fedprox" in (how.name, how.model_sharing)
    return EgoSettings(
        num_features=features,
        num_classes=classes,
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


def _sizes(config: FedSCemConfig, folder: RunFolder | None) -> tuple[int, int]:
    """Count features and classes of the whole run."""
    if folder is not None:
        return folder.manifest.features, folder.manifest.classes
    data = cached_data(config)
    return int(data.x.shape[1]), int(data.num_classes)
