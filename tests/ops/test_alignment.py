"""Means in each client's space: by hand, against a plain loop, and what must not change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from alignment_helpers import DOUBLE, masks, normal, orthogonal, spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops import align_pairs, alignment_precision, consensus, orthogonal_procrustes
from flower_graph.ops import alignment as module

seeds = st.integers(0, 10**6)
# Client 1's space is client 0's turned by 90 degrees, client 2's is mirrored.
THREE = torch.tensor([[[1.0, 0], [0, 2]], [[0, 3], [-4, 0]], [[0, 5], [9, 0]]])


def test_three_clients_by_hand():
    """In client 0's space they have (1, 0), (3, 0), (5, 0) of node 0, (0, 2), (0, 4), (0, 9)."""
    wanted = torch.tensor([[[3.0, 0], [0, 5]], [[0, 3], [-5, 0]], [[0, 3], [5, 0]]])
    torch.testing.assert_close(align_pairs(THREE), wanted)
    assert torch.equal(align_pairs(THREE[:1]), THREE[:1])


def test_three_clients_with_rotations_only_by_hand():
    """Client 2 turns: into space 0 its nodes come as (-5, 0), (0, 9), into 1 as (0, -5), (-9, 0).

    0 and 1 come into its own as (0, -1), (2, 0) and (0, -3), (4, 0).
    """
    third = 1 / 3
    wanted = torch.tensor([[[-third, 0], [0, 5]], [[0, -third], [-5, 0]], [[0, third], [5, 0]]])
    torch.testing.assert_close(align_pairs(THREE, rotations_only=True), wanted)


def test_three_clients_with_different_nodes_by_hand():
    """Client 2 lacks node 1, whose mean is over two: (0, 2) and (0, 4). Nobody holds node 2."""
    x = torch.full((3, 3, 2), torch.nan)
    x[:, :2] = THREE
    held = torch.tensor([[True, True, False], [True, True, False], [True, False, False]])
    wanted = torch.tensor([[[3.0, 0], [0, 3]], [[0, 3], [-3, 0]], [[0, 3], [0, 0]]])
    aligned = align_pairs(x, held)
    torch.testing.assert_close(aligned[:, :2], wanted)
    assert not aligned[:, 2].any()


def test_clients_without_common_nodes_keep_their_own():
    x = normal(0, 3, 6, 2)
    held = torch.zeros(3, 6, dtype=torch.bool)
    held[:2, :4] = held[2, 4:] = True
    found = align_pairs(x, held)
    assert torch.equal(found[2, 4:], x[2, 4:])
    torch.testing.assert_close(found[:2, :4], align_pairs(x[:2, :4]))


def test_what_a_client_has_of_other_nodes_does_not_drown_the_common_ones():
    """Zero is relative to the embeddings of the common nodes, not to all of a client's."""
    x, held = spaces(0, 2, 12, 3, noise=0.3), torch.ones(2, 12, dtype=torch.bool)
    for client in (0, 1):
        held[1 - client, 10 + client] = False
        x[client, 10 + client] *= 1e20
    torch.testing.assert_close(align_pairs(x, held)[:, :10], align_pairs(x[:, :10]))


def slow(x: Tensor, held: Tensor) -> Tensor:
    """Align one pair of clients after the other, by scipy."""
    out = torch.zeros_like(x)
    for i, own in enumerate(held):
        for j, other in enumerate(held):
            both = own & other
            w = np.eye(x.shape[2])
            if i != j:
                w, _ = scipy.linalg.orthogonal_procrustes(x[j, both].numpy(), x[i, both].numpy())
            out[i, both] += x[j, both] @ torch.tensor(w)
        out[i, own] /= held[:, own].sum(0)[:, None]
    return out


@settings(deadline=None, max_examples=40)
@given(seed=seeds, m=st.integers(1, 6), d=st.integers(1, 5), more=st.integers(0, 20))
def test_equals_a_plain_loop(seed: int, m: int, d: int, more: int):
    x, held = spaces(seed, m, 2 * d + more, d, noise=1.0), masks(seed, m, 2 * d + more, d)
    torch.testing.assert_close(align_pairs(x, held), slow(x, held), atol=1e-7, rtol=1e-7)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, m=st.integers(2, 5), d=st.integers(1, 5), client=st.integers(0, 4))
