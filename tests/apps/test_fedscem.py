"""What a config of FedSCem becomes: the strategy that it names, and each SuperNode's clients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app_helpers import own_config

from flower_graph.config.common import CHECKPOINTS
from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage
from flower_graph.strategies.fedscem import baselines
from flower_graph.strategies.fedscem import method as fedscem
from flower_graph.strategies.fedscem import strategy as embedding_averaging
from flower_graph.strategies.fedscem.config import FedSCemConfig

SERVERS = {
    "masked-embedding-averaging": embedding_averaging.MaskedEmbeddingAveraging,
    "self-training": baselines.SelfTraining,
    "fedavg": baselines.EgoFedAvg,
    "fedprox": baselines.EgoFedProx,
    "local-sage": LocalSage,
    "fed-sage": FedSage,
}
SAGE = ("local-sage", "fed-sage")


MakeEgoConfig = Callable[..., FedSCemConfig]


@pytest.fixture
def config_of(tmp_path: Path) -> MakeEgoConfig:
    """Twelve ego-networks of the small graph, one hop."""
    partition = "partition:\n  hops: 1\n  clients: 12\n  min_nodes: 2\n"
    return own_config(tmp_path, "fedscem", f"rounds: 3\n{partition}")


@pytest.mark.parametrize("name", SERVERS)
def test_the_strategy_is_what_the_config_says(
    name: str, config_of: MakeEgoConfig, tmp_path: Path
) -> None:
    config = config_of(
        f"strategy.name={name}",
        "checkpoint_every=2",
        *("seed=5", "strategy.participation=0.5", "strategy.min_nodes=3", "model.hidden=8"),
        "strategy.proximal=0.5",
    )
    built: Any = fedscem.METHOD.build_strategy(config, tmp_path)
    assert type(built) is SERVERS[name]
    session = built.session
    assert (session.share, session.min_nodes, session.seed) == (0.5, 3, 5)
    saving = session.checkpoints
    assert (saving.folder, saving.every) == (tmp_path / CHECKPOINTS, 2)
    settings = built.fixed_settings()
    assert (settings["hidden"], settings["seed"]) == (8, 5)
    if name not in SAGE:
        sizes = (settings["num_features"], settings["num_classes"], settings["projection"])
        assert sizes == (6, 3, 32)
        assert settings["proximal"] == (0.5 if name == "fedprox" else 0.0)
