"""Maps between two spaces, and means in each client's: by hand, by scipy, and with missing data."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops import procrustes as module
from flower_graph.ops.procrustes import (
    LIMIT,
    align_pairs,
    alignment_precision,
    consensus,
    orthogonal_procrustes,
)

seeds = st.integers(0, 10**6)
DOUBLE = torch.float64


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def orthogonal(seed: int, *shape: int) -> Tensor:
    """Draw orthogonal matrices: reflections are as frequent as rotations."""
    q: Tensor = torch.linalg.qr(normal(seed, *shape))[0]
    return q * torch.sign(normal(seed + 1, *shape[:-2], 1, shape[-1]))


def spaces(seed: int, m: int, u: int, d: int, noise: float = 0.0) -> Tensor:
    """Draw embeddings [m, u, d] of the same nodes by clients that each have their own space."""
    base = normal(seed, u, d)
    return (base + noise * normal(seed + 10, m, u, d)) @ orthogonal(seed + 20, m, d, d)


def masks(seed: int, m: int, u: int, d: int) -> Tensor:
    """Draw who holds what [m, u], so that all share the first 2 d nodes and any of the others."""
    held = normal(seed + 30, m, u) > 0
    held[:, : 2 * d] = True
    return held


def error(w: Tensor) -> float:
    return float((w.mT @ w - torch.eye(w.shape[-1], dtype=w.dtype)).abs().max())


@settings(deadline=None, max_examples=60)
@given(seed=seeds, d=st.integers(1, 7), p=st.integers(1, 9))
def test_exactly_orthogonal_for_any_number_of_nodes(seed: int, d: int, p: int):
    x, y = normal(seed, p, d), normal(seed + 1, p, d)
    w = orthogonal_procrustes(x, y)
    assert error(w) < 1e-12
    assert error(orthogonal_procrustes(x.float(), y.float())) < 1e-6
    # The data get all that they can: the sum of the singular values.
    most = float(torch.linalg.svdvals(x.mT @ y).sum())
    assert float((w * (x.mT @ y)).sum()) == pytest.approx(most)


@pytest.mark.parametrize("scale", [1e-120, 1.0, 1e120])
@pytest.mark.parametrize(
    ("d", "smallest"), [(1, 1.0), (2, 0.3), (16, 1e-2), (64, 1e-4), (128, 0.9)]
)
def test_regular_products_keep_their_singular_vectors(d: int, smallest: float, scale: float):
    left, right = orthogonal(1, 3, d, d), orthogonal(2, d, d)
    values = torch.ones(3, d, dtype=DOUBLE)
    values[1, -1], values[2] = smallest, smallest  # the last one, and all but the first
    values[2, 0] = 1
    product = scale * (left * values[:, None] @ right)
    w = module.nearest_orthogonal(product, product.new_zeros(3))
    torch.testing.assert_close(w, left @ right, atol=1e-11, rtol=0)
    assert error(w) < 1e-13


@settings(deadline=None, max_examples=40)
@given(seed=seeds, d=st.integers(2, 7), rank=st.integers(0, 5))
def test_what_is_unknown_is_nearest_to_the_identity(seed: int, d: int, rank: int):
    """No other turn of the unknown directions has a larger trace."""
    rank = min(rank, d - 1)
    x, y = normal(seed, 9, rank) @ normal(seed + 1, rank, d), normal(seed + 2, 9, d)
    w = orthogonal_procrustes(x, y)
    left, _, right = torch.linalg.svd(x.mT @ y)
    for other in orthogonal(seed, 200, d - rank, d - rank):
        turn = torch.block_diag(torch.eye(rank, dtype=DOUBLE), other)
        candidate = left @ turn @ right
        assert torch.allclose(x @ candidate, x @ w)
        assert candidate.trace() <= w.trace() + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_no_information_is_the_identity(dtype: torch.dtype):
    x, zeros = normal(0, 1000, 4).to(dtype), torch.zeros(1000, 4, dtype=dtype)
    same = torch.full((1000, 4), 0.1, dtype=dtype)
    centred = torch.cat([x[:500], -x[:500].flip(0)])  # its sum with `same` is rounding
    assert (same.double().mT @ centred.double()).abs().max() < 1e-10
    for source, target in ((x, zeros), (zeros, x), (zeros, zeros), (same, centred)):
        w = orthogonal_procrustes(source, target)
        torch.testing.assert_close(w, torch.eye(4, dtype=dtype))
    # Rank 1 in float64 is rank 1 in float32, although its numbers are rounded.
    x, y = normal(0, 300, 1) @ normal(1, 1, 5), normal(2, 300, 5)
    found = orthogonal_procrustes(x.to(dtype), y.to(dtype))
    torch.testing.assert_close(found.double(), orthogonal_procrustes(x, y), atol=1e-5, rtol=0)


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


# Means of several clients ------------------------------------------------------------------------

# Client 1's space is client 0's turned by 90 degrees, client 2's is mirrored.
THREE = torch.tensor([[[1.0, 0], [0, 2]], [[0, 3], [-4, 0]], [[0, 5], [9, 0]]])


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


@settings(deadline=None, max_examples=50)
@given(
    seed=seeds,
    m=st.integers(1, 6),
    d=st.integers(1, 5),
    more=st.integers(0, 20),
    size=st.integers(1, 7),
)
def test_equals_a_plain_loop_in_blocks_of_any_size(seed: int, m: int, d: int, more: int, size: int):
    x, held = spaces(seed, m, 2 * d + more, d, noise=1.0), masks(seed, m, 2 * d + more, d)
    x[~held] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_COLUMNS", d * size)
        torch.testing.assert_close(align_pairs(x, held), slow(x, held), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("scale", [1e-90, 1e97])
def test_very_small_and_very_large_numbers(scale: float):
    x, held = spaces(0, 3, 12, 3, noise=0.3), masks(0, 3, 12, 3)
    for align in (align_pairs, lambda *given: consensus(*given).aligned):
        found = align(x * scale, held) / scale
        torch.testing.assert_close(found, align(x, held))
        assert found.is_contiguous()


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


# One reference for all ----------------------------------------------------------------------------


def disagreement(x: Tensor, held: Tensor, found: Any) -> float:
    """Sum ``||X_i W_i - R||^2`` over the nodes held."""
    apart = (x @ found.rotations - found.reference) * held[:, :, None]
    return float(apart.square().sum())


def test_three_clients_by_hand():
    """Client 0's space is the reference's; the others' are turned by 90 degrees, and mirrored."""
    found = consensus(THREE)
    torch.testing.assert_close(found.reference, torch.tensor([[3.0, 0], [0, 5]]))
    maps = torch.tensor([[[1.0, 0], [0, 1]], [[0, -1], [1, 0]], [[0, 1], [1, 0]]])
    torch.testing.assert_close(found.rotations, maps)
    torch.testing.assert_close(found.aligned, align_pairs(THREE))
    assert found.change < 1e-12


