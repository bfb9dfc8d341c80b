"""FedSCem and its baselines as a method: server, clients, and figures for commands."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, fields
from pathlib import Path

from flwr.app import Context
from torch import Tensor

from flower_graph.client.trust import trust_of
from flower_graph.config.common import checkpoint_settings
from flower_graph.config.rules import require
from flower_graph.data.description import NewGraph
from flower_graph.data.folders.party import RunFolder
from flower_graph.data.graph import ClientGraph
from flower_graph.errors import ConfigError, DataError
from flower_graph.flower_compat import Mod, NumPyClient
from flower_graph.method.base import FinishedRun, GraphMethod
from flower_graph.method.permits import Permits
from flower_graph.outputs.client import client_folders
from flower_graph.privacy.noise import ClientNoise, central_noise, client_noise
from flower_graph.server.averaging import ReportedFedAvg, make_robust
from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage, SageClient
from flower_graph.strategies.fedscem import baselines
from flower_graph.strategies.fedscem.algorithm import train_alone
from flower_graph.strategies.fedscem.client import EgoNetworkClient, Hiding
from flower_graph.strategies.fedscem.config import (
    APP,
    AVERAGING,
    FEDSCEM,
    SAGE,
    EgoSettings,
    FedSCemConfig,
    TrainingConfig,
)
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging

LOG = logging.getLogger(__name__)
Server = MaskedEmbeddingAveraging | ReportedFedAvg
BASELINES: dict[str, type[ReportedFedAvg]] = {
    "self-training": baselines.SelfTraining,
    "fedavg": baselines.EgoFedAvg,
    "fedprox": baselines.EgoFedProx,
    "local-sage": LocalSage,
    "fed-sage": FedSage,
}
# A noise so many deviations long comes once in 4e11 draws; a run draws fewer.
FARTHEST = 7
ALONE = "a newcomer trains alone, on its nodes with a label:"


class FedSCem(GraphMethod[FedSCemConfig, Server]):
    """Every client is an ego-network."""

    name = APP
    schema = FedSCemConfig
    client, clients = "ego-network", "ego-networks"
    identified = True
    heterophily = (
        "FedSCem's GCN smooths over edges: at homophily 0.1 it gained over training alone, to 0.32 "
        "where logistic regression on good features has 0.84 (`flower-graph docs results/heat-map`)"
    )
    tables = ("fedscem",)
    attacks = "flower_graph.strategies.fedscem.attack:EgoAudit"

    def build_strategy(
        self, config: FedSCemConfig, out: Path | None, folder: RunFolder | None = None
    ) -> Server:
        how, settings = config.strategy, ego_settings(config, self.whole(config, folder))
        options = checkpoint_settings(config, out)
        if how.name == FEDSCEM:
            return MaskedEmbeddingAveraging(settings, how, **options)
        options |= {"participation": how.participation, "min_nodes": how.fewest_nodes}
        averaging = make_robust(BASELINES[how.name], how, settings, **options)
        averaging.central_noise = central_noise(config.privacy, config.rounds)
        return averaging

    def build_client(
        self, config: FedSCemConfig, context: Context, out: Path | None
    ) -> NumPyClient:
        egos, whole = self.hosted(config, context)
        how = client_folders(context, out, whole.class_names)
        how["device"] = config.device
        settings = ego_settings(config, whole)
        if config.strategy.name != FEDSCEM:
            kind = SageClient if config.strategy.name in SAGE else baselines.EgoModelClient
            averages = config.strategy.name in ("fed-sage", *AVERAGING)
            return kind(context, egos, settings, averages=averages, **how)
        noised = config.privacy.is_on and Permits.of(context.node_config).noises
        noise = embedding_noise(config) if config.privacy.is_on else None
        hiding = Hiding(config.masks_sums, config.strategy.alignment, noise)
        trust = trust_of(context, hides=noised) if config.strategy.distrusts else None
        return EgoNetworkClient(context, egos, settings, **how, hiding=hiding, trust=trust)

    def load_graphs(self, config: FedSCemConfig) -> list[ClientGraph]:
        egos = super().load_graphs(config)
        if len(egos) < 2 and config.masks_sums:
            raise ConfigError(f"data.name: {config.data.name!r} has 1 client; a masked sum needs 2")
        return egos

    def train_mods(self, config: FedSCemConfig) -> list[Mod]:
        """Build none for FedSCem: its clients add noise before masks, which mods would spoil."""
        return [] if config.strategy.name == FEDSCEM else super().train_mods(config)

    def predict(
        self, config: FedSCemConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        """Predict by a model; without a common one a newcomer trains on its own labels."""
        if client is not None or not run.are_own or config.strategy.name in SAGE:
            return super().predict(config, run, graph, client)
        graph.needed_edges()
        if not (count := int(graph.trains.sum())):
            raise DataError(
                f"{config.strategy.name} has no common model, and without labels a newcomer cannot "
                "train. Give it labels, say whose model to use (client=, --client), or train with "
                "strategy.model_sharing=fedavg"
            )
        LOG.warning("%s has no common model: %s %d", config.strategy.name, ALONE, count)
        form = run.saved(run.clients[0])[0].arguments
        settings = _settings(config, form["features"], form["classes"])
        return train_alone(graph, settings, config.rounds)


METHOD = FedSCem()


def ego_settings(config: FedSCemConfig, whole: RunFolder | None = None) -> EgoSettings:
    """Collect the settings of the clients' training, which the server sends."""
    whole = whole or METHOD.whole(config)
    return _settings(config, whole.features, whole.classes)


def _settings(config: FedSCemConfig, features: int, classes: int) -> EgoSettings:
    how = config.strategy
    training = {one.name: getattr(how, one.name) for one in fields(TrainingConfig)}
    if "fedprox" not in (how.name, how.model_sharing):
        training["proximal"] = 0.0
    return EgoSettings(features, classes, seed=config.seed, **training, **asdict(config.model))


def embedding_noise(config: FedSCemConfig) -> ClientNoise | None:
    """Return the noise that clients add to embeddings before pads and masks."""
    noise, how = client_noise(config.privacy, config.rounds), config.strategy
    if noise is None or how.aggregation != "masked":
        return noise
    longest = noise.clipping_norm + FARTHEST * noise.deviation
    allowed = f"at least {math.ceil(longest)} with privacy.epsilon={config.privacy.epsilon:g}"
    require(longest <= how.limit, "strategy.limit", how.limit, allowed)
    return noise
