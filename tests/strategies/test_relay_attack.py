"""A user's features from its latent vectors and gradients: what the attack computes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flower_graph.ops.active_rows import pack
from flower_graph.strategies.nfedgnn import attack
from flower_graph.strategies.nfedgnn.attack import Step
from flower_graph.strategies.nfedgnn.users import LinearCohort, UserSettings, shared_linear_weight

FEATURES, SIZE, ROUNDS = 60, 8, 12
HOW = UserSettings(SIZE, True, 5e-4, 3, "holders")


def start_of(how: UserSettings) -> NDArray[np.float64]:
    return shared_linear_weight(FEATURES, how).numpy().astype(float)


def user(count: int) -> NDArray[np.float32]:
    x = np.zeros(FEATURES, np.float32)
    x[np.random.default_rng(count).choice(FEATURES, count, replace=False)] = 1 / count
    return x


def run(x: NDArray[np.float32], how: UserSettings) -> list[Step]:
    """Let the real client train by gradients that look like those of a run."""
    cohort = LinearCohort(pack(torch.from_numpy(x[None]), bias=how.bias), how)
    cohort.hold(cohort.start())
    rng, steps = np.random.default_rng(7), []
    for number in range(ROUNDS):
        rate = 0.1 * (1 - number / ROUNDS)  # as a schedule may have it
        gradient = None if number == 0 else (1e-2 * rng.normal(size=SIZE)).astype(np.float32)
        if gradient is not None:
            cohort.step(None, torch.from_numpy(gradient[None]), rate)
        steps.append(Step(gradient, None, cohort.forward(None).numpy()[0], rate))
    return steps


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_few_words_are_found_exactly_and_so_is_their_value(count: int, bias: bool) -> None:
    how, x = HOW._replace(bias=bias), user(count)
    steps, candidates = run(x, how), [1 / number for number in range(1, 11)]
    rows = attack.course(start_of(how), 1 / count, how, steps)
    matrix, target = attack.equations(rows, np.stack([s.latent for s in steps]), FEATURES)
    np.testing.assert_allclose(matrix @ x, target, atol=1e-6)
    scores, value = attack.from_sequence(start_of(how), how, steps, candidates)
    assert value == pytest.approx(1 / count)
    assert set(np.argsort(-scores)[:count]) == set(np.flatnonzero(x))


@pytest.mark.parametrize(("decay", "least", "most"), [(0.0, 1, SIZE + 1), (5e-4, 2 * SIZE + 1, 96)])
def test_without_weight_decay_later_rounds_tell_nothing_new(
    decay: float, least: int, most: int
) -> None:
    how = HOW._replace(weight_decay=decay)
    rows = attack.course(start_of(how), 0.2, how, run(user(5), how))
    matrix, _ = attack.equations(rows, np.zeros((ROUNDS, SIZE)), FEATURES)
    # All rows move alike: besides the first latent's equations there is but their number.
    assert least <= np.linalg.matrix_rank(matrix, tol=1e-8) <= most


def test_averaged_weights_are_taken_over() -> None:
    average = np.full((FEATURES + 1, SIZE), np.nan)
    average[2] = 0.5
    steps = [Step(None, None, np.zeros(SIZE)), Step(None, average, np.zeros(SIZE))]
    rows = attack.course(start_of(HOW), 1.0, HOW, steps)
    assert (rows[1, 2] == 0.5).all() and (rows[1, [3, -1]] == rows[0, [3, -1]]).all()
