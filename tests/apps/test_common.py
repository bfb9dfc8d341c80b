"""What all apps share: which method, which data, which clients are where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from app_helpers import MakeConfig, context_of, own_graph
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.apps.client_app import app
from flower_graph.apps.run import simulate
from flower_graph.config.of_app import configured
from flower_graph.config.registry import method_of
from flower_graph.data.cached import cached_data
from flower_graph.data.folders.party import share
from flower_graph.errors import ConfigError
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig

ROOT = Path(__file__).resolve().parents[2]


@given(count=st.integers(1, 200), parts=st.integers(1, 200))
def test_dealing_is_an_even_partition(count: int, parts: int) -> None:
    contexts = [context_of({"partition-id": p, "num-partitions": parts}) for p in range(parts)]
    if parts > count:
        with pytest.raises(ConfigError, match=f"{parts} SuperNodes for {count} clients"):
            share(contexts[0], count)
        return
    shares = [list(range(count))[share(context, count)] for context in contexts]
    assert [client for one in shares for client in one] == list(range(count))
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_data_are_loaded_anew_when_something_changes(config_of: MakeConfig) -> None:
    config = config_of(own_graph())
    first = cached_data(config)
    assert cached_data(config) is first
    assert cached_data(config_of(own_graph(), "data.normalize=false")) is not first
    assert cached_data(config_of(own_graph(), "seed=1")) is not first
    wider = own_graph(x=torch.cat([own_graph().x, own_graph().x], 1))
    assert cached_data(config_of(wider)).x.shape == (30, 12)  # of the same name, saved anew


def test_a_flower_run_config_names_config_overrides_and_folder(tmp_path: Path) -> None:
    given = {
        "config": "nfedgnn/cora",
        "overrides": "model.name=gat strategy.reg_weight=10",
        "output-dir": str(tmp_path),
    }
    config, out = configured(context_of({}, given))
    assert isinstance(config, NFedGNNConfig)
    assert (config.data.name, config.model.name, config.strategy.reg_weight) == ("Cora", "gat", 10)
    assert out == tmp_path
    config, out = configured(context_of({}, {"config": "quickstart", "output-dir": ""}))
    assert (config.data.name, out) == ("cora-linqs", None)
    config, _ = configured(context_of({}, {"config": "fedscem/pubmed", "overrides": "rounds=7"}))
    assert (config.app, config.data.name, config.rounds) == ("fedscem", "PubMed", 7)
    with pytest.raises(ConfigError, match="checkpoint_every: 5 needs output-dir"):
        configured(context_of({}, {"overrides": "checkpoint_every=5"}))


def test_the_client_app_answers_as_the_configured_method(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    """The app that Flower loads knows no method before its first message."""
    config = config_of(own_graph(), "checkpoint_every=0")
    run_config = {"config": str(tmp_path / "own.yaml"), "overrides": "checkpoint_every=0"}
    grid = InProcessGrid(app, num_supernodes=3, run_config=run_config)
    reports: list[RoundReport] = []
    strategy = method_of(config).build_strategy(config, None)
    strategy.start(grid, num_rounds=config.rounds, on_round=reports.append)
    assert [report.answered for report in reports] == [30] * 6
    assert [report.loss for report in reports] == [r.loss for r in simulate(config)]


def test_a_process_loads_no_method_before_it_is_asked_to() -> None:
    script = (
        "import sys; from flower_graph.apps import client_app, server_app;"
        "print([name for name in sys.modules if name.startswith('flower_graph.strategies')])"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
