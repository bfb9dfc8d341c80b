"""FedSCem, one ego-network for each client, and its baselines: read ``algorithm.py`` first."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedscem.baselines import EgoFedAvg as EgoFedAvg
    from flower_graph.strategies.fedscem.baselines import EgoFedProx as EgoFedProx
    from flower_graph.strategies.fedscem.baselines import EgoModelClient as EgoModelClient
    from flower_graph.strategies.fedscem.baselines import SelfTraining as SelfTraining
    from flower_graph.strategies.fedscem.client import EgoNetworkClient as EgoNetworkClient
    from flower_graph.strategies.fedscem.client import Hiding as Hiding
    from flower_graph.strategies.fedscem.config import EgoSettings as EgoSettings
    from flower_graph.strategies.fedscem.strategy import (
        MaskedEmbeddingAveraging as MaskedEmbeddingAveraging,
    )

__getattr__ = attach(__name__)
