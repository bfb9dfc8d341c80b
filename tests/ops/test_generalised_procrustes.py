"""One reference for all: by hand, beside the form with pairs, and where few nodes are common."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from alignment_helpers import masks, normal, orthogonal, spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops import align_pairs, consensus

seeds = st.integers(0, 10**6)


def disagreement(x: Tensor, held: Tensor, found: Any) -> float:
    """Sum ``||X_i W_i - R||^2`` over the nodes held."""
    apart = (x @ found.rotations - found.reference) * held[:, :, None]
    return float(apart.square().sum())


def test_three_clients_by_hand():
    """Client 0's space is the reference's; the others' are turned by 90 degrees, and mirrored."""
    x = torch.tensor([[[1.0, 0], [0, 2]], [[0, 3], [-4, 0]], [[0, 5], [9, 0]]])
    found = consensus(x)
    torch.testing.assert_close(found.reference, torch.tensor([[3.0, 0], [0, 5]]))
    maps = torch.tensor([[[1.0, 0], [0, 1]], [[0, -1], [1, 0]], [[0, 1], [1, 0]]])
    torch.testing.assert_close(found.rotations, maps)
    torch.testing.assert_close(found.aligned, align_pairs(x))
    assert found.change < 1e-12
    # Client 2 turned: (-5, 0), (0, 9); the three nodes' sums are -1 and 15.
    only = consensus(x, rotations_only=True)
    torch.testing.assert_close(only.reference, torch.tensor([[-1 / 3, 0], [0, 5]]))
    torch.testing.assert_close(torch.linalg.det(only.rotations), torch.ones(3))


@settings(deadline=None, max_examples=30)
@given(seed=seeds, m=st.integers(2, 8), only=st.booleans())
def test_disagreement_never_grows(seed: int, m: int, only: bool):
    x, held = spaces(seed, m, 12, 3, noise=1.0), masks(seed, m, 12, 3)
    found = [
        consensus(x, held, iterations=steps, tolerance=0, rotations_only=only)
        for steps in range(1, 6)
    ]
    apart = [disagreement(x, held, one) for one in found]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(apart))
    if only:
        torch.testing.assert_close(torch.linalg.det(found[-1].rotations), torch.ones(m).double())


@settings(deadline=None, max_examples=30)
@given(seed=seeds, order=st.permutations(range(5)))
def test_neither_order_nor_a_clients_space_matters(seed: int, order: list[int]):
    x, held = spaces(seed, 5, 15, 3, noise=0.1), masks(seed, 5, 15, 3)
    wanted = consensus(x, held, iterations=300, tolerance=1e-12).aligned
    q = orthogonal(seed + 60, 5, 3, 3)
    found = consensus((x @ q)[order], held[order], iterations=300, tolerance=1e-12).aligned
    torch.testing.assert_close(found, (wanted @ q)[order], atol=1e-5, rtol=1e-5)


def test_a_chain_of_clients_reaches_from_end_to_end():
    """Clients 0 and 3 have no common node, yet all are in one space: the nodes' true geometry."""
    base = normal(0, 24, 3)
    x, held = base @ orthogonal(1, 4, 3, 3), torch.zeros(4, 24, dtype=torch.bool)
    for client in range(4):
        held[client, 5 * client : 5 * client + 9] = True
    found = consensus(x, held)
    torch.testing.assert_close(
        torch.cdist(found.reference, found.reference), torch.cdist(base, base)
    )
    torch.testing.assert_close(found.aligned, x * held[:, :, None])


def test_groups_without_common_nodes_have_references_of_their_own():
    """Two pairs of clients, and one alone with the last node: as if no other group was there."""
    x, held = spaces(0, 5, 20, 3, noise=0.3), torch.zeros(5, 20, dtype=torch.bool)
    groups = [([0, 2], slice(0, 9)), ([1, 4], slice(9, 19)), ([3], slice(19, 20))]
    for members, nodes in groups:
        held[members, nodes] = True
    found = consensus(x, held, iterations=1)
    for members, nodes in groups:
        alone = consensus(x[members, nodes], iterations=1)
        torch.testing.assert_close(found.reference[nodes], alone.reference)
        torch.testing.assert_close(found.rotations[members], alone.rotations)
        torch.testing.assert_close(found.aligned[members, nodes], alone.aligned)


def test_the_reference_begins_with_the_first_of_the_clients_with_most_nodes():
    """Where all agree but for their space, it stays in that client's space."""
    x, held = spaces(0, 4, 12, 3), torch.ones(4, 12, dtype=torch.bool)
    held[0, 7] = held[3, :2] = False
    found = consensus(x, held)
    torch.testing.assert_close(found.reference, x[1])
    assert not torch.allclose(found.rotations[2], torch.eye(3).double(), atol=0.1)


def test_it_stops_as_soon_as_it_has_settled():
    x = spaces(0, 4, 12, 3, noise=0.5)
    every = [consensus(x, iterations=steps, tolerance=0) for steps in range(1, 20)]
    first = next(one for one in every if one.change <= 1e-3)
    assert first.change < every[0].change / 2
    torch.testing.assert_close(consensus(x, tolerance=1e-3), first, rtol=0, atol=0)


def test_nodes_of_one_client_and_of_none():
    """Node 8 is client 0's alone, which bears on no map; nobody holds node 9."""
    x, held = spaces(0, 3, 10, 2, noise=0.3), torch.ones(3, 10, dtype=torch.bool)
    held[1:, 8] = held[:, 9] = False
    x[1:, 8] = x[:, 9] = torch.nan
    found = consensus(x, held)
    torch.testing.assert_close(found.aligned[0, 8], x[0, 8])
    assert not found.reference[9].any() and not found.aligned[:, 9].any()
    x[0, 8] *= 1000
    torch.testing.assert_close(consensus(x, held).rotations, found.rotations)


@pytest.mark.parametrize("shape", [(1, 5, 2), (3, 5, 2), (3, 1, 4)])
def test_zeros_and_single_nodes(shape: tuple[int, ...]):
    found = consensus(torch.zeros(shape))
    assert not found.reference.any() and not found.aligned.any() and found.change == 0
    assert torch.equal(found.rotations, torch.eye(shape[2]).expand(shape[0], -1, -1))
    x = normal(0, *shape)
    alone = consensus(x[:1])
    torch.testing.assert_close(alone.aligned, x[:1])
    torch.testing.assert_close(alone.reference, x[0])


def test_bad_settings_and_input_are_named():
    x = torch.zeros(3, 4, 2)
    with pytest.raises(ValueError, match="iterations = 0"):
        consensus(x, iterations=0)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"tolerance = {tolerance}"):
            consensus(x, tolerance=tolerance)
    with pytest.raises(ValueError, match="held: client 0"):
        consensus(x, torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"x\[0, 0, 0\] = nan"):
        consensus(x * torch.nan)
