"""Averages that hostile clients cannot move far: one of seven sends its weights a thousandfold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from ego_helpers import SETTINGS as EGO_SETTINGS
from ego_strategy_helpers import client_app as ego_app
from ego_strategy_helpers import seven_egos
from flwr.app import Array, ArrayRecord, Context, Message
from plain_structure import FEDGLS
from structure_helpers import client_app, settings_of

from flower_graph.config.robust import ROBUST, Robust
from flower_graph.errors import ConfigError
from flower_graph.report.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.server.robust import make_robust, too_few
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging.baselines import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
)
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig
from flower_graph.strategies.structure_fedavg.config import FedGLSConfig
from flower_graph.strategies.structure_fedavg.strategy import StructureFedAvg

PROXIMAL = EGO_SETTINGS._replace(proximal=0.5)
KINDS: dict[str, tuple[type[ReportedFedAvg], Any]] = {
    "fedgls": (StructureFedAvg, settings_of(FEDGLS)),
    "fedavg": (EgoFedAvg, EGO_SETTINGS),
    "fedprox": (EgoFedProx, PROXIMAL),
}
AVERAGES = {
    "none": Robust(),
    "krum": Robust("krum", num_malicious=1),
    "trimmed-mean": Robust("trimmed-mean", beta=0.2),
    "median": Robust("median"),
}


def hostile(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Send weights a thousandfold from the SuperNode in place 2: all of them finite."""
    reply = call_next(message, context)
    is_train = message.metadata.message_type == "train"
    if is_train and context.node_config["partition-id"] == 2:
        ((name, record),) = reply.content.array_records.items()
        large = {key: Array(1e3 * value.numpy()) for key, value in record.items()}
        reply.content[name] = ArrayRecord(large)
    return reply


class Found(NamedTuple):
    """What a run came to."""

    losses: list[float]  # the clients', after each round
    largest: float  # number in the last model


@lru_cache
def found(method: str, average: str, is_hostile: bool) -> Found:
    """Run ten rounds."""
    kind, settings = KINDS[method]
    mods = [hostile] if is_hostile else []
    nodes = 6 if method == "fedgls" else 7
    app = client_app(FEDGLS, mods=mods)
    if method != "fedgls":
        app = ego_app(seven_egos(), client=EgoModelClient, mods=mods)
    strategy = make_robust(kind, AVERAGES[average], settings)
    reports: list[RoundReport] = []
    grid = InProcessGrid(app, num_supernodes=nodes)
    strategy.start(grid, num_rounds=10, timeout=1, on_round=reports.append)  # type: ignore[call-arg]
    largest = max(float(np.abs(values).max()) for values in strategy.weights().values())
    return Found([report.loss for report in reports], largest)


@pytest.mark.parametrize("method", KINDS)
def test_one_hostile_client_ruins_the_mean(method: str) -> None:
    good, bad = (found(method, "none", is_hostile) for is_hostile in (False, True))
    assert good.largest < 3
    assert bad.largest > 100


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("average", ["krum", "trimmed-mean", "median"])
def test_and_none_of_the_others(method: str, average: str) -> None:
    good, bad = (found(method, average, is_hostile) for is_hostile in (False, True))
    assert bad.largest < 3
    # They need not choose the same clients without the hostile one.
    assert bad.losses[-1] < 1.3 * good.losses[-1]
    assert min(bad.losses) < bad.losses[0]


def test_no_defence_is_the_strategy_itself() -> None:
    made = make_robust(StructureFedAvg, Robust(), settings_of(FEDGLS), min_nodes=2)
    assert type(made) is StructureFedAvg
    other: Any = make_robust(EgoFedProx, Robust("krum", num_malicious=3), PROXIMAL)
    assert (other.num_malicious_nodes, other.proximal_mu) == (3, 0.5)
    assert isinstance(other, EgoFedProx)
    trimmed: Any = make_robust(EgoFedAvg, Robust("trimmed-mean", beta=0.3), PROXIMAL)
    assert trimmed.beta == 0.3


