"""What only the messages of FedSage+ check; all else is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fed_sage.messages import Generators
from flower_graph.strategies.fed_sage.modules import LATENT
from flower_graph.wire.keys import EPOCH

CLIENTS = np.array([3, 5], dtype=np.int64)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"epoch": 2}, "epoch"),
        ({"clients": np.array([3, 6])}, "clients"),
        ({"rows": np.array([1, 2])}, "rows"),
        ({"rows": np.array([-1, 3])}, "rows"),
        ({"missing": np.array([0, 5])}, "missing"),
        ({"missing": np.array([1, 6])}, "missing"),
    ],
)
def test_bad_generators_are_refused(changes: dict[str, Any], key: str) -> None:
    entries: dict[str, Any] = {"clients": CLIENTS, "rows": np.array([0, 2])}
    entries |= {"missing": np.array([1, 5]), "encoded": np.ones((2, LATENT), dtype=np.float32)}
    entries["weights"] = np.ones((2, 9), dtype=np.float32)
    message = Generators(**({"epoch": 1} | entries | changes))
    content = message.to_record()
    content["metrics"] = MetricRecord({EPOCH: message.epoch})
    with pytest.raises(MalformedReplyError, match=key):
        Generators.read(content, epoch=1, clients=CLIENTS, w=9)
