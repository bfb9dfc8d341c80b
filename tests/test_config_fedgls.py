"""Settings of FedGLS and its baselines: their schema and checks, beside those of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_graph.config.load import load_config, to_dict, to_yaml
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig
from flower_graph.strategies.structure_fedavg.config import METHODS, FedGLSConfig


def refusal(*overrides: str, config: str = "fedgls/cora") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "clients", "rounds"),
    [
        ("cora", "Cora", 8, 100),
        ("cora-linqs", "cora-linqs", 8, 100),
        ("citeseer", "CiteSeer", 8, 100),
        ("pubmed", "PubMed", 16, 200),
        ("flickr", "Flickr", 20, 300),
        ("ogbn-arxiv", "ogbn-arxiv", 16, 2000),
    ],
)
def test_shipped_configs_are_the_papers_but_for_what_was_chosen_by_validation(
    name: str, data: str, clients: int, rounds: int
) -> None:
    config = load_config(f"fedgls/{name}")
    assert isinstance(config, FedGLSConfig)
    assert (config.data.name, config.partition.clients, config.rounds) == (data, clients, rounds)
    assert (config.partition.method, config.partition.ratios) == ("louvain", [0.6, 0.2, 0.2])
    assert (config.graph.graphless_ratio, config.graph.encoder) == (0.5, "attentive")
    assert (config.graph.layers, config.graph.similarity) == (2, "cosine")
    assert (config.graph.tau, config.model.hidden) == (0.2, 16)
    assert (config.strategy.name, config.seed) == ("structure-fedavg", 0)
    assert (config.strategy.learning_rate, config.strategy.local_epochs) == (0.01, 5)


def test_the_app_decides_which_schema_holds(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seed: 4\n")
    assert isinstance(load_config(str(own)), NFedGNNConfig)
    config = load_config(str(own), ["graph.tau=2", "app=fedgls", "partition.clients=3"])
    assert isinstance(config, FedGLSConfig)
    assert (config.app, config.seed, config.rounds) == ("fedgls", 4, 100)
    assert (config.graph.tau, config.partition.clients) == (2.0, 3)


def test_settings_of_another_app_are_unknown() -> None:
    assert refusal("strategy.reg_weight=1").startswith("strategy.reg_weight: unknown key")
    assert refusal("partition.hops=1").startswith("partition.hops: unknown key")
    said = refusal("graph.graphless_ratio=0.5", config="fedscem/cora")
    assert said.startswith("graph.graphless_ratio: unknown key")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("graphless_ratio=1", "graph.graphless_ratio"),
        ("graph.neighbors=3", "graph.neighbours"),
        ("partition.client=3", "partition.clients"),
        ("strategy.local_epoch=1", "strategy.local_epochs"),
        ("strategy.optimizer=keep", "strategy.optimiser"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, meant: str) -> None:
    assert refusal(override).endswith(f"unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("partition.clients=0", "at least 1"),
        ("partition.resolution=0.0", "above 0 and finite"),
        ("partition.alpha=0.0", "above 0 and finite"),
        ("partition.seed=-1", "at least 0 and below 2^63"),
        ("partition.ratios=[0.6, 0.4]", "three shares"),
        ("partition.ratios=[0.6, 0.3, 0.2]", "three shares"),
        ("graph.graphless_ratio=-0.1", "at least 0 and at most 1"),
        ("graph.graphless_ratio=1.1", "at least 0 and at most 1"),
        ("graph.graphless_ratio=nan", "at least 0 and at most 1"),
        ("graph.neighbours=0", "at least 1"),
        ("graph.layers=0", "at least 1"),
        ("graph.width=0", "at least 1"),
        ("graph.learning_rate=-1.0", "at least 0 and finite"),
        ("graph.tau=0.0", "above 0 and finite"),
        ("graph.tau=inf", "above 0 and finite"),
        ("model.hidden=0", "at least 1"),
        ("model.dropout=1.0", "at least 0 and below 1"),
        ("model.input_dropout=1.0", "at least 0 and below 1"),
        ("model.input_dropout=-0.1", "at least 0 and below 1"),
        ("strategy.local_epochs=0", "at least 1"),
        ("strategy.learning_rate=0.0", "above 0 and finite"),
        ("strategy.weight_decay=-1.0", "at least 0 and finite"),
        ("strategy.prototype_weight=-1.0", "at least 0 and finite"),
        ("strategy.participation=0.0", "above 0 and at most 1"),
        ("strategy.participation=1.1", "above 0 and at most 1"),
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
        ("partition.method=louvin", "louvain"),
        ("graph.encoder=attention", "attentive"),
        ("graph.similarity=euclid", "euclidean"),
        ("strategy.optimiser=keeps", "keep"),
        ("strategy.name=fedgnn", "fed-gnn"),
        ("strategy.name=fed-proto", "fedproto"),
    ],
)
def test_unknown_choices_name_the_nearest(override: str, meant: str) -> None:
    key, _, value = override.partition("=")
    said = refusal(override)
    assert said.startswith(f"{key}: {value!r} is not one of ")
    assert said.endswith(f"did you mean {meant}?")


def test_edges_of_what_is_allowed_are_allowed() -> None:
    for ratio in (0, 1):
        load_config("fedgls/cora", [f"graph.graphless_ratio={ratio}", "model.dropout=0"])
    load_config("fedgls/cora", ["partition.clients=1", "strategy.weight_decay=0"])
    load_config("fedgls/cora", ["strategy.prototype_weight=0", "strategy.participation=1"])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_saves_checkpoints(name: str) -> None:
    config = load_config("fedgls/cora", [f"strategy.name={name}", "checkpoint_every=5"])
    assert config.checkpoint_every == 5


def test_any_graph_loads_without_a_public_split() -> None:
    data = FedGLSConfig().data
    assert (data.split, data.ratios) == ("random", [0.6, 0.2, 0.2])


def test_resolved_yaml_loads_to_the_same_settings(tmp_path: Path) -> None:
    config = load_config("fedgls/pubmed", ["partition.seed=3", "graph.tau=1e-3"])
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_it_starts_with_the_keys_of_every_app() -> None:
    common = ["app", "seed", "rounds", "device", "checkpoint_every", "data"]
    assert list(to_dict(FedGLSConfig()))[: len(common)] == common
    needed = {"strategy.timeout", "strategy.name", "data.root"}
    assert needed <= known_keys(FedGLSConfig).keys()