@pytest.mark.parametrize(
    ("robust", "answers", "why"),
    [
        (Robust("krum", num_malicious=1), 4, "krum with strategy.num_malicious=1 needs 5"),
        (Robust("krum", num_malicious=1), 5, ""),
        (Robust("trimmed-mean", beta=0.2), 4, "leaves out none of 4 SuperNodes"),
        (Robust("trimmed-mean", beta=0.2), 5, ""),
        (Robust("median"), 2, "the median of 2 SuperNodes is their mean"),
        (Robust("median"), 3, ""),
    ],
)
def test_too_few_answers(robust: Robust, answers: int, why: str) -> None:
    said = too_few(robust, answers)
    assert why in said
    assert bool(why) == bool(said)


def test_too_few_answers_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy = make_robust(StructureFedAvg, Robust("median"), settings_of(FEDGLS))
    grid = InProcessGrid(client_app(FEDGLS), num_supernodes=2)
    with caplog.at_level(logging.WARNING):
        strategy.start(grid, num_rounds=3, timeout=1, on_round=lambda report: None)
    said = "round 1: no protection from hostile clients: the median of 2 SuperNodes is their mean"
    assert caplog.text.count("no protection") == 1
    assert said in caplog.text


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ROBUST)
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (FedGLSConfig, ["structure-fedavg", "fed-mlp", "fed-gnn-knn", "fed-gnn"]),
        (FedSCemConfig, ["fedavg", "fedprox"]),
    ],
)
def test_methods_that_take_them(config: Any, names: list[str], average: str) -> None:
    for name in names:
        settings = config()
        settings.strategy.name, settings.strategy.robust = name, average
        settings.validate()
        assert settings.strategy.average.name == average


@pytest.mark.parametrize(
    ("config", "name", "why"),
    [
        (FedGLSConfig, "fed-gnn-mlp", "whose quotient no such average gives"),
        (FedGLSConfig, "fedproto", "whose quotient no such average gives"),
        (FedGLSConfig, "local-gnn-knn", "nothing is averaged"),
        (FedSCemConfig, "masked-embedding-averaging", "the server sees sums alone"),
        (FedSCemConfig, "self-training", "nothing is averaged"),
        (FedSCemConfig, "fed-sage", "could still spoil the generators"),
    ],
)
def test_methods_for_which_they_are_wrong(config: Any, name: str, why: str) -> None:
    settings = config()
    settings.strategy.name, settings.strategy.robust = name, "median"
    with pytest.raises(ConfigError, match=f"median is not allowed with strategy.name={name}") as e:
        settings.validate()
    assert why in str(e.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("robust", "kurm", "strategy.robust: 'kurm'.*krum"),
        ("beta", 0.5, r"strategy.beta: 0.5.*less than 0.5"),
        ("num_malicious", -1, "strategy.num_malicious: -1"),
    ],
)
def test_impossible_settings(key: str, value: Any, said: str) -> None:
    settings = FedGLSConfig()
    setattr(settings.strategy, key, value)
    with pytest.raises(ConfigError, match=said):
        settings.validate()


def test_not_with_noise_for_a_mean() -> None:
    settings = FedGLSConfig()
    settings.strategy.robust, settings.privacy.epsilon = "median", 8.0
    settings.privacy.form = "central"
    with pytest.raises(ConfigError, match=r"not allowed with strategy\.robust=median"):
        settings.validate()


def test_one_line_of_yaml_is_enough() -> None:
    from flower_graph.config.load import load_config
    from flower_graph.strategies.structure_fedavg.method import METHOD

    config: Any = load_config("fedgls/cora-linqs", ["strategy.robust=krum"])
    strategy: Any = METHOD.build_strategy(config, None)
    assert type(strategy).__name__ == "StructureFedAvgWithKrum"
    assert strategy.num_malicious_nodes == 1
