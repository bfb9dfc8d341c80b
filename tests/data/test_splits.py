"""Splits: sizes, disjointness, determinism, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from partition_helpers import chance

from flower_graph.data.splits import (
    Masks,
    geom_gcn_split,
    random_split,
    ratio_split,
    select_column,
    stratified_split,
)
from flower_graph.errors import DataError


def draw(y: torch.Tensor, seed: int = 0, **changes: int) -> Masks:
    counts = {"train_per_class": 2, "num_val": 3, "num_test": 4, **changes}
    return random_split(y, int(y.max()) + 1, **counts, generator=chance(seed))


def assert_disjoint(masks: Masks) -> None:
    assert int(torch.stack(masks).sum(0).max()) <= 1


def test_random_split_has_the_sizes_that_were_asked_for() -> None:
    y = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 1, 2, 2, 2])
    masks = draw(y)
    assert torch.bincount(y[masks.train]).tolist() == [2, 2, 2]
    assert [int(mask.sum()) for mask in masks] == [6, 3, 4]
    assert_disjoint(masks)
    y = torch.tensor([0, 2] * 10)  # a class without nodes is passed over
    assert torch.bincount(y[draw(y).train]).tolist() == [2, 0, 2]


def test_random_split_depends_on_the_seed_only() -> None:
    y = torch.arange(100) % 4
    torch.manual_seed(1)
    first = draw(y, seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, other = draw(y, seed=5), draw(y, seed=6)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.train, other.train)


def test_random_split_says_what_is_too_small() -> None:
    with pytest.raises(DataError, match=r"data\.num_test = 7: 6"):
        draw(torch.tensor([0, 1] * 5))
    with pytest.raises(DataError, match=r"train_per_class = 2: class 1"):
        draw(torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    for key in ("train_per_class", "num_val", "num_test"):
        with pytest.raises(DataError, match=f"data.{key} = 0"):
            draw(torch.tensor([0, 1] * 10), **{key: 0})


@given(
    nodes=st.integers(10, 300),
    ratios=st.tuples(*[st.floats(0.15, 0.33) for _ in range(3)]),
    seed=st.integers(0, 99),
)
def test_ratio_split_is_disjoint_and_near_the_shares(
    nodes: int, ratios: tuple[float, float, float], seed: int
) -> None:
    masks = ratio_split(nodes, ratios, generator=chance(seed))
    assert_disjoint(masks)
    for mask, share in zip(masks, ratios, strict=True):
        assert abs(int(mask.sum()) - share * nodes) <= 1


def test_ratio_split_that_sums_to_one_covers_every_node() -> None:
    # 0.6 * 7, 0.2 * 7 and 0.2 * 7 rounded one by one would be 4 + 1 + 1.
    masks = ratio_split(7, [0.6, 0.2, 0.2], generator=chance())
    assert torch.stack(masks).sum(0).tolist() == [1] * 7


def test_stratified_split_by_hand() -> None:
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, -1, 0, 1, 1, 1, 1, 1, 1])
    train, val, test = stratified_split(y, [0.6, 0.2, 0.2], generator=chance())
    assert torch.stack([train, val, test]).sum(0).tolist() == [1] * 7 + [0] + [1] * 7
    assert [torch.bincount(y[mask]).tolist() for mask in (train, val, test)] == [
        [3, 5],
        [1, 2],
        [1, 2],
    ]


def test_stratified_split_may_leave_a_part_out() -> None:
    masks = stratified_split(torch.arange(40) % 2, [0, 0.2, 0.8], generator=chance())
    assert [int(mask.sum()) for mask in masks] == [0, 8, 32]
    other = stratified_split(torch.arange(40) % 2, [0, 0.2, 0.8], generator=chance(1))
    assert not torch.equal(other.val, masks.val)


@pytest.mark.parametrize(
    "ratios", [[0.5, 0.5], [0.6, 0.3, 0.2], [0, 0, 0], [-0.1, 0.5, 0.5], [float("nan"), 0.2, 0.2]]
)
def test_impossible_shares_are_refused(ratios: list[float]) -> None:
    with pytest.raises(DataError, match=r"partition.ratios"):
        stratified_split(torch.arange(9) % 2, ratios, generator=chance())
    with pytest.raises(DataError, match=r"data.ratios"):
        ratio_split(100, ratios, generator=chance())
    with pytest.raises(DataError, match=r"leaves.*10"):
        ratio_split(10, [0.5, 0.01, 0.4], generator=chance())


def columns() -> Masks:
    train = torch.eye(4, dtype=torch.uint8)[:, :3]
    return Masks(train, train.roll(1, 0), torch.tensor([True, False, False, True]))


@pytest.mark.parametrize(("seed", "column"), [(2, 2), (4, 1), (3, 0)])
def test_select_column_chooses_by_the_seed(seed: int, column: int) -> None:
    chosen = select_column(columns(), seed)
    assert all(mask.dtype == torch.bool for mask in chosen)
    assert chosen.train.nonzero().flatten().tolist() == [column]
    assert chosen.val.nonzero().flatten().tolist() == [column + 1]
    assert chosen.test.tolist() == [True, False, False, True]
    train, val, test = columns()
    with pytest.raises(DataError, match=r"\[2, 3\]"):
        select_column(Masks(train, val[:, :2], test), 0)


def write_split(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_geom_gcn_split_reads_bytes_as_booleans(tmp_path: Path) -> None:
    path = write_split(
        tmp_path / "split.npz",
        train_mask=np.array([1, 0, 0, 0], np.uint8),
        val_mask=np.array([False, True, False, False]),
        test_mask=np.array([0, 0, 1, 0], np.uint8),
    )
    masks = geom_gcn_split(path, 4)
    assert [mask.tolist().index(True) for mask in masks] == [0, 1, 2]
    assert all(mask.dtype == torch.bool for mask in masks)


def test_geom_gcn_split_refuses_another_graph_a_missing_key_and_a_pickle(tmp_path: Path) -> None:
    mask = np.array([True, False])
    path = write_split(tmp_path / "a.npz", train_mask=mask, val_mask=mask, test_mask=mask)
    with pytest.raises(DataError, match=r"\(2,\).*\(3,\)"):
        geom_gcn_split(path, 3)
    with pytest.raises(DataError, match="test_mask"):
        geom_gcn_split(write_split(tmp_path / "b.npz", train_mask=mask, val_mask=mask), 2)
    pickled = np.array([{}, {}], dtype=object)
    path = write_split(tmp_path / "c.npz", train_mask=pickled, val_mask=mask, test_mask=mask)
    with pytest.raises(DataError):
        geom_gcn_split(path, 2)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError):
        geom_gcn_split(path, 2)
