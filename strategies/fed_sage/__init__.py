"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage, SageClient

__all__ = ["FedSage", "LocalSage", "SageClient"]

__getattr__ = attach(__name__)
