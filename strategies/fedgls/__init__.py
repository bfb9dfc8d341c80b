"""FedGLS: clients with and without edges, and its baselines."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedgls.networks import LearnerSettings, StructureSettings
    from flower_graph.strategies.fedgls.strategy import (
        FedProto,
        LocalClient,
        LocalTraining,
        PrototypeClient,
        SharewiseFedAvg,
        StructureClient,
        StructureFedAvg,
        initial_arrays,
    )

__all__ = [
    "FedProto",
    "LearnerSettings",
    "LocalClient",
    "LocalTraining",
    "PrototypeClient",
    "SharewiseFedAvg",
    "StructureClient",
    "StructureFedAvg",
    "StructureSettings",
    "initial_arrays",
]

__getattr__ = attach(__name__)
