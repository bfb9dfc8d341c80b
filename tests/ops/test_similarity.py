"""Kept similarities by hand, against the formulas on all pairs, and where lengths are zero."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_helpers import slow_similarity, sparse
from torch import Tensor

from flower_graph.ops import similarity as module
from flower_graph.ops.similarity import SIMILARITIES, Rows, SparseRows, kept_similarity, nearest

# Lengths 5, 5 and 0; the products of the first two are 24, their distance the root of 2.
HAND = torch.tensor([[3.0, 4.0], [4.0, 3.0], [0.0, 0.0]])
OTHERS = torch.tensor([[1, 2], [0, 2], [0, 1]])


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
    square=st.sampled_from([0, module.SQUARE_NUMBERS]),
)
def test_gradients_are_those_of_the_formula(
    case: tuple[Tensor, Tensor], similarity: str, square: int
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
        found = (kept_similarity(e, neighbours, similarity) * upstream).sum()
        with patch.object(module, "SQUARE_NUMBERS", square):
            (grad,) = torch.autograd.grad(found, values(e))
        inside = wanted[e.row, e.col] if isinstance(e, SparseRows) else wanted
        torch.testing.assert_close(grad, inside)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_parts_by_columns_change_nothing(
    similarity: str, columns: int, monkeypatch: pytest.MonkeyPatch
):
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=chance, dtype=torch.float64)
    x *= torch.rand(6, 5, generator=chance) < 0.6
    neighbours = torch.randint(0, 6, (6, 3), generator=chance)

    def run() -> tuple[Tensor, Tensor]:
        e = tracked(sparse(x))
        found = kept_similarity(e, neighbours, similarity)
        return found, torch.autograd.grad(found.square().sum(), values(e))[0]

    whole = run()
    monkeypatch.setattr(module, "SQUARE_NUMBERS", 0)
    monkeypatch.setattr(module, "DENSE_NUMBERS", 1)
    monkeypatch.setattr(module, "DENSE_COLUMNS", columns)
    for one, other in zip(run(), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_products_of_the_search_change_nothing(similarity: str):
    x = torch.rand(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3] = 0
    for e in both(x):
        found = nearest(e, 4, similarity)
        results = []
        for products in (None, found.products):
            leaf = tracked(e)
            values_ = kept_similarity(leaf, found.neighbours, similarity, products)
            results.append((values_, *torch.autograd.grad(values_.square().sum(), values(leaf))))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
        assert results[1][0].diff(dim=1).max() <= 1e-12, "the most similar come first"


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_zero_rows_and_equal_rows_have_finite_gradients(similarity: str):
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.1, 0.7], [0.1, 0.7]])
    neighbours = torch.tensor([[1, 2], [0, 3], [3, 0], [2, 1]])
    row, col = torch.arange(4).repeat_interleave(2), torch.arange(2).repeat(4)
    for e in (x, SparseRows(row, col, x.reshape(-1), (4, 2))):  # the zeros are entries too
        e = tracked(e)
        found = kept_similarity(e, neighbours, similarity)
        (grad,) = torch.autograd.grad(found[:, 0].sum(), values(e))
        grad = grad.view(4, 2)
        assert grad.isfinite().all()
        if similarity != "inner":  # equal rows are as similar as can be, zeros of no direction
            torch.testing.assert_close(grad, torch.zeros(4, 2), rtol=0, atol=1e-6)
        if similarity == "euclidean":
            assert found[:, 0].tolist() == [1, 1, 1, 1]


def test_near_nodes_far_from_the_origin_are_told_apart():
    """In float32 both products were 1,000,000, and the distance nothing."""
    x = torch.tensor([[1000.0, 0.0], [1000.0, 0.01]])
    found = kept_similarity(sparse(x), torch.tensor([[1], [0]]), "euclidean")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((2, 1), 1 / 1.01))


def test_an_unknown_similarity_is_refused():
    with pytest.raises(ValueError, match="'dot'"):
        kept_similarity(HAND, OTHERS, "dot")