def test_a_turn_of_one_clients_space_turns_its_means_only(seed: int, m: int, d: int, client: int):
    client, q = client % m, orthogonal(seed + 50, d, d)
    x, held = spaces(seed, m, 3 * d, d, noise=0.5), masks(seed, m, 3 * d, d)
    turned, wanted = x.clone(), align_pairs(x, held)
    turned[client] @= q
    wanted[client] @= q
    torch.testing.assert_close(align_pairs(turned, held), wanted, atol=1e-7, rtol=1e-7)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, order=st.permutations(range(5)), size=st.integers(1, 7))
def test_neither_the_order_of_clients_nor_of_blocks_matters(seed: int, order: list[int], size: int):
    x, held = spaces(seed, 5, 12, 3, noise=0.5), masks(seed, 5, 12, 3)
    wanted = align_pairs(x, held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_COLUMNS", 3 * size)
        found = align_pairs(x[order], held[order])
    torch.testing.assert_close(found, wanted[order], atol=1e-7, rtol=1e-7)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, m=st.integers(1, 5), d=st.integers(1, 6), u=st.integers(1, 9))
def test_a_mask_that_all_share_is_a_subset_of_the_nodes(seed: int, m: int, d: int, u: int):
    """Also with fewer nodes than dimensions, where part of each map is unknown."""
    x, chosen = spaces(seed, m, u, d, noise=0.5), normal(seed + 1, u) > 0
    chosen[0] = True
    found = align_pairs(x, chosen.expand(m, -1))
    torch.testing.assert_close(found[:, chosen], align_pairs(x[:, chosen]), atol=1e-7, rtol=1e-7)
    assert not found[:, ~chosen].any()


@pytest.mark.parametrize("scale", [1e-90, 1e97])
def test_very_small_and_very_large_numbers(scale: float):
    x, held = spaces(0, 3, 12, 3, noise=0.3), masks(0, 3, 12, 3)
    for align in (align_pairs, lambda *given: consensus(*given).aligned):
        found = align(x * scale, held) / scale
        torch.testing.assert_close(found, align(x, held))
        assert found.is_contiguous()


def test_clients_that_agree_but_for_their_space_get_their_own_back():
    x = spaces(0, 4, 30, 5)
    torch.testing.assert_close(align_pairs(x), x)
    only = orthogonal(3, 4, 5, 5)
    only[torch.linalg.det(only) < 0, 0] *= -1
    turned = x[0] @ only
    torch.testing.assert_close(align_pairs(turned, rotations_only=True), turned)


