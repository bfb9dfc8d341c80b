"""nFedGNN: one node per client."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.nfedgnn.client import CommonLayerClient, NodeClient
    from flower_graph.strategies.nfedgnn.strategy import SplitGradientRelay
    from flower_graph.strategies.nfedgnn.users import UserSettings

__all__ = [
    "CommonLayerClient",
    "NodeClient",
    "SplitGradientRelay",
    "UserSettings",
]

__getattr__ = attach(__name__)
