"""Seconds and bytes of an exchange with a SuperLink and four SuperNodes, with and without TLS.

Run alone: ``python -m benchmarks.deployment [--quick]``.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import say, spread, table
from deploy.loopback import DeploymentError, Loopback, deal
from flower_graph.records.rounds import format_bytes

TIMEOUT = 900.0  # seconds that one run may take
# Configuration, settings, exchanges of a round
NFEDGNN = ("nfedgnn/cora-linqs", ["rounds=7"], 1)
FEDGLS = ("fedgls/cora-linqs", ["rounds=4", "partition.clients=4"], 2)
QUICK = ("nfedgnn/cora-linqs", ["rounds=2"], 1)


def measure(
    config: str, settings: list[str], exchanges: int, *, tls: bool, supernodes: int
) -> list[str]:
    """Time a run and count its bytes."""
    say(f"deployment: {config}, {supernodes} SuperNodes, {'TLS' if tls else 'no TLS'}")
    settings = [*settings, f"strategy.min_nodes={supernodes}", "device=cpu"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        data, run = deal(config, settings, folder, supernodes)
        with Loopback(folder / "deployment", tls=tls) as deployment:
            for number, own in enumerate(data):
                deployment.start_node(f"node-{number}", {"data-folder": str(own)})
            deployment.start_run("run", run)
            log = deployment.wait("run", TIMEOUT)
        if not (folder / "deployed" / "result.json").is_file():
            raise DeploymentError(log)
        lines = (folder / "deployed" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    seconds = spread([one["seconds"] / exchanges for one in rounds[1:]])
    totals = [sum(one["wire-bytes"].values()) for one in rounds]
    steps = [(later - sooner) / exchanges for sooner, later in itertools.pairwise(totals)]
    sent = format_bytes(statistics.median(steps))
    return [f"`{config}`", str(supernodes), "yes" if tls else "no", seconds, sent]


def main() -> None:
    """Print the tables as JSON."""
    quick = "--quick" in sys.argv
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # as an installed package has its bytecode
    cases, supernodes = ((QUICK,), 2) if quick else ((NFEDGNN, FEDGLS), 4)
    turns = [(case, tls) for case in cases for tls in (False, True)]
    rows = [measure(*case, tls=tls, supernodes=supernodes) for case, tls in turns]
    about = "A SuperLink and its SuperNodes on one machine, whose cores they share."
    head = ["config", "SuperNodes", "TLS", "an exchange", "messages"]
    print(json.dumps([table("Deployment", about, head, rows)]))


if __name__ == "__main__":
    main()
