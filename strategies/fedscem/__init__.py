"""FedSCem, one ego-network for each client, and its baselines."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedscem.baselines import (
        EgoFedAvg,
        EgoFedProx,
        EgoModelClient,
        SelfTraining,
    )
    from flower_graph.strategies.fedscem.cohort_client import EgoNetworkClient
    from flower_graph.strategies.fedscem.config import EgoSettings
    from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging

__all__ = [
    "EgoFedAvg",
    "EgoFedProx",
    "EgoModelClient",
    "EgoNetworkClient",
    "EgoSettings",
    "MaskedEmbeddingAveraging",
    "SelfTraining",
]

__getattr__ = attach(__name__)
