"""Clients that live in a worker between messages: same answers, and gone when nobody needs them."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.app import Context, Message, RecordDict

from flower_graph.client import resident
from flower_graph.client.resident import ResidentClientApp
from flower_graph.errors import ConfigError, WorkerLostError
from flower_graph.flower_compat import identify, stamp
from flower_graph.storage.files import STATE_VARIABLE

HERE = Path(__file__).parent  # where workers find `told_app`
RUN, NODE = 77, 5
# What Flower starts for a message: its own modules, then the app; here with the message given
PROCESS = """
import sys
import flwr.supernode.runtime.run_clientapp
before = set(sys.modules)
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flower_graph.flower_compat import identify
from flower_graph.client.resident import ResidentClientApp

kind, file = sys.argv[1:3]
identify(77)
content = RecordDict({"where": ConfigRecord({"file": file})})
message = Message(content, 5, kind)
context = Context(77, 5, {"data-folder": "."}, RecordDict(), {})
reply = ResidentClientApp("told_app:app")(message, context)
print(int(reply.content["about"]["process"]), *sorted(set(sys.modules) - before))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where workers have their sockets; none of them is left."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setattr(resident, "owner_of_message", os.getpid)
    identify(RUN)
    place_of_sockets = tmp_path / "state"  # it stands in the command line of a worker
    yield place_of_sockets
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.ppid() == os.getpid() and process.status() == psutil.STATUS_ZOMBIE:
                process.wait(10)
            elif str(place_of_sockets) in " ".join(process.cmdline()):
                process.kill()
                process.wait(10)


def context_of(**node_config: Any) -> Context:
    return Context(RUN, NODE, {"data-folder": ".", **node_config}, RecordDict(), {"rounds": 3})


def message_of(kind: str = "train", content: RecordDict | None = None) -> Message:
    result = Message(content or RecordDict(), NODE, kind)
    stamp(result, message_id="first")
    return result


def ask(context: Context, kind: str = "train") -> dict[str, Any]:
    return dict(ResidentClientApp("told_app:app")(message_of(kind), context).content["about"])


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(process: float) -> bool:
    try:
        return psutil.Process(int(process)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_clients_stay_in_one_process_until_the_run_is_over(place: Path) -> None:
    context = context_of()
    answers = [ask(context) for _ in range(3)]
    assert [one["count"] for one in answers] == [1, 2, 3]
    (process,) = {one["process"] for one in answers}
    assert process != os.getpid()
    (socket,) = place.glob("run-*/*")
    assert (mode_of(socket), mode_of(socket.parent), mode_of(place)) == (0o600, 0o700, 0o700)
    assert ask(context, "train.finish")["process"] == process
    assert not context.state
    until(lambda: is_gone(process))
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("kind", ["train.fail", "train.refuse", "train.unknown"])
def test_an_error_has_the_name_and_the_words_that_it_has_in_the_process(
    kind: str, place: Path
) -> None:
    """Flower sends both to the server; what an app may say is for `boundary`, in the worker too."""
    with pytest.raises(Exception) as caught:
        ResidentClientApp("told_app:app")(message_of(kind), context_of(resident=False))
    reply = ResidentClientApp("told_app:app")(message_of(kind), context_of())
    assert reply.error.reason == f"{caught.type}:<'{caught.value}'>"  # as Flower writes it


def test_of_an_app_that_cannot_be_imported_only_the_kind_of_error_leaves(place: Path) -> None:
    said = ResidentClientApp("no_such_app:app")(message_of(), context_of()).error.reason
    assert "ClientError" in said and "no_such_app" not in said


def test_a_worker_that_dies_costs_its_message_and_is_started_again(place: Path) -> None:
    context = context_of()
    first = ask(context)
    with pytest.raises(WorkerLostError) as caught:
        ask(context, "train.die")
    assert caught.value.told == str(caught.value)  # it may leave the machine
    second = ask(context)
    assert second["count"] == 2
    assert second["process"] != first["process"]
    os.kill(int(second["process"]), signal.SIGKILL)  # between two messages: its socket stays
    psutil.Process(int(second["process"])).wait(10)  # until its last thread is gone
    assert ask(context)["count"] == 3


@pytest.mark.slow
def test_a_worker_without_messages_ends_and_the_next_message_starts_another(place: Path) -> None:
    context = context_of(**{"resident-idle": 0.2})
    first = ask(context)
    until(lambda: is_gone(first["process"]))
    assert list(place.iterdir()) == []
    assert ask(context)["count"] == 2


@pytest.mark.parametrize("is_busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_worker_ends_with_its_supernode(
    is_busy: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supernode:
        monkeypatch.setattr(resident, "owner_of_message", lambda: supernode.pid)
        process = ask(context_of())["process"]
        file = tmp_path / "process"
        if is_busy:
            arguments = ["--parent-pid", str(supernode.pid)]
            with subprocess.Popen([*started("train.hang", file), *arguments]) as caller:
                until(file.exists)
                supernode.kill()
                until(lambda: is_gone(process))
                caller.kill()
        else:
            supernode.kill()
            until(lambda: is_gone(process))
    assert list(place.iterdir()) == []


def started(kind: str, file: Path) -> list[str]:
    return [sys.executable, "-c", PROCESS, kind, str(file)]


def test_a_worker_ends_when_nobody_waits_for_its_answer(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "process"
    arguments = [*started("train.hang", file), "--parent-pid", str(os.getpid())]
    with subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": str(HERE)}) as caller:
        until(lambda: file.exists() and file.read_text())
        caller.kill()
        until(lambda: is_gone(int(file.read_text())))
    assert list(place.iterdir()) == []


def test_what_flower_starts_for_a_message_imports_no_engine(place: Path, tmp_path: Path) -> None:
    arguments = [*started("train", tmp_path), "--parent-pid", str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    with (tmp_path / "said").open("w+") as said:  # a pipe would stay open as long as the worker
        subprocess.run(arguments, env=environment, stdout=said, check=True)
        said.seek(0)
        process, *modules = said.read().splitlines()[-1].split()
    assert psutil.Process(int(process)).cmdline()[1] == "-c"  # the worker
    ours = {name for name in modules if name.startswith("flower_graph")}
    parts = ("client", "errors", "flower_compat", "lazy", "storage", "wire")
    assert {name.split(".")[1] for name in ours if "." in name} == set(parts)
    assert {"torch", "told_app", "flower_graph.client.adaptor"}.isdisjoint(modules)
    assert len(modules) < 40


def test_another_users_process_is_not_spoken_to(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(context_of())
    monkeypatch.setattr(resident, "is_own", lambda connection: False)
    with pytest.raises(WorkerLostError):
        ask(context_of())


def test_a_supernode_may_keep_its_clients_in_the_process(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(context_of(resident=False))["process"] == os.getpid()
    monkeypatch.undo()  # no SuperNode
    assert ask(context_of())["process"] == os.getpid()
    for key, value in (("resident", "no"), ("resident-idle", 0), ("resident-idle", "long")):
        with pytest.raises(ConfigError, match=f"^node-config {key}: "):
            ask(context_of(**{key: value}))
