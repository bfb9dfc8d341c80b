"""The run config of the root app: Flower's own keys, as Flower reads them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps.client_app import app as client_app
from flower_graph.apps.server_app import app as server_app
from flower_graph.config.app_keys import RUN_CONFIG, SETTINGS
from flower_graph.config.schema import known_keys
from flower_graph.errors import ConfigError
from flower_graph.flower_compat import fuse_dicts, parse_config_args
from flower_graph.method.load import load_config
from flower_graph.method.of_app import configured
from flower_graph.method.registry import known_apps, schema_of
from flower_graph.simulation import InProcessGrid

ROOT = Path(__file__).parents[2]
TINY = (
    "data.name=csbm data.nodes=60 data.classes=3 data.degree=6 data.active=5 data.split=random "
    "data.ratios=[0.4,0.3,0.3]"
)


def declared() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config: dict[str, Any] = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return config


def context_of(*words: str) -> Context:
    """Read `--run-config` as `flwr run` and its SuperLink do: unknown keys are refused."""
    given = fuse_dicts(declared(), parse_config_args(list(words)), check_keys=True)
    return Context(1, 2, {}, RecordDict(), given)


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_the_root_app_declares_what_is_read():
    assert declared() == dict(RUN_CONFIG)


@pytest.mark.parametrize("app", known_apps())
def test_every_method_has_what_the_keys_stand_for(app):
    """But the last two: not every method trains in epochs, or with one step size."""
    missing = {
        key for key, setting in SETTINGS.items() if setting not in known_keys(schema_of(app))
    }
    assert missing <= {"learning-rate", "local-epochs"}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("num-server-rounds=5", "rounds", 5),
        ("num-server-rounds='5'", "rounds", 5),
        ("seed=3", "seed", 3),
        ("seed=0 overrides='seed=3'", "seed", 0),
        ("strategy-name='fed-mlp'", "strategy.name", "fed-mlp"),
        ("fraction-train=0.5", "strategy.participation", 0.5),
        ("fraction-train=1", "strategy.participation", 1.0),
        ("learning-rate=1e-3", "strategy.learning_rate", 0.001),
        ("local-epochs=2", "strategy.local_epochs", 2),
        ("min-available-nodes=4", "strategy.min_nodes", 4),
        ("most-supernodes=6", "strategy.most_supernodes", 6),
        ("num-server-rounds=5 overrides='rounds=7 seed=3'", "rounds", 5),
        ("num-server-rounds='' overrides='rounds=7'", "rounds", 7),
        ("learning-rate=''", "strategy.learning_rate", None),
    ],
)
def test_a_key_is_a_setting(words, key, value, tmp_path):
    expected = value_of(load_config("fedgls/cora-linqs"), key) if value is None else value
    config, _ = configured(context_of("config='fedgls/cora-linqs'", words))
    assert value_of(config, key) == expected
    # The same from a file
    file = tmp_path / "mine.toml"
    overrides = parse_config_args(["config='fedgls/cora-linqs'", words])
    file.write_text("\n".join(f"{name} = {json.dumps(one)}" for name, one in overrides.items()))
    config, _ = configured(context_of(str(file)))
    assert value_of(config, key) == expected


def test_without_keys_everything_is_as_in_the_config():
    for name in ("quickstart", "ppfl/cora-linqs-gat"):
        assert configured(context_of(f"config='{name}'"))[0] == load_config(name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("local-epochs=2", "local-epochs in the run config: strategy.local_epochs"),
        ("config='ppfl/cora-linqs-gat' learning-rate=0.1", "learning-rate in the run config"),
        ("num-server-rounds=0", "num-server-rounds in the run config: rounds: 0"),
        ("num-server-rounds='ten'", "num-server-rounds in the run config: rounds: 'ten'"),
        ("fraction-train=1.5", "fraction-train in the run config: strategy.participation: 1.5"),
        ("strategy-name='fedavg'", "strategy-name in the run config: strategy.name: 'fedavg'"),
        (
            "config='nfedgnn/cora-averaged' fraction-train=0.5 "
            "overrides='strategy.average_over=all'",
            "fraction-train in the run config: strategy.participation: 0.5",
        ),
        (
            "config='ppfl/cora-linqs-gat' fraction-train=0.5 overrides='strategy.alignment=secure'",
            "fraction-train in the run config: strategy.participation: 0.5",
        ),
        # What is wrong with the overrides is not blamed on a key.
        ("num-server-rounds=2 overrides='rounds=2 strategy.nmae=x'", "strategy.nmae: "),
        ("local-epochs=2 overrides='sede=1'", "sede: "),
    ],
)
def test_a_bad_key_is_named_with_what_there_is(words, complaint):
    with pytest.raises(ConfigError) as error:
        configured(context_of(words))
    assert complaint in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_root_app_runs_by_its_keys(tmp_path):
    words = f"num-server-rounds=2 seed=7 learning-rate=0.05 output-dir='{tmp_path / 'out'}'"
    given = context_of(words, f"overrides='{TINY}'").run_config
    grid = InProcessGrid(client_app, num_supernodes=2, run_config=given)
    server_app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), given))
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert (result["rounds"], result["seed"], result["clients"]) == (2, 7, 60)
    assert result["config"]["strategy"]["learning_rate"] == 0.05
