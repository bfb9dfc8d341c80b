"""nFedGNN: one node per client."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.split_gradient_relay.cohort_client import NodeClient
    from flower_graph.strategies.split_gradient_relay.strategy import SplitGradientRelay
    from flower_graph.strategies.split_gradient_relay.users import UserSettings

__all__ = ["NodeClient", "SplitGradientRelay", "UserSettings"]

__getattr__ = attach(__name__)
