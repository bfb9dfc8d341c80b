"""Schemas of settings and their rules: which keys and values a YAML file may have.

Names are imported on first use: engines read schemas on machines without OmegaConf.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.config.common import DataConfig, RunConfig

__all__ = ["DataConfig", "RunConfig"]

__getattr__ = attach(__name__)
