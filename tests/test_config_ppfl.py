"""Settings of PPFL-GNN: their schema and checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_graph.config.load import load_config, to_dict, to_yaml
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError
from flower_graph.strategies.procrustes_alignment.config import PPFLConfig


def refusal(*overrides: str, config: str = "ppfl/cora-gat") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    return str(caught.value)


@pytest.mark.parametrize("model", ["deepwalk", "gat"])
@pytest.mark.parametrize(
    ("name", "data"), [("cora", "Cora"), ("citeseer", "CiteSeer"), ("cora-linqs", "cora-linqs")]
)
def test_shipped_configs_have_the_papers_setting(name: str, data: str, model: str) -> None:
    config = load_config(f"ppfl/{name}-{model}")
    assert isinstance(config, PPFLConfig)
    assert (config.data.name, config.model.name, config.model.dimension) == (data, model, 16)
    parts = config.partition
    assert (parts.clients, parts.public_share, parts.private_share) == (4, 0.4, 0.15)
    assert (parts.public, parts.label_noise, config.judge.folds) == ("random", 0.0, 5)
    assert (config.strategy.name, config.strategy.alignment) == ("procrustes-alignment", "pairs")
    assert config.privacy.epsilon is None
    assert parts.ratios[2] > 0
    if model == "deepwalk":
        assert (config.deepwalk.walks, config.deepwalk.length, config.deepwalk.window) == (
            10,
            40,
            5,
        )
        assert parts.ratios[0] == 0  # labels play no part


def test_the_app_decides_which_schema_holds(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seed: 4\n")
    config = load_config(str(own), ["gat.beta=2", "app=ppfl", "model.name=gat"])
    assert isinstance(config, PPFLConfig)
    assert (config.app, config.seed, config.rounds, config.gat.beta) == ("ppfl", 4, 10, 2.0)
    assert refusal("graph.tau=1").startswith("graph.tau: unknown key")
    assert refusal("gat.beta=1", config="fedgls/cora").startswith("gat.beta: unknown key")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("beta=1", "gat.beta"),
        ("partition.publics=degree", "partition.public"),
        ("deepwalk.walk=3", "deepwalk.walks"),
        ("judge.fold=3", "judge.folds"),
        ("privacy.clip_norm=3", "privacy.clipping_norm"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, meant: str) -> None:
    assert refusal(override).endswith(f"unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("partition.clients=0", "at least 1"),
        ("partition.public=best", "random, degree, cover"),
        ("partition.public_share=0", "above 0 and at most 1"),
        ("partition.public_share=1.2", "above 0 and at most 1"),
        ("partition.private_share=-0.1", "at least 0 and at most 1"),
        ("partition.private_share=0.2", "at most 0.15 is left for each client"),
        ("partition.public_share=0.5", "at most 0.125 is left for each client"),
        ("partition.label_noise=1", "at least 0 and below 1"),
        ("partition.ratios=[0.6,0.4]", "three shares"),
        ("partition.ratios=[0.6,0.4,0]", "the last above 0"),
        ("partition.ratios=[0,0.4,0.6]", "the first must be above 0"),
        ("partition.seed=-1", "at least 0"),
        ("model.name=gcn", "deepwalk, gat"),
        ("model.dimension=0", "at least 1"),
        ("gat.heads=3", "cannot share model.dimension: 16"),
        ("gat.epochs=0", "at least 1"),
        ("gat.dropout=1", "below 1"),
        ("gat.beta=-1", "at least 0"),
        ("deepwalk.walks=0", "at least 1"),
        ("deepwalk.length=1", "at least 2"),
        ("deepwalk.length=10001", "at most 10000"),
        ("deepwalk.decay=0", "above 0 and at most 1"),
        ("deepwalk.window=0", "at least 1"),
        ("deepwalk.learning_rate=0", "above 0"),
        ("judge.folds=1", "at least 2"),
        ("judge.every=0", "at least 1"),
        ("strategy.name=fedavg", "procrustes-alignment, local"),
        ("strategy.alignment=all", "pairs, consensus, secure"),
        ("strategy.absent=zeros", "leave-out, last"),
        ("strategy.participation=0", "above 0"),
        ("privacy.epsilon=0", "above 0"),
        ("privacy.delta=1", "above 0 and below 1"),
        ("privacy.clipping_norm=0", "above 0"),
        ("rounds=0", "at least 1"),
    ],
)
def test_values_that_cannot_be_are_refused(override: str, allowed: str) -> None:
    said = refusal(override)
    key, _, value = override.partition("=")
    assert key.split(".")[-1] in said
    assert allowed in said
    assert value.strip("[]").split(",")[0] in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("privacy.epsilon=5", "strategy.name=local"), "privacy.epsilon: 5 adds noise to"),
        (("privacy.epsilon=5", "strategy.alignment=secure"), "set privacy.epsilon=null"),
        (
            ("strategy.participation=0.5", "strategy.alignment=secure"),
            "strategy.participation: 0.5",
        ),
        (("strategy.absent=last", "strategy.alignment=secure"), "strategy.absent: last is not"),
    ],
)
def test_settings_that_do_not_go_together(overrides: tuple[str, ...], said: str) -> None:
    assert said in refusal(*overrides)


def test_settings_come_back_from_yaml(tmp_path: Path) -> None:
    config = load_config("ppfl/citeseer-deepwalk", ["seed=3", "privacy.epsilon=2"])
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config))
    assert to_dict(load_config(str(path))) == to_dict(config)
    assert {"deepwalk.walks", "gat.beta", "privacy.epsilon"} <= set(known_keys(PPFLConfig))
