"""DeepWalk: the same bits in any process, going on from its state, and what it does to nodes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import DataError
from flower_graph.strategies.procrustes_alignment.deepwalk import (
    DeepWalk,
    DeepWalkSettings,
    negative_sampling_loss,
)

SETTINGS = DeepWalkSettings(dimension=4, walks=5, length=8, window=2, seed=3)
ROWS = np.array([0, 2])
# The same model and rounds as in `run_three_rounds`, in a process of its own.
FRESH = "from test_deepwalk import run_three_rounds; print(run_three_rounds())"


def cliques(size: int, alone: int = 0) -> tuple[Tensor, int]:
    """Make two cliques without an edge between them, and some nodes without any."""
    pairs = [(a + k * size, b + k * size) for k in (0, 1) for a, b in permutations(range(size), 2)]
    return torch.tensor(pairs).T, 2 * size + alone


def model(
    settings: DeepWalkSettings = SETTINGS, client: int = 0, *, size: int = 4, alone: int = 1
) -> DeepWalk:
    """Make an untrained model of two cliques."""
    return DeepWalk(*cliques(size, alone), settings, client)


def targets(shift: float = 0.0) -> NDArray[np.float32]:
    """Make targets for ``ROWS``, of the size that trained vectors have."""
    return np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4) + np.float32(shift)


def run_three_rounds() -> str:
    """Train three rounds and write every bit of the result."""
    walker = model()
    losses = [
        walker.learn(ROWS, None if t == 1 else targets(t / 10), server_round=t) for t in (1, 2, 3)
    ]
    return f"{losses} {walker.embed().tobytes().hex()}"


@pytest.mark.slow
def test_a_fresh_process_with_another_hash_seed_computes_the_same_bits():
    for hash_seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parent), *sys.path]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        run = subprocess.run(
            [sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == run_three_rounds()
        assert run.stderr == ""  # gensim has nothing to warn of


def test_a_model_made_anew_from_the_state_goes_on_with_the_same_bits():
    walker = model()
    walker.learn(ROWS, None, 1)
    state = walker.state_dict()
    anew = model()
    anew.load_state_dict(state)
    losses = [each.learn(ROWS, targets(), 2) for each in (walker, anew)]
    assert losses[0] == losses[1]
    assert np.array_equal(walker.embed(), anew.embed())
    # The saved state is not what training changes.
    assert not np.array_equal(walker.embed(), state["vectors"].numpy())


@pytest.mark.parametrize("what", ["seed", "client", "round"])
def test_walks_and_draws_depend_on(what: str) -> None:
    one, other = model(), model(client=int(what == "client"))
    if what == "seed":
        other = model(replace(SETTINGS, seed=4))
    other.load_state_dict(one.state_dict())  # the same start, so that only draws differ
    one.learn(ROWS, None, 1)
    other.learn(ROWS, None, 2 if what == "round" else 1)
    assert not np.array_equal(one.embed(), other.embed())


def test_clients_start_at_different_vectors_of_word2vecs_size():
    first, second = model().embed(), model(client=1).embed()
    assert first.shape == (9, 4) and first.dtype == np.float32
    assert not np.array_equal(first, second)
    assert 0.2 < np.abs(first).max() <= 1 / 4  # uniform in -1/d to 1/d


def test_public_rows_start_at_their_targets_and_others_where_they_were():
    """With steps of a billionth nothing moves that far that a float would show it."""
    still = replace(SETTINGS, learning_rate=1e-9, final_learning_rate=1e-9)
    walker = model(still)
    before = walker.embed()
    walker.learn(ROWS, targets(), 1)
    after = walker.embed()
    np.testing.assert_allclose(after[ROWS], targets(), atol=1e-6)
    others = np.setdiff1d(np.arange(9), ROWS)
    np.testing.assert_allclose(after[others], before[others], atol=1e-6)


def test_training_moves_rows_away_from_their_targets():
    walker = model()
    walker.learn(ROWS, targets(), 1)
    assert (np.abs(walker.embed()[ROWS] - targets()) > 1e-4).any(axis=1).all()


def test_steps_of_a_later_round_are_smaller_by_the_decay():
    """Contexts grow with the step, and vectors move by step times context: steps a quarter of the
    size, in round 3, change a sixteenth."""
    small = replace(SETTINGS, learning_rate=1e-4, final_learning_rate=1e-4)
    changes = []
    for decay in (1.0, 0.5):
        walker = model(replace(small, decay=decay))
        walker.learn(ROWS, targets(), 3)
        changes.append(walker.embed()[ROWS] - targets())
    np.testing.assert_allclose(changes[1], changes[0] / 16, atol=np.abs(changes[0]).max() / 100)


def test_a_node_without_edges_keeps_its_vector_or_its_target():
    walker = model(alone=2)
    before = walker.embed()
    walker.learn(np.array([8]), np.full((1, 4), 0.5, np.float32), 1)
    after = walker.embed()
    assert after[8].tolist() == [0.5] * 4 and np.array_equal(after[9], before[9])
    assert not np.array_equal(after[:8], before[:8])


def test_a_graph_without_edges_takes_targets_and_learns_nothing():
    walker = DeepWalk(torch.empty(2, 0, dtype=torch.long), 3, SETTINGS, 0)
    before = walker.embed()
    assert walker.learn(ROWS, targets(), 1) == 0.0
    assert np.array_equal(walker.embed()[ROWS], targets())
    assert np.array_equal(walker.embed()[1], before[1])


def test_two_cliques_come_apart_and_the_loss_falls():
    walker = model(replace(SETTINGS, walks=40, length=20), size=6, alone=0)
    losses = [walker.learn(ROWS, None, t) for t in (1, 2, 3)]
    # At contexts of zero, each of a pair's 6 terms is log 2.
    assert losses[2] < losses[1] < 6 * math.log(2)
    unit = walker.embed() / np.linalg.norm(walker.embed(), axis=1, keepdims=True)
    cosine, clique = unit @ unit.T, np.arange(12) // 6
    inside = clique[:, None] == clique
    assert cosine[inside].min() > cosine[~inside].max() + 0.2


def test_loss_of_two_pairs_by_hand():
    """Products ln 3 and 0: σ is 3/4 and 1/2, so -log σ(v·c) is log 4/3, and log 2 twice."""
    vectors = np.array([[math.log(3), 0], [0, 1]], np.float32)
    near = np.array([[1, 5], [7, 0]], np.float32)
    far = np.array([[[-1, 0]], [[3, 0]]], np.float32)  # -v·f is ln 3, and 0
    by_hand = (2 * math.log(4 / 3) + 2 * math.log(2)) / 2
    assert negative_sampling_loss(vectors, near, far) == pytest.approx(by_hand, rel=1e-6)


def test_embeddings_and_states_are_copies():
    walker = model()
    walker.embed()[:] = 7
    walker.state_dict()["vectors"].fill_(7)
    state = walker.state_dict()
    walker.load_state_dict(state)
    state["vectors"].fill_(7)
    assert np.abs(walker.embed()).max() < 1


@pytest.mark.parametrize(
    ("rows", "wrong", "message"),
    [
        (ROWS, np.zeros((2, 3), np.float32), r"shape \(2, 3\).*client 6.*one row of 4 numbers"),
        (ROWS, np.zeros((1, 4), np.float32), r"shape \(1, 4\) for rows of shape \(2,\)"),
        (np.array([0, 9]), targets(), "rows 0 to 9 at client 6: 0 to 8 exist"),
        (np.array([-1, 2]), targets(), "rows -1 to 2"),
        (ROWS, targets() * np.array([[1], [np.nan]], np.float32), "row 2 at client 6.*not finite"),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_change_nothing(
    rows: NDArray[np.int64], wrong: NDArray[np.float32], message: str
) -> None:
    walker = model(client=6)
    before = walker.embed()
    with pytest.raises(ValueError, match=message):
        walker.learn(rows, wrong, 1)
    assert np.array_equal(walker.embed(), before)


def test_an_empty_graph_and_a_state_of_another_size_are_refused():
    with pytest.raises(DataError, match="client 5 has 0 nodes"):
        DeepWalk(torch.empty(2, 0, dtype=torch.long), 0, SETTINGS, 5)
    with pytest.raises(ValueError, match=r"client 0 have shape \(8, 4\), not \(9, 4\)"):
        model().load_state_dict(model(alone=0).state_dict())
    with pytest.raises(ValueError, match="vectors of client 0 have shape None"):
        model().load_state_dict({})


@pytest.mark.parametrize("length", [1, 10_001])
def test_walks_that_gensim_cannot_take_whole_are_refused(length: int) -> None:
    with pytest.raises(
        ValueError, match=rf"deepwalk\.length: {length} is not allowed; it must be at least 2"
    ):
        DeepWalkSettings(length=length)
