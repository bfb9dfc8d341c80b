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


def settings(weight_decay: float = 5e-4, bias: bool = True) -> UserSettings:
    return UserSettings(SIZE, bias, weight_decay, 3, "holders")


def start_of(how: UserSettings) -> NDArray[np.float32]:
    return shared_linear_weight(FEATURES, how).numpy()[:FEATURES]


def user(count: int) -> NDArray[np.float32]:
    x = np.zeros(FEATURES, np.float32)
    x[np.random.default_rng(count).choice(FEATURES, count, replace=False)] = 1 / count
    return x


def run(x: NDArray[np.float32], how: UserSettings, noise: float = 0.0) -> list[Step]:
    """Let the real client train by gradients that look like those of a run."""
    cohort = LinearCohort(pack(torch.from_numpy(x[None]), bias=how.bias), how)
    rng, steps = np.random.default_rng(7), []
    for number in range(ROUNDS):
        rate = 0.1 * (1 - number / ROUNDS)  # as a schedule may have it
        gradient = None if number == 0 else (1e-2 * rng.normal(size=SIZE)).astype(np.float32)
        if gradient is not None:
            cohort.step(None, torch.from_numpy(gradient[None]), rate)
        latent = cohort.forward(None).numpy()[0] + noise * rng.normal(size=SIZE)
        steps.append(Step(gradient, None, latent.astype(np.float32), rate))
    return steps


@pytest.mark.parametrize("bias", [True, False])
def test_rows_move_as_the_clients_do(bias: bool) -> None:
    how, x = settings(bias=bias), user(5)
    steps = run(x, how)
    course = attack.row_course(start_of(how), 0.2, how.weight_decay, steps)
    expected = course[:, x > 0].sum(1) * 0.2 + attack.bias_course(how, steps)
    np.testing.assert_allclose(np.stack([s.latent for s in steps]), expected, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_few_words_are_found_exactly_and_so_is_their_value(count: int) -> None:
    how, x = settings(), user(count)
    candidates = [1 / number for number in range(1, 11)]
    scores, value = attack.sparse_from_sequence(start_of(how), how, run(x, how), candidates)
    assert value == pytest.approx(1 / count)
    assert set(np.argsort(-scores)[:count]) == set(np.flatnonzero(x))


def test_noise_leaves_a_guess() -> None:
    how = settings()
    right = []
    for count in range(3, 8):
        for _ in range(4):
            x = user(count)
            steps = run(x, how, noise=50.0)
            scores, _ = attack.sparse_from_sequence(start_of(how), how, steps, [1 / count])
            right += (x[np.argsort(-scores)[:count]] > 0).tolist()
    chance = 5 / FEATURES
    assert np.mean(right) < chance + 4 * np.sqrt(chance * (1 - chance) / len(right))


def test_without_weight_decay_later_rounds_tell_nothing_new() -> None:
    how, without = settings(), settings(weight_decay=0.0)
    equations = attack.equations(start_of(without), without, run(user(5), without), 0.2)
    # All rows move alike: besides the first latent's equations there is but their number.
    assert np.linalg.matrix_rank(equations, tol=1e-8) <= SIZE + 1
    with_decay = attack.equations(start_of(how), how, run(user(5), how), 0.2)
    assert np.linalg.matrix_rank(with_decay, tol=1e-8) > 2 * SIZE


def test_as_many_equations_as_features_give_them_away() -> None:
    rng = np.random.default_rng(0)
    start, x = rng.normal(size=(6, 6)), rng.normal(size=6)
    np.testing.assert_allclose(attack.least_squares(x @ start, start), x, atol=1e-9)
    np.testing.assert_allclose(attack.sparse_from_one(abs(x) @ start, start), abs(x), atol=1e-9)


def test_averaged_weights_are_taken_over() -> None:
    how = settings()
    average = np.full((FEATURES + 1, SIZE), np.nan)
    average[2] = 0.5
    steps = [Step(None, None, np.zeros(SIZE)), Step(None, average, np.zeros(SIZE))]
    course = attack.row_course(start_of(how), 1.0, how.weight_decay, steps)
    np.testing.assert_array_equal(course[1, 2], 0.5)
    np.testing.assert_array_equal(course[1, 3], course[0, 3])
    assert (attack.bias_course(how, steps) == 0).all()
