"""FedGLS: clients with and without edges, and its baselines."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedgls.config import (
        FedGLSSection,
        GraphSection,
        StructureSettings,
    )
    from flower_graph.strategies.fedgls.strategy import (
        StructureClient,
        StructureFedAvg,
        initial_arrays,
    )

__all__ = [
    "FedGLSSection",
    "GraphSection",
    "StructureClient",
    "StructureFedAvg",
    "StructureSettings",
    "initial_arrays",
]

__getattr__ = attach(__name__)
