"""A client's context, where a SuperNode that is started anew finds it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flower_graph.client import adaptor
from flower_graph.client.adaptor import keep_state, state_file
from flower_graph.errors import StateLostError

pytestmark = pytest.mark.usefixtures("identity")
RUN = 7


def context_of(where: Path | str, node: int = 3, **more: Any) -> Context:
    return Context(RUN, node, {"state-dir": str(where), **more}, RecordDict(), {})


def count(message: Message, context: Context) -> Message:
    """Count messages in the context."""
    number = int(context.state.config_records.get("own", {}).get("count", 0)) + 1  # type: ignore[arg-type]
    context.state["own"] = ConfigRecord({"count": number, "key": b"\x00secret", "list": [1, 2]})
    context.state["figures"] = MetricRecord({"loss": 0.5})
    context.state["weights"] = ArrayRecord({"w": Array(np.arange(3.0) + number)})
    return Message(RecordDict({"reply": ConfigRecord({"count": number})}), reply_to=message)


def send(context: Context, answer: Any = count) -> int:
    message = Message(RecordDict(), context.node_id, "train")
    return int(keep_state(message, context, answer).content["reply"]["count"])  # type: ignore[index,arg-type]


def test_what_flower_has_goes_before_an_older_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(tmp_path)
    send(context)
    file = state_file(context)
    assert file is not None
    older = file.read_bytes()
    send(context)
    file.write_bytes(older)
    assert send(context) == 3
    file.write_bytes(b"junk")
    assert send(context) == 4
    file.unlink()
    assert send(context) == 5
    assert str(file) in caplog.text
    assert send(context_of(tmp_path)) == 6


def test_each_supernode_and_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    assert send(context_of(tmp_path, **{"partition-id": 0})) == 1
    assert send(context_of(tmp_path, **{"partition-id": 1})) == 1
    assert send(Context(RUN + 1, 3, {"state-dir": str(tmp_path)}, RecordDict(), {})) == 1
    given: dict[str, Any] = {"data-folder": str(tmp_path / "client-0007")}
    assert [send(Context(RUN, node, given, RecordDict(), {})) for node in (3, 4)] == [1, 2]
    (file,) = (tmp_path / "client-0007").rglob("*.state")
    assert file.is_relative_to(tmp_path / "client-0007" / "state" / f"run-{RUN}")


@pytest.mark.parametrize("where", ["", ":memory:"])
def test_without_a_place_nothing_is_kept(where: str) -> None:
    context = context_of(where)
    assert state_file(context) is None
    assert [send(context), send(context)] == [1, 2]
    assert adaptor.RECORD not in context.state


def test_it_is_its_owners_alone_and_goes_with_the_state(tmp_path: Path) -> None:
    context = context_of(tmp_path / "state")
    before = os.umask(0)
    try:
        send(context)
    finally:
        os.umask(before)
    file = state_file(context)
    assert file is not None
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700

    def forget(message: Message, context: Context) -> Message:
        reply = count(message, context)
        context.state.clear()
        return reply

    send(context, forget)
    assert not file.parent.exists()
    assert not context.state


def test_a_message_that_fails_changes_nothing(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    send(context)

    def fail(message: Message, context: Context) -> Message:
        count(message, context)
        raise KeyError

    with pytest.raises(KeyError):
        send(context, fail)
    assert send(context_of(tmp_path)) == 2


def test_no_reply_leaves_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path)
    send(context)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(adaptor.checkpoint, "save_client", full)
        send(context)
    assert send(context_of(tmp_path)) == 2, "as if that message had never come"


@pytest.mark.parametrize("change", ["one bit", "cut", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, change: str) -> None:
    context = context_of(tmp_path, **{"partition-id": 5})
    send(context)
    file = state_file(context)
    assert file is not None
    data = file.read_bytes()
    changed = {"one bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "cut": data[:-1]}
    file.write_bytes(changed.get(change, b""))
    with pytest.raises(StateLostError, match=r"client 5: .*5\.state"):
        send(context_of(tmp_path, **{"partition-id": 5}))
