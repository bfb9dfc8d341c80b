"""FedSCem, one ego-network for each client, and its baselines."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flower_graph.strategies.fedscem.baselines import (
        EgoFedAvg,
        EgoFedProx,
        EgoModelClient,
        SelfTraining,
    )
    from flower_graph.strategies.fedscem.cohort import (
        EgoSettings,
    )
    from flower_graph.strategies.fedscem.cohort_client import (
        EgoNetworkClient,
    )
    from flower_graph.strategies.fedscem.strategy import (
        MaskedEmbeddingAveraging,
    )

__all__ = [
    "EgoFedAvg",
    "EgoFedProx",
    "EgoModelClient",
    "EgoNetworkClient",
    "EgoSettings",
    "MaskedEmbeddingAveraging",
    "SelfTraining",
]


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
