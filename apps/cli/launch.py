"""Run a configuration through `flwr run` on Ray, and leave no process behind.

`flwr run` starts a detached SuperLink that outlives it, and Ray starts half a dozen processes
more. Here all of them get a private home folder, private ports and a private temporary folder;
they are found by that home folder in their environment, and ended by their process ids.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

import flower_graph
from flower_graph.errors import OutputError
from flower_graph.method.of_app import RUN_CONFIG
from flower_graph.storage.files import STATE_VARIABLE, default_folder
from flower_graph.storage.reading import MOST_LINES, read_bytes, read_json, reading

Handler = Callable[[int, FrameType | None], object] | signal.Handlers  # of a signal
ATTEMPTS = 3  # a port that was free may be taken before the SuperLink binds it
CLIENT = "client-resources-num-cpus=1"
LOG = "flower.log"  # all lines of Flower's engine, in the run's folder
TAIL = 40  # lines of the log that an error shows
KILL_WAIT = 15.0  # seconds until processes that were killed must be gone
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
LINE_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# The app that Flower bundles: a few lines, because the library itself is installed. A SuperLink
# therefore copies nothing large, and a wheel install runs as a checkout does.
APP_PYPROJECT = """\
[project]
name = "flower-graph-run"
version = {version}
description = "Launches flower-graph"
license = "Apache-2.0"
dependencies = ["flower-graph"]

[tool.flwr.app]
publisher = "flower-graph"

[tool.flwr.app.components]
serverapp = "run_server:app"
clientapp = "run_client:app"

[tool.flwr.app.config]
{settings}
"""
APP_MODULE = 'from flower_graph.apps.{name} import app\n\n__all__ = ["app"]\n'


class _NotStartedError(RuntimeError):
    """The local SuperLink did not come up; another attempt takes other ports."""


def flwr_run(
    config: str,
    overrides: Sequence[str],
    out: Path,
    *,
    supernodes: int = 2,
    seed: int | None = None,
    resume: bool = False,
    echo: Callable[[str], None] = print,
) -> dict[str, object]:
    """Run one configuration on Flower's simulation engine and wait for its result."""
    if supernodes < 1:
        raise ValueError(f"supernodes={supernodes}: at least 1 is needed")
    result = out.resolve() / "result.json"
    before = _stamp(result)
    log = _launch(_settings(config, overrides, out, seed, resume), supernodes, echo, out)
    # `flwr run` itself ends with code 0 when the app fails.
    if _stamp(result) == before or any("Exit Code:" in line for line in log):
        raise RuntimeError(_failure("the run failed", log))
    with reading(result, OutputError):
        payload: dict[str, object] = read_json(result)
    return payload


def _settings(
    config: str, overrides: Sequence[str], out: Path, seed: int | None, resume: bool
) -> dict[str, str | bool]:
    """Return the run config; here every party makes its own data."""
    return {
        **RUN_CONFIG,
        "config": config,
        "overrides": shlex.join(overrides),
        "output-dir": str(out.resolve()),
        "resume": bool(resume),
        "seed": "" if seed is None else str(seed),
    }


def _launch(
    settings: dict[str, str | bool],
    supernodes: int,
    echo: Callable[[str], None],
    out: Path,
) -> list[str]:
    """Run the app, again with other ports if the SuperLink does not start; return its log."""
    for attempt in range(ATTEMPTS):
        home = Path(tempfile.mkdtemp(prefix="fg-", dir=_short_temporary_folder()))
        with adopted_orphans():
            try:
                with termination_as_exit():
                    return _run_in(home, settings, supernodes, echo)
            except _NotStartedError:
                if attempt + 1 == ATTEMPTS:
                    raise
            finally:
                with without_interrupts():
                    _keep_log(home / LOG, out)
                    end_processes("FLWR_HOME", str(home))
                    # State too, which may be gigabytes: a run that is ended cannot clear up.
                    for folder in (home, _state_folder(home)):
                        shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _run_in(
    home: Path,
    settings: dict[str, str | bool],
    supernodes: int,
    echo: Callable[[str], None],
) -> list[str]:
    """Start `flwr run` with everything private in `home` and follow it to its end."""
    app = _write_app(home / "app", settings)
    # Ray starts one actor per CPU that it is told of; more than one per SuperNode is waste.
    actors = min(supernodes, os.cpu_count() or 1)
    federation = f"num-supernodes={supernodes} init-args-num-cpus={actors}"
    environment = _environment(home)
    flwr = shutil.which("flwr", path=environment["PATH"]) or "flwr"
    process = subprocess.Popen(
        [flwr, "run", str(app), "--stream", "--federation-config", f"{federation} {CLIENT}"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
    )
    tail = _follow(process, echo, home / LOG)
    if process.wait() != 0:
        what = f"`flwr run` ended with code {process.returncode}"
        if any("Failed to start local SuperLink" in line for line in tail):
            raise _NotStartedError(_failure(what, tail + _superlink_log(home)))
        raise RuntimeError(_failure(what, tail))
    return tail


def _follow(process: subprocess.Popen[str], echo: Callable[[str], None], log: Path) -> list[str]:
    """Pass the output on line by line, and write it to a file; return its last lines."""
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=TAIL)
    with log.open("w", encoding="utf-8") as file:
        for line in process.stdout:
            text = LINE_COLOURS.sub("", line).rstrip()
            if text:
                tail.append(text)
                print(text, file=file, flush=True)
                echo(text)
    return list(tail)


