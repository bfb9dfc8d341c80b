"""Where and how often a run saves, as its config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flower_graph.config.common import RunConfig

CHECKPOINTS = "checkpoints"


def checkpoint_settings(config: RunConfig, out: Path | None) -> dict[str, Any]:
    """Say where and how often a strategy saves; a run without a folder saves nothing."""
    if out is None:
        return {"checkpoint_dir": None, "checkpoint_every": 0}
    return {"checkpoint_dir": out / CHECKPOINTS, "checkpoint_every": config.checkpoint_every}
