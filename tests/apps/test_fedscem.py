"""What a config of FedSCem becomes: the strategy that it names, and each SuperNode's clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import context_of, own_graph

from flower_graph.config.common import CHECKPOINTS
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError, DataError
from flower_graph.strategies.masked_embedding_averaging import method as fedscem
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig

SERVERS = {
    "masked-embedding-averaging": ("embedding_averaging", "MaskedEmbeddingAveraging"),
    "self-training": ("ego_baselines", "SelfTraining"),
    "fedavg": ("ego_baselines", "EgoFedAvg"),
    "fedprox": ("ego_baselines", "EgoFedProx"),
    "local-sage": ("fed_sage", "LocalSage"),
    "fed-sage": ("fed_sage", "FedSage"),
}
SAGE = ("local-sage", "fed-sage")


class Recorder:
    """Stands for a class: notes what it is called with."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.given, self.settings = given, settings


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., FedSCemConfig]:
    """Twelve ego-networks of the small graph, one hop."""
    torch.save(own_graph(), tmp_path / "graph.pt")
    (tmp_path / "own.yaml").write_text(
        f"app: fedscem\ndata:\n  name: {tmp_path / 'graph.pt'}\nrounds: 3\n"
        "partition:\n  hops: 1\n  clients: 12\n  min_nodes: 2\n"
    )

    def make(*overrides: str) -> FedSCemConfig:
        config = load_config(str(tmp_path / "own.yaml"), overrides)
        assert isinstance(config, FedSCemConfig)
        return config

    return make


MakeEgoConfig = Callable[..., FedSCemConfig]


@pytest.mark.parametrize("name", list(SERVERS))
def test_the_strategy_is_what_the_config_says(
    name: str, config_of: MakeEgoConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, server = SERVERS[name]
    monkeypatch.setattr(getattr(fedscem, module), server, Recorder)
    config = config_of(
        f"strategy.name={name}",
        "checkpoint_every=2",
        *("seed=5", "strategy.participation=0.5", "strategy.min_nodes=3", "model.hidden=8"),
    )
    built = fedscem.METHOD.build_strategy(config, tmp_path)
    (settings,) = built.given
    assert (settings.num_features, settings.num_classes) == (6, 3)
    assert (settings.hidden, settings.projection, settings.seed) == (8, 32, 5)
    sampling = {"participation": 0.5, "min_nodes": 3}
    assert sampling.items() <= built.settings.items()
    saving = {"checkpoint_dir": tmp_path / CHECKPOINTS, "checkpoint_every": 2}
    assert saving.items() <= built.settings.items()
    assert built.settings.get("seed", 5) == 5


def test_the_choices_of_fedscem_reach_its_strategy(
    config_of: MakeEgoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedscem.embedding_averaging, "MaskedEmbeddingAveraging", Recorder)
    chosen = {
        "variant": "minus",
        "model_sharing": "fedavg",
        "alignment": "plain",
        "aggregation": "plain",
        "limit": 8.0,
        "resolution": 0.25,
        "dropout": 0.125,
    }
    overrides = [f"strategy.{key}={value}" for key, value in chosen.items()]
    built = fedscem.METHOD.build_strategy(
        config_of(*overrides, "strategy.tau=2", "strategy.mu=3"), None
    )
    assert chosen.items() <= built.settings.items()
    assert (built.settings["checkpoint_dir"], built.settings["checkpoint_every"]) == (None, 0)
    assert (built.given[0].mu, built.given[0].tau) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        (["strategy.name=fedprox"], 0.5),
        (["strategy.model_sharing=fedprox"], 0.5),
        (["strategy.name=fedavg"], 0.0),
        ([], 0.0),
    ],
)
def test_only_fedprox_has_a_proximal_term(
    overrides: list[str], weight: float, config_of: MakeEgoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, server in SERVERS.values():
        monkeypatch.setattr(getattr(fedscem, module), server, Recorder)
    config = config_of("strategy.proximal=0.5", *overrides)
    assert fedscem.METHOD.build_strategy(config, None).given[0].proximal == weight


@pytest.mark.parametrize("name", list(SERVERS))
def test_a_client_hosts_its_share(
    name: str, config_of: MakeEgoConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fedscem.embedding_averaging, "EgoNetworkClient", Recorder)
    monkeypatch.setattr(fedscem.ego_baselines, "EgoModelClient", Recorder)
    monkeypatch.setattr(fedscem.fed_sage, "SageClient", Recorder)
    config = config_of(f"strategy.name={name}")
    hosted = []
    for part in range(5):
        context = context_of({"partition-id": part, "num-partitions": 5})
        client = fedscem.METHOD.build_client(config, context, tmp_path)
        assert client.given[0] is context
        assert client.settings.get("num_classes") == (3 if name in SAGE else None)
        assert client.settings["device"] == "auto"
        assert client.settings["checkpoint_dir"] == tmp_path / CHECKPOINTS
        hosted += [ego.client for ego in client.given[1]]
    assert hosted == list(range(12)) == list(range(fedscem.METHOD.num_clients(config)))


def test_the_ego_networks_are_cut_once_a_process(config_of: MakeEgoConfig) -> None:
    first = fedscem.METHOD.graphs(config_of())
    assert fedscem.METHOD.graphs(config_of("strategy.tau=2")) is first
    assert [ego.ego for ego in fedscem.METHOD.graphs(config_of("seed=1"))] != [e.ego for e in first]
    assert len(fedscem.METHOD.graphs(config_of("partition.clients=4"))) == 4


def test_a_graph_saved_anew_is_cut_anew(config_of: MakeEgoConfig) -> None:
    config = config_of()
    before = fedscem.METHOD.graphs(config)[0].x.shape[1]
    wider = own_graph(x=torch.cat([own_graph().x, own_graph().x], 1))
    torch.save(wider, config.data.name)
    assert fedscem.METHOD.graphs(config)[0].x.shape[1] == 2 * before


def test_impossible_partitions_and_dealings_are_refused(config_of: MakeEgoConfig) -> None:
    with pytest.raises(DataError, match=r"partition\.clients = 31: the graph has 30 nodes"):
        fedscem.METHOD.num_clients(config_of("partition.clients=31"))
    context = context_of({"partition-id": 0, "num-partitions": 13})
    with pytest.raises(ConfigError, match="13 SuperNodes for 12 clients"):
        fedscem.METHOD.build_client(config_of(), context, None)


# The whole of it ---------------------------------------------------------------------------------