def _keep_log(log: Path, out: Path) -> None:
    """Add the engine's lines to the run's outputs, if it has any; a refused run leaves nothing."""
    if log.is_file() and out.is_dir() and any(out.iterdir()):
        with log.open("rb") as lines, (out / LOG).open("ab") as kept:
            shutil.copyfileobj(lines, kept)


def _write_app(folder: Path, settings: dict[str, str | bool]) -> Path:
    """Write the small app that `flwr run` bundles; return its folder."""
    folder.mkdir()
    # JSON's strings and booleans are TOML's too.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    pyproject = APP_PYPROJECT.format(
        version=json.dumps(flower_graph.__version__), settings="\n".join(lines)
    )
    (folder / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    for side in ("server", "client"):
        module = APP_MODULE.format(name=f"{side}_app")
        (folder / f"run_{side}.py").write_text(module, encoding="utf-8")
    return folder


def _environment(home: Path) -> dict[str, str]:
    """Return the environment that keeps Flower and Ray to themselves and off the network."""
    http, control = _free_ports(2)
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)  # never join a cluster that runs already
    environment.setdefault("PYTHONWARNINGS", "ignore::DeprecationWarning")  # of the libraries
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # actors share the cores
    root = str(Path(flower_graph.__file__).resolve().parents[1])
    if Path(root).name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = _paths(root, environment.get("PYTHONPATH"))
    environment.update(
        PATH=_paths(str(Path(sys.executable).parent), environment.get("PATH")),
        FLWR_HOME=str(home),
        **{STATE_VARIABLE: str(_state_folder(home))},
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(http),
        FLWR_LOCAL_CONTROL_API_PORT=str(control),
        FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
        FLWR_TELEMETRY_ENABLED="0",
        FLWR_DISABLE_UPDATE_CHECK="1",
        RAY_TMPDIR=str(home),
        RAY_USAGE_STATS_ENABLED="0",
        # Client processes see the same accelerators as the server; Ray would hide them.
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        PYTHONUNBUFFERED="1",
    )
    return environment


def _state_folder(home: Path) -> Path:
    """Return where the clients of the run keep their state."""
    usual = default_folder()
    return usual.with_name(f"{usual.name}-{home.name}")


def _paths(*parts: str | None) -> str:
    """Join search paths; an empty one would stand for the working directory."""
    return os.pathsep.join(filter(None, parts))


def _free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _short_temporary_folder() -> str:
    """Return a folder for temporary files with a short path."""
    # Ray adds about 65 characters to it for its sockets, and a socket's path has 107 at most.
    usual = tempfile.gettempdir()
    short = "/tmp"
    return short if len(usual) > 30 and os.access(short, os.W_OK) else usual


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tell one version of a file from the next; None where there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _superlink_log(home: Path) -> list[str]:
    path = home / "local-superlink" / "superlink.log"
    if not path.exists():
        return []
    with reading(path, OutputError):
        return read_bytes(path, MOST_LINES).decode(errors="replace").splitlines()[-TAIL:]


def _failure(what: str, tail: Sequence[str]) -> str:
    return "\n".join([f"{what}. The last lines of its log:", *tail[-TAIL:]])


# Processes, however far they have detached themselves --------------------------------------------


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
            raise RuntimeError(f"processes that cannot be ended: {[p.pid for p in family]}")


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
    """Become the parent of orphaned descendants (Linux), and reap them on the way out."""
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
    """Turn the termination signals into SystemExit, so that `finally` clauses run then too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers({signal.SIGTERM: leave, signal.SIGHUP: leave}):
        yield


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep an impatient second Ctrl-C from stopping a clean-up half-way."""
    ignore = signal.SIG_IGN
    with _handlers({signal.SIGINT: ignore, signal.SIGTERM: ignore, signal.SIGHUP: ignore}):
        yield


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers for a while; only the main thread may, others leave them be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
