"""Active rows against dense matrices, and against themselves in other blocks and dealings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.ops import active_rows
from flower_graph.ops.active_rows import ActiveRows, adam_, pack, project, sum_by_feature, take
from flower_graph.ops.adam import Rates

OPTIONS = Rates(learning_rate=0.1, weight_decay=0.05)
X = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, -3.0]])


def random_features(n: int, f: int, seed: int) -> Tensor:
    """Make sparse features of which user 0 has none."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, f, generator=draw) * (torch.rand(n, f, generator=draw) < 0.3)
    x[0] = 0
    return x


def steps(
    rows: ActiveRows, weight: Tensor, gradients: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step per gradient ``[t, n, h]``; return weights and moments."""
    weight = weight.clone()
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients):
        adam_(rows, weight, exp_avg, exp_avg_sq, gradient, count + number, OPTIONS)
    return weight, exp_avg, exp_avg_sq


def drawn(rows: ActiveRows, h: int, rounds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw weights ``[r, h]`` and gradients of some rounds ``[t, n, h]``."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows.feature.numel(), h, generator=draw)
    return weight, torch.randn(rounds, rows.num_users, h, generator=draw)


def assert_rows(rows: ActiveRows, ptr: list[int], feature: list[int], value: list[float]) -> None:
    assert rows.ptr.tolist() == ptr
    assert rows.feature.tolist() == feature
    assert rows.value.tolist() == value
    assert rows.user.tolist() == [u for u in range(len(ptr) - 1) for _ in range(ptr[u], ptr[u + 1])]
    assert rows.ptr.dtype == rows.feature.dtype == rows.user.dtype == torch.int32
    assert rows.value.dtype == torch.float32


def test_pack_keeps_what_is_not_zero():
    rows = pack(X)
    assert_rows(rows, [0, 1, 1, 3], [1, 0, 2], [2.0, 1.0, -3.0])
    assert (rows.num_features, rows.num_users) == (3, 3)


@pytest.mark.parametrize("bias", [False, True])
@given(seed=st.integers(0, 1000), n=st.integers(1, 8), f=st.integers(1, 6))
def test_csr_gives_the_same_rows(bias: bool, seed: int, n: int, f: int):
    x = random_features(n, f, seed)
    csr = x.to_sparse_csr()
    got, want = pack(csr, bias=bias), pack(x, bias=bias)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    assert got.num_features == want.num_features
    assert torch.equal(csr.crow_indices(), x.to_sparse_csr().crow_indices()), "input was changed"


def test_take_reorders_users():
    rows, place = take(pack(X), torch.tensor([2, 1, 0]))
    assert_rows(rows, [0, 2, 2, 3], [0, 2, 1], [1.0, -3.0, 2.0])
    assert place.tolist() == [1, 2, 0]


@pytest.mark.parametrize("bias", [False, True])
def test_equals_dense_adam_of_users_that_come_now_and_then(bias: bool):
    """User ``u`` takes part in every round, or in every second one, by PyTorch's own Adam."""
    n, f, h = 12, 12, 4
    x = random_features(n, f, seed=3)
    rows = pack(x, bias=bias)
    x = torch.cat([x, torch.ones(n, 1)], dim=1) if bias else x
    draw = torch.Generator().manual_seed(4)
    dense = torch.randn(n, x.shape[1], h, generator=draw)
    own = [torch.nn.Parameter(one.clone()) for one in dense]
    rates = {"lr": OPTIONS.learning_rate, "weight_decay": OPTIONS.weight_decay}
    optimizers = [torch.optim.Adam([one], **rates) for one in own]
    weight = dense[rows.user.long(), rows.feature.long()].clone()
    kept, count = (weight, *torch.zeros(2, *weight.shape)), torch.zeros(n, dtype=torch.int32)
    for number, gradient in enumerate(torch.randn(30, n, h, generator=draw)):
        users = torch.arange(0, n, 1 + number % 2)
        for user in users.tolist():
            optimizers[user].zero_grad()
            (x[user] @ own[user]).backward(gradient[user])
            optimizers[user].step()
        count[users] += 1
        part, place = take(rows, users)
        held = [t[place] for t in kept]
        adam_(part, *held, gradient[users], count[users], OPTIONS)
        for tensor, value in zip(kept, held, strict=True):
            tensor[place] = value
        expected = torch.stack([one @ its.detach() for one, its in zip(x, own, strict=True)])
        torch.testing.assert_close(project(rows, weight), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("block", [1, 7, 33])
@pytest.mark.parametrize("h", [1, 3, 16])
def test_block_size_changes_no_bit(block: int, h: int, monkeypatch: pytest.MonkeyPatch):
    rows = pack(random_features(31, 15, seed=8))
    (weight, gradients), count = drawn(rows, h, 4, seed=9), torch.ones(31, dtype=torch.int32)
    want = steps(rows, weight, gradients, count)
    monkeypatch.setattr(active_rows, "BLOCK_NUMBERS", block * h)
    got = steps(rows, weight, gradients, count)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_adam_without_rows_or_users():
    for x in (torch.zeros(2, 3), torch.zeros(0, 3)):
        empty = torch.zeros(0, 4)
        count = torch.ones(x.shape[0], dtype=torch.int32)
        adam_(pack(x), empty, empty, empty, torch.ones(x.shape[0], 4), count, OPTIONS)
        assert project(pack(x), empty).shape == (x.shape[0], 4)


def test_sum_by_feature_by_hand():
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]])
    weight = torch.tensor([[1.0], [10.0], [100.0]])  # rows (0, 0), (0, 1), (1, 1)
    total, count = sum_by_feature(pack(x), weight)
    assert total.tolist() == [[1.0], [110.0], [0.0]]
    assert count.tolist() == [1, 2, 0]
    assert total.dtype == torch.float64
