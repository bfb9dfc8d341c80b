"""What the secure consensus tells clients about the sum."""

import numpy as np
import pytest

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.procrustes_alignment.rotated_sum import ABSENT, SumOrder


def test_there_and_back() -> None:
    order = SumOrder([np.array([3, ABSENT]), np.array([0])], 7, True, False)
    found = SumOrder.from_config(order.to_config(), sizes=[2, 1])
    assert [slots.tolist() for slots in found.slots] == [[3, ABSENT], [0]]
    assert (found.seed, found.is_target, found.rotations_only) == (7, True, False)


def test_slots_that_do_not_fit() -> None:
    entries = SumOrder([np.array([3, 1])], 7, True, False).to_config()
    with pytest.raises(MalformedReplyError, match="slots: 2 came, expected 3"):
        SumOrder.from_config(entries, sizes=[3])
    with pytest.raises(MalformedReplyError, match="slots"):
        SumOrder.from_config(entries | {"slots": "x"}, sizes=[2])
