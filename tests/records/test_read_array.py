"""Arrays of replies: what the server does not take."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import read_array
from flower_graph.messages.keys import MAX_NUMBER


def read(values: np.ndarray, limit: float | None = MAX_NUMBER) -> np.ndarray:
    content = RecordDict({"arrays": ArrayRecord({"x": Array(values)})})
    return read_array(content, "arrays", "x", (3,), limit=limit)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "<f16"])
def test_numbers_in_the_form_of_another_machine_are_refused(dtype: str) -> None:
    with pytest.raises(MalformedReplyError, match="of another machine"):
        read(np.ones(3, dtype))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i4", "<i8", "<u8", "|u1"])
def test_numbers_of_other_types_are_read(dtype: str) -> None:
    assert read(np.ones(3, dtype)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [1e9, -1e9, 2**20 + 1, 2**63 - 1, -(2**63)])
def test_a_number_that_is_too_large_is_refused(value: float) -> None:
    with pytest.raises(MalformedReplyError, match=r"at most 1\.04858e"):
        read(np.array([0, 0, value]))


def test_words_of_a_ring_may_be_anything() -> None:
    words = np.array([0, 1, 2**64 - 1], np.uint64)
    assert (read(words, None) == words).all()
    assert read(np.full(3, -MAX_NUMBER)).tolist() == [-(2.0**20)] * 3
