"""Products and sums of ragged groups against a loop, and their gradients."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.ops.grouped import group_sizes, group_sum, grouped_add, grouped_linear, one_thread

PTR = [0, 3, 3, 4, 8]  # the second group has no rows


def test_add_and_sum_by_hand():
    x, bias = torch.tensor([[1.0], [2], [3]]), torch.tensor([[10.0], [20], [30]])
    assert grouped_add(x, bias, [0, 1, 1, 3]).flatten().tolist() == [11.0, 32.0, 33.0]
    assert group_sum(x, [0, 1, 1, 3]).flatten().tolist() == [1.0, 0.0, 5.0]
    assert group_sum(torch.tensor([1.0, 2, 4]), [0, 2, 3]).tolist() == [3.0, 4.0]
    assert group_sizes([0, 1, 1, 3]) == [1, 0, 2]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_linear_is_a_loop(sizes: list[int], seed: int):
    draw = torch.Generator().manual_seed(seed)
    ptr = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    x = torch.randn(ptr[-1], 3, generator=draw)
    weight = torch.randn(len(sizes), 3, 2, generator=draw)
    bias = torch.randn(len(sizes), 2, generator=draw)
    parts = zip(x.split(sizes), weight, bias, strict=True)
    wanted = torch.cat([part @ matrix + own for part, matrix, own in parts])
    torch.testing.assert_close(grouped_linear(x, weight, bias, ptr), wanted)
    wanted = torch.cat([part + own for part, own in zip(x[:, :2].split(sizes), bias, strict=True)])
    torch.testing.assert_close(grouped_add(x[:, :2], bias, ptr), wanted)


def test_gradients():
    draw = torch.Generator().manual_seed(0)
    shapes = ((8, 3), (4, 3, 2), (4, 2))
    x, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.double, requires_grad=True)
        for shape in shapes
    )
    assert torch.autograd.gradcheck(lambda *a: grouped_linear(*a, PTR), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *a: grouped_add(*a, PTR), (x[:, :2], bias))
    constant = x.detach()
    assert torch.autograd.gradcheck(lambda *a: grouped_linear(constant, *a, PTR), (weight, bias))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_pieces_have_one_thread_and_large_ones_keep_all():
    for small, threads in ((True, 1), (False, 2)):
        with one_thread(small):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), one_thread(True):
        raise KeyError
    assert torch.get_num_threads() == 2, "an error gives them back"
