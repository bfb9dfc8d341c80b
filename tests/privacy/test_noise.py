"""Noise on what clients send and on their mean: how much, from where, how often, what it costs."""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from averaging_helpers import Simple
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flower_graph.client.adaptor import make_client_app
from flower_graph.config.common import PrivacyConfig, RunConfig
from flower_graph.errors import ConfigError, RefusedError
from flower_graph.flower_compat import NumPyClient, identify
from flower_graph.privacy.noise import (
    CentralNoise,
    ClientNoise,
    PrivateReplies,
    PrivateRows,
    accounted,
    central_noise,
    noise_multiplier,
    note_privacy,
    privacy_mods,
    spent,
    withhold_measurements,
)
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import pack_integers

BUDGET = PrivacyConfig(epsilon=8.0, delta=1e-5, clipping_norm=3.0)


# Exact by Balle and Wang (ICML 2018), theorem 8: rounds add up to one Gaussian release
EXACT = [(0.3, 1, 19.1307), (1, 1, 4.3771), (1, 10, 17.8565), (8, 50, 3.7965), (30, 1, 0.1027)]


@pytest.mark.parametrize(("multiplier", "rounds", "exact"), EXACT)
def test_the_accountant_bounds_the_exact_budget_from_above(
    multiplier: float, rounds: int, exact: float
) -> None:
    # Mironov's conversion, which every better one stays below: rho + 2 sqrt(rho log(1 / delta))
    rho = rounds / (2 * multiplier**2)
    mironov = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert exact <= accounted(multiplier, 1e-5, rounds) <= 1.01 * mironov


@pytest.mark.parametrize("rounds", [1, 10])
@pytest.mark.parametrize("epsilon", [0.5, 8.0, 1000.0])
def test_the_noise_is_the_least_within_the_budget(epsilon: float, rounds: int) -> None:
    found = noise_multiplier(epsilon, 1e-5, rounds)
    assert accounted(found, 1e-5, rounds) <= epsilon
    assert accounted(found * 0.999, 1e-5, rounds) > epsilon


def test_what_is_reported_adds_up_to_the_budget() -> None:
    config, so_far = RunConfig(rounds=10, privacy=BUDGET), list[float]()
    found = spent(config)
    for last in range(1, 11):
        report: Any = SimpleNamespace(round=last)
        note_privacy(config, report)
        so_far.append(report.privacy["epsilon"])
    assert so_far == sorted(set(so_far)) and 7.99 < so_far[-1] <= 8
    assert (so_far[0], so_far[-1]) == (found["epsilon-of-a-round"], found["epsilon"])
    multiplier: Any = found["noise-multiplier"]
    # Composition of Gaussian noise: as one release with the noise over the root of the rounds.
    assert so_far[3] == pytest.approx(accounted(multiplier / 2, 1e-5, 1), rel=1e-9)
    assert (found["delta"], found["noise"]) == (1e-5, 2 * 3.0 * multiplier)
    assert "not-covered" not in found
    open_ = PrivacyConfig(epsilon=8.0, measurements="report")
    assert "accuracies" in str(spent(RunConfig(rounds=10, privacy=open_))["not-covered"])


def test_a_budget_that_cannot_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"privacy.epsilon: 0.001"):
        noise_multiplier(0.001, 1e-12, 10)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"'flower-graph\[dp\]'"):
        accounted(1.0, 1e-5, 1)


def request(rows: np.ndarray, kind: str = "train", **config: Any) -> Message:
    identify(1)
    arrays = ArrayRecord({"public": Array(rows)})
    return Message(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}), 1, kind)


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def client(rows: np.ndarray, *others: str, **measured: Any) -> Callable[..., Message]:
    """Make a client that answers with rows, and with further arrays."""

    def answer(message: Message, context: Context) -> Message:
        records = {name: ArrayRecord({name: Array(np.ones(3))}) for name in others}
        content = RecordDict({"arrays": ArrayRecord({"public": Array(rows)}), **records})
        content["metrics"] = MetricRecord({"loss": 1.0} | measured)
        return Message(content, reply_to=message)

    return answer


def replies(norm: float = 1.0, multiplier: float = 1.0, releases: int = 1, **how: Any) -> Any:
    return PrivateReplies(ClientNoise(norm, 2 * norm * multiplier, releases, **how))


def rows_mod(deviation: float = 1.0, releases: int = 1, norm: float = 1.0) -> PrivateRows:
    return PrivateRows(ClientNoise(norm, deviation, releases))


ZEROS, ONES = np.zeros((2, 2)), np.ones((2, 2))


