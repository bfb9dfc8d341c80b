"""Seconds and bytes of an exchange with a SuperLink and four SuperNodes, with and without TLS.

All bytes between SuperNodes and SuperLink pass a forwarder that counts them.
Run alone: ``python -m benchmarks.deployment [--quick]``.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from socket import SHUT_WR, create_connection, socket
from socketserver import BaseRequestHandler, ThreadingTCPServer

from benchmarks.measure import say, size, spread, table
from deploy.loopback import HOST, DeploymentError, Loopback
from flower_graph.apps.cli import main as cli

TIMEOUT = 900.0  # seconds that one run may take
# Configuration, settings, exchanges of a round
NFEDGNN = ("nfedgnn/cora-linqs", ["rounds=7"], 1)
FEDGLS = ("fedgls/cora-linqs", ["rounds=4", "partition.clients=4"], 2)
QUICK = ("nfedgnn/cora-linqs", ["rounds=2"], 1)
BLOCK = 1 << 16


class Forwarder(ThreadingTCPServer):
    """Passes connections on to a port of this machine and counts the bytes."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        super().__init__((HOST, 0), _Connection)
        self.port = port
        self.up = self.down = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def total(self) -> int:
        with self.lock:
            return self.up + self.down


class _Connection(BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with create_connection((HOST, self.server.port)) as far:
            back = threading.Thread(target=self._pass, args=(far, self.request, "down"))
            back.start()
            self._pass(self.request, far, "up")
            back.join()

    def _pass(self, here: socket, there: socket, way: str) -> None:
        try:
            while block := here.recv(BLOCK):
                there.sendall(block)
                with self.server.lock:
                    setattr(self.server, way, getattr(self.server, way) + len(block))
            there.shutdown(SHUT_WR)
        except OSError:
            return  # a process that was ended


def measure(
    config: str, settings: list[str], exchanges: int, *, tls: bool, supernodes: int
) -> list[str]:
    """Time a run and count its bytes."""
    say(f"deployment: {config}, {supernodes} SuperNodes, {'TLS' if tls else 'no TLS'}")
    settings = [*settings, f"strategy.min_nodes={supernodes}", "device=cpu"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        data = partitioned(config, settings, folder / "data", supernodes)
        with Loopback(folder / "deployment", tls=tls) as deployment:
            forwarder = Forwarder(deployment.port)
            to_it = ["--superlink", f"{HOST}:{forwarder.server_address[1]}"]
            for number, own in enumerate(data):
                node = {"data-folder": str(own)}
                deployment.start_node(f"node-{number}", node, options=to_it)
            run = {
                "config": config,
                "overrides": " ".join(settings),
                "output-dir": str(folder / "out"),
                "server-folder": str(folder / "data" / "server"),
            }
            deployment.start_run("run", run)
            network = _watch(deployment, forwarder, folder / "out" / "metrics.jsonl")
            forwarder.shutdown()
            forwarder.server_close()
        return _row(folder / "out", config, exchanges, tls, supernodes, network)


def partitioned(config: str, settings: list[str], out: Path, supernodes: int) -> list[Path]:
    """Write the data folders; return the SuperNodes' folders."""
    command = ["partition", config, *settings, "--out", str(out), "--supernodes", str(supernodes)]
    with redirect_stdout(sys.stderr):  # standard output is for the result
        if cli.main(command) != 0:
            raise DeploymentError(f"{config}: no data folders were written")
    return sorted(out.glob("client*"))


def _watch(deployment: Loopback, forwarder: Forwarder, metrics: Path) -> list[int]:
    """Wait for the end of the run; return the bytes on the network after each round."""
    totals: list[int] = []
    deadline = time.monotonic() + TIMEOUT
    while deployment.processes["run"].poll() is None:
        if time.monotonic() > deadline:
            raise DeploymentError(f"the run takes longer than {TIMEOUT:g} s")
        done = len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0
        totals.extend([forwarder.total()] * (done - len(totals)))
        time.sleep(0.02)
    if not (metrics.parent / "result.json").is_file():
        raise DeploymentError(deployment.tail("run"))
    return totals


def _row(
    out: Path, config: str, exchanges: int, tls: bool, nodes: int, network: list[int]
) -> list[str]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    wire = [sum(one["wire-bytes"].values()) for one in rounds]
    seconds = spread([one["seconds"] / exchanges for one in rounds[1:]])
    steps = [_step(totals, exchanges) for totals in (wire, network)]
    return [f"`{config}`", str(nodes), "yes" if tls else "no", seconds, *steps]


def _step(totals: list[int], exchanges: int) -> str:
    steps = [(later - sooner) / exchanges for sooner, later in itertools.pairwise(totals)]
    return size(statistics.median(steps)) if steps else ""


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # as an installed package has its bytecode
    cases, supernodes = ((QUICK,), 2) if quick else ((NFEDGNN, FEDGLS), 4)
    turns = [(case, tls) for case in cases for tls in (False, True)]
    rows = [measure(*case, tls=tls, supernodes=supernodes) for case, tls in turns]
    about = """A SuperLink and its SuperNodes on one machine, whose cores they share. The bytes are
        all that passes between SuperNodes and SuperLink, and what the messages have of it."""
    head = ["config", "SuperNodes", "TLS", "an exchange", "messages", "on the network"]
    print(json.dumps([table("Deployment", about, head, rows)]))


if __name__ == "__main__":
    main()
