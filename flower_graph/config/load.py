"""Settings of a run: the schema of each method, the YAML files that ship with it, overrides.

Settings are laid over each other in three steps: the defaults that the method's schema has
(``config.py`` in its folder), one YAML file (and the parent that it names), and overrides such as
``strategy.reg_weight=10``. The key ``app`` chooses the method. Whatever is unknown, of the wrong
type or impossible is refused here, before data are read or a client is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flower_graph.config.checks import one_line, refuse_key, show
from flower_graph.config.common import RunConfig
from flower_graph.config.registry import DEFAULT, schema_of
from flower_graph.config.schema import LAST, known_keys
from flower_graph.config.sources import (
    read_chain,
    read_override,
)
from flower_graph.errors import ConfigError

__all__ = ["load_config", "to_dict", "to_yaml"]


def load_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    allowed: Collection[str] | None = None,
) -> RunConfig:
    """Build the settings of a run from a YAML file and overrides.

    Parameters
    ----------
    name_or_path : str
        A config that ships with the package (``nfedgnn/cora``), or the path of a YAML file of
        your own (it ends in ``.yaml`` or ``.yml``).
    overrides : sequence of str
        Settings as ``key=value`` with dotted keys, laid over the file in this order.
    allowed : collection of str or None
        Modules that ``app`` may name besides methods that ship or are announced; None: any.

    Returns
    -------
    RunConfig
        Complete, resolved and validated settings.

    Raises
    ------
    ConfigError
        If a config, key or value is unknown, of the wrong type or impossible.
    """
    layers = [(settings, f" (in {source})") for source, settings in read_chain(name_or_path)]
    layers += [(read_override(override), "") for override in overrides]
    schema = _schema((settings for settings, _ in layers), allowed)
    tree = OmegaConf.structured(schema)
    for settings, where in layers:
        _lay_over(tree, settings, known_keys(schema), where)
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:  # an interpolation `${...}` that leads nowhere
        key = getattr(error, "full_key", None) or name_or_path
        raise ConfigError(f"{key}: {one_line(error)}") from error
    assert isinstance(config, RunConfig)
    config.validate()
    return config


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Give the settings as nested plain dictionaries, in the order in which they are shown."""
    settings = asdict(config)
    return settings | {LAST: settings.pop(LAST)}


def to_yaml(config: RunConfig) -> str:
    """Give the settings as YAML text that `load_config` reads back to the same settings."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _schema(layers: Iterable[dict[str, Any]], allowed: Collection[str] | None) -> type[RunConfig]:
    """Choose the schema by the last layer that names an app."""
    app = next((layer["app"] for layer in reversed(list(layers)) if "app" in layer), DEFAULT)
    if not isinstance(app, str):
        raise ConfigError(f"app: {show(app)} is not text")
    return schema_of(app, allowed)


def _lay_over(
    tree: DictConfig, settings: dict[str, Any], known: dict[str, str], where: str
) -> None:
    """Write settings, given by dotted key, into the typed tree."""
    for key, value in settings.items():
        if key not in known:
            refuse_key(key, list(known), where)
        try:
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {show(value)} is not {known[key]}{where}") from error
