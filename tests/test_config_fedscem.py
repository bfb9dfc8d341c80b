"""Settings of FedSCem: its own schema, its own checks, beside those of nFedGNN."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_graph.config.load import load_config, to_dict, to_yaml
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError
from flower_graph.strategies.masked_embedding_averaging.config import STRATEGIES, FedSCemConfig
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig


def refusal(*overrides: str, config: str = "fedscem/cora") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "mu", "tau", "projection", "min_nodes"),
    [
        ("cora", "Cora", 20, 1, 256, 20),
        ("cora-linqs", "cora-linqs", 20, 1, 256, 20),
        ("citeseer", "CiteSeer", 20, 1, 256, 15),
        ("pubmed", "PubMed", 2, 1, 256, 80),
        ("lastfm-asia", "LastFMAsia", 1, 0.1, 32, 15),
    ],
)
def test_shipped_configs_differ_from_the_paper_in_three_settings(
    name: str, data: str, mu: float, tau: float, projection: int, min_nodes: int
) -> None:
    config = load_config(f"fedscem/{name}")
    assert isinstance(config, FedSCemConfig)
    assert (config.data.name, config.partition.min_nodes) == (data, min_nodes)
    assert (config.strategy.mu, config.strategy.tau) == (mu, tau)
    assert (config.partition.hops, config.partition.clients) == (2, 100)
    assert not config.data.normalize
    assert (config.model.hidden, config.model.projection) == (64, projection)
    assert (config.strategy.learning_rate, config.strategy.weight_decay) == (0.0005, 5e-5)
    assert (config.strategy.local_epochs, config.strategy.proximal) == (1, 0.01)


def test_the_app_decides_which_schema_holds(tmp_path: Path) -> None:
    assert isinstance(load_config("quickstart"), NFedGNNConfig)
    own = tmp_path / "own.yaml"
    own.write_text("seed: 4\n")
    assert isinstance(load_config(str(own)), NFedGNNConfig)
    config = load_config(str(own), ["strategy.tau=2", "app=fedscem", "partition.hops=1"])
    assert isinstance(config, FedSCemConfig)
    assert (config.app, config.seed, config.rounds) == ("fedscem", 4, 400)
    assert (config.strategy.tau, config.partition.hops) == (2.0, 1)
    assert isinstance(load_config(str(own), ["app=fedscem", "app=nfedgnn"]), NFedGNNConfig)


def test_settings_of_another_app_are_unknown() -> None:
    assert refusal("strategy.reg_weight=1").startswith("strategy.reg_weight: unknown key")
    assert "reg_weight" not in refusal("zzz=1")
    assert "partition.hops" not in refusal("zzz=1", config="quickstart")
    assert refusal("app=nfedgnn").startswith("partition.min_nodes: unknown key")
    assert refusal("app=fedscen").endswith("did you mean fedscem?")
    assert refusal("app=[fedscem]") == "app: ['fedscem'] is not text"
    assert refusal("app=null") == "app: null is not text"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("partition.hop=1", "partition.hops"),
        ("tau=1", "strategy.tau"),
        ("strategy.model_sharin=none", "strategy.model_sharing"),
        ("min_nodes=3", "partition.min_nodes or strategy.min_nodes"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, meant: str) -> None:
    assert refusal(override).endswith(f"unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("partition.hops=0", "at least 1"),
        ("partition.clients=0", "at least 1"),
        ("partition.clients=1", "at least 2 for a masked sum"),
        ("partition.min_nodes=0", "at least 1"),
        ("partition.seed=-1", "at least 0 and below 2^63"),
        ("partition.ratios=[0.6, 0.4]", "three shares"),
        ("partition.ratios=[0.0, 0.5, 0.5]", "three shares"),
        ("partition.ratios=[0.6, 0.3, 0.2]", "three shares"),
        ("partition.ratios=[nan, 0.3, 0.2]", "three shares"),
        ("model.hidden=0", "at least 1"),
        ("model.projection=0", "at least 1"),
        ("strategy.proximal=-0.1", "at least 0 and finite"),
        ("strategy.mu=-0.5", "at least 0 and finite"),
        ("strategy.mu=nan", "at least 0 and finite"),
        ("strategy.tau=0.0", "above 0 and finite"),
        ("strategy.tau=-1.0", "above 0 and finite"),
        ("strategy.tau=inf", "above 0 and finite"),
        ("strategy.local_epochs=0", "at least 1"),
        ("strategy.learning_rate=0.0", "above 0 and finite"),
        ("strategy.weight_decay=-1.0", "at least 0 and finite"),
        ("strategy.participation=0.0", "above 0 and at most 1"),
        ("strategy.participation=1.1", "above 0 and at most 1"),
        ("strategy.limit=0.0", "above 0 and finite"),
        ("strategy.resolution=0.0", "above 0 and at most 32.0 (strategy.limit)"),
        ("strategy.resolution=33.0", "above 0 and at most 32.0 (strategy.limit)"),
        ("strategy.dropout=1.0", "at least 0 and below 1"),
        ("strategy.dropout=-0.1", "at least 0 and below 1"),
        ("strategy.timeout=0.0", "above 0 and finite"),
        ("strategy.min_nodes=0", "at least 1"),
        ("rounds=0", "at least 1"),
        ("seed=-1", "at least 0 and below 2^63"),
    ],
)
def test_impossible_values_name_key_value_and_what_is_allowed(override: str, allowed: str) -> None:
    key, _, value = override.partition("=")
    said = refusal(override)
    assert said.startswith(f"{key}: {value} is not allowed; it must be ")
    assert allowed in said


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("partition.split=per_client", "per-client"),
        ("strategy.name=self_training", "self-training"),
        ("strategy.name=masked-embedding-average", "masked-embedding-averaging"),
        ("strategy.variant=ful", "full"),
        ("strategy.model_sharing=fedproxy", "fedprox"),
        ("strategy.alignment=polynomal", "polynomial"),
        ("strategy.aggregation=mask", "masked"),
    ],
)
def test_unknown_choices_name_the_nearest(override: str, meant: str) -> None:
    key, _, value = override.partition("=")
    said = refusal(override)
    assert said.startswith(f"{key}: {value!r} is not one of ")
    assert said.endswith(f"did you mean {meant}?")


def test_edges_of_what_is_allowed_are_allowed() -> None:
    load_config(
        "fedscem/cora",
        [
            "partition.clients=2",
            "partition.ratios=[1, 0, 0]",
            "strategy.mu=0",
            "strategy.dropout=0",
            "strategy.participation=1",
            "strategy.resolution=32",
        ],
    )
    load_config("fedscem/cora", ["partition.clients=1", "strategy.aggregation=plain"])
    load_config("fedscem/cora", ["partition.clients=1", "strategy.name=self-training"])


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_method_saves_checkpoints(name: str) -> None:
    config = load_config("fedscem/cora", [f"strategy.name={name}", "checkpoint_every=10"])
    assert config.checkpoint_every == 10


def test_resolved_yaml_loads_to_the_same_settings(tmp_path: Path) -> None:
    config = load_config("fedscem/pubmed", ["partition.seed=3", "strategy.resolution=1e-3"])
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_every_app_starts_with_the_same_keys() -> None:
    common = ["app", "seed", "rounds", "device", "checkpoint_every", "data"]
    for schema in (NFedGNNConfig, FedSCemConfig):
        assert list(to_dict(schema()))[: len(common)] == common
        # What the server's loop reads, whichever method it runs.
        assert {"strategy.timeout", "strategy.name", "data.root"} <= known_keys(schema).keys()


def test_patience_is_for_methods_that_average() -> None:
    found = load_config("fedscem/cora", ["strategy.name=fedavg", "strategy.patience=5"])
    assert found.strategy.patience == 5
    text = refusal("strategy.patience=5")
    assert "strategy.patience: 5 is not allowed with strategy.name=masked-emb" in text
    assert "strategy.patience: -1" in refusal("strategy.name=fedavg", "strategy.patience=-1")
