"""The map between two spaces: known ones, scipy's, all rotations of the plane, missing data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from alignment_helpers import DOUBLE, normal, orthogonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops import orthogonal_procrustes
from flower_graph.ops.procrustes import LIMIT

seeds = st.integers(0, 10**6)


def error(w: Tensor) -> float:
    return float((w.mT @ w - torch.eye(w.shape[-1], dtype=w.dtype)).abs().max())


@settings(deadline=None, max_examples=40)
@given(seed=seeds, d=st.integers(1, 16), noise=st.sampled_from([0.0, 0.1]))
def test_a_known_map_is_recovered(seed: int, d: int, noise: float):
    """The error of ``d`` numbers with noise, known by 2,000 nodes, is the noise / sqrt(2000)."""
    x, q = normal(seed, 2000, d), orthogonal(seed, d, d)
    w = orthogonal_procrustes(x, x @ q + noise * normal(seed + 2, 2000, d))
    assert error(w) < 1e-12
    bound = 6 * noise * math.sqrt(d / 2000) + 1e-12
    assert float(torch.linalg.matrix_norm(w - q, 2)) < bound


@settings(deadline=None, max_examples=60)
@given(seed=seeds, d=st.integers(1, 8), more=st.integers(0, 20))
def test_scipy_agrees(seed: int, d: int, more: int):
    x, y = normal(seed, d + more, d).numpy(), normal(seed + 7, d + more, d).numpy()
    wanted, _ = scipy.linalg.orthogonal_procrustes(x, y)
    np.testing.assert_allclose(orthogonal_procrustes(x, y), wanted, atol=1e-8)


def test_a_quarter_turn_and_a_mirror_by_hand():
    x = torch.tensor([[1.0, 0], [0, 2]])
    turned, mirrored = torch.tensor([[0.0, 3], [-4, 0]]), torch.tensor([[0.0, 3], [4, 0]])
    quarter, swap = torch.tensor([[0.0, 1], [-1, 0]]), torch.tensor([[0.0, 1], [1, 0]])
    torch.testing.assert_close(orthogonal_procrustes(x, turned), quarter)
    torch.testing.assert_close(orthogonal_procrustes(x, mirrored), swap)
    # Node 0 adds 3 s and node 1 adds -8 s for a turn by the sine s: back by a quarter.
    only = orthogonal_procrustes(x, mirrored, rotations_only=True)
    torch.testing.assert_close(only, -quarter)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, p=st.integers(1, 6))
def test_no_rotation_of_the_plane_is_better(seed: int, p: int):
    x, y = normal(seed, p, 2), normal(seed + 3, p, 2)
    w = orthogonal_procrustes(x, y, rotations_only=True)
    assert torch.linalg.det(w) == pytest.approx(1)
    angle = torch.linspace(0, 2 * math.pi, 3601, dtype=DOUBLE)
    cos, sin = angle.cos(), angle.sin()
    turns = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)
    distance = torch.linalg.matrix_norm(x @ turns - y)
    found = float(torch.linalg.matrix_norm(x @ w - y))
    assert found <= float(distance.min()) + 1e-12
    assert found == pytest.approx(float(distance.min()), abs=1e-2)  # the grid has it, nearly
    free = torch.linalg.matrix_norm(x @ orthogonal_procrustes(x, y) - y)
    assert float(free) <= found + 1e-12


@settings(deadline=None, max_examples=60)
@given(seed=seeds, d=st.integers(1, 7), p=st.integers(1, 9), only=st.booleans())
def test_exactly_orthogonal_for_any_number_of_nodes(seed: int, d: int, p: int, only: bool):
    x, y = normal(seed, p, d), normal(seed + 1, p, d)
    w = orthogonal_procrustes(x, y, rotations_only=only)
    assert error(w) < 1e-12
    assert error(orthogonal_procrustes(x.float(), y.float(), rotations_only=only)) < 1e-6
    if only:
        assert torch.linalg.det(w) == pytest.approx(1)
    else:  # the data get all that they can: the sum of the singular values
        most = float(torch.linalg.svdvals(x.mT @ y).sum())
        assert float((w * (x.mT @ y)).sum()) == pytest.approx(most)


def test_one_node_by_hand():
    """The other direction is the one that keeps the trace high: 0.6 + 0.6, and -0.6 + 0.6."""
    x = torch.tensor([[2.0, 0]], dtype=DOUBLE)
    near, far = (torch.tensor([[a, 4.0]], dtype=DOUBLE) for a in (3, -3))
    turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=DOUBLE)
    mirror = torch.tensor([[-0.6, 0.8], [0.8, 0.6]], dtype=DOUBLE)
    torch.testing.assert_close(orthogonal_procrustes(x, near), turn)
    torch.testing.assert_close(orthogonal_procrustes(x, far), mirror)
    only = torch.tensor([[-0.6, 0.8], [-0.8, -0.6]], dtype=DOUBLE)
    torch.testing.assert_close(orthogonal_procrustes(x, far, rotations_only=True), only)
    # Rows that are all alike say as much as one.
    torch.testing.assert_close(orthogonal_procrustes(x.expand(9, 2), near.expand(9, 2)), turn)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, d=st.integers(2, 7), rank=st.integers(0, 5), only=st.booleans())
def test_what_is_unknown_is_nearest_to_the_identity(seed: int, d: int, rank: int, only: bool):
    """No other turn of the unknown directions has a larger trace."""
    rank = min(rank, d - 1)
    x, y = normal(seed, 9, rank) @ normal(seed + 1, rank, d), normal(seed + 2, 9, d)
    w = orthogonal_procrustes(x, y, rotations_only=only)
    left, _, right = torch.linalg.svd(x.mT @ y)
    for other in orthogonal(seed, 200, d - rank, d - rank):
        turn = torch.block_diag(torch.eye(rank, dtype=DOUBLE), other)
        candidate = left @ turn @ right
        assert torch.allclose(x @ candidate, x @ w)
        if not only or torch.linalg.det(candidate) > 0:
            assert candidate.trace() <= w.trace() + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("only", [False, True])
def test_no_information_is_the_identity(dtype: torch.dtype, only: bool):
    x, zeros = normal(0, 1000, 4).to(dtype), torch.zeros(1000, 4, dtype=dtype)
    same = torch.full((1000, 4), 0.1, dtype=dtype)
    centred = torch.cat([x[:500], -x[:500].flip(0)])  # its sum with `same` is rounding
    assert (same.double().mT @ centred.double()).abs().max() < 1e-10
    for source, target in ((x, zeros), (zeros, x), (zeros, zeros), (same, centred)):
        w = orthogonal_procrustes(source, target, rotations_only=only)
        torch.testing.assert_close(w, torch.eye(4, dtype=dtype))


def test_rounding_is_no_information():
    """Rank 1 in float64 is rank 1 in float32, although its numbers are rounded."""
    x, y = normal(0, 300, 1) @ normal(1, 1, 5), normal(2, 300, 5)
    found = orthogonal_procrustes(x.float(), y.float())
    torch.testing.assert_close(found, orthogonal_procrustes(x, y).float(), atol=1e-5, rtol=0)


def test_a_mirror_costs_nothing_in_a_direction_without_data():
    """The data want a mirror; a rotation has another one where all embeddings are zero."""
    for seed in range(30):
        mirror, axes = orthogonal(seed, 4, 4), orthogonal(seed + 5, 7, 7)
        mirror[0] *= -torch.sign(torch.linalg.det(mirror))
        x = normal(seed, 30, 4)
        source, target = x @ axes[:4], x @ mirror @ axes[:4]
        w = orthogonal_procrustes(source, target, rotations_only=True)
        torch.testing.assert_close(source @ w, target)
        assert torch.linalg.det(w) == pytest.approx(1)
        # Two of the three other directions stay as they were, one turns round.
        assert (axes[4:] @ w @ axes[4:].T).trace() == pytest.approx(1)


def test_leading_axes_are_a_batch():
    """With a degenerate pair among them, and one target for several sources."""
    x, y = normal(0, 2, 3, 6, 4), normal(1, 3, 6, 4)
    x[1, 2, :, 1:] = 0
    w = orthogonal_procrustes(x, y)
    assert w.shape == (2, 3, 4, 4)
    for i, j in np.ndindex(2, 3):
        torch.testing.assert_close(w[i, j], orthogonal_procrustes(x[i, j], y[j]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_given_comes_back(dtype: Any, request: pytest.FixtureRequest):
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)  # or PyTorch warns of the first read-only array only
    x, y = normal(0, 5, 3).numpy().astype(dtype), normal(1, 5, 3).numpy().astype(dtype)
    w = orthogonal_procrustes(x, y)
    tensor = orthogonal_procrustes(torch.tensor(x).requires_grad_(), torch.tensor(y))
    assert isinstance(w, np.ndarray) and isinstance(tensor, Tensor)
    assert w.dtype == dtype == tensor.numpy().dtype
    np.testing.assert_array_equal(w, tensor.numpy())
    frozen = np.frombuffer(x.tobytes(), dtype).reshape(x.shape)
    for other in (np.asfortranarray(x), x.astype(x.dtype.newbyteorder(">")), x[::-1][::-1], frozen):
        np.testing.assert_array_equal(orthogonal_procrustes(other, y), w)


X = np.zeros((4, 3))


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (X, np.zeros((4, 2)), r"source \(4, 3\) and target \(4, 2\): the same nodes and dim"),
        (X, np.zeros((5, 3)), r"source \(4, 3\) and target \(5, 3\): the same nodes"),
        (X[0], X[0], r"source of shape \(3,\) is not allowed: \[..., p, d\] is"),
        (X[:0], X[:0], r"source of shape \(0, 3\) .* at least one node"),
        (X[:, :0], X[:, :0], r"source of shape \(4, 0\) .* and one dimension"),
        (np.zeros((2, 4, 3)), np.zeros((3, 4, 3)), r"\(2, 4, 3\) and target \(3, 4, 3\): leading"),
        (X, X.astype(np.float32), r"source torch.float64 and target torch.float32: one dtype"),
        (X.astype(int), X, r"source: int64 is not allowed; float32 and float64"),
        (X, X.astype(np.float16), r"target: float16 is not allowed"),
        (X.tolist(), X, r"source: list is not allowed"),
        (X, np.where(np.eye(4, 3) > 0, np.nan, 0), r"target\[0, 0\] = nan: finite"),
        (np.full((4, 3), -np.inf), X, r"source\[0, 0\] = -inf: finite numbers below 1e\+100"),
        (X, np.full((4, 3), LIMIT), r"target\[0, 0\] = 1e\+100: finite numbers below 1e\+100"),
    ],
)
def test_bad_input_is_named(source: Any, target: Any, said: str):
    with pytest.raises(ValueError, match=said):
        orthogonal_procrustes(source, target)
