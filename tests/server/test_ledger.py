"""Who took part: every client once, the figures of a run, the picture; bytes that travelled."""

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import who_of
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from flower_graph.config.common import StrategySection
from flower_graph.records.participation import (
    ANSWERED,
    FAILED,
    LEFT_OUT,
    NOT_CONNECTED,
    NOT_DRAWN,
    Participation,
    grouped,
    numbers,
    ranges,
    summarise_participation,
)
from flower_graph.records.rounds import RoundReport
from flower_graph.report.plots import COLOUR, draw_participation, plot
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import Session
from flower_graph.wire.arrays import encode_array
from flower_graph.wire.exchange import Rejected
from flower_graph.wire.ledger import ByteLedger, count_bytes

pytestmark = pytest.mark.usefixtures("identity")


def report(number: int, participation: dict[str, Any]) -> RoundReport:
    return RoundReport(number, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 8, 8, participation=participation)


def record(answered: str, failed: str = "", left_out: str = "") -> dict[str, Any]:
    states = (answered, ANSWERED, ""), (failed, FAILED, "silent"), (left_out, LEFT_OUT, NOT_DRAWN)
    parts = [(np.array(numbers(text), np.int64), *outcome) for text, *outcome in states]
    result = Participation([clients for clients, *_ in parts])
    for part in parts:
        result.mark(*part)
    return result.to_record()


# One round ---------------------------------------------------------------------------------------

client_sets = st.sets(st.integers(0, 2**63 - 1), max_size=50)  # what a SuperNode may claim


@given(client_sets)
@example({5, 0, 2, 1, 9, 10})
@example({2**62, 2**63 - 2, 2**63 - 1})
def test_ranges_come_back(clients: set[int]) -> None:
    text = ranges(clients)
    assert numbers(text) == sorted(clients)
    gaps = sum(client + 1 not in clients for client in clients)
    assert len(text.split(",")) == max(1, gaps)


def outcome(
    hosted: dict[int, list[int]],
    connected: Collection[int],
    asked: dict[int, list[int]],
    answered: list[int],
    silent: dict[int, str],
    **how: Any,
) -> dict[str, Any]:
    session = Session(Membership(), StrategySection())
    session.members.clients, session.connected, session.asked = hosted, [*connected], {**asked}
    session.rejected = [Rejected(node, why) for node, why in silent.items()]
    return session.participation(answered, **how).to_record()


def test_a_client_is_in_one_place_with_its_reason() -> None:
    who = outcome(
        {1: [0, 1], 2: [2], 3: [3, 4], 4: [5], 5: [6]},
        [1, 2, 3, 5],
        {1: [0, 1], 2: [2], 3: [3]},
        [0, 4],  # 4 was not asked: what it sent cannot have been used
        silent={2: "no reply within 5 s"},
        failed={1: "its vector is too large", 0: "said of a client that answered"},
        left_out=grouped({6: "not aligned", 7: "nobody hosts it", 2: "asked all the same"}),
        no_use="the sum was skipped",
    )
    answered, failed, left_out = who_of(who)
    assert answered == {0}
    silent = {2: "no reply within 5 s", 3: "the sum was skipped"}
    assert failed == {1: "its vector is too large"} | silent
    named = {6: "not aligned", 7: "nobody hosts it"}
    assert left_out == {4: NOT_DRAWN, 5: NOT_CONNECTED} | named
    # One that came back at another SuperNode is there once
    assert who_of(outcome({1: [0], 9: [0]}, [9], {9: [0]}, [0], {})) == ({0}, {}, {})


# A run -------------------------------------------------------------------------------------------


def test_figures_of_a_run() -> None:
    records = [record("0-2"), record("0", "1", "2"), {}, record("0,2", "1")]
    figures = summarise_participation(records)
    assert figures["share-answered"] == pytest.approx({"min": 1 / 3, "mean": 2 / 3, "max": 1})
    assert figures["failed-once"] == 1
    assert summarise_participation([{}]) == {}


# Bytes -------------------------------------------------------------------------------------------


def test_bytes_of_a_message_counted_by_hand() -> None:
    latent = ArrayRecord({"latent": encode_array("latent", np.zeros((3, 4), np.float32))})
    measured = MetricRecord({"loss": 0.5, "history": [1, 2, 3]})
    entries = ConfigRecord({"on": True, "name": "gcn", "raw": b"12345", "round": 7})
    content = RecordDict({"arrays": latent, "metrics": measured, "config": entries})
    arrays = len("latent") + 128 + 3 * 4 * 4  # NumPy pads its header to a multiple of 64
    metrics = len("loss") + 8 + len("history") + 3 * 8
    config = len("on") + 1 + len("name") + 3 + len("raw") + 5 + len("round") + 8
    assert count_bytes(content) == arrays + metrics + config
    assert count_bytes(content) == sum(one.count_bytes() for one in content.values())
    # Empty values count their key, where Flower raises
    settings = ConfigRecord({"empty": "", "none": [], "raw": b"", "flags": [True, False]})
    with pytest.raises((ValueError, IndexError)):
        settings.count_bytes()
    assert count_bytes(RecordDict({"config": settings})) == 5 + 4 + 3 + 5 + 2


@pytest.mark.usefixtures("identity")
def test_ledger_adds_up_by_direction_and_kind_and_survives_a_checkpoint() -> None:
    ledger, restored = ByteLedger(), ByteLedger()
    ledger.count("up", "latent", 100)
    ledger.count("up", "latent", 20)
    ledger.count("down", "gradient", 2**40)
    content = RecordDict({"config": ConfigRecord({"raw": bytes(297)})})
    ledger.count_messages("up", [Message(content, 1, "train")])
    assert ledger.payload == {"up": {"latent": 120}, "down": {"gradient": 2**40}}
    assert ledger.wire == {"up": 300, "down": 0}
    restored.count("up", "forgotten", 1)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    ledger.count("up", "latent", 1)
    assert restored.payload == {"up": {"latent": 120}, "down": {"gradient": 2**40}}
    assert restored.wire == {"up": 300, "down": 0}
    for damaged in ({}, {"payload": {}, "wire": {}}, {"payload": 1, "wire": {"up": 1, "down": 1}}):
        with pytest.raises((KeyError, TypeError)):
            restored.load_state_dict(damaged)


# The picture -------------------------------------------------------------------------------------


def test_each_cell_has_the_colour_of_what_its_client_was(drawn: list[Axes]) -> None:
    records = [record("0-1", "5"), {}, record("0", "1", "5,9")]
    reports = [report(n, r) for n, r in enumerate(records, 4)]
    plot(Path("x.png"), [[partial(draw_participation, reports=reports)]])
    (who,) = drawn
    (image,) = who.images
    answered, failed, left_out = (to_rgb(COLOUR[state]) for state in (1, 2, 3))
    white = (1.0, 1.0, 1.0)
    expected = [
        [answered, white, answered],
        [answered, white, failed],
        [failed, white, left_out],
        [white, white, left_out],
    ]
    assert np.allclose(np.asarray(image.get_array()), expected)
    assert image.get_extent() == [3.5, 6.5, 3.5, -0.5]
    name = who.yaxis.get_major_formatter()
    assert [name(place) for place in (0, 2, 3, 4)] == ["0", "5", "9", ""]
