"""LocalSage+ and FedSage+: classifiers on mended graphs; read ``algorithm.py`` first."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fed_sage.strategy import FedSage as FedSage
    from flower_graph.strategies.fed_sage.strategy import LocalSage as LocalSage
    from flower_graph.strategies.fed_sage.strategy import SageClient as SageClient

__getattr__ = attach(__name__)
