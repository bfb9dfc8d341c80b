"""Settings: schemas, YAML files, overrides, and the registry of methods."""

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
