"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flower_graph.strategies.fed_sage.client import (
        SageClient,
    )
    from flower_graph.strategies.fed_sage.strategy import (
        FedSage,
        LocalSage,
    )

__all__ = [
    "FedSage",
    "LocalSage",
    "SageClient",
]


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
