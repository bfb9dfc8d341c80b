"""The interface of a method, the registry of methods, and the loader of a run's settings.

Names are imported on first use: a process that answers one message imports one method.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.method.base import Method, Partition
    from flower_graph.method.graph_method import GraphMethod, OwnGraphMethod
    from flower_graph.method.load import (
        list_configs,
        load_config,
        parse_overrides,
        to_dict,
        to_yaml,
    )
    from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
    from flower_graph.method.registry import known_apps, method_of
    from flower_graph.method.run import Run, load_run
    from flower_graph.method.trust import TrustSection

__all__ = [
    "GraphMethod",
    "Method",
    "ModuleFedAvg",
    "ModuleMethod",
    "OwnGraphMethod",
    "Partition",
    "Run",
    "TrustSection",
    "known_apps",
    "list_configs",
    "load_config",
    "load_run",
    "method_of",
    "parse_overrides",
    "to_dict",
    "to_yaml",
]

__getattr__ = attach(__name__)
