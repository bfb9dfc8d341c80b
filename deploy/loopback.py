"""A deployment on one machine: a SuperLink and SuperNodes, each in processes of its own.

The processes talk over the loopback interface as over a network: with TLS and registered keys. The
demo, the tests and the benchmark start it.
"""

import json
import shlex
import shutil
import signal
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Self

import httpx
import psutil
import tomli_w

from deploy.connection import NAME, write_connection
from deploy.credentials import make_node_key, make_server_credentials
from flower_graph.apps.cli import launch
from flower_graph.apps.cli import main as cli

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
HOST = "127.0.0.1"
MARK = "FLOWER_GRAPH_DEPLOYMENT"  # in the environment of every process of one deployment
PARTY = "FLOWER_GRAPH_PARTY"  # and of every process of one of its parties
USER = "user"  # the party that starts runs
START_WAIT = 60.0  # seconds until the SuperLink must answer
POLL = 0.1


class DeploymentError(RuntimeError):
    """A process of the deployment failed; the message has its log."""


class Loopback:
    """A SuperLink and SuperNodes on this machine; leaving the context ends all their processes."""

    def __init__(
        self, folder: Path, *, tls: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.tls = tls
        self.mark = uuid.uuid4().hex
        self.port = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = dict(environment or {})
        self._exits = ExitStack()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def authority(self) -> Path:
        return self.folder / "credentials" / "ca.crt"

    def __enter__(self) -> Self:
        self._exits.callback(self._reap)
        self._exits.enter_context(launch.guarded(MARK, self.mark))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.tls:
                make_server_credentials(self.authority.parent, [HOST])
            self.start_superlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _reap(self) -> None:
        for process in self.processes.values():
            process.wait(timeout=10)

    def start_superlink(self) -> None:
        """Start the SuperLink on the port that it had before, or on a free one."""
        self.port = self.port or launch.free_ports(1)[0]
        home = self.folder / "superlink"
        home.mkdir(exist_ok=True)
        trust = self.authority if self.tls else None
        write_connection(self._home(USER), NAME, self.address, trust)
        database = str(home / "state.db")
        if self.tls:
            command = ["sh", str(SCRIPTS / "superlink.sh"), str(self.authority.parent)]
            command += [HOST, str(self.port)]
        else:
            command = ["flower-superlink", "--host", HOST, "--port", str(self.port), "--insecure"]
            command += ["--disable-runtime-dependency-installation", "--database", database]
        self._start("superlink", command, SUPERLINK_DATABASE=database)
        self._wait_for_superlink()

    def register(self, name: str) -> Path:
        """Make a key for a SuperNode and register its public half; return the private half."""
        key = self.make_key(name)
        answer = self.flwr("supernode", "register", f"{key}.pub", NAME, "--format", "json")
        if not json.loads(answer).get("success"):
            raise DeploymentError(f"{name} was not registered: {answer}")
        return key

    def make_key(self, name: str) -> Path:
        key = self.folder / "keys" / name
        make_node_key(key)
        return key

    def start_node(
        self,
        name: str,
        node_config: Mapping[str, str | int],
        *,
        key: Path | None = None,
        authority: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())
        common = ["--node-config", pairs, *options]
        port, trust = str(launch.free_ports(1)[0]), str(authority or self.authority)
        if not self.tls:
            command = ["flower-supernode", "--insecure", "--superlink", self.address]
            self._start(name, [*command, "--port", port, *common])
            return
        key = key or self.register(name)
        if "data-folder" in node_config:
            command = ["sh", str(SCRIPTS / "supernode.sh"), self.address, trust, str(key)]
            command += [str(node_config["data-folder"]), port]
        else:
            command = ["flower-supernode", "--superlink", self.address, "--port", port]
            command += ["--root-certificates", trust, "--auth-supernode-private-key", str(key)]
        self._start(name, [*command, *common])

    def start_run(self, name: str, run_config: Mapping[str, str | bool], app: Path = ROOT) -> None:
        """Start ``flwr run . my-deployment --stream``, whose log is then called `name`."""
        settings = self.folder / f"{name}.toml"
        settings.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
        command = ["flwr", "run", str(app), NAME, "--stream", "--run-config", str(settings)]
        self._start(name, command, home=USER)

    def wait(
        self, name: str, timeout: float, echo: Callable[[str], object] = lambda _: None
    ) -> str:
        deadline = time.monotonic() + timeout
        with (self.folder / "logs" / f"{name}.log").open(encoding="utf-8", errors="replace") as log:
            while True:
                has_ended = self.processes[name].poll() is not None
                for line in log:
                    echo(launch.LINE_COLOURS.sub("", line).rstrip())
                if has_ended:
                    return self.log(name)
                if time.monotonic() > deadline:
                    tails = f"{self.tail(name)}\n{self.tail('superlink')}"
                    raise DeploymentError(f"{name} takes longer than {timeout:g} s:\n{tails}")
                time.sleep(POLL)

    def flwr(self, *arguments: str) -> str:
        """Run the command ``flwr`` as the user of this deployment; return its output."""
        done = subprocess.run(
            ["flwr", *arguments],
            env=self._variables(USER),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode != 0:
            text = launch.LINE_COLOURS.sub("", done.stdout + done.stderr)
            raise DeploymentError(f"flwr {shlex.join(arguments)}: code {done.returncode}\n{text}")
        return done.stdout

    def end(self, name: str) -> None:
        """End a party as Ctrl-C would, and the processes that it leaves."""
        process = self.processes[name]
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        self.kill(name)

    def kill(self, name: str) -> None:
        """Kill a party and all its processes at once (SIGKILL)."""
        launch.end_processes(PARTY, self._party(name))
        self.processes[name].wait(timeout=10)

    def processes_of(self, name: str, command: str) -> list[psutil.Process]:
        """List a party's processes whose command line has a word, such as flwr-clientapp."""
        found = []
        for process in launch.marked_processes(PARTY, self._party(name)):
            with suppress(psutil.Error):
                if any(command in part for part in process.cmdline()):
                    found.append(process)
        return found

    def left(self) -> list[psutil.Process]:
        return launch.marked_processes(MARK, self.mark)

    def log(self, name: str) -> str:
        text = (self.folder / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return launch.LINE_COLOURS.sub("", text)

    def tail(self, name: str, lines: int = 30) -> str:
        return "\n".join(self.log(name).splitlines()[-lines:])

    def _start(
        self, name: str, command: Sequence[str], home: str | None = None, **variables: str
    ) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        own = self._variables(name, home) | variables
        folder = self._home(home or name)
        self.processes[name] = start(command, own, folder, logs / f"{name}.log")

    def _wait_for_superlink(self) -> None:
        scheme = "https" if self.tls else "http"
        trust = ssl.create_default_context(cafile=self.authority) if self.tls else False
        deadline = time.monotonic() + START_WAIT
        while time.monotonic() < deadline and self.processes["superlink"].poll() is None:
            try:
                if httpx.get(f"{scheme}://{self.address}/health", verify=trust).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(POLL)
        raise DeploymentError(f"the SuperLink did not start:\n{self.tail('superlink')}")

    def _party(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _variables(self, name: str, home: str | None = None) -> dict[str, str]:
        return launch.quiet_environment(self._home(home or name), self.folder / "state") | {
            "OMP_NUM_THREADS": "1",  # several parties share this machine's cores
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            MARK: self.mark,
            PARTY: self._party(name),
            **self._environment,
        }


def start(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start a process in a folder, which writes to a log; Ctrl-C reaches its caller alone."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def deal(
    config: str, settings: Sequence[str], folder: Path, supernodes: int
) -> tuple[list[Path], dict[str, str]]:
    """Write the data folders of a run; return the SuperNodes' folders, and the run config."""
    words = ["partition", config, *settings, "--out", str(folder / "data")]
    with redirect_stdout(StringIO()) as printed:  # a page of statistics
        code = cli.main([*words, "--supernodes", str(supernodes)])
    if code != 0:
        raise DeploymentError(f"{config}: no data folders were written\n{printed.getvalue()}")
    run = {
        "config": config,
        "overrides": " ".join(settings),
        "output-dir": str(folder / "deployed"),
        "server-folder": str(folder / "data" / "server"),
    }
    return sorted((folder / "data").glob("client*")), run


def remove(folder: Path) -> None:
    """Remove a deployment's folder once its processes have ended."""
    shutil.rmtree(folder, ignore_errors=True)
