"""Runs that go on from a checkpoint: to the bit, after damage, a full disk, or a killed server."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import ALL, EACH, EVERY, METHODS, ONCE, Done, later, one_fast, tried

from flower_graph.config.common import CHECKPOINTS
from flower_graph.errors import CheckpointError, OutputError
from flower_graph.method.registry import method_of
from flower_graph.storage import checkpoint

ROUNDS, LONG = 4, ("rounds=6",)


def assert_same(whole: Done, resumed: Done, first: int = 1) -> None:
    """Hold every round from ``first`` on, and what is left, against the other run's."""
    assert len(whole.reports) == len(resumed.reports)
    for one, other in zip(whole.reports[first - 1 :], resumed.reports[first - 1 :], strict=True):
        left, right = one.to_record(), other.to_record()
        for key in ("seconds", "wire-bytes"):
            left.pop(key), right.pop(key)
        assert repr(left) == repr(right), f"round {one.round}"
    left_, right_ = whole.kept, resumed.kept
    assert left_.keys() == right_.keys()
    for name, value in left_.items():
        assert torch.equal(value, right_[name]), name


@pytest.mark.parametrize("name", EVERY)
def test_interrupted_after_any_round(name: str, tmp_path: Path) -> None:
    """Interrupted twice in one run; a variant once."""
    setup = ALL[name]
    every = (f"rounds={ROUNDS}", "checkpoint_every=1")
    out = tmp_path / "out"
    first = 2 if name in METHODS else ROUNDS - 1
    for stop_at in range(first, ROUNDS):  # a round is reported before its checkpoint is made
        setup.run(out, *every, resume=stop_at > first, stop_at=stop_at)
    assert_same(setup.whole(f"rounds={ROUNDS}"), setup.run(out, *every, resume=True))


@pytest.mark.parametrize("name", EACH)
def test_with_some_of_the_clients_every_client_has_its_part(name: str, tmp_path: Path) -> None:
    setup = METHODS[name].with_("strategy.participation=0.5", f"rounds={ROUNDS}")
    out = tmp_path / "out"
    setup.run(out, "checkpoint_every=2", stop_at=3)
    assert_same(setup.whole(), setup.run(out, "checkpoint_every=2", resume=True))
    found = sorted(tmp_path.glob(f"out*/**/round-{ROUNDS:06d}/*"))
    clients = [path.name for path in found if path.name != "server.safetensors"]
    assert clients == [f"client-{k}.safetensors" for k in range(setup.supernodes)]
    assert len(clients) == len(found) - 1


@pytest.mark.parametrize("name", EACH)
def test_the_last_two_are_kept_and_a_longer_run_goes_on(name: str, tmp_path: Path) -> None:
    setup, out = METHODS[name], tmp_path / "out"
    setup.run(out, "rounds=2", "checkpoint_every=1")
    assert checkpoint.complete_rounds(out / CHECKPOINTS) == [1, 2]
    longer = (f"rounds={ROUNDS}", "checkpoint_every=1")
    ended = setup.run(out, *longer, resume=True)
    assert_same(
        setup.whole(f"rounds={ROUNDS}"), ended, first=3
    )  # what the shorter run's end cost is in its last round
    again = setup.run(out, *longer, resume=True)  # nothing is left to do
    assert_same(ended, again)
    with pytest.raises(CheckpointError, match=r"num_rounds: 1.*round 4"):
        setup.run(out, "rounds=1", "checkpoint_every=1", resume=True)


@pytest.mark.parametrize("name", EACH)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    setup, out = METHODS[name], tmp_path / "out"
    setup.run(out, "rounds=1", "checkpoint_every=1")
    size = "dimension" if setup.load().app == "ppfl" else "hidden"
    more: dict[str, Any] = {"rounds=2": {"supernodes": setup.supernodes - 1}}
    more |= {"seed=4": {}, f"model.{size}=8": {}}
    for word, how in more.items():
        with pytest.raises(CheckpointError, match=r"round.*1"):
            setup.run(out, "rounds=2", "checkpoint_every=1", word, resume=True, **how)
    with pytest.raises(CheckpointError):
        setup.run(tmp_path / "other", "rounds=2", "checkpoint_every=1", resume=True)


