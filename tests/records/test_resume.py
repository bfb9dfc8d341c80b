"""What a client is told to go on, and what it says of its own state."""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from flower_graph.wire.fields import read_handled, read_not_saved


def test_messages_handled() -> None:
    assert read_handled({}) is None
    assert read_handled({"handled-messages": 0}) == 0
    assert read_handled({"handled-messages": 7}) == 7


def test_why_a_checkpoint_was_not_written() -> None:
    said = {"config": ConfigRecord({"not-saved": "no\nroom"})}
    assert read_not_saved(RecordDict(said)) == "no room"
    assert read_not_saved(RecordDict({"config": ConfigRecord({})})) == ""
    assert read_not_saved(RecordDict()) == ""
