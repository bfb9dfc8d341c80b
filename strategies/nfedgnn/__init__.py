"""nFedGNN: one node per client. Read ``algorithm.py`` first."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.nfedgnn.algorithm import UserSettings
    from flower_graph.strategies.nfedgnn.client import CommonLayerClient, NodeClient
    from flower_graph.strategies.nfedgnn.strategy import SplitGradientRelay

__all__ = [
    "CommonLayerClient",
    "NodeClient",
    "SplitGradientRelay",
    "UserSettings",
]

__getattr__ = attach(__name__)
