"""What Flower's accountant says of a budget, and the noise that is chosen by it."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from flower_graph.config.common import PrivacyConfig
from flower_graph.errors import ConfigError
from flower_graph.privacy.accountant import accounted, noise_multiplier, spent, spent_until

BUDGET = PrivacyConfig(epsilon=8.0, delta=1e-5, clipping_norm=3.0)


def exact_epsilon(multiplier: float, delta: float, rounds: int) -> float:
    """Balle and Wang (ICML 2018), theorem 8, for rounds that add up to one Gaussian release."""
    mu = math.sqrt(rounds) / multiplier

    def excess(epsilon: float) -> float:
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return float(norm.cdf(a) - math.exp(epsilon + norm.logcdf(b)) - delta)

    return float(brentq(excess, 0, 1e4))


@given(st.floats(0.3, 30.0), st.integers(1, 50))
def test_the_accountant_bounds_the_exact_budget_from_above(multiplier: float, rounds: int) -> None:
    found = accounted(multiplier, 1e-5, rounds)
    # Mironov's conversion, which every better one stays below: rho + 2 sqrt(rho log(1 / delta))
    rho = rounds / (2 * multiplier**2)
    assert exact_epsilon(multiplier, 1e-5, rounds) <= found
    assert found <= 1.01 * (rho + 2 * math.sqrt(rho * math.log(1e5)))


@pytest.mark.parametrize("rounds", [1, 10])
@pytest.mark.parametrize("epsilon", [0.5, 8.0, 1000.0])
def test_the_noise_is_the_least_within_the_budget(epsilon: float, rounds: int) -> None:
    found = noise_multiplier(epsilon, 1e-5, rounds)
    assert accounted(found, 1e-5, rounds) <= epsilon
    assert accounted(found * 0.999, 1e-5, rounds) > epsilon


def test_flowers_own_formula_promises_too_much_where_epsilon_is_large() -> None:
    def of_formula(epsilon: float) -> float:
        return exact_epsilon(math.sqrt(2 * math.log(1.25e5)) / epsilon, 1e-5, 1)

    assert of_formula(0.9) < 0.9
    assert of_formula(20.0) > 20.0


def test_what_is_reported() -> None:
    found = spent(BUDGET, 10)
    assert 7.99 < found["epsilon"] <= 8
    assert 1 < found["epsilon-of-a-round"] < 8
    assert found["delta"] == 1e-5
    assert found["noise"] == 2 * 3.0 * found["noise-multiplier"]
    assert "not-covered" not in found
    open_ = PrivacyConfig(epsilon=8.0, measurements="report")
    assert "accuracies" in spent(open_, 10)["not-covered"]


def test_a_budget_that_cannot_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"privacy.epsilon: 0.001 is less.*delta: 1e-12; at least"
    ):
        noise_multiplier(0.001, 1e-12, 10)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'flower-graph\[dp\]'"):
        accounted(1.0, 1e-5, 1)


def test_rounds_add_up_to_the_budget() -> None:
    so_far = [spent_until(BUDGET, 10, last)["epsilon"] for last in range(1, 11)]
    assert so_far == sorted(set(so_far))
    assert so_far[0] == spent(BUDGET, 10)["epsilon-of-a-round"]
    assert so_far[-1] == spent(BUDGET, 10)["epsilon"]
    # Composition of Gaussian noise: as one release with the noise over the root of the rounds.
    alone = accounted(spent(BUDGET, 10)["noise-multiplier"] / 2, 1e-5, 1)
    assert so_far[3] == pytest.approx(alone, rel=1e-9)
