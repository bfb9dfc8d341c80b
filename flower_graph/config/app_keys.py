"""Run-config keys of this project's Flower apps; starting an app imports no more than these."""

from collections.abc import Mapping

# Keys of Flower's own apps, and their settings; "" means "as in the config".
SETTINGS = {
    "num-server-rounds": "rounds",
    "seed": "seed",
    "strategy-name": "strategy.name",
    "fraction-train": "strategy.participation",
    "learning-rate": "strategy.learning_rate",
    "local-epochs": "strategy.local_epochs",
    "min-available-nodes": "strategy.min_nodes",
    "most-supernodes": "strategy.most_supernodes",
}
# Flower refuses every key that an app's pyproject.toml does not have, but takes any type for it.
RUN_CONFIG: Mapping[str, str | bool] = {
    "config": "quickstart",
    "overrides": "",
    "output-dir": "",
    "resume": False,
    "server-folder": "",
    "resident-num-gpus": "",
    **dict.fromkeys(SETTINGS, ""),
}
