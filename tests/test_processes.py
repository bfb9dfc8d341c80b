import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from flower_graph.apps.cli.launch import (
    adopted_orphans,
    end_processes,
    marked_processes,
    termination_as_exit,
    without_interrupts,
)

MARK = "FLOWER_GRAPH_TEST_MARK"
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


def test_detached_processes_are_found_ended_and_reaped() -> None:
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    with adopted_orphans():
        process, stranger = _detached(mine), _detached(other)
        assert [p.pid for p in marked_processes(MARK, mine)] == [process.pid]
        end_processes(MARK, mine)
        assert marked_processes(MARK, mine) == []
        assert stranger.status() != psutil.STATUS_ZOMBIE
        end_processes(MARK, other)
    assert not psutil.pid_exists(process.pid)
    assert not psutil.pid_exists(stranger.pid)


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


def test_this_process_is_never_among_them() -> None:
    code = f"""
import os
from flower_graph.apps.cli.launch import marked_processes
assert os.environ[{MARK!r}] == "x" and not marked_processes({MARK!r}, "x")
"""
    environment = {**os.environ, MARK: "x", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_termination_runs_the_clean_up() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, termination_as_exit():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler


def test_interrupts_are_ignored_during_the_clean_up() -> None:
    # A shell's background jobs begin with interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with without_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    signal.signal(signal.SIGINT, before)
