"""A client's tensors between two messages: in the context, in a file, in the process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph.client import state
from flower_graph.client.state import SMALL_BYTES, StateStore, Tensors, forget_run
from flower_graph.errors import StateLostError
from flower_graph.storage.places import IN_PROCESS

NAME = "test-client"
RUNS = itertools.count(secrets.randbits(40))  # other tests may run on this machine
LARGE = SMALL_BYTES // 4 + 16  # float32 numbers, just above the limit


@pytest.fixture
def run_id() -> Iterator[int]:
    """Give the test a run of its own, since this process remembers runs."""
    number = next(RUNS)
    yield number
    forget_run(number)


@pytest.fixture
def place(run_id: int) -> Path:
    """Return where the run's files are that are mapped into memory."""
    return state.default_folder() / f"run-{run_id}"


def context_of(run_id: int, folder: Path | str, node: int = 3) -> Context:
    """Make a context: in this process, in files here, or in a folder of the SuperNode's own."""
    named = {} if isinstance(folder, Path) else {"state-dir": folder}
    return Context(run_id, node, named, RecordDict(), {})


def some(count: int) -> Tensors:
    return {"weight": torch.zeros(count), "step": torch.tensor([1, 2, 3], dtype=torch.int32)}


def start(context: Context, tensors: Tensors) -> Tensors:
    """Handle the first message."""
    store = StateStore(context, NAME)
    assert store.version == 0
    placed = store.create(tensors)
    store.commit(placed, placed)
    return placed


def begun(context: Context) -> tuple[StateStore, Tensors]:
    """Begin to handle a message."""
    store = StateStore(context, NAME)
    tensors = store.load(lambda tensors: tensors)
    store.begin()
    return store, tensors


def add(context: Context, value: float) -> Context:
    """Handle one more message, perhaps in another process: add a number to every weight."""
    store, tensors = begun(context)
    tensors["weight"] += value
    store.commit(tensors, tensors)
    return context


def failed(context: Context) -> None:
    """Have a message fail half way in this process."""
    begun(context)[1]["weight"][:10] += 1


def die_halfway(context: Context) -> None:
    failed(context)
    os._exit(1)


def kept(context: Context) -> Tensors:
    """Read the tensors as the next message would."""
    return StateStore(context, NAME).load(lambda tensors: tensors)


