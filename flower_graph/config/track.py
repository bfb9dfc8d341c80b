"""Which trackers a run reports to, and what must be installed for each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from flower_graph.config.rules import Rule
from flower_graph.errors import ConfigError

TRACKERS = ("tensorboard", "mlflow", "wandb")  # each also the module, and the extra that has it
SOME = Rule(
    f"some of {', '.join(TRACKERS)}, none twice",
    lambda names: set(names) <= {*TRACKERS} and len(set(names)) == len(names),
)
HELP = (
    "trackers that the server shows each round to, of `tensorboard`, `mlflow`, `wandb`, each an "
    "extra of this name: docs/using-a-run.md"
)


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed; ``ConfigError`` names the extra."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"track: {name} is not installed: pip install 'flower-graph[{name}]', "
                "or leave it out",
                key="track",
            )
