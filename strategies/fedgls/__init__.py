"""FedGLS: clients with and without edges, and its baselines; read ``algorithm.py`` first."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fedgls.config import FedGLSSection as FedGLSSection
    from flower_graph.strategies.fedgls.config import GraphSection as GraphSection
    from flower_graph.strategies.fedgls.config import StructureSettings as StructureSettings
    from flower_graph.strategies.fedgls.strategy import StructureClient as StructureClient
    from flower_graph.strategies.fedgls.strategy import StructureFedAvg as StructureFedAvg
    from flower_graph.strategies.fedgls.strategy import initial_arrays as initial_arrays

__getattr__ = attach(__name__)
