"""PPFL-GNN from a config: builds the server's and the clients' half."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient

from flower_graph.apps.common import CHECKPOINTS, cached_data, checkpoint_settings, saved_at
from flower_graph.apps.data_folders import client_folder, graphs_of, share
from flower_graph.config import DataConfig, PPFLConfig
from flower_graph.config_ppfl import DEEPWALK, LOCAL, SECURE, PartitionConfig
from flower_graph.data.names import folder_path
from flower_graph.data.overlapping import OverlappingGraph, overlapping_graphs
from flower_graph.data.overlapping_folder import load_overlapping_folder
from flower_graph.data.run_folder import RunFolder
from flower_graph.deepwalk import DeepWalk, DeepWalkSettings
from flower_graph.embedding_judge import MLP, SVC, check_folds, judge_embeddings
from flower_graph.local_privacy import require_one_client
from flower_graph.public_gat import PublicGAT, PublicGATSettings
from flower_graph.public_nodes import EmbeddingModel, FloatArray, Member
from flower_graph.rng import derive_seed
from flower_graph.strategies import secure_consensus
from flower_graph.strategies.procrustes_alignment import (
    LocalEmbedding,
    ProcrustesAlignment,
    PublicNodeClient,
)

ACTIONS = secure_consensus.ACTIONS
JUDGED = ("val", "test")


def build_strategy(
    config: PPFLConfig, out: Path | None, folder: RunFolder | None = None
) -> ProcrustesAlignment:
    """Build the server's half.

    Parameters
    ----------
    config : PPFLConfig
        The run.
    out : Path, optional
        Output folder; checkpoints go below it.
    folder : RunFolder, optional
        The server's data; not used, since this server needs none.
    """
    how = config.strategy
    shared: dict[str, Any] = {"min_nodes": how.min_nodes, "seed": config.seed}
    shared |= checkpoint_settings(config, out)
    if how.name == LOCAL:
        return LocalEmbedding(participation=how.participation, **shared)
    if how.alignment == SECURE:
        return secure_consensus.SecureConsensus(rotations_only=how.rotations_only, **shared)
    return ProcrustesAlignment(
        alignment=how.alignment,
        rotations_only=how.rotations_only,
        absent=how.absent,
        participation=how.participation,
        **shared,
    )


def build_client(config: PPFLConfig, context: Context, out: Path | None) -> NumPyClient:
    """Build the clients of one SuperNode, dealt by its partition.

    Parameters
    ----------
    config : PPFLConfig
        The run.
    context : Context
        The ClientApp's; ``data-folder``, or ``partition-id`` and ``num-partitions``, say which
        clients are here.
    out : Path, optional
        Output folder; checkpoints go below it, and after the last round the clients' embeddings.
    """
    here, classes = hosted_clients(config, context)
    require_one_client(config.privacy, [graph.client for graph in here])
    members = [make_member(graph, config, classes) for graph in here]
    where: dict[str, Path] = {}
    if out is not None:
        where = {"save_to": out / "embeddings", "checkpoint_dir": out / CHECKPOINTS}
    if config.strategy.name != LOCAL and config.strategy.alignment == SECURE:
        return secure_consensus.SecureConsensusClient(context, members, **where)
    return PublicNodeClient(context, members, **where)


def hosted_clients(config: PPFLConfig, context: Context) -> tuple[list[OverlappingGraph], int]:
    """Give the clients of one SuperNode, and the number of classes of the whole run."""
    folder = client_folder(config, context)
    if folder is None:
        everyone = cached_clients(config)
        return everyone[share(context, len(everyone))], _num_classes(config)
    here = graphs_of(folder, OverlappingGraph)
    _check_labels(here, config.judge.folds)
    return here, folder.manifest.classes


def num_clients(config: PPFLConfig, folder: RunFolder | None = None) -> int:
    """Count the clients."""
    return len(cached_clients(config)) if folder is None else folder.manifest.num_clients


def final_figures(
    config: PPFLConfig, strategy: Any, folder: RunFolder | None = None
) -> dict[str, Any]:
    """Give the whole payload, and the last accuracies by classifier, role and client."""
    judged = {
        name: {
            role: [value for _, value in sorted(strategy.judged.get(f"{name}-{role}", {}).items())]
            for role in JUDGED
        }
        for name in (SVC, MLP)
    }
    figures = {"bytes": strategy.session.exchange.ledger.payload, "judged": judged}
    return figures


def make_member(graph: OverlappingGraph, config: PPFLConfig, classes: int | None = None) -> Member:
    """Make a client of its graph: ids, public rows, model and judge.

    Without ``classes``, those of the whole run are counted.
    """
    return Member(
        number=graph.client,
        nodes=graph.nodes.numpy(),
        rows=graph.public.nonzero().flatten().numpy(),
        dimension=config.model.dimension,
        build=partial(build_model, graph, config, classes),
        judge=partial(judge, graph, config),
    )


def build_model(
    graph: OverlappingGraph, config: PPFLConfig, classes: int | None = None
) -> EmbeddingModel:
    """Build the embedding model that ``model.name`` names; ``classes`` as of ``make_member``."""
    shared = {"dimension": config.model.dimension, "seed": config.seed}
    if config.model.name == DEEPWALK:
        walking = DeepWalkSettings(**asdict(config.deepwalk), **shared)
        return DeepWalk(graph.edge_index, graph.nodes.numel(), walking, graph.client)
    known = _num_classes(config) if classes is None else classes
    return PublicGAT(graph, PublicGATSettings(known, **asdict(config.gat), **shared))


def judge(
    graph: OverlappingGraph,
    config: PPFLConfig,
    embeddings: FloatArray,
    server_round: int,
    is_last: bool,
) -> Mapping[str, float]:
    """Cross-validate classifiers among the nodes that the embedding did not learn from.

    Validation and test nodes are judged apart. The SVC's figures are the round's; after the last
    round both classifiers' are given by their names.
    """
    if not is_last and server_round % config.judge.every:
        return {}
    masks = {"val": graph.val_mask, "test": graph.test_mask}
    y, found = graph.y.numpy(), {}
    for role, mask in masks.items():
        chosen = (mask & (graph.y >= 0)).numpy()
        if not chosen.any():
            continue
        seed = derive_seed(config.seed, "folds", graph.client, role) % 2**32
        for name in (SVC, MLP) if is_last and config.judge.mlp else (SVC,):
            found[f"{name}-{role}"] = judge_embeddings(
                embeddings[chosen], y[chosen], config.judge.folds, seed, name
            )
        found[role] = found[f"{SVC}-{role}"]
    return found


def cached_clients(config: PPFLConfig) -> list[OverlappingGraph]:
    """Make the run's clients once a process, and check that they can be judged."""
    settings = json.dumps([asdict(config.data), asdict(config.partition)])
    return _cached_clients(settings, config.judge.folds, config.seed, saved_at(config.data.name))


