"""Settings of every method: what ships, what is refused and how methods differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flower_graph.config.load import load_config, to_dict
from flower_graph.config.registry import known_apps, schema_of
from flower_graph.config.rules import show
from flower_graph.config.schema import known_keys, settings_of
from flower_graph.errors import ConfigError
from flower_graph.strategies.masked_embedding_averaging.config import STRATEGIES
from flower_graph.strategies.structure_fedavg.config import METHODS

FEDGLS = {
    "partition.method": "louvain",
    "partition.ratios": [0.6, 0.2, 0.2],
    "graph.graphless_ratio": 0.5,
    "graph.encoder": "attentive",
    "graph.layers": 2,
    "graph.similarity": "cosine",
    "graph.tau": 0.2,
    "model.hidden": 16,
    "strategy.name": "structure-fedavg",
    "strategy.learning_rate": 0.01,
    "strategy.local_epochs": 5,
}
FEDSCEM = {
    "partition.hops": 2,
    "partition.clients": 100,
    "data.normalize": False,
    "model.hidden": 64,
    "strategy.learning_rate": 0.0005,
    "strategy.weight_decay": 5e-5,
    "strategy.local_epochs": 1,
    "strategy.proximal": 0.01,
}
PPFL = {
    "model.dimension": 16,
    "partition.clients": 4,
    "partition.public_share": 0.4,
    "partition.private_share": 0.15,
    "partition.public": "random",
    "partition.label_noise": 0.0,
    "judge.folds": 5,
    "strategy.name": "procrustes-alignment",
    "strategy.alignment": "pairs",
    "privacy.epsilon": None,
}
WALKS = {"model.name": "deepwalk", "deepwalk.walks": 10, "deepwalk.length": 40}
WALKS |= {"deepwalk.window": 5}
SIZES = ("data.name", "partition.clients", "rounds")
SCALES = ("data.name", "strategy.mu", "strategy.tau", "model.projection", "partition.min_nodes")


def named(keys: tuple[str, ...], *values: object) -> dict[str, object]:
    return dict(zip(keys, values, strict=True))


# The papers' settings, but for what was chosen by validation
SHIPPED: dict[str, dict[str, object]] = {
    "quickstart": {
        "data.name": "cora-linqs",
        "model.name": "gcn",
        "rounds": 200,
        "model.hidden": 16,
        "model.dropout": 0.5,
        "strategy.learning_rate": 0.1,
        "strategy.weight_decay": 5e-4,
    },
    "nfedgnn/cora-gat": {
        "model.name": "gat",
        "model.heads": 8,
        "model.hidden": 16,
        "model.dropout": 0.6,
        "data.name": "Cora",
        "strategy.learning_rate": 0.01,
    },
    "nfedgnn/cora-cnfgnn": {
        "strategy.reg_weight": 0,
        "strategy.average_every": 1,
        "strategy.average_over": "all",
        "model.user_bias": True,
    },
    "fedgls/cora": FEDGLS | named(SIZES, "Cora", 8, 100),
    "fedgls/cora-linqs": FEDGLS | named(SIZES, "cora-linqs", 8, 100),
    "fedgls/citeseer": FEDGLS | named(SIZES, "CiteSeer", 8, 100),
    "fedgls/pubmed": FEDGLS | named(SIZES, "PubMed", 16, 200),
    "fedgls/flickr": FEDGLS | named(SIZES, "Flickr", 20, 300),
    "fedgls/ogbn-arxiv": FEDGLS | named(SIZES, "ogbn-arxiv", 16, 2000),
    "fedscem/cora": FEDSCEM | named(SCALES, "Cora", 20, 1, 256, 20),
    "fedscem/cora-linqs": FEDSCEM | named(SCALES, "cora-linqs", 20, 1, 256, 20),
    "fedscem/citeseer": FEDSCEM | named(SCALES, "CiteSeer", 20, 1, 256, 15),
    "fedscem/pubmed": FEDSCEM | named(SCALES, "PubMed", 2, 1, 256, 80),
    "fedscem/lastfm-asia": FEDSCEM | named(SCALES, "LastFMAsia", 1, 0.1, 32, 15),
    **{
        f"ppfl/{data.lower()}-{model}": PPFL
        | {"data.name": data, "model.name": model}
        | (WALKS if model == "deepwalk" else {})
        for data in ("Cora", "CiteSeer", "cora-linqs")
        for model in ("deepwalk", "gat")
    },
}
NUMBERS: list[Any] = [-1, 0, 1, 2, 10**6, 2**63]
# What a rule may refuse, by the type that the setting wants
TRIED: dict[str, list[Any]] = {
    "a whole number": NUMBERS,
    "a number": [*map(float, NUMBERS), 0.5, math.nan, math.inf],
    "text": ["", "nonsense"],
    "a list of numbers": [
        [0.6, 0.4],
        [0.6, 0.4, 0.0],
        [0.6, 0.3, 0.2],
        [-0.1, 0.5, 0.5],
        [math.nan, 0.1, 0.1],
    ],
}
# Their limits are those of other settings, and are refused where all of them are known.
WITHOUT_RULES = {"data.nodes", "data.features", "strategy.resolution"}


def refusal(*overrides: str, config: str = "fedscem/cora") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_have_the_papers_settings(name: str) -> None:
    config: Any = load_config(name)
    for key, expected in SHIPPED[name].items():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected, key


# What every schema refuses -----------------------------------------------------------------------


@pytest.mark.parametrize("app", known_apps())
def test_every_rule_names_key_value_and_what_is_allowed(app: str) -> None:
    for one in settings_of(schema_of(app)):
        kind = one.wanted.removesuffix(" or null")
        if kind.endswith("number") and one.key not in WITHOUT_RULES:
            assert one.rules, f"{one.key}: any number is allowed"
        refusing = set()
        for value in TRIED[kind] if one.rules else ():
            broken = next((rule for rule in one.rules if not rule.admits(value)), None)
            if broken is None:
                continue
            refusing.add(broken)
            config = schema_of(app)()
            place, _, name = one.key.rpartition(".")
            setattr(getattr(config, place) if place else config, name, value)
            with pytest.raises(ConfigError) as caught:
                config.validate()
            said = str(caught.value)
            assert said.startswith(f"{one.key}: {show(value)} is not ")
            assert broken.words in said
        assert refusing == set(one.rules), f"{one.key}: a rule refuses nothing"


@pytest.mark.parametrize("app", known_apps())
def test_every_schema_starts_with_the_same_keys(app: str) -> None:
    common = ["app", "seed", "rounds", "device", "checkpoint_every", "data"]
    assert list(to_dict(schema_of(app)()))[: len(common)] == common
    # What the server's loop reads, whichever method it runs
    assert {"strategy.timeout", "strategy.name", "data.root"} <= known_keys(schema_of(app)).keys()


def test_the_app_decides_which_schema_holds(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seed: 4\n")
    for words, app, rounds in (
        ([], "nfedgnn", 200),
        (["strategy.tau=2", "app=fedscem", "partition.hops=1"], "fedscem", 400),
        (["graph.tau=2", "app=fedgls", "partition.clients=3"], "fedgls", 100),
        (["gat.beta=2", "app=ppfl", "model.name=gat"], "ppfl", 10),
        (["app=fedscem", "app=nfedgnn"], "nfedgnn", 200),
    ):
        config = load_config(str(own), words)
        assert type(config) is schema_of(app)
        assert (config.app, config.seed, config.rounds) == (app, 4, rounds)


@pytest.mark.parametrize(
    ("config", "override"),
    [
        ("fedscem/cora", "strategy.reg_weight=1"),
        ("fedscem/cora", "graph.graphless_ratio=0.5"),
        ("fedgls/cora", "partition.hops=1"),
        ("fedgls/cora", "gat.beta=1"),
        ("ppfl/cora-gat", "graph.tau=1"),
    ],
)
def test_settings_of_another_app_are_unknown(config: str, override: str) -> None:
    said = refusal(override, config=config)
    assert said.startswith(f"{override.partition('=')[0]}: unknown key")


def test_apps_that_are_none() -> None:
    assert refusal("app=nfedgnn").startswith("partition.min_nodes: unknown key")
    assert refusal("app=fedscen").endswith("did you mean fedscem?")
    assert refusal("app=[fedscem]") == "app: ['fedscem'] is not text"
    assert refusal("app=null") == "app: null is not text"


@pytest.mark.parametrize(
    ("config", "override", "meant"),
    [
        ("fedscem/cora", "tau=1", "strategy.tau"),
        ("fedscem/cora", "min_nodes=3", "partition.min_nodes or strategy.min_nodes"),
        ("fedgls/cora", "graph.neighbors=3", "graph.neighbours"),
        ("fedgls/cora", "strategy.optimizer=keep", "strategy.optimiser"),
        ("ppfl/cora-gat", "privacy.clip_norm=3", "privacy.clipping_norm"),
    ],
)
def test_unknown_keys_name_the_nearest(config: str, override: str, meant: str) -> None:
    assert refusal(override, config=config).endswith(f"unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("fedscem/cora", "partition.clients=1", "at least 2 for a masked sum"),
        ("fedscem/cora", "strategy.resolution=0.0", "above 0 and at most 32.0 (strategy.limit)"),
        ("fedscem/cora", "strategy.resolution=33.0", "above 0 and at most 32.0 (strategy.limit)"),
        ("fedscem/cora", "strategy.patience=5", "strategy.patience: 5 is not allowed with strat"),
        ("ppfl/cora-gat", "partition.private_share=0.2", "at most 0.15 is left for each client"),
        ("ppfl/cora-gat", "partition.public_share=0.5", "at most 0.125 is left for each client"),
        ("ppfl/cora-gat", "partition.ratios=[0.6,0.4]", "three shares"),
        ("ppfl/cora-gat", "partition.ratios=[0.6,0.4,0]", "the last above 0"),
        ("ppfl/cora-gat", "partition.ratios=[0,0.4,0.6]", "the first must be above 0"),
        ("ppfl/cora-gat", "gat.heads=3", "cannot share model.dimension: 16"),
        ("ppfl/cora-gat", "privacy.epsilon=5 strategy.name=local", "privacy.epsilon: 5 adds noi"),
        ("ppfl/cora-gat", "privacy.epsilon=5 strategy.alignment=secure", "set privacy.epsilon=nu"),
        (
            "ppfl/cora-gat",
            "strategy.participation=0.5 strategy.alignment=secure",
            "strategy.participation: 0.5",
        ),
        (
            "ppfl/cora-gat",
            "strategy.absent=last strategy.alignment=secure",
            "strategy.absent: last is not",
        ),
    ],
)
def test_settings_that_do_not_go_together(config: str, overrides: str, said: str) -> None:
    assert said in refusal(*overrides.split(), config=config)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("fedscem/cora", "partition.clients=2 partition.ratios=[1,0,0] strategy.mu=0"),
        ("fedscem/cora", "strategy.dropout=0 strategy.participation=1 strategy.resolution=32"),
        ("fedscem/cora", "partition.clients=1 strategy.aggregation=plain"),
        ("fedscem/cora", "partition.clients=1 strategy.name=self-training"),
        ("fedscem/cora", "strategy.name=fedavg strategy.patience=5"),
        ("fedgls/cora", "graph.graphless_ratio=0 model.dropout=0 partition.clients=1"),
        ("fedgls/cora", "graph.graphless_ratio=1 strategy.weight_decay=0"),
        ("fedgls/cora", "strategy.prototype_weight=0 strategy.participation=1"),
        *(("fedscem/cora", f"strategy.name={name} checkpoint_every=10") for name in STRATEGIES),
        *(("fedgls/cora", f"strategy.name={name} checkpoint_every=5") for name in METHODS),
    ],
)
def test_edges_of_what_is_allowed_are_allowed(config: str, overrides: str) -> None:
    load_config(config, overrides.split())