def died(context: Context) -> None:
    """Have a process of its own die in the middle of a message."""
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        pytest.raises(BrokenProcessPool),
    ):
        pool.submit(die_halfway, context).result()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """Start one more process, which knows nothing of this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("count", "kind"), [(16, "context"), (LARGE, "file")])
def test_another_process_takes_the_next_message(
    count: int, kind: str, run_id: int, place: Path, other_process: ProcessPoolExecutor
):
    context = context_of(run_id, place)
    start(context, some(count))
    assert context.state.config_records[NAME]["kind"] == kind
    assert bool(files(place)) == (kind == "file")
    add(context, 1.0)  # here
    context = other_process.submit(add, context, 2.0).result()  # there
    context = other_process.submit(add, context, 4.0).result()  # there, still in memory
    add(context, 8.0)  # and here again, where an older version is in memory
    tensors = kept(context)
    assert torch.equal(tensors["weight"], torch.full((count,), 15.0))
    assert tensors["step"].tolist() == [1, 2, 3]
    assert tensors["step"].dtype == torch.int32
    assert StateStore(context, NAME).version == 5


def test_another_process_cannot_take_over_what_is_kept_in_this_one(
    run_id: int, other_process: ProcessPoolExecutor
):
    context = context_of(run_id, IN_PROCESS)
    start(context, some(LARGE))
    add(context, 1.0)
    assert kept(context)["weight"][0] == 1
    assert context.state.config_records[NAME]["kind"] == "process"
    assert not context.state.array_records
    with pytest.raises(StateLostError, match="version 2"):
        other_process.submit(add, context, 2.0).result()


HALF = "half changed by a process that died"


@pytest.mark.parametrize(
    ("happens", "count", "folder", "said"),
    [
        (died, LARGE, None, f"client 3.*{HALF}"),
        (failed, LARGE, None, f"client 3.*{HALF}"),
        (failed, 16, IN_PROCESS, "message"),
        (failed, 16, None, ""),  # a copy was in the context
        (died, LARGE, "own", ""),  # the file of the message before is there
        (failed, LARGE, "own", ""),
    ],
)
def test_a_message_that_ends_half_way_is_undone_or_refused(
    happens: Callable[[Context], None],
    count: int,
    folder: str | None,
    said: str,
    run_id: int,
    place: Path,
    tmp_path: Path,
):
    context = context_of(run_id, str(tmp_path) if folder == "own" else folder or place)
    start(context, some(count))
    add(context, 1.0)
    happens(context)
    if said:
        with pytest.raises(StateLostError, match=said):
            kept(context)
    else:
        assert torch.equal(kept(context)["weight"], torch.ones(count))


@pytest.mark.parametrize(
    ("count", "folder", "expected"),
    [(16, None, 5.0), (LARGE, None, 7.0), (16, IN_PROCESS, 7.0)],
    ids=["context", "file", "process"],
)
def test_a_context_that_was_taken_back(
    count: int, folder: str | None, expected: float, run_id: int, place: Path
):
    """The message was handled, then something else failed: the next one must still work."""
    context = context_of(run_id, folder or place)
    start(context, some(count))
    add(context, 1.0)
    older = RecordDict(dict(context.state))
    add(context, 2.0)
    assert StateStore(context, NAME).version == 3
    context = Context(run_id, 3, context.node_config, older, {})
    add(context, 4.0)
    # What lies in the context is taken back with it, the rest is not.
    assert kept(context)["weight"][0] == expected
    assert StateStore(context, NAME).version == (3 if count == 16 and not folder else 4)


def test_a_file_that_is_older_or_gone_is_refused(run_id: int, place: Path):
    context = context_of(run_id, place)
    start(context, some(LARGE))
    (path,) = place.rglob("*.version")
    before = path.read_text()
    add(context, 1.0)
    path.write_text(before)
    with pytest.raises(StateLostError, match=r"version 1.*version 2"):
        kept(context)
    path.with_suffix(".bin").unlink()
    with pytest.raises(StateLostError, match=r"client 3.*node-3\.bin"):
        kept(context)


def test_once_builds_once_per_client(run_id: int, place: Path):
    first, second = (StateStore(context_of(run_id, place, node), NAME) for node in (1, 2))
    built: list[int] = []

    def build() -> int:
        built.append(len(built))
        return built[-1]

    assert [first.once(build), first.once(build), second.once(build)] == [0, 0, 1]


def test_all_types_and_shapes_survive(run_id: int, place: Path):
    tensors: dict[str, Any] = {
        "a": torch.arange(5, dtype=torch.int32),
        "b": torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)),
        "c": torch.tensor([True, False]),
        "d": torch.zeros(0, 7),
        "e": torch.tensor(2.5, dtype=torch.float64),
        "f": torch.ones(LARGE),
    }
    context = context_of(run_id, place)
    for value in start(context, tensors).values():
        assert value.data_ptr() % 64 == 0 or not value.numel()
    state._LIVE.clear()  # as a new process would be
    for name, value in kept(context).items():
        assert torch.equal(value, tensors[name])
        assert value.dtype == tensors[name].dtype
        assert value.shape == tensors[name].shape


def test_a_commit_of_64_mb_copies_nothing(run_id: int, place: Path):
    context = context_of(run_id, place)
    tensors = start(context, some(1 << 24))
    (path,) = place.rglob("*.bin")
    inode, address = path.stat().st_ino, tensors["weight"].data_ptr()
    assert path.stat().st_size == (1 << 26) + 64
    seconds = []
    for _ in range(5):
        store = StateStore(context, NAME)
        loaded = store.load(lambda _: pytest.fail("loaded again"))
        store.begin()
        loaded["weight"][0] += 1
        started = time.perf_counter()
        store.commit(loaded, loaded)
        seconds.append(time.perf_counter() - started)
    assert loaded["weight"].data_ptr() == address
    assert path.stat().st_ino == inode
    assert min(seconds) < 0.01, "writing 64 MB takes longer"
    assert sum(record.count_bytes() for record in context.state.values()) < 1000
    assert not context.state.array_records
    assert files(place) == ["node-3.bin", "node-3.version"]
    state._LIVE.clear()
    assert kept(context)["weight"][0] == 5, "the change is in the file"


def test_a_change_by_another_process_needs_no_new_mapping(run_id: int, place: Path):
    context = context_of(run_id, place)
    start(context, some(LARGE))
    here = state._LIVE.copy(), state._MAPS.copy()
    state._LIVE.clear()  # another process takes the next message
    store, there = begun(context)
    there["weight"][0] = 17
    store.commit(there, there)
    state._LIVE.update(here[0])
    state._MAPS.update(here[1])
    loaded = StateStore(context, NAME).load(lambda _: pytest.fail("mapped again"))
    assert loaded["weight"][0] == 17
    assert loaded["weight"].data_ptr() != there["weight"].data_ptr()


def test_a_new_file_in_the_same_place_is_mapped_anew(run_id: int, place: Path):
    context = context_of(run_id, place)
    start(context, some(LARGE))
    (path,) = place.rglob("*.bin")
    copied = path.with_suffix(".copy")
    copied.write_bytes(bytes(path.stat().st_size))
    copied.replace(path)
    assert kept(context)["weight"][0] == 0


def test_drop_removes_everything(run_id: int, place: Path):
    contexts = [context_of(run_id, place, node) for node in (1, 2)]
    for context in contexts:
        start(context, some(LARGE))
    assert place.stat().st_mode & 0o077 == 0, "other users can read it"
    StateStore(contexts[0], NAME).drop()
    assert files(place) == ["node-2.bin", "node-2.version"], "the neighbour's files stay"
    assert not contexts[0].state
    assert StateStore(contexts[0], NAME).version == 0
    StateStore(contexts[1], NAME).drop()
    assert not place.exists()
    for folder in (IN_PROCESS, ""):
        context = context_of(run_id, folder)
        start(context, some(16))
        for _ in range(2):  # a second time does no harm
            StateStore(context, NAME).drop()
            assert not context.state


def test_forget_run_removes_all_its_clients(run_id: int, place: Path):
    other = next(RUNS)
    contexts = [context_of(run, place, node) for run in (run_id, other) for node in (1, 2)]
    for context in contexts:
        start(context, some(LARGE))
    forget_run(run_id)
    assert not place.exists()
    with pytest.raises(StateLostError):
        kept(contexts[0])
    assert kept(contexts[2])["step"].tolist() == [1, 2, 3]
    forget_run(other)
    forget_run(run_id)  # nothing is there


def test_no_room_is_said_before_writing(run_id: int, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state.shutil, "disk_usage", lambda _: type("U", (), {"free": 1_000}))
    with pytest.raises(StateLostError, match=r"1,000.*1.*state-dir"):
        start(context_of(run_id, place), some(LARGE))
    assert files(place) == []


# In a folder of the SuperNode's own --------------------------------------------------------------


def test_a_file_of_its_own_outlasts_the_supernode(run_id: int, tmp_path: Path):
    context = context_of(run_id, str(tmp_path))
    start(context, some(LARGE))
    add(context, 1.0)
    assert context.state.config_records[NAME]["kind"] == "saved"
    assert not context.state.array_records
    # Another process, under another id, that was given the context's records.
    again = Context(run_id, 4, context.node_config, context.state, {})
    assert torch.equal(kept(again)["weight"], torch.ones(LARGE))
    add(again, 2.0)
    assert kept(again)["step"].dtype == torch.int32
    (path,) = tmp_path.rglob("*.*")
    assert path.stat().st_mode & 0o777 == 0o600
    StateStore(again, NAME).drop()
    assert not list(tmp_path.iterdir())


def test_a_newer_file_of_its_own_is_taken_and_an_older_one_refused(run_id: int, tmp_path: Path):
    context = context_of(run_id, str(tmp_path))
    start(context, some(LARGE))
    older = RecordDict(dict(context.state))
    (path,) = tmp_path.rglob("*.safetensors")
    first = path.read_bytes()
    add(context, 1.0)
    state._LIVE.clear()
    assert kept(Context(run_id, 3, context.node_config, older, {}))["weight"][0] == 1
    path.write_bytes(first)
    with pytest.raises(StateLostError, match=r"client 3.*version 1.*version 2"):
        kept(context)
    path.write_bytes(first[:-1] + b"!")
    with pytest.raises(StateLostError, match="client 3"):
        kept(context)
    path.unlink()
    with pytest.raises(StateLostError, match="client 3"):
        kept(context)


def test_a_full_disk_leaves_the_message_before(
    run_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    context = context_of(run_id, str(tmp_path))
    start(context, some(LARGE))
    add(context, 1.0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(state, "save_client", full)
        add(context, 5.0)
    assert kept(context)["weight"][0] == 1
    add(context, 2.0)
    assert kept(context)["weight"][0] == 3
