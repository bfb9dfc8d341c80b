"""A client's context, where a SuperNode that is started anew finds it, perhaps encrypted."""

import os
import secrets
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flower_graph.client import adaptor
from flower_graph.client.adaptor import keep_state, state_file
from flower_graph.client.state import CohortState
from flower_graph.errors import CheckpointError, ConfigError, StateLostError
from flower_graph.storage import sealed
from flower_graph.storage.checkpoint import load_client, save_client
from flower_graph.storage.sealed import StateKey

pytestmark = pytest.mark.usefixtures("identity")
RUN, TOKEN = 7, "a" * 32


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


def test_a_message_that_fails_or_is_not_saved_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path)
    send(context)

    def fail(message: Message, context: Context) -> Message:
        count(message, context)
        raise KeyError

    with pytest.raises(KeyError):
        send(context, fail)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(adaptor.checkpoint, "save_client", Mock(side_effect=OSError(28, "full")))
        send(context)
    assert send(context_of(tmp_path)) == 2, "as if these messages had never come"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    context = context_of(tmp_path, **{"partition-id": 5})
    send(context)
    file = state_file(context)
    assert file is not None
    data = file.read_bytes()
    file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(StateLostError, match=r"client 5: .*5\.state"):
        send(context_of(tmp_path, **{"partition-id": 5}))


# State that is encrypted where it lies -----------------------------------------------------------


def key_file(folder: Path, text: str = "correct horse battery\n", mode: int = 0o600) -> str:
    path = folder / f"key-{secrets.token_hex(4)}"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def key_of(given: str, place: Path) -> StateKey:
    sealed._SALTS.clear()  # as in a new process
    return StateKey.of({"state-key": given}, place)


@pytest.mark.parametrize("secret", ["a passphrase of ours\n", "0f" * 32])
def test_what_is_written_opens_with_the_same_secret_alone(secret: str, tmp_path: Path) -> None:
    path, given = tmp_path / "place" / "run-1" / "client-0.safetensors", key_file(tmp_path, secret)
    key = key_of(given, tmp_path / "place")
    tensors = {"secret": torch.arange(64.0), "step": torch.tensor(3)}
    save_client(path, tensors, TOKEN, key)
    assert torch.arange(64.0).numpy().tobytes()[:64] not in path.read_bytes()
    assert b"secret" not in path.read_bytes() and path.stat().st_mode & 0o777 == 0o600
    assert torch.equal(load_client(path, TOKEN, key_of(given, tmp_path / "place"))["secret"],
                       tensors["secret"])  # fmt: skip
    other = key_of(key_file(tmp_path, "another passphrase"), tmp_path / "place")
    with pytest.raises(CheckpointError, match="state-key"):
        load_client(path, TOKEN, other)
    with pytest.raises(CheckpointError, match="state-key"):
        load_client(path, TOKEN)
    with pytest.raises(CheckpointError):
        load_client(path, "b" * 32, key)
    one, other = (key.seal(b"x" * 99, path) for _ in range(2))
    start = sealed.HEAD - sealed.NONCE
    assert one[:start] == other[:start]  # magic, salt, check, length: one derivation a process
    assert one[start:][:12] != other[start:][:12] and one[-99:] != other[-99:]


def test_every_changed_bit_and_every_other_place_is_refused(tmp_path: Path) -> None:
    key = key_of(key_file(tmp_path, "ab" * 32), tmp_path)
    data = key.seal(b"state", tmp_path / "run-1" / "a")
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(CheckpointError):
            key.open(bytes(changed), tmp_path / "run-1" / "a")
    for path in (tmp_path / "run-2" / "a", tmp_path / "run-1" / "b", tmp_path / "a"):
        with pytest.raises(CheckpointError):
            key.open(data, path)
    for cut in (0, 10, sealed.HEAD - 1, sealed.HEAD, -1):
        with pytest.raises(CheckpointError):
            key.open(data[:cut], tmp_path / "run-1" / "a")
    assert key.open(data, tmp_path / "run-1" / "a") == b"state"


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    open_to_all = key_file(tmp_path, mode=0o640)
    short, blank = key_file(tmp_path, "short"), key_file(tmp_path, "\n" * 13)
    for given in (3, "", "/missing", open_to_all, short, blank):
        with pytest.raises(ConfigError, match="node-config state-key"):
            StateKey.of({"state-key": given}, tmp_path)


@pytest.mark.parametrize("where", ["", ":memory:"])
def test_state_in_memory_is_not_encrypted_and_that_is_refused(where: str, tmp_path: Path) -> None:
    context = context_of(where)
    assert state_file(context) is None
    assert [send(context), send(context)] == [1, 2]
    assert adaptor.RECORD not in context.state
    context = context_of(where, **{"state-key": key_file(tmp_path)})
    for use in (
        lambda: CohortState(context, [0], tmp_path, lambda found: (0, found or {})),
        lambda: keep_state(Message(RecordDict(), 3, "train"), context, lambda *_: pytest.fail()),
    ):
        with pytest.raises(ConfigError, match="memory"):
            use()


def test_a_context_of_another_key_or_of_none_is_lost(tmp_path: Path) -> None:
    with_key = {"state-key": key_file(tmp_path)}
    context = context_of(tmp_path, **with_key)
    assert send(context) == 1
    file = state_file(context)
    assert file is not None and b"secret" not in file.read_bytes()
    assert send(context_of(tmp_path, **with_key)) == 2
    other = {"state-key": key_file(tmp_path, "another passphrase")}
    for wrong, said in ((other, "with another key than state-key"), ({}, "state-key is not set")):
        with pytest.raises(StateLostError, match=said):
            send(context_of(tmp_path, **wrong))
    file.unlink()
    send(context_of(tmp_path))
    with pytest.raises(StateLostError, match="state-key"):
        send(context_of(tmp_path, **with_key))
