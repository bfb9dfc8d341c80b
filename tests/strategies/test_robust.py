"""Averages that hostile clients cannot move far: one of seven sends its weights a thousandfold."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ego_helpers import SETTINGS as EGO_SETTINGS
from ego_strategy_helpers import Mod, seven_egos
from ego_strategy_helpers import client_app as ego_app
from federation import one_fast
from flwr.app import Array, ArrayRecord, Context, Message
from graph_helpers import Outcome
from structure_helpers import client_app, settings_of

from flower_graph.config.common import ROBUST, RobustSection
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.server.averaging import ReportedFedAvg, make_robust, too_few
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.config import FedGLSConfig
from flower_graph.strategies.fedgls.method import METHOD
from flower_graph.strategies.fedgls.strategy import StructureFedAvg
from flower_graph.strategies.fedscem import EgoFedAvg, EgoFedProx, EgoModelClient
from flower_graph.strategies.fedscem.config import FedSCemConfig

PROXIMAL = replace(EGO_SETTINGS, proximal=0.5)
KINDS: dict[str, tuple[type[ReportedFedAvg], Any]] = {
    "fedgls": (StructureFedAvg, settings_of()),
    "fedavg": (EgoFedAvg, EGO_SETTINGS),
}


def hostile(place: int) -> Mod:
    """Send finite weights a thousandfold from a SuperNode."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        is_train = message.metadata.message_type == "train"
        if is_train and context.node_config["partition-id"] == place:
            ((name, record),) = reply.content.array_records.items()
            rows = {key: Array(value.numpy() * 1e3) for key, value in record.items()}
            reply.content[name] = ArrayRecord(rows)
        return reply

    return mod


AVERAGES = (
    RobustSection("krum", num_malicious=1),
    RobustSection("trimmed-mean", beta=0.2),
    RobustSection("median"),
)


def run(method: str, average: RobustSection, is_hostile: bool) -> tuple[list[float], float]:
    """Run ten rounds: the clients' loss after each, and the largest number in the last model."""
    kind, settings = KINDS[method]
    mods = [hostile(2)] if is_hostile else []
    is_ego = method != "fedgls"
    egos = {"client": EgoModelClient, "settings": settings, "mods": mods}
    app = ego_app(seven_egos(), **egos) if is_ego else client_app(mods=mods)
    grid = InProcessGrid(app, num_supernodes=7 if is_ego else 6)
    outcome = Outcome(make_robust(kind, average, settings), grid).run(10, timeout=1)
    return outcome.losses, max(float(np.abs(one).max()) for one in outcome.weights.values())


@pytest.mark.parametrize("method", one_fast(KINDS, "fedavg"))
def test_one_hostile_client_ruins_the_mean(method: str) -> None:
    assert run(method, RobustSection(), False)[1] < 3
    assert run(method, RobustSection(), True)[1] > 100


# One of them, CI all
@pytest.mark.parametrize(
    ("method", "average"),
    [
        pytest.param(*case, marks=[] if number == 4 else pytest.mark.slow)
        for number, case in enumerate(itertools.product(KINDS, AVERAGES))
    ],
)
def test_and_none_of_the_others(method: str, average: RobustSection) -> None:
    good, _ = run(method, average, False)
    bad, largest = run(method, average, True)
    assert largest < 3
    # They need not choose the same clients without the hostile one.
    assert bad[-1] < 1.3 * good[-1]
    assert min(bad) < bad[0]


def test_no_defence_is_the_strategy_itself_and_settings_arrive() -> None:
    made = make_robust(StructureFedAvg, RobustSection(), settings_of(), min_nodes=2)
    assert type(made) is StructureFedAvg
    other: Any = make_robust(EgoFedProx, RobustSection("krum", num_malicious=3), PROXIMAL)
    assert (other.num_malicious_nodes, other.proximal_mu) == (3, 0.5)
    assert isinstance(other, EgoFedProx)
    trimmed: Any = make_robust(EgoFedAvg, RobustSection("trimmed-mean", beta=0.3), PROXIMAL)
    assert trimmed.beta == 0.3
    config: Any = load_config("fedgls/cora-linqs", ["strategy.robust=krum"])
    by_yaml: Any = METHOD.build_strategy(config, None)
    assert type(by_yaml).__name__ == "StructureFedAvgWithKrum"
    assert by_yaml.num_malicious_nodes == 1


@pytest.mark.parametrize(
    ("robust", "answers", "why"),
    [
        (RobustSection("krum", num_malicious=1), 5, "krum with strategy.num_malicious=1 needs 5"),
        (RobustSection("trimmed-mean", beta=0.2), 5, "leaves out none of 4 clients"),
        (RobustSection("median"), 3, "the median of 2 clients is their mean"),
    ],
)
def test_too_few_answers(robust: RobustSection, answers: int, why: str) -> None:
    assert why in too_few(robust, answers - 1)
    assert too_few(robust, answers) == ""


SENDS_MORE = ("fed-gnn-mlp", "fedproto", "local-gnn-knn")
NO_WEIGHTS = ("masked-embedding-averaging", "self-training", "fed-sage")


@pytest.mark.parametrize("average", ROBUST)
@pytest.mark.parametrize(
    ("config", "takes", "refuses"),
    [
        (FedGLSConfig, ("structure-fedavg", "fed-mlp", "fed-gnn-knn", "fed-gnn"), SENDS_MORE),
        (FedSCemConfig, ("fedavg", "fedprox"), NO_WEIGHTS),
    ],
)
def test_methods_that_take_them(
    config: Any, takes: tuple[str, ...], refuses: tuple[str, ...], average: str
) -> None:
    settings = config()
    settings.strategy.robust = average
    for name in takes:
        settings.strategy.name = name
        settings.validate()
        assert settings.strategy.robust == average
    for name in refuses if average != "none" else ():
        settings.strategy.name = name
        with pytest.raises(ConfigError, match=rf"{average}.*strategy\.name={name}"):
            settings.validate()


def test_not_with_noise_for_a_mean() -> None:
    settings = FedGLSConfig()
    settings.strategy.robust = "median"
    settings.privacy.epsilon, settings.privacy.form = 8.0, "central"
    with pytest.raises(ConfigError, match=r"strategy\.robust=median"):
        settings.validate()
