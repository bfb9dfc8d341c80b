"""FedSCem, one ego-network for each client, and its baselines."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedscem.client import EgoModelClient, EgoNetworkClient, Hiding
    from flower_graph.strategies.fedscem.config import EgoSettings
    from flower_graph.strategies.fedscem.strategy import (
        EgoFedAvg,
        EgoFedProx,
        MaskedEmbeddingAveraging,
        SelfTraining,
    )

__all__ = [
    "EgoFedAvg",
    "EgoFedProx",
    "EgoModelClient",
    "EgoNetworkClient",
    "EgoSettings",
    "Hiding",
    "MaskedEmbeddingAveraging",
    "SelfTraining",
]

__getattr__ = attach(__name__)
