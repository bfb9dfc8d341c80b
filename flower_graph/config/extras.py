"""Libraries that come with an extra of this package, and that only some settings need."""

from __future__ import annotations

from importlib.util import find_spec

from flower_graph.errors import ConfigError


def require_library(library: str, key: str, *, extra: str, otherwise: str) -> None:
    """Refuse a setting whose library is not installed; ``ConfigError`` names the extra."""
    if find_spec(library) is None:
        raise ConfigError(
            f"{key}: {library} is not installed: pip install 'flower-graph[{extra}]', "
            f"or {otherwise}",
            key=key,
        )
