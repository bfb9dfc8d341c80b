"""The search against sorting all pairs, with ties, in blocks of any size, and what it holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_helpers import Largest, slow_nearest, slow_similarity, sparse
from torch import Tensor

from flower_graph.ops.similarity import SIMILARITIES, nearest


@st.composite
def counts(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw small whole numbers, so that ties are many and products exact, and a k."""
    n = draw(st.integers(2, 45))
    k = draw(st.integers(1, min(n - 1, draw(st.sampled_from([2, 6, 44])))))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    lowest = draw(st.sampled_from([0, -2]))
    return torch.randint(lowest, 3, (n, 4), generator=chance).float(), k


@given(
    case=counts(),
    similarity=st.sampled_from(["inner", "euclidean"]),
    block=st.sampled_from([1, 2, 7, 64]),
)
def test_equals_sorting_all_pairs(case: tuple[Tensor, int], similarity: str, block: int):
    x, k = case
    wanted = slow_nearest(slow_similarity(x.double(), similarity), k)
    assert nearest(sparse(x), k, similarity, block).neighbours.tolist() == wanted
    assert nearest(x, k, similarity, block).neighbours.tolist() == wanted


@given(case=counts(), block=st.sampled_from([1, 7, 64]))
def test_the_kept_cosines_are_the_largest(case: tuple[Tensor, int], block: int):
    """By their values: two whole vectors of one direction may be rounded to different lengths."""
    x, k = case
    cosine = slow_similarity(x, "cosine")
    wanted = cosine.masked_fill(torch.eye(len(x), dtype=torch.bool), -2).topk(k, dim=1).values
    for e in (x, sparse(x)):
        found = nearest(e, k, "cosine", block).neighbours
        torch.testing.assert_close(cosine.gather(1, found), wanted, rtol=0, atol=1e-6)
        assert not (found == torch.arange(len(x))[:, None]).any(), "nobody is its own neighbour"
        assert all(len(set(row)) == k for row in found.tolist())


def test_binary_features_tie_by_number():
    """Node 0 has two features; all others have one of them, with equal cosines."""
    x = torch.tensor([[1.0, 1], *([[1.0, 0], [0.0, 1]] * 9)])
    assert nearest(sparse(x), 5, "cosine").neighbours[0].tolist() == [1, 2, 3, 4, 5]
    third = nearest(sparse(x), 10, "cosine").neighbours[2]
    assert third.tolist() == [4, 6, 8, 10, 12, 14, 16, 18, 0, 1]


def test_what_only_rounding_tells_apart_ties_by_number():
    """Sums of the same numbers in another order; and a product that is 0 but for its sign."""
    chance = torch.Generator().manual_seed(0)
    number = torch.rand(30, generator=chance)
    others = torch.stack([number[torch.randperm(30, generator=chance)] for _ in range(20)])
    e = torch.cat([torch.ones(1, 30), others])
    for block in (1, 2, 64):
        assert nearest(e, 5, "inner", block).neighbours[0].tolist() == [1, 2, 3, 4, 5]
    e = torch.tensor([[1.0, 0.0], [-1e-50, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert nearest(e, 2, "inner").neighbours[0].tolist() == [1, 2]


@pytest.mark.parametrize("k", [0, 3, 7])
def test_a_k_that_is_not_possible_is_refused(k: int):
    with pytest.raises(ValueError, match=f"k = {k}"):
        nearest(torch.eye(3), k, "cosine")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_holds_blocks_of_nodes_only(similarity: str, is_sparse: bool):
    n, block = 1000, 20
    chance = torch.Generator().manual_seed(0)
    x = torch.rand(n, 20, generator=chance)
    e = sparse(x) if is_sparse else x
    with Largest() as largest:
        nearest(e, 5, similarity, block)
    assert n * block <= largest.numbers <= n * 20  # a block, or the features