def released(mod: Any, before: np.ndarray, after: np.ndarray, own: Context | None = None) -> Any:
    reply = mod(request(before), own or context(), client(after))
    return reply.content["arrays"]["public"].numpy()


def test_the_change_is_clipped_and_the_noise_is_as_wide_as_was_asked_for() -> None:
    before = np.full((300, 40), 5.0)
    after = before.copy()
    after[0, 0] += 1000.0  # a change that is much longer than the norm of 3
    noise = released(replies(3.0, 0.5), before, after) - before
    assert abs(noise.std() / (0.5 * 2 * 3.0) - 1) < 0.05  # 12,000 draws: a deviation is 0.6 %
    assert abs(noise.mean()) < 0.2
    assert released(replies(3.0, 1e-9), before, after)[0, 0] == pytest.approx(8.0, abs=1e-6)
    short = before + np.eye(300, 40)[:1]
    assert np.allclose(released(replies(30.0, 1e-9), before, short), short, atol=1e-5)


def test_rows_of_a_cohort_are_clipped_and_noised_one_by_one() -> None:
    rows = np.array([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0], [-30.0, 40.0]], np.float32)
    before = rows.copy()
    found = released(rows_mod(1e-9), np.zeros_like(rows), rows)
    wanted = [[0.6, 0.8], [0.03, 0.04], [0.0, 0.0], [-0.6, 0.8]]
    assert np.allclose(found, wanted, atol=1e-6)
    assert np.array_equal(rows, before)  # the client's own state stays as it is
    noise = released(rows_mod(2.0), np.zeros((400, 50)), np.zeros((400, 50)))
    assert np.allclose(noise.std(1).mean(), 2.0, rtol=0.05)
    assert abs(np.corrcoef(noise[0::2].ravel(), noise[1::2].ravel())[0, 1]) < 0.06


@pytest.mark.parametrize("mod_of", [replies, rows_mod, None])
def test_no_seed_fixes_the_noise_and_none_is_disturbed(mod_of: Callable[..., Any] | None) -> None:
    found = []
    for _ in range(2):
        mean = ArrayRecord({"w": Array(np.zeros(4))})
        np.random.seed(7)
        CentralNoise(1.0, 1.0).blur(mean, 2)
        found.append(released(mod_of(), ZEROS, ONES) if mod_of else mean["w"].numpy())
        assert np.random.random() == np.random.RandomState(7).random_sample()
    assert not (found[0] == found[1]).any()


@pytest.mark.parametrize("mod_of", [replies, rows_mod])
def test_a_client_stops_when_its_budget_is_spent(mod_of: Callable[..., Any]) -> None:
    mod, own = mod_of(releases=2), context()
    for _ in range(2):
        released(mod, ZEROS, ONES, own)
    with pytest.raises(RefusedError, match=r"budget.*2.*2"):
        released(mod, ZEROS, ONES, own)
    released(mod, ZEROS, ONES)  # another client's is its own


TWICE, APART = (pack_integers(np.array(users)) for users in ([4, 4], [4, 5]))
FINISH = request(ZEROS, "train.finish")


@pytest.mark.parametrize(
    ("mod_of", "message", "answer", "said"),
    [
        # What cannot be clipped
        *((mod, request(ZEROS), client(np.array([[1, bad], [1, 1]])), "numbers")
          for mod in (replies, rows_mod) for bad in (np.nan, np.inf)),
        (replies, request(ZEROS), client(np.zeros((3, 2))), "6 numbers"),
        # Other actions send zeros or nothing
        *((mod, FINISH, client(ONES), r"train\.finish") for mod in (replies, rows_mod)),
        *((mod, FINISH, client(ZEROS), None) for mod in (replies, rows_mod)),
        # Several clients behind one reply
        (replies, request(ZEROS, clients=[3, 4]), client(ONES), r"\[3, 4\]"),
        (replies, request(ZEROS, clients=[3]), client(ONES), None),
        (replies, request(ZEROS), client(ONES, clients=2), "2 clients"),
        # A client that is named twice, and arrays that are not a row each
        (rows_mod, request(ONES, users=TWICE), client(ONES), "client"),
        (rows_mod, request(ONES, users=APART), client(ONES), None),
        (rows_mod, request(ZEROS), client(ONES, "weights"), "'weights'"),
    ],
)  # fmt: skip
def test_what_cannot_be_protected_is_not_sent(
    mod_of: Any, message: Message, answer: Any, said: str | None
) -> None:
    with nullcontext() if said is None else pytest.raises(RefusedError, match=said):
        assert mod_of()(message, context(), answer).has_content()


MEASURED = {"loss": [0.5], "disagreement": [0.25], "judged-val": [0.75], "num-examples": 2}
measuring = client(ONES, **MEASURED)


