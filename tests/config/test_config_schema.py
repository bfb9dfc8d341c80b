"""Schemas of a stranger's: the same vocabulary, and what is checked without a word more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from flower_graph.config.common import DataConfig, RunConfig, StrategySection
from flower_graph.config.rules import NOT_NEGATIVE, Rule, at_least, choice
from flower_graph.config.schema import known_keys, section, setting, settings_of
from flower_graph.errors import ConfigError

EVEN = Rule("even", lambda value: value % 2 == 0)


@dataclass
class Model:
    name: str = setting("gcn", choice("gcn", "sgc"), help="what embeds the nodes")
    hidden: int = setting(4, at_least(2), EVEN, help="numbers in the hidden layer")
    steps: list[int] = setting([1, 2], help="hops")
    scale: float | None = setting(None, NOT_NEGATIVE, help="null: none")


@dataclass
class Strategy(StrategySection):
    name: str = "mine"
    timeout: float = 5.0

    def validate(self) -> None:
        if self.participation < 1 and self.timeout > 100:
            raise ConfigError("strategy.timeout: too long for a sample")


@dataclass
class Mine(RunConfig):
    rounds: int = 7
    data: DataConfig = section(DataConfig, split="random", ratios=[0.5, 0.2, 0.3])
    model: Model = section(Model)
    strategy: Strategy = section(Strategy)


def given(**values: object) -> Mine:
    config = Mine()
    for key, value in values.items():
        part, _, name = key.rpartition("__")
        setattr(getattr(config, part) if part else config, name, value)
    return config


def test_defaults_hold_and_are_nobody_elses() -> None:
    first, second = Mine(), Mine()
    first.validate()
    first.model.steps.append(3)
    assert first.data.ratios is not None
    first.data.ratios.append(0.0)
    assert second == Mine() and second.model.steps == [1, 2]
    assert OmegaConf.to_object(OmegaConf.structured(Mine)) == second


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model__hidden": 1}, "model.hidden: 1 is not allowed; it must be at least 2"),
        ({"model__hidden": 3}, "model.hidden: 3 is not allowed; it must be even"),
        ({"model__name": "gcnn"}, "model.name: 'gcnn' is not one of gcn, sgc; did you mean gcn?"),
        ({"model__scale": -0.5}, "model.scale: -0.5 is not allowed; it must be at least 0 and"),
        # A default that is given anew leaves the rules as they are.
        ({"rounds": 0}, "rounds: 0 is not allowed; it must be at least 1"),
        ({"strategy__timeout": 0.0}, "strategy.timeout: 0.0 is not allowed; it must be above 0"),
        ({"strategy__timeout": 200.0, "strategy__participation": 0.5}, "too long for a sample"),
    ],
)
def test_rules_are_asked_in_every_section(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(**values).validate()
    assert said in str(caught.value)


def test_what_a_schema_says_can_be_read() -> None:
    settings = {found.key: found for found in settings_of(Mine)}
    assert (settings["rounds"].default, settings["rounds"].help) == (7, "rounds of training")
    assert settings["data.split"].default == "random"
    assert settings["model.hidden"].rules[1] is EVEN
    assert known_keys(Mine)["model.scale"] == "a number or null"
