"""Settings: schemas, YAML files, overrides, and the registry of methods.

Names are imported on first use: engines read schemas on machines without OmegaConf.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.config.common import DataConfig, RunConfig
    from flower_graph.config.load import load_config, to_dict, to_yaml
    from flower_graph.config.registry import known_apps, method_of
    from flower_graph.config.sources import list_configs, parse_overrides

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

__getattr__ = attach(
    __name__,
    {
        "DataConfig": "flower_graph.config.common",
        "RunConfig": "flower_graph.config.common",
        "known_apps": "flower_graph.config.registry",
        "list_configs": "flower_graph.config.sources",
        "load_config": "flower_graph.config.load",
        "method_of": "flower_graph.config.registry",
        "parse_overrides": "flower_graph.config.sources",
        "to_dict": "flower_graph.config.load",
        "to_yaml": "flower_graph.config.load",
    },
)
