"""What a config of nFedGNN becomes: the strategy, and each SuperNode's users."""

from __future__ import annotations

from pathlib import Path

import pytest
from app_helpers import MakeConfig, context_of, own_graph

from flower_graph.config.common import CHECKPOINTS
from flower_graph.errors import DataError, RefusedError
from flower_graph.models import SplitGAT, SplitGCN, SplitSAGE
from flower_graph.strategies.split_gradient_relay.method import METHOD


@pytest.mark.parametrize(
    ("name", "kind", "latent"), [("gcn", SplitGCN, 4), ("gat", SplitGAT, 8), ("sage", SplitSAGE, 8)]
)
def test_the_strategy_is_what_the_config_says(
    name: str, kind: type, latent: int, config_of: MakeConfig, tmp_path: Path
) -> None:
    overrides = ["model.heads=2", "strategy.participation=0.5"]
    overrides += ["strategy.share=averaged", "strategy.average_every=3"]
    overrides += ["strategy.weight_decay=0.01", "strategy.learning_rate=0.2", "seed=5"]
    config = config_of(own_graph(), f"model.name={name}", *overrides)
    strategy = METHOD.build_strategy(config, tmp_path)
    assert isinstance(strategy.server.model, kind)
    assert strategy.users.settings == (latent, False, 0.01, 5, "holders")
    assert strategy.learning_rate == 0.2
    assert (strategy.session.share, strategy.users.average_every) == (0.5, 3)
    assert strategy.server.reg_weight == 1.0
    saving = strategy.session.checkpoints
    assert (saving.folder, saving.every) == (tmp_path / CHECKPOINTS, 2)


def test_a_deployed_client_shows_no_sum_of_gradients_unless_its_node_allows_it(
    config_of: MakeConfig,
) -> None:
    config = config_of(own_graph(), "strategy.share=summed")
    node: dict[str, str] = {"data-folder": "/nowhere"}
    for more in ({}, {"allow-trust": "semi-honest"}):
        with pytest.raises(RefusedError, match=r"strategy\.share.*allow-trust"):
            METHOD.build_client(config, context_of(node | more), None)
    masked = config_of(own_graph(), "strategy.share=summed", "strategy.aggregation=masked")
    with pytest.raises(DataError):  # it goes on to read the folder
        METHOD.build_client(masked, context_of(node), None)
    with pytest.raises(DataError):
        METHOD.build_client(config, context_of(node | {"allow-trust": "plain,semi-honest"}), None)
