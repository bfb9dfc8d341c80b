"""Runs a configuration through `flwr run` on Ray, and leaves no process behind.

`flwr run` starts a detached SuperLink that outlives it, and Ray starts half a dozen processes
more. Here all of them get a private home folder, private ports and a private temporary folder.
They are found by the home folder in their environment, and ended by their process ids.
"""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

import flower_graph
from flower_graph.config.app_keys import RUN_CONFIG
from flower_graph.errors import EngineFailedError, OutputError
from flower_graph.storage import files
from flower_graph.storage.reading import MOST_LINES, read_bytes, read_json, reading

ROOT = str(Path(flower_graph.__file__).resolve().parents[1])
KILL_WAIT = 15.0  # seconds until processes that were killed must be gone
GUARD = """\
import shutil, sys
_, root, *words = sys.argv
sys.path.insert(0, root)
from flower_graph.apps.cli.launch import end_processes
sys.stdin.read()
end_processes(*words[:2])
for folder in words[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


def end_processes(name: str, value: str) -> None:
    """Kill every process that has a variable in its environment, and wait for its end."""
    deadline = time.monotonic() + KILL_WAIT
    while family := marked_processes(name, value):
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=1.0)
        if time.monotonic() > deadline:
            raise EngineFailedError(f"processes that cannot be ended: {[p.pid for p in family]}")


def marked_processes(name: str, value: str) -> list[psutil.Process]:
    """List the processes whose environment has a variable, and all their descendants."""
    # Ray's workers rename themselves, which overwrites what the system shows of their environment;
    # they are found as children of the raylet.
    result: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                result |= {p.pid: p for p in [process, *process.children(recursive=True)]}
    result.pop(os.getpid(), None)
    return [process for process in result.values() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def guarded(name: str, value: str, *folders: Path) -> Iterator[None]:
    """Have a process end those with a variable in their environment, and remove folders.

    It does so when the block ends, or when this process dies in whatever way: then nobody is at the
    other end of a pipe. Signals that reach this process do not reach the guard. A termination
    signal leaves the block by SystemExit, so that what is to be kept of the folders is kept.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Handlers are the main thread's to set, and `nohup` is left as it is
    ending = (signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    usual = [one for one in ending if is_main and signal.getsignal(one) is signal.SIG_DFL]
    words = [sys.executable, "-c", GUARD, ROOT, name, value, *map(str, folders)]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        for one in usual:
            signal.signal(one, leave)
        yield
    finally:
        guard.communicate()
        for one in usual:
            signal.signal(one, signal.SIG_DFL)
    if guard.returncode:
        raise EngineFailedError("processes of Flower or Ray cannot be ended")


CLIENT = "client-resources-num-cpus=1"
LOG = "flower.log"  # all lines of Flower's engine, in the run's folder
TAIL = 40  # lines of the log that an error shows
LINE_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# The app that Flower bundles: this file alone, because the library itself is installed. A SuperLink
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
serverapp = {server}
clientapp = {client}

[tool.flwr.app.config]
{settings}
"""


def flwr_run(
    config: str,
    overrides: Sequence[str],
    out: Path,
    *,
    supernodes: int = 2,
    seed: int | None = None,
    resume: bool = False,
    echo: Callable[[str], None] = print,
    ray_address: str | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, object]:
    """Run one configuration on Flower's simulation engine and wait for its result.

    Ray is started for the run, unless ``ray_address`` names the head of a cluster to join.
    ``meanwhile`` is called while the engine starts; an error in it ends the run.
    """
    result = out.resolve() / "result.json"
    before = result.stat().st_mtime_ns if result.exists() else None
    settings = {
        **RUN_CONFIG,
        "config": config,
        "overrides": shlex.join(overrides),
        "output-dir": str(out.resolve()),
        "resume": bool(resume),
        "seed": "" if seed is None else str(seed),
    }
    home = files.temporary_folder("fg-", Path(_short_temporary_folder()))
    with guarded("FLWR_HOME", str(home), home, _state_folder(home)):
        try:
            app = write_app(home / "app", settings)
            log = _run_in(home, app, supernodes, ray_address, echo, meanwhile)
        finally:
            if (home / LOG).is_file() and out.is_dir() and any(out.iterdir()):
                with (home / LOG).open("rb") as lines, files.append(out / LOG) as kept:
                    shutil.copyfileobj(lines, kept)
    # `flwr run` itself ends with code 0 when the app fails.
    after = result.stat().st_mtime_ns if result.exists() else None
    if after == before or any("Exit Code:" in line for line in log):
        raise _failure("the run failed", log)
    with reading(result, OutputError):
        payload: dict[str, object] = read_json(result)
    return payload


def _run_in(
    home: Path,
    app: Path,
    supernodes: int,
    ray_address: str | None,
    echo: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> list[str]:
    environment = engine_environment(home, ray_address)
    process = subprocess.Popen(
        engine_command(app, supernodes, environment),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
    )
    meanwhile()
    lines: deque[str] = deque(maxlen=TAIL)
    with files.append(home / LOG) as file:
        for line in process.stdout or ():
            if text := LINE_COLOURS.sub("", line).rstrip():
                lines.append(text)
                file.write(f"{text}\n".encode())
                echo(text)
    tail = [*lines]
    if process.wait() != 0:
        path = home / "local-superlink" / "superlink.log"
        if any("Failed to start local SuperLink" in line for line in tail) and path.exists():
            with reading(path, OutputError):
                tail += read_bytes(path, MOST_LINES).decode(errors="replace").splitlines()
        raise _failure(f"`flwr run` ended with code {process.returncode}", tail)
    return tail


def write_app(
    folder: Path,
    settings: Mapping[str, str | int],
    server: str = "flower_graph.apps.server_app:app",
    client: str = "flower_graph.apps.client_app:app",
) -> Path:
    """Write what Flower reads of an app: its settings, and where its two halves are."""
    files.make_folder(folder)
    # JSON's strings and booleans are TOML's too.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    about = {"version": flower_graph.__version__, "server": server, "client": client}
    words = {name: json.dumps(value) for name, value in about.items()}
    pyproject = APP_PYPROJECT.format(**words, settings="\n".join(lines))
    files.write_text(folder / "pyproject.toml", pyproject)
    return folder


def engine_command(app: Path, supernodes: int, environment: Mapping[str, str]) -> list[str]:
    """Return the command that simulates an app in an environment."""
    federation = f"num-supernodes={supernodes}"
    if "RAY_ADDRESS" not in environment:
        # Flower starts one actor per CPU that it is told of; more than one per SuperNode is waste.
        federation += f" init-args-num-cpus={min(supernodes, os.cpu_count() or 1)}"
    flwr = shutil.which("flwr", path=environment["PATH"]) or "flwr"
    return [flwr, "run", str(app), "--stream", "--federation-config", f"{federation} {CLIENT}"]


def engine_environment(home: Path, ray_address: str | None = None) -> dict[str, str]:
    """Return an environment private to this run, whose Ray joins only a given cluster."""
    http, control = free_ports(2)
    return quiet_environment(home, _state_folder(home)) | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        **({"RAY_TMPDIR": str(home)} if ray_address is None else {"RAY_ADDRESS": ray_address}),
        # Client processes see the same accelerators as the server; Ray would hide them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def quiet_environment(home: Path, state: Path) -> dict[str, str]:
    """Return an environment in which Flower and Ray join nothing and call no server of theirs."""
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)  # join no cluster that runs already but the one asked for
    environment.setdefault("PYTHONWARNINGS", "ignore::DeprecationWarning")  # of the libraries
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # actors share the cores
    if Path(ROOT).name not in ("site-packages", "dist-packages"):
        paths = [ROOT, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
        "FLWR_HOME": str(home),
        files.STATE_VARIABLE: str(state),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _state_folder(home: Path) -> Path:
    usual = files.default_folder()
    return usual.with_name(f"{usual.name}-{home.name}")


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nothing listens on."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _short_temporary_folder() -> str:
    # Ray adds about 65 characters to it for its sockets, and a socket's path has 107 at most.
    usual = tempfile.gettempdir()
    return "/tmp" if len(usual) > 30 and os.access("/tmp", os.W_OK) else usual


def _failure(what: str, tail: Sequence[str]) -> EngineFailedError:
    return EngineFailedError("\n".join([f"{what}. The last lines of its log:", *tail[-TAIL:]]))
