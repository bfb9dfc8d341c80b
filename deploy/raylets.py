"""A Ray cluster on one machine, in which each raylet stands for a machine.

The raylets share the code and nothing else: each has an address of the loopback interface, and a
home, temporary, state and data folder of its own. If the system allows it, all but the
first, where the driver runs, are also in a mount namespace: their ``/tmp`` and ``/dev/shm`` have
nothing of the others, so a path that only the driver's machine knows leads nowhere.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from deploy.loopback import start
from flower_graph.apps.cli import launch

ROOT = Path(__file__).resolve().parents[1]
MARK = "FLOWER_GRAPH_TEST_RAYLET"
START = 180.0  # seconds that a raylet may take to start on a busy machine
LEFT_WAIT = 20.0  # seconds after a run in which Ray ends its actors
STORE = 100 * 2**20  # bytes of an object store
STARTED = "Ray runtime started"
RAYS_OWN = ("raylet", "DashboardAgent", "RuntimeEnvAgent", "IDLE")  # processes without an actor
# Run in a new mount namespace: /tmp and /dev/shm are empty but for the raylet's own folder, and the
# checkout and its Python, should they lie in /tmp
APART = """
mount -t tmpfs none /mnt && mount -t tmpfs none /dev/shm || exit
for kept in "$1" "$2" "$3"; do case "$kept" in
/tmp/*) mkdir -p "/mnt/${kept#/tmp/}" && mount --bind "$kept" "/mnt/${kept#/tmp/}" || exit ;;
esac; done
mount --move /mnt /tmp && cd "$1" && shift 3 && exec "$@"
"""


class Raylet:
    """One of the machines: an address of the loopback interface, with so many processors."""

    def __init__(self, address: str, cpus: int) -> None:
        self.address, self.cpus, self.mark = address, cpus, uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))  # paths of sockets are short
        for name in ("home", "tmp", "data", "ray"):
            (self.folder / name).mkdir()
        self._log = self.folder / "log"

    def begin(self, words: Sequence[str], *, apart: bool) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block"]
        command += [f"--node-ip-address={self.address}", f"--num-cpus={self.cpus}"]
        command += [f"--temp-dir={self.folder / 'ray'}", f"--object-store-memory={STORE}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"]
        if apart:
            kept = self.folder, ROOT, sys.prefix
            command = [*_unshare(), "sh", "-c", APART, "sh", *map(str, kept), *command]
        self._process = start(command, self.environment(), self.folder, self._log)

    def environment(self) -> dict[str, str]:
        return launch.quiet_environment(self.folder / "home", self.folder / "state") | {
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "home" / ".cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "FLOWER_GRAPH_DATA": str(self.folder / "data"),
            "OMP_NUM_THREADS": "1",
            "RAY_health_check_period_ms": "500",  # a machine that goes is noticed in seconds
            MARK: self.mark,
        }

    def wait(self) -> None:
        end = time.monotonic() + START
        while STARTED not in self._log.read_text(errors="replace"):
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"a raylet does not start:\n{self._log.read_text()}")
            time.sleep(0.1)

    def kill(self) -> None:
        launch.end_processes(MARK, self.mark)

    def end(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def actors(self) -> list[str]:
        names = []
        for one in launch.marked_processes(MARK, self.mark):
            with suppress(psutil.Error):
                names.append(" ".join(one.cmdline()).strip())
        return [n for n in names if n.startswith("ray::") and n[5:] not in RAYS_OWN]

    def left(self) -> list[str]:
        """Name the processes of actors and tasks, and the files outside Ray's own folder."""
        own = {self.folder / "ray", self._log}
        files = [p for p in self.folder.rglob("*") if not p.is_dir() and not own & {p, *p.parents}]
        return [*self.actors(), *map(str, files)]


class Raylets:
    """A cluster, as a context; ``cpus`` has each machine's processors, the driver's first.

    Attributes
    ----------
    address : str
        The address at which a driver finds the cluster.
    """

    def __init__(self, cpus: Sequence[int] = (1, 1)) -> None:
        # Addresses of its own: what listens at usual ports of one is in no other cluster's way. But
        # the GCS and the server of Ray's clients listen at all addresses.
        net = f"127.{random.SystemRandom().randint(1, 254)}.{random.SystemRandom().randint(0, 255)}"
        self._net, (self._port, self._clients) = net, launch.free_ports(2)
        self.address = f"{net}.1:{self._port}"
        self.machines = [Raylet(f"{net}.{n}", c) for n, c in enumerate(cpus, start=1)]

    def __enter__(self) -> Raylets:
        head, *others = self.machines
        ports = (f"--port={self._port}", f"--ray-client-server-port={self._clients}")
        try:
            head.begin(["--head", *ports, "--include-dashboard=false"], apart=False)
            head.wait()
            self._join(others)
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self, cpus: int = 1) -> Raylet:
        one = Raylet(f"{self._net}.{len(self.machines) + 1}", cpus)
        self.machines.append(one)
        self._join([one])
        return one

    def _join(self, others: Sequence[Raylet]) -> None:
        for one in others:
            one.begin([f"--address={self.address}"], apart=bool(_unshare()))
        for one in others:
            one.wait()

    def __exit__(self, *_: object) -> None:
        for one in reversed(self.machines):
            one.end()

    def left(self) -> list[str]:
        """Name what runs left on the machines, after Ray has had time to end its processes."""
        end = time.monotonic() + LEFT_WAIT
        while left := [one for machine in self.machines for one in machine.left()]:
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        return left


@cache
def _unshare() -> tuple[str, ...]:
    """Return the command that makes a mount namespace; nothing if that is not allowed."""
    for command in (("unshare", "-m"), ("unshare", "-rm")):
        try:
            subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/tmp"], check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return ()
