"""Whole numbers in a SuperNode's node config, which its user writes."""

from __future__ import annotations

from collections.abc import Mapping

from flower_graph.errors import ConfigError, brief


def whole_number(
    node_config: Mapping[str, object], key: str, default: int, low: int, high: int | None = None
) -> int:
    """Read a whole number; ``ConfigError`` names the key, the value and what is allowed."""
    value = node_config.get(key, default)
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"node-config {key}: {brief(value)}; must be a whole number {allowed}")
    return value
