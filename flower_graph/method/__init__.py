"""The interface of a method, the registry of methods, and the loader of a run's settings.

Names are imported on first use: a process that answers one message imports one method.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.method.base import GraphMethod, Method, Partition
    from flower_graph.method.load import load_config
    from flower_graph.method.registry import method_of

__all__ = ["GraphMethod", "Method", "Partition", "load_config", "method_of"]

__getattr__ = attach(__name__)