@settings(deadline=None, max_examples=30)
@given(seed=seeds, m=st.integers(2, 8))
def test_disagreement_never_grows(seed: int, m: int):
    x, held = spaces(seed, m, 12, 3, noise=1.0), masks(seed, m, 12, 3)
    found = [consensus(x, held, iterations=steps, tolerance=0) for steps in range(1, 6)]
    apart = [disagreement(x, held, one) for one in found]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(apart))


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


# What is refused ----------------------------------------------------------------------------------

X, CLIENTS, HELD = np.zeros((4, 3)), np.zeros((3, 4, 2)), np.ones((3, 4), bool)
NAN = np.where(np.arange(3) == 2, np.nan, 0).repeat(8).reshape(CLIENTS.shape)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "dimensions": (orthogonal_procrustes, (X, np.zeros((4, 2))), r"\(4, 3\).*\(4, 2\)"),
    "axes": (orthogonal_procrustes, (X[0], X[0]), r"\(3,\)"),
    "leading axes": (
        orthogonal_procrustes,
        (np.zeros((2, 4, 3)), np.zeros((3, 4, 3))),
        "broadcast",
    ),
    "two types": (orthogonal_procrustes, (X, X.astype("f")), "torch.float64.*torch.float32"),
    "integers": (orthogonal_procrustes, (X.astype(int), X), "source: int64.*float32"),
    "NaN": (orthogonal_procrustes, (X, np.where(np.eye(4, 3) > 0, np.nan, 0)), r"target\[0, 0\]"),
    "too large": (orthogonal_procrustes, (X, np.full((4, 3), LIMIT)), r"target\[0, 0\]"),
    "one client": (align_pairs, (X,), r"\(4, 3\)"),
    "mask's shape": (align_pairs, (CLIENTS, HELD[:2]), r"torch.bool.*\(2, 4\).*\(3, 4\)"),
    "holds nothing": (align_pairs, (CLIENTS, HELD & (np.arange(3) != 1)[:, None]), "client 1"),
    "NaN of a client": (align_pairs, (NAN,), r"x\[2, 0, 0\]"),
    "iterations": (partial(consensus, iterations=0), (CLIENTS,), "iterations = 0"),
    "other rows": (alignment_precision, (X, X[:3], np.eye(3)), r"\(4, 3\).*\(3, 3\).*\(3, 3\)"),
    "k": (alignment_precision, (X, X, np.eye(3), [5, 0]), "k = 0"),
    "rotation": (alignment_precision, (X, X, np.eye(3) * np.nan), r"rotation\[0, 0\] = nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named(name: str):
    call, given_, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        call(*given_)
