from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.messages.arrays import encode_array
from flower_graph.server.ledger import ByteLedger, count_bytes


def test_bytes_of_a_message_counted_by_hand() -> None:
    record = ArrayRecord({"latent": encode_array("latent", np.zeros((3, 4), np.float32))})
    content = RecordDict(
        {
            "arrays": record,
            "metrics": MetricRecord({"loss": 0.5, "history": [1, 2, 3]}),
            "config": ConfigRecord({"on": True, "name": "gcn", "raw": b"12345", "round": 7}),
        }
    )
    arrays = len("latent") + 128 + 3 * 4 * 4  # NumPy pads its header to a multiple of 64
    metrics = len("loss") + 8 + len("history") + 3 * 8
    config = len("on") + 1 + len("name") + 3 + len("raw") + 5 + len("round") + 8
    assert count_bytes(content) == arrays + metrics + config
    assert count_bytes(content) == sum(record.count_bytes() for record in content.values())


def test_empty_values_count_their_key_where_flower_raises() -> None:
    record = ConfigRecord({"empty": "", "none": [], "raw": b"", "flags": [True, False]})
    with pytest.raises((ValueError, IndexError)):
        record.count_bytes()
    assert count_bytes(RecordDict({"config": record})) == 5 + 4 + 3 + 5 + 2


def test_ledger_adds_up_by_direction_and_kind() -> None:
    ledger = ByteLedger()
    ledger.count("up", "latent", 100)
    ledger.count("up", "latent", 20)
    ledger.count("down", "gradient", 7)
    ledger.count_wire("up", 300)
    assert ledger.payload == {"up": {"latent": 120}, "down": {"gradient": 7}}
    assert ledger.wire == {"up": 300, "down": 0}
    ledger.payload["up"]["latent"] = 0  # a copy
    assert ledger.payload["up"]["latent"] == 120


def test_ledger_survives_a_checkpoint() -> None:
    ledger, restored = ByteLedger(), ByteLedger()
    ledger.count("down", "weights", 2**40)
    ledger.count_wire("down", 5)
    restored.count("up", "forgotten", 1)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.state_dict() == ledger.state_dict()


def test_ledger_refuses_nonsense_and_keeps_what_it_had() -> None:
    ledger = ByteLedger()
    ledger.count("up", "latent", 1)
    with pytest.raises(ValueError, match="'sideways'"):
        ledger.count("sideways", "latent", 1)
    with pytest.raises(ValueError, match="-1"):
        ledger.count_wire("up", -1)
    for state in ({}, {"payload": 3}, {"payload": {"up": {}, "down": {}}, "wire": {"up": 1}}):
        with pytest.raises(ValueError, match="not the state of a byte ledger"):
            ledger.load_state_dict(state)
    assert ledger.payload == {"up": {"latent": 1}, "down": {}}
