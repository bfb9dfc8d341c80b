"""FedGLS: clients with and without edges, and its baselines."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flower_graph.strategies.fedgls.networks import (
        LearnerSettings,
        StructureSettings,
    )
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


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
