"""nFedGNN: one node per client."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flower_graph.strategies.nfedgnn.cohort_client import (
        NodeClient,
    )
    from flower_graph.strategies.nfedgnn.common_client import (
        CommonLayerClient,
    )
    from flower_graph.strategies.nfedgnn.strategy import (
        SplitGradientRelay,
    )
    from flower_graph.strategies.nfedgnn.summed import (
        SummedGradientRelay,
    )
    from flower_graph.strategies.nfedgnn.users import (
        UserSettings,
    )

__all__ = [
    "CommonLayerClient",
    "NodeClient",
    "SplitGradientRelay",
    "SummedGradientRelay",
    "UserSettings",
]


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
