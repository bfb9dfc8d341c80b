"""PPFL-GNN and FedGLS in a real deployment on this machine: ``make deploy-demo``.

The demo makes certificates and keys in a temporary folder and gives each of four clients its own
data folder. It starts a SuperLink and four SuperNodes on the loopback interface: TLS, registered
keys, one client each. Both methods run; their results are compared with the simulation's of the
same seed. At the end, after an error and after Ctrl-C, all processes are ended and the folder
removed.
"""

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.loopback import DeploymentError, Loopback, remove

say = partial(print, flush=True)
CLIENTS = 4
TIMEOUT = 280.0  # seconds for one method's run
# Rounding: sums come in another order than in the simulation, and training multiplies that.
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 1e-3, 5e-3


@dataclass(frozen=True)
class Method:
    """One run of the demo."""

    title: str
    config: str
    overrides: tuple[str, ...]
    exchanges: int  # of one round

    @property
    def short(self) -> str:
        return self.config.partition("/")[0]


METHODS = (
    Method("PPFL-GNN", "ppfl/cora-linqs-gat", ("rounds=3", "judge.mlp=false"), 1),
    Method("FedGLS", "fedgls/cora-linqs", ("rounds=2",), 2),
)
SHARED = (f"partition.clients={CLIENTS}", f"strategy.min_nodes={CLIENTS}", "seed=0")


@dataclass(frozen=True)
class Outcome:
    """The results of one method, deployed and simulated."""

    method: Method
    deployed: dict[str, Any]
    simulated: dict[str, Any]
    rounds: list[tuple[dict[str, Any], dict[str, Any]]]  # of both
    seconds: float

    @property
    def loss_difference(self) -> float:
        """The largest difference of a round's losses, relative to the simulation's."""
        losses = [(float(here["loss"]), float(there["loss"])) for here, there in self.rounds]
        return max(abs(here - there) / abs(there) for here, there in losses)

    @property
    def is_equal(self) -> bool:
        """Whether deployment and simulation gave the same, up to rounding."""
        key = "test-accuracy"
        apart = max(abs(here[key] - there[key]) for here, there in self.rounds)
        return self.loss_difference <= LOSS_TOLERANCE and apart <= ACCURACY_TOLERANCE


def run_demo(folder: Path) -> list[Outcome]:
    """Run both methods with everything in `folder`."""
    outcomes = []
    with Loopback(folder / "deployment") as deployment:
        say(f"SuperLink on {deployment.address}, TLS, registered keys only")
        keys = [deployment.register(f"node-{client}") for client in range(CLIENTS)]
        for method in METHODS:
            outcomes.append(_run(method, deployment, keys, folder / method.short))
        ran = len(deployment.processes)
    if deployment.left():
        raise DeploymentError(f"still running: {[process.pid for process in deployment.left()]}")
    say(f"ended: all {ran} processes that were started, and theirs")
    return outcomes


def _run(method: Method, deployment: Loopback, keys: Sequence[Path], folder: Path) -> Outcome:
    from flower_graph.apps.cli.main import main
    from flower_graph.apps.run import run
    from flower_graph.method.load import load_config

    overrides, printed = [*method.overrides, *SHARED], io.StringIO()
    with redirect_stdout(printed):  # a page of statistics
        code = main(["partition", method.config, *overrides, "--out", str(folder / "data")])
    if code != 0:
        raise DeploymentError(f"{method.title}: no data folders were written\n{printed.getvalue()}")
    names = [f"{method.short}-node-{client}" for client in range(CLIENTS)]
    for client, (name, key) in enumerate(zip(names, keys, strict=True)):
        own = folder / "data" / f"client-{client:04d}"
        deployment.start_node(name, {"data-folder": str(own)}, key=key)
    say(f"{method.title}: {CLIENTS} SuperNodes, each with its own data folder")
    began = time.monotonic()
    settings = {
        "config": method.config,
        "overrides": " ".join(overrides),
        "output-dir": str(folder / "deployed"),
        "server-folder": str(folder / "data" / "server"),
    }
    deployment.start_run(method.short, settings)
    log = deployment.wait(method.short, TIMEOUT, echo=lambda line: say(f"  {line}"))
    seconds = time.monotonic() - began
    if not (folder / "deployed" / "result.json").is_file():
        raise DeploymentError(f"{method.title} failed:\n{log[-4000:]}")
    for name in names:
        deployment.end(name)
    say(f"{method.title}: the same in one process, as a simulation")
    config = load_config(method.config, overrides)
    simulated = run(config, folder / "simulated", supernodes=CLIENTS)
    deployed = json.loads((folder / "deployed" / "result.json").read_text(encoding="utf-8"))
    both = zip(_rounds(folder / "deployed"), _rounds(folder / "simulated"), strict=True)
    return Outcome(method, deployed, simulated, list(both), seconds)


def _rounds(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay the results out, one line a method."""
    lines = [
        f"{'method':10}{'rounds':>7}{'test accuracy':>15}{'simulation':>12}{'losses apart':>14}"
        f"{'s/exchange':>12}{'kB/exchange':>13}"
    ]
    for one in outcomes:
        exchanges = one.method.exchanges * len(one.rounds)
        wire = sum(int(count) for count in one.deployed["wire-bytes"].values())
        spent = one.deployed["seconds"]["per-round-median"] / one.method.exchanges
        lines.append(
            f"{one.method.title:10}{len(one.rounds):>7}{one.deployed['test-accuracy']:>15.4f}"
            f"{one.simulated['test-accuracy']:>12.4f}{one.loss_difference:>14.1e}"
            f"{spent:>12.1f}{wire / exchanges / 1000:>13.0f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 1 if something failed or results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="new folder for everything; it is not removed")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="deploy-demo-"))
    try:
        outcomes = run_demo(folder.resolve())
    except DeploymentError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes were ended", file=sys.stderr)
        return 130
    finally:
        if not given.keep:
            remove(folder)
    say(table(outcomes))
    say(f"{time.monotonic() - began:.0f} s in all; nothing is left running")
    differing = [one.method.title for one in outcomes if not one.is_equal]
    if differing:
        print(f"not what the simulation gives: {', '.join(differing)}", file=sys.stderr)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
