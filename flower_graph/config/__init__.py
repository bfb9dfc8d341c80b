"""Settings: schemas, YAML files, overrides, and the registry of methods.

Names are imported on first use: engines read schemas on machines without OmegaConf.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.config.common import DataConfig, RunConfig
    from flower_graph.config.load import (
        list_configs,
        load_config,
        parse_overrides,
        to_dict,
        to_yaml,
    )
    from flower_graph.config.registry import known_apps, method_of

__all__ = [
    "DataConfig",
    "RunConfig",
    "known_apps",
    "list_configs",
    "load_config",
    "method_of",
    "parse_overrides",
    "to_dict",
    "to_yaml",
]

__getattr__ = attach(__name__)
