"""A client's tensors between two messages: in the context, in a file, in the process."""

import itertools
import multiprocessing
import pickle
import secrets
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph.client import state
from flower_graph.client.state import SMALL_BYTES, CohortState, Tensors, forget_run
from flower_graph.errors import StateLostError
from flower_graph.storage.files import IN_PROCESS, default_folder

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
    """Return where the run's files are if the SuperNode has no folder of its own."""
    return default_folder() / f"run-{run_id}"


def context_of(run_id: int, folder: Path | str, node: int = 3) -> Context:
    """Make a context: in this process, in files here, or in a folder of the SuperNode's own."""
    named = {} if isinstance(folder, Path) else {"state-dir": folder}
    return Context(run_id, node, named, RecordDict(), {})


def some(count: int) -> Tensors:
    return {"weight": torch.zeros(count), "step": torch.tensor([1, 2, 3], dtype=torch.int32)}


def cohort_of(context: Context, begun: Tensors | None = None) -> CohortState[Tensors]:
    """Return the state of clients whose object is their tensors."""
    copies = context.node_config.get("state-dir") != IN_PROCESS
    made = begun or {}
    return CohortState(
        context, [0], None, lambda found: (found or made, found or made), copies=copies
    )


def start(context: Context, tensors: Tensors) -> None:
    """Handle the first message."""
    cohort = cohort_of(context, tensors)
    assert cohort.version == 0
    with cohort.opened():
        pass


def add(context: Context, value: float) -> Context:
    """Handle one more message, perhaps in another process: add a number to every weight."""
    with cohort_of(context).opened() as tensors:
        tensors["weight"] += value
    return context


def kept(context: Context) -> Tensors:
    """Read the tensors as the next message would."""
    return cohort_of(context).look()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """Start one more process, which knows nothing of this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("count", [16, LARGE], ids=["context", "file"])
def test_another_process_takes_the_next_message(
    count: int, run_id: int, place: Path, other_process: ProcessPoolExecutor
):
    context = context_of(run_id, place)
    start(context, some(count))
    assert bool(files(place)) == (count == LARGE)
    add(context, 1.0)  # here
    context = other_process.submit(add, context, 2.0).result()  # there
    tensors = kept(add(context, 4.0))  # and here again
    assert torch.equal(tensors["weight"], torch.full((count,), 7.0))
    assert tensors["step"].tolist() == [1, 2, 3]
    assert tensors["step"].dtype == torch.int32
    assert cohort_of(context).version == 4


def test_another_process_cannot_take_over_what_is_kept_in_this_one(
    run_id: int, other_process: ProcessPoolExecutor
):
    context = context_of(run_id, IN_PROCESS)
    start(context, some(LARGE))
    add(context, 1.0)
    assert kept(context)["weight"][0] == 1
    with pytest.raises(StateLostError, match="client 3"):
        other_process.submit(add, context, 2.0).result()


@pytest.mark.parametrize("count", [16, LARGE])
@pytest.mark.parametrize("folder", [None, IN_PROCESS, "own"])
def test_a_message_that_ends_half_way_is_undone_or_refused(
    count: int, folder: str | None, run_id: int, place: Path, tmp_path: Path
):
    context = context_of(run_id, str(tmp_path) if folder == "own" else folder or place)
    start(context, some(count))
    add(context, 1.0)
    with pytest.raises(KeyError), cohort_of(context).opened() as tensors:
        tensors["weight"][:10] += 1
        raise KeyError
    if folder == IN_PROCESS:
        with pytest.raises(StateLostError, match="half changed"):
            kept(context)
    else:
        assert torch.equal(kept(context)["weight"], torch.ones(count))


@pytest.mark.parametrize(("count", "folder"), [(16, None), (LARGE, None), (16, IN_PROCESS)])
def test_a_context_that_was_taken_back(count: int, folder: str | None, run_id: int, place: Path):
    """The message was handled, then something else failed: the next one must still work."""
    context = context_of(run_id, folder or place)
    start(context, some(count))
    older = RecordDict(dict(context.state))
    add(context, 2.0)
    context.state = older
    add(context, 4.0)
    assert kept(context)["weight"][0] == 6
    assert cohort_of(context).version == 2


def test_drop_removes_everything(run_id: int, place: Path):
    contexts = [context_of(run_id, place, node) for node in (1, 2)]
    for context in contexts:
        start(context, some(LARGE))
    assert place.stat().st_mode & 0o077 == 0, "other users can read it"
    cohort_of(contexts[0]).drop()
    assert files(place) == ["clients-node-2.safetensors"], "the neighbour's file stays"
    assert not contexts[0].state
    assert cohort_of(contexts[0]).version == 0
    cohort_of(contexts[1]).drop()
    assert not place.exists()
    start(contexts[0], some(LARGE))
    forget_run(run_id)
    assert not place.exists()
    context = context_of(run_id, IN_PROCESS)
    start(context, some(16))
    for _ in range(2):  # a second time does no harm
        forget_run(run_id)
        cohort_of(context).drop()
        assert not context.state


@pytest.mark.parametrize("own", [True, False])
def test_a_newer_file_is_taken_and_an_older_one_refused(
    own: bool, run_id: int, place: Path, tmp_path: Path
):
    context = context_of(run_id, str(tmp_path) if own else place)
    start(context, some(LARGE))
    older = RecordDict(dict(context.state))
    (path,) = (tmp_path if own else place).rglob("*.safetensors")
    first = path.read_bytes()
    add(context, 1.0)
    newer, context.state = context.state, older
    assert kept(pickle.loads(pickle.dumps(context)))["weight"][0] == 1  # as another process does
    context.state = newer
    for data, match in ((first, "version 1.*version 2"), (first[:-1] + b"!", ""), (None, "")):
        path.unlink()
        if data:
            path.write_bytes(data)
        with pytest.raises(StateLostError, match=f"client 3.*{match}"):
            kept(pickle.loads(pickle.dumps(context)))


def test_a_full_disk_leaves_the_message_before(
    run_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    context = context_of(run_id, str(tmp_path))
    start(context, some(LARGE))
    add(context, 1.0)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(state.checkpoint, "save_client", Mock(side_effect=OSError(28, "full")))
        add(context, 5.0)
    assert kept(context)["weight"][0] == 1
    add(context, 2.0)
    assert kept(context)["weight"][0] == 3