def test_a_collapsed_client_takes_part_as_the_formula_says():
    """Zeros add nothing but their weight: the others' means are two thirds of what they were."""
    x = spaces(0, 3, 30, 5, noise=0.2)
    x[2] = 0
    found = align_pairs(x)
    torch.testing.assert_close(found[:2], align_pairs(x[:2]) * 2 / 3)
    torch.testing.assert_close(found[2], (x[0] + x[1]) / 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_is_torch(dtype: Any):
    x, held = spaces(0, 4, 12, 3, noise=0.3).numpy().astype(dtype), masks(0, 4, 12, 3)
    found, tensor = align_pairs(x, held.numpy()), align_pairs(torch.tensor(x), held)
    assert isinstance(found, np.ndarray) and found.dtype == dtype == tensor.numpy().dtype
    np.testing.assert_array_equal(found, tensor.numpy())


X, HELD = np.zeros((3, 4, 2)), np.ones((3, 4), bool)


@pytest.mark.parametrize(
    ("x", "held", "said"),
    [
        (X[0], None, r"x of shape \(4, 2\): \[clients, nodes, dimensions\] is needed"),
        (X[:0], None, r"x of shape \(0, 4, 2\) is not allowed"),
        (X, HELD[:2], r"held is torch.bool of shape \(2, 4\): bool of shape \(3, 4\)"),
        (X, HELD.astype(int), r"held is torch.int64 of shape \(3, 4\): bool"),
        (X, HELD & (np.arange(3) != 1)[:, None], "held: client 1 holds 0 nodes; at least 1"),
        (np.where(np.arange(3) == 2, np.nan, 0).repeat(8).reshape(X.shape), None, r"x\[2, 0, 0\]"),
        (np.where(np.arange(3) == 1, np.inf, 0).repeat(8).reshape(X.shape), HELD, r"x\[1, 0, 0\]"),
    ],
)
def test_bad_input_is_named(x: Any, held: Any, said: str):
    with pytest.raises(ValueError, match=said):
        align_pairs(x, held)


def test_precision_by_hand():
    """Rows at 0, 1, 2, 3; queries 0 and 1 have changed places.

    Query 0, at 1, has row 1 before its own, and row 2 as near as that; query 1, at 0, has row 0
    before its own.
    """
    target, one = torch.arange(4.0, dtype=DOUBLE)[:, None], torch.eye(1, dtype=DOUBLE)
    assert alignment_precision(target, target, one) == {1: 1.0, 5: 1.0, 10: 1.0}
    assert alignment_precision(-target, target, -one, [1]) == {1: 1.0}
    found = alignment_precision(target[[1, 0, 2, 3]], target, one, [1, 2, 3])
    assert found == {1: 0.5, 2: (0.5 + 1 + 1 + 1) / 4, 3: 1.0}


@pytest.mark.parametrize("collapsed", ["source", "target"])
def test_precision_without_information_is_chance(collapsed: str):
    x = normal(0, 40, 3).float()
    point = torch.full((40, 3), 0.1)
    pair = (point, x) if collapsed == "source" else (x, point)
    found = alignment_precision(*pair, torch.eye(3))
    assert found == pytest.approx({1: 1 / 40, 5: 5 / 40, 10: 10 / 40})


@settings(deadline=None, max_examples=50)
@given(
    seed=seeds, p=st.integers(1, 12), d=st.integers(1, 3), k=st.integers(1, 14), block=st.booleans()
)
def test_precision_equals_counting(seed: int, p: int, d: int, k: int, block: bool):
    """Small whole numbers, so that ties are many, and a turned space, so that they are rounded."""
    q = orthogonal(seed, d, d)
    query, rows = normal(seed, p, d).round(), normal(seed + 1, p, d).round()
    shares = []
    for u in range(p):
        distance = (rows - query[u]).square().sum(1)
        nearer, equal = int((distance < distance[u]).sum()), int((distance == distance[u]).sum())
        shares.append(min(max((k - nearer) / equal, 0), 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_DISTANCES", 2 * p if block else 10**6)
        found = alignment_precision(query, rows @ q, q, [k])
    assert found[k] == pytest.approx(sum(shares) / p)


def test_precision_falls_with_noise():
    base = normal(0, 200, 8)
    found = []
    for noise in (0.01, 0.5, 50.0):
        x = base @ orthogonal(1, 8, 8) + noise * normal(2, 200, 8)
        found.append(alignment_precision(x, base, orthogonal_procrustes(x, base))[1])
    assert found[0] == 1 > found[1] > 0.5 > 0.1 > found[2]


@pytest.mark.parametrize(
    ("shapes", "ks", "said"),
    [
        (((4, 3), (5, 3), (3, 3)), [1], r"source \(4, 3\), target \(5, 3\), rotation \(3, 3\)"),
        (((4, 3), (4, 3), (2, 2)), [1], r"rotation \(2, 2\): \[p, d\], \[p, d\] and \[d, d\]"),
        (((2, 4, 3), (2, 4, 3), (3, 3)), [1], r"\[p, d\] and \[d, d\] are needed"),
        (((4, 3), (4, 3), (3, 3)), [5, 0], "k = 0: at least 1 is needed"),
    ],
)
def test_precision_refuses(shapes: Any, ks: list[int], said: str):
    with pytest.raises(ValueError, match=said):
        alignment_precision(*(torch.zeros(shape) for shape in shapes), ks)


def test_precision_refuses_numbers_that_are_none():
    x = np.zeros((4, 2))
    with pytest.raises(ValueError, match=r"rotation\[0, 1\] = nan"):
        alignment_precision(x, x, np.array([[1.0, np.nan], [0, 1]]))