def measured(mod: Any, kind: str = "train", answer: Any = measuring) -> MetricRecord:
    return mod(request(ZEROS, kind), context(), answer).content["metrics"]


def test_what_a_client_measures_is_withheld_unless_it_is_to_be_reported() -> None:
    found = measured(replies())
    assert all(np.isnan(found[name]).all() for name in ("loss", "disagreement", "judged-val"))
    assert found["num-examples"] == 2
    assert math.isnan(measured(replies(), answer=client(ONES))["loss"])
    assert dict(measured(replies(withholds=False))) == MEASURED
    assert dict(measured(withhold_measurements, "evaluate")) == {"num-examples": 2}
    assert dict(measured(withhold_measurements)) == MEASURED


def test_in_the_central_form_losses_are_withheld_and_arrays_left_to_the_server() -> None:
    (mod,) = privacy_mods(PrivacyConfig(epsilon=1.0, form="central"), 10)
    assert np.isnan(measured(mod)["loss"]).all()
    assert (released(mod, ZEROS, ONES) == 1).all()
    central = PrivacyConfig(epsilon=1.0, form="central", measurements="report")
    assert privacy_mods(central, 10) == privacy_mods(PrivacyConfig(), 10) == []


SIZE = 4000
QUIET = 1e-9


def averaged(
    noise: CentralNoise | None, changes: list[float], nodes: int = 1, clients: int = 1
) -> tuple[np.ndarray, list[str]]:
    """Average a model of ones once; return it, and why SuperNodes were left out.

    Each adds a number to the first entry; the first weighs and speaks for as many as it likes.
    """

    class Mover(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.place = int(context.node_config["partition-id"])

        def fit(self, parameters, config):
            values, is_first = parameters[0].copy(), self.place == 0
            values[0] += changes[self.place]
            return [values], nodes if is_first else 1, {"clients": clients if is_first else 1}

        def evaluate(self, parameters, config):
            return 0.0, 1, {}

    strategy, reports = Simple(), list[RoundReport]()
    strategy.central_noise = noise
    grid = InProcessGrid(make_client_app(Mover), num_supernodes=len(changes))
    start = ArrayRecord({"w": Array(np.ones(SIZE, np.float32))})
    strategy.start(grid, start, 1, timeout=5.0, on_round=reports.append)
    return strategy.weights()["w"], [entry["reason"] for entry in reports[0].rejected]


def test_each_client_is_clipped_and_counts_once() -> None:
    """Nobody's nodes give it more weight: the sensitivity would grow with them."""
    found, _ = averaged(CentralNoise(2.0, QUIET), [100.0, 1.0, -1.0], 1000)
    assert found[0] == pytest.approx(1 + (2.0 + 1.0 - 1.0) / 3, abs=1e-5)
    assert np.allclose(found[1:], 1.0, atol=1e-5)
    assert averaged(None, [100.0, 1.0, -1.0], 1000)[0][0] > 90
    found, reasons = averaged(CentralNoise(1.0, QUIET), [0.0, 1.0])  # the first changes nothing
    assert (found[0], reasons) == (pytest.approx(1.5, abs=1e-5), [])
    found, reasons = averaged(CentralNoise(1.0, QUIET), [1.0, 0.5], clients=3)
    assert found[0] == pytest.approx(1.5, abs=1e-5) and "3 clients" in reasons[0]


@pytest.mark.parametrize(
    ("changes", "in_mean"), [([0.0] * 2, 2), ([0.0] * 5, 5), ([math.nan, 0.0, 0.0], 2)]
)
def test_the_noise_is_for_the_clients_in_the_mean(changes: list[float], in_mean: int) -> None:
    """Where one is missing, Flower's wrapper by itself would add noise for all that were asked."""
    found, reasons = averaged(CentralNoise(2.0, 0.5), changes)
    wanted = 0.5 * 2 * 2.0 / in_mean  # the multiplier, of a sensitivity of 2 C / n
    assert abs((found - 1).std() / wanted - 1) < 0.06  # 4,000 draws: a deviation is 1.1 %
    assert len(reasons) == len(changes) - in_mean and all("NaN" in each for each in reasons)


def test_it_is_built_from_the_budget() -> None:
    found = central_noise(PrivacyConfig(epsilon=3.0, clipping_norm=0.5, form="central"), 7)
    assert found == CentralNoise(0.5, noise_multiplier(3.0, 1e-5, 7))
    assert central_noise(PrivacyConfig(epsilon=3.0), 7) is None
    assert central_noise(PrivacyConfig(form="central"), 7) is None
