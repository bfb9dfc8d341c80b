"""What only FedSCem's messages have: parts that depend on one another, and their checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fedscem.cohort import EgoSettings
from flower_graph.strategies.fedscem.messages import (
    SUMMED_NAMES,
    EgoReply,
    Layout,
    PlainEnrolment,
)
from flower_graph.wire.arrays import decode_array, encode_array

SETTINGS = EgoSettings(7, 3, 5, 4, 0.25, 0.5, 11, 2, 0.75, 1.5, 0.125, 16)
RUN = b"0123456789abcdef"


def received(content: RecordDict) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What the adaptor hands to ``fit``."""
    arrays = [
        decode_array(key, array)
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for key, array in record.items()
    ]
    return arrays, dict(content.config_records["config"])


def test_layout_by_hand() -> None:
    layout = Layout(2, 3, 4)
    parts = [layout.embeddings, layout.counts, layout.metrics, layout.model]
    assert [(part.start, part.stop) for part in parts] == [(0, 6), (6, 8), (8, 18), (18, 22)]
    assert (layout.length, len(SUMMED_NAMES)) == (22, 10)
    assert Layout(0, 3).length == 10


def reply_record(total: np.ndarray, **metrics: Any) -> RecordDict:
    numbers = {"num-examples": 1, "server-round": 3, **metrics}
    return RecordDict(
        {
            "sums": ArrayRecord({"total": encode_array("total", total)}),
            "metrics": MetricRecord(numbers),
            "config": ConfigRecord({"present": np.array([2], "<i8").tobytes()}),
        }
    )


def test_times_that_are_missing_or_none_are_no_reason_to_refuse() -> None:
    content = reply_record(np.arange(4.0), **{"mask-seconds": [1.0]})
    read = EgoReply.read(content, server_round=3, L=4)
    assert (read.train_seconds, read.mask_seconds) == (0.0, 0.0)


def test_who_is_in_a_plain_sum_was_asked() -> None:
    presence = PlainEnrolment(np.array([4, 2]), {7: "too large: 9", 3: ""})
    with pytest.raises(MalformedReplyError, match="client 4"):
        PlainEnrolment.from_config(presence.to_config(), asked=np.array([2]))
