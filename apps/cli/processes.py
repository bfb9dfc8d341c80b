"""Finds, ends and reaps the processes of a run, even detached ones."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from flower_graph.errors import EngineFailedError

Handler = Callable[[int, FrameType | None], object] | signal.Handlers  # of a signal
KILL_WAIT = 15.0  # seconds until processes that were killed must be gone
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def end_processes(name: str, value: str) -> None:
    """Kill every process that has a variable in its environment, and wait for its end."""
    deadline = time.monotonic() + KILL_WAIT
    while family := marked_processes(name, value):
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=1.0)
        if time.monotonic() > deadline:
            raise EngineFailedError(f"processes that cannot be ended: {[p.pid for p in family]}")


def marked_processes(name: str, value: str) -> list[psutil.Process]:
    """List the processes whose environment has a variable, and all their descendants."""
    # Ray's workers rename themselves, which overwrites what the system shows of their environment;
    # they are found as children of the raylet.
    result: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                result |= {p.pid: p for p in [process, *process.children(recursive=True)]}
        except (psutil.Error, OSError):
            continue
    result.pop(os.getpid(), None)
    return [process for process in result.values() if not _ended(process)]


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Become the parent of orphaned descendants (Linux), and reap them at the end."""
    # Detached processes pass to process 1 otherwise, which in a container often reaps nothing, so
    # that dead processes would stay in the process table.
    if not sys.platform.startswith("linux"):
        yield
        return
    before = {child.pid for child in psutil.Process().children()}
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for child in psutil.Process().children():
            if child.pid not in before and _ended(child):
                # Threads of a dead process may take a while; what ended the run is still to be told
                with suppress(psutil.TimeoutExpired):
                    child.wait(timeout=KILL_WAIT)


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turn the termination signals into SystemExit, so that `finally` clauses run too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave}):
        yield


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep a second Ctrl-C from stopping a clean-up half-way."""
    ignore = signal.SIG_IGN
    with _handlers({signal.SIGINT: ignore, signal.SIGTERM: ignore, signal.SIGHUP: ignore}):
        yield


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers for a while; outside the main thread, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
