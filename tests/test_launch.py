"""`flwr run` on Ray: the same figures as in-process, and no process left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flower_graph.apps.cli import launch
from flower_graph.apps.cli.launch import end_processes, guarded, marked_processes
from flower_graph.method.load import load_config
from flower_graph.storage.files import STATE_VARIABLE

RELEASE = pytest.mark.release
MARK = "FLOWER_GRAPH_TEST_MARK"
SMALL = ["rounds=2", "data.name=csbm", "data.nodes=60", "data.classes=3", "data.num_features=40"]
SMALL += ["data.split=random", "data.ratios=[0.4,0.3,0.3]"]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark all that a test starts; a test that fails half-way leaves nothing either."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    end_processes(MARK, value)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the launcher put its temporary folders where a test sees them."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(launch, "_short_temporary_folder", lambda: str(folder))
    return folder


def _rounds(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.flwr
@pytest.mark.fast
def test_flower_on_ray_gives_the_figures_of_the_in_process_engine(
    tmp_path: Path, mark: str, scratch: Path
) -> None:
    from flower_graph.apps.run import run

    lines: list[str] = []

    def echo(line: str) -> None:
        lines.append(line)
        print(line)  # pytest shows it where the figures differ

    started = time.monotonic()
    out, how = tmp_path / "ray", {"seed": 4, "supernodes": 2}
    result = launch.flwr_run("nfedgnn/cora-linqs", SMALL, out, echo=echo, **how)
    assert time.monotonic() - started < 180
    assert marked_processes(MARK, mark) == []
    assert list(scratch.iterdir()) == []
    config = load_config("nfedgnn/cora-linqs", [*SMALL, "seed=4"])
    expected = run(config, tmp_path / "here")
    assert (result["engine"], expected["engine"]) == ("flwr", "in-process")
    assert result["seed"] == expected["seed"] == 4
    assert result["rejected"] == expected["rejected"] == 0
    assert result["bytes"] == expected["bytes"]
    for ray, here in zip(_rounds(tmp_path / "ray"), _rounds(tmp_path / "here"), strict=True):
        assert ray["loss"] == pytest.approx(here["loss"], rel=1e-4)
        for part in ("train", "val", "test"):
            key = f"{part}-accuracy"
            assert ray[key] == pytest.approx(here[key], abs=1e-6), (key, ray["round"])
    assert sum("round" in line and "/2" in line for line in lines) >= 2
    assert (out / launch.LOG).read_text(encoding="utf-8").splitlines() == lines


@pytest.mark.flwr
def test_a_run_that_fails_says_why(tmp_path: Path, mark: str, scratch: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)the run failed.*model\.nmae"):
        launch.flwr_run("quickstart", ["model.nmae=gat"], tmp_path / "out", echo=lambda _: None)
    assert marked_processes(MARK, mark) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.flwr
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=RELEASE)])
def test_a_run_that_is_ended_leaves_nothing(how: signal.Signals, tmp_path: Path, mark: str) -> None:
    out, temporary = tmp_path / "out", Path(tempfile.mkdtemp(prefix="t-"))
    command = [sys.executable, "-m", "flower_graph.apps.cli.main", "run", "quickstart"]
    command += ["rounds=100000", "--engine", "flwr", "--out", str(out)]
    own = {STATE_VARIABLE: str(tmp_path / "state"), "TMPDIR": str(temporary)}
    environment = os.environ | own | {"PYTHONPATH": str(Path(launch.__file__).parents[1])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:
            deadline = time.monotonic() + 120
            while not (out / "metrics.jsonl").exists() or not _rounds(out):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert len(marked_processes(MARK, mark)) > 5
            process.send_signal(how)
            started = time.monotonic()
            assert process.wait(timeout=30) == (130 if how == signal.SIGINT else -how)
        finally:
            process.kill()
    while how == signal.SIGKILL and marked_processes(MARK, mark):
        assert time.monotonic() - started < 30
        time.sleep(0.2)
    assert time.monotonic() - started < 30
    assert marked_processes(MARK, mark) == []
    assert list(tmp_path.glob("state*")) == list(temporary.glob("fg-*")) == []
    assert _rounds(out)  # what was written stands
    shutil.rmtree(temporary)


def test_old_results_are_not_taken_for_new_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scratch: Path
) -> None:
    result = tmp_path / "result.json"

    def run_in(*_: object) -> list[str]:
        if not result.exists():
            result.write_text('{"rounds": 1}', encoding="utf-8")
        return ["all went wrong"]

    monkeypatch.setattr(launch, "_run_in", run_in)
    assert launch.flwr_run("quickstart", [], tmp_path) == {"rounds": 1}
    with pytest.raises(RuntimeError, match="went"):
        launch.flwr_run("quickstart", [], tmp_path)
    assert list(scratch.iterdir()) == []


def test_environment_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    first, second = (
        launch.engine_environment(tmp_path / "a"),
        launch.engine_environment(tmp_path / "b"),
    )
    assert "RAY_ADDRESS" not in first
    ports = ["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT"]
    assert len({environment[port] for environment in (first, second) for port in ports}) >= 3
    for name in ("FLWR_HOME", "RAY_TMPDIR"):
        assert first[name] != second[name]
    assert first["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/folders/" + "x" * 40)
    assert len(launch._short_temporary_folder()) <= 30


# Families of processes ----------------------------------------------------------------------------

# Starts a process that outlives it in a session of its own, and writes that one's number.
DETACH = """
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeper, start_new_session=True).pid)
"""


def _detached(value: str) -> psutil.Process:
    command = [sys.executable, "-c", DETACH]
    # Its output goes to nobody, or reading it would wait for the sleeper too.
    with subprocess.Popen(
        command, env={**os.environ, MARK: value}, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        return psutil.Process(int(run.stdout.readline()))


def test_detached_processes_are_found_and_ended(tmp_path: Path) -> None:
    mine, other, folder = uuid.uuid4().hex, uuid.uuid4().hex, tmp_path / "home"
    folder.mkdir()
    with guarded(MARK, other, folder):
        process, stranger = _detached(mine), _detached(other)
        assert [p.pid for p in marked_processes(MARK, mine)] == [process.pid]
        end_processes(MARK, mine)
        assert marked_processes(MARK, mine) == []
        assert [p.pid for p in marked_processes(MARK, other)] == [stranger.pid]
    assert marked_processes(MARK, other) == [] and not folder.exists()


def test_termination_leaves_the_block_before_the_folders_are_removed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught, guarded(MARK, uuid.uuid4().hex, tmp_path):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            assert tmp_path.exists()
    assert caught.value.code == 128 + signal.SIGTERM and not tmp_path.exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_descendants_without_the_mark_are_found() -> None:
    value = uuid.uuid4().hex
    inner = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import subprocess; subprocess.run({inner!r}, env={{}})"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: value}) as outer:
        deadline = time.monotonic() + 10
        while len(marked_processes(MARK, value)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(marked_processes(MARK, value)) == 2
        end_processes(MARK, value)
        assert not psutil.pid_exists(outer.pid)
