"""Kept similarities by hand, against the formulas on all pairs, and where lengths are zero."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from graph_helpers import Largest
from hypothesis import given
from hypothesis import strategies as st
from plain.fedgls import similarity_of as slow_similarity
from torch import Tensor

from flower_graph.ops import similarity as module
from flower_graph.ops.similarity import SIMILARITIES, Rows, SparseRows, kept_similarity, nearest


def sparse(x: Tensor) -> SparseRows:
    row, col = x.nonzero(as_tuple=True)
    return SparseRows(row, col, x[row, col], (x.shape[0], x.shape[1]))


def both(x: Tensor) -> list[Rows]:
    return [x, sparse(x)]


def values(e: Rows) -> Tensor:
    return e.value if isinstance(e, SparseRows) else e


def tracked(e: Rows) -> Rows:
    """Return the same vectors, with gradients by their entries."""
    leaf = values(e).detach().clone().requires_grad_()
    return e._replace(value=leaf) if isinstance(e, SparseRows) else leaf


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw vectors, some of them zero or equal, and neighbours in any order, some twice."""
    n, r, k = draw(st.integers(2, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(n, r, generator=chance, dtype=torch.float64)
    x *= torch.rand(n, r, generator=chance) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    if draw(st.booleans()):
        x[1] = x[0]
    return x, torch.randint(0, n, (n, k), generator=chance)


@given(case=vectors(), similarity=st.sampled_from(SIMILARITIES))
def test_equals_the_formula_on_all_pairs(case: tuple[Tensor, Tensor], similarity: str):
    x, neighbours = case
    wanted = slow_similarity(x, similarity).gather(1, neighbours)
    for e in both(x):
        torch.testing.assert_close(kept_similarity(e, neighbours, similarity), wanted)
    for e in both(x.float()):
        found = kept_similarity(e, neighbours, similarity)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


@given(
    case=vectors(),
    similarity=st.sampled_from(SIMILARITIES),
    sizes=st.sampled_from([{}, {"SQUARE_NUMBERS": 0}])
    | st.integers(1, 3).map(lambda c: dict(SQUARE_NUMBERS=0, DENSE_NUMBERS=1, DENSE_COLUMNS=c)),
)
def test_gradients_are_those_of_the_formula(
    case: tuple[Tensor, Tensor], similarity: str, sizes: dict[str, int]
):
    """At lengths and distances of zero the formula's own gradients are set to zero too."""
    x, neighbours = case
    upstream = torch.linspace(-1, 2, neighbours.numel(), dtype=x.dtype).view_as(neighbours)
    leaf = x.clone().requires_grad_()
    slow = slow_similarity(leaf, similarity).gather(1, neighbours)
    (wanted,) = torch.autograd.grad((slow * upstream).sum(), leaf)
    wanted = wanted * x.any(1, keepdim=True) if similarity == "cosine" else wanted
    for e in both(x):
        e = tracked(e)
        with patch.multiple(module, **sizes) if sizes else nullcontext():
            found = (kept_similarity(e, neighbours, similarity) * upstream).sum()
            (grad,) = torch.autograd.grad(found, values(e))
        inside = wanted[e.row, e.col] if isinstance(e, SparseRows) else wanted
        torch.testing.assert_close(grad, inside)


def test_near_nodes_far_from_the_origin_are_told_apart():
    """In float32 both products were 1,000,000, and the distance nothing."""
    x = torch.tensor([[1000.0, 0.0], [1000.0, 0.01]])
    found = kept_similarity(sparse(x), torch.tensor([[1], [0]]), "euclidean")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((2, 1), 1 / 1.01))


def slow_nearest(similarity: Tensor, k: int) -> list[list[int]]:
    """Sort each node's others by similarity, ties by number, and keep k (equation 16)."""
    rows = similarity.tolist()
    return [
        sorted((j for j in range(len(row)) if j != i), key=lambda j: (-row[j], j))[:k]
        for i, row in enumerate(rows)
    ]


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


@pytest.mark.parametrize(("k", "similarity"), [(0, "cosine"), (3, "cosine"), (2, "dot")])
def test_what_is_not_possible_is_refused(k: int, similarity: str):
    with pytest.raises(ValueError, match="dot" if similarity == "dot" else f"k = {k}"):
        nearest(torch.eye(3), k, similarity)


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
