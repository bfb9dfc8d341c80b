"""The trackers that a run reports to, and the packages that each needs."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.config.extras import require_library
from flower_graph.config.rules import Rule

TRACKERS = ("tensorboard", "mlflow", "wandb")  # each also the module, and the extra that has it
SOME = Rule(
    f"some of {', '.join(TRACKERS)}, none twice",
    lambda names: set(names) <= {*TRACKERS} and len(set(names)) == len(names),
)
HELP = (
    "trackers that the server shows each round to, of `tensorboard`, `mlflow`, `wandb`, each an "
    "extra of this name: `flower-graph docs using-a-run#trackers`"
)


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed; ``ConfigError`` names the extra."""
    for name in names:
        require_library(name, "track", extra=name, otherwise="leave it out")
