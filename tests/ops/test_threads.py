"""One thread for loops over small groups, and all of them again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flower_graph.ops.threads import one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_groups_have_one_thread():
    with one_thread(2):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_single_group_keeps_all():
    with one_thread(1):
        assert torch.get_num_threads() == 2


def test_an_error_gives_them_back():
    with pytest.raises(KeyError), one_thread(9):
        raise KeyError
    assert torch.get_num_threads() == 2
