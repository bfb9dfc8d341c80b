"""What a config becomes: the strategy, the dealing of users, the settings of a Flower app."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import MakeConfig, own_graph
from flwr.app import Context, RecordDict

from flower_graph.apps.nfedgnn import (
    CHECKPOINTS,
    build_client,
    build_strategy,
    cached_data,
    configured,
    deal,
)
from flower_graph.errors import ConfigError
from flower_graph.models import SplitGAT, SplitGCN, SplitSAGE


@pytest.mark.parametrize("n", [1, 7, 30])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 30])
def test_dealing_is_a_partition(n: int, parts: int) -> None:
    x = torch.arange(n * 2).view(n, 2).float()
    if parts > n:
        with pytest.raises(ConfigError, match=f"{parts} SuperNodes for {n} users"):
            deal(x, 0, parts)
        return
    shares = [deal(x, part, parts) for part in range(parts)]
    assert torch.equal(torch.cat([users for _, users in shares]), torch.arange(n))
    assert torch.equal(torch.cat([rows for rows, _ in shares]), x)
    sizes = [users.numel() for _, users in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("name", "kind", "latent"), [("gcn", SplitGCN, 4), ("gat", SplitGAT, 8), ("sage", SplitSAGE, 8)]
)
def test_the_strategy_is_what_the_config_says(
    name: str, kind: type, latent: int, config_of: MakeConfig, tmp_path: Path
) -> None:
    overrides = ["model.heads=2", "strategy.participation=0.5", "strategy.average_every=3"]
    overrides += ["strategy.weight_decay=0.01", "strategy.learning_rate=0.2", "seed=5"]
    config = config_of(own_graph(), f"model.name={name}", *overrides)
    strategy = build_strategy(config, cached_data(config), tmp_path)
    assert isinstance(strategy.server.model, kind)
    assert strategy.book.settings == (latent, False, 0.2, 0.01, 5, "holders")
    assert (strategy.book.participation, strategy.book.average_every) == (0.5, 3)
    assert strategy.server.reg_weight == 1.0
    session = strategy.session
    assert (session.checkpoint_dir, session.checkpoint_every) == (tmp_path / CHECKPOINTS, 2)


def context_of(node_config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Context:
    return Context(1, 2, node_config, RecordDict(), run_config or {})


def test_a_client_hosts_its_share(config_of: MakeConfig) -> None:
    context = context_of({"partition-id": 1, "num-partitions": 4, "state-dir": ":memory:"})
    client = build_client(config_of(own_graph()), context, None)
    assert client.host.users.tolist() == list(range(7, 15))


def test_the_data_are_loaded_once_a_process(config_of: MakeConfig) -> None:
    config = config_of(own_graph())
    assert cached_data(config) is cached_data(config)


def test_a_flower_run_config_names_config_overrides_and_folder(tmp_path: Path) -> None:
    given = {
        "config": "nfedgnn/cora",
        "overrides": "model.name=gat strategy.reg_weight=10",
        "output-dir": str(tmp_path),
    }
    config, out = configured(context_of({}, given))
    assert (config.data.name, config.model.name, config.strategy.reg_weight) == ("Cora", "gat", 10)
    assert out == tmp_path
    config, out = configured(context_of({}, {"config": "quickstart", "output-dir": ""}))
    assert (config.data.name, out) == ("cora-linqs", None)


def test_checkpoints_of_a_flower_run_need_a_folder_that_clients_know() -> None:
    with pytest.raises(ConfigError, match="checkpoint_every: 5 needs output-dir"):
        configured(context_of({}, {"overrides": "checkpoint_every=5"}))