@pytest.mark.parametrize("name", one_fast(["fedscem", "deepwalk, secure"], "fedscem"))
def test_a_proven_cheat_is_out_of_a_resumed_run_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, out = ALL[name], tmp_path / "out"
    kind = type(method_of(setup.load()).build_strategy(setup.load(), None))
    honest = kind.state

    def state(strategy: Any) -> Any:
        sums = getattr(strategy.session, "sums", None) or strategy.sums
        sums.server.exclude([1])
        return honest(strategy)

    with monkeypatch.context() as cheating:
        cheating.setattr(kind, "state", state)
        setup.run(out, "rounds=2", "checkpoint_every=1")
    again = setup.run(out, "rounds=4", "checkpoint_every=1", resume=True)
    assert 1 in again.who[0].answered and 1 not in again.who[-1].answered


DUE = 2  # the round whose checkpoint goes wrong


@contextmanager
def full_disk() -> Iterator[None]:
    """Have the kernel refuse whatever makes a file longer than a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("who", ["save_client", "save_server"])
# What is written differs by method, and what becomes of a failure to write it does not
@pytest.mark.parametrize("name", tried(METHODS, slow=["fedscem"]))
def test_a_full_disk(name: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, save = METHODS[name], getattr(checkpoint, who)

    def refused(*given: Any) -> Any:
        if f"round-{DUE:06d}" in str(given[0]) or given[1] == DUE:
            with full_disk():
                return save(*given)
        return save(*given)

    monkeypatch.setattr(checkpoint, who, refused)
    out = tmp_path / "full"
    done = setup.run(out, *LONG, "checkpoint_every=2")
    assert done.figures == pytest.approx(setup.whole(*LONG).figures, nan_ok=True, abs=1e-6)
    found = checkpoint.complete_rounds(out / "checkpoints")
    assert DUE not in found and max(found) >= 4


@pytest.mark.parametrize("who", ["server.safetensors", "client-*.safetensors"])
@pytest.mark.parametrize("name", ONCE)
def test_a_corrupt_checkpoint(
    name: str, who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup, out = METHODS[name], tmp_path / "damaged"
    setup.run(out, "rounds=4", "checkpoint_every=2")
    file = sorted(tmp_path.glob(f"damaged*/**/round-000004/{who}"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor, not of the header
    file.write_bytes(content)
    resumed = setup.run(out, *LONG, "checkpoint_every=2", resume=True)
    assert resumed.figures == pytest.approx(setup.whole(*LONG).figures, nan_ok=True, abs=1e-6)
    # The server is told what is wrong with a client's file, and not its name.
    assert (
        file.name if who == "server.safetensors" else "checkpoint: damaged: it does not"
    ) in caplog.text


@pytest.mark.parametrize("name", later(ONCE))
def test_two_runs_with_one_folder(name: str, tmp_path: Path) -> None:
    setup, words = METHODS[name], ("rounds=4", "checkpoint_every=1")
    out, refused = tmp_path / "o", []

    def second(partition: int, server_round: int, kind: str) -> str:
        if server_round == 3 and kind == "train" and not refused:
            for resume in (False, True):
                with pytest.raises(OutputError) as error:
                    setup.run(out, *words, resume=resume)
                refused.append(str(error.value))
        return "good"

    done = setup.run(out, *words, faults=second)
    assert len(refused) == 2 and all(str(out) in said for said in refused)
    assert [report.round for report in done.reports] == [1, 2, 3, 4]


DIES = 5  # with a checkpoint of round 4


def dies(partition: int, server_round: int, kind: str) -> str:
    if server_round == DIES and kind.startswith("train"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "good"


@pytest.mark.parametrize("name", later(ONCE))
def test_killed_between_checkpoint_and_send(name: str, tmp_path: Path) -> None:
    setup = METHODS[name]
    out = tmp_path / "killed"
    process = os.fork()
    if process == 0:
        try:
            setup.run(out, *LONG, "checkpoint_every=2", faults=dies)
        finally:
            os._exit(1)  # it is killed before
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not (out / "result.json").exists()
    resumed = setup.run(out, *LONG, "checkpoint_every=2", resume=True)
    assert [report.round for report in resumed.reports] == list(range(1, 7))
    assert resumed.figures == pytest.approx(setup.whole(*LONG).figures, nan_ok=True, abs=1e-6)