@lru_cache(maxsize=2)
def _cached_clients(settings: str, folds: int, seed: int, saved: int) -> list[OverlappingGraph]:
    """Make them; `saved`, the time of the graph's file, is there to read a new file anew."""
    data, partition = json.loads(settings)
    config = PPFLConfig(seed=seed, data=DataConfig(**data), partition=PartitionConfig(**partition))
    graphs = load_clients(config)
    _check_labels(graphs, folds)
    return graphs


def _check_labels(graphs: list[OverlappingGraph], folds: int) -> None:
    """Check that every client's validation and test nodes can be judged."""
    for graph in graphs:
        for role, mask in (("val", graph.val_mask), ("test", graph.test_mask)):
            labels = graph.y[mask].numpy()
            if labels.size:
                check_folds(labels, folds, graph.client, role)


def load_clients(config: PPFLConfig) -> list[OverlappingGraph]:
    """Cut the clients out of the config's graph, or read them from its folder."""
    folder, parts = folder_path(config.data.name), config.partition
    if folder is not None:
        return load_overlapping_folder(
            folder,
            parts.ratios,
            config.seed if parts.seed is None else parts.seed,
            parts.label_noise,
            presence=config.data.presence,
            normalize=config.data.normalize,
        )
    return overlapping_graphs(cached_data(config), config.partition, config.seed)


def _num_classes(config: PPFLConfig) -> int:
    """Count the classes of the whole run: a client may lack one."""
    return 1 + max(int(graph.y.max()) for graph in cached_clients(config))
