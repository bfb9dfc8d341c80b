"""PPFL-GNN and FedGLS in a real deployment on this machine: ``make deploy-demo``.

The demo makes certificates and keys in a temporary folder and gives each of four clients its own
data folder. It starts a SuperLink and four SuperNodes on the loopback interface: TLS, registered
keys, one client each. Both methods run; their results are compared with the simulation's of the
same seed. At the end, after an error and after Ctrl-C, all processes are ended and the folder
removed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.loopback import DeploymentError, Loopback, deal, remove

say = partial(print, flush=True)
CLIENTS = 4
TIMEOUT = 280.0  # seconds for one method's run
# Rounding: sums come in another order than in the simulation, and training multiplies that.
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 1e-3, 5e-3
# Title, config, and settings
METHODS = (
    ("PPFL-GNN", "ppfl/cora-linqs-gat", ["rounds=3", "judge.mlp=false"]),
    ("FedGLS", "fedgls/cora-linqs", ["rounds=2"]),
)
SHARED = [f"partition.clients={CLIENTS}", f"strategy.min_nodes={CLIENTS}", "seed=0"]


def is_equal(
    deployment: Loopback,
    keys: Sequence[Path],
    title: str,
    config: str,
    settings: Sequence[str],
    out: Path,
) -> bool:
    """Run a method in the deployment and as a simulation; return whether both give the same."""
    from flower_graph.apps.run import run
    from flower_graph.method.load import load_config
    from flower_graph.method.run import load_run

    settings = [*settings, *SHARED]
    data, run_config = deal(config, settings, out, CLIENTS)
    names = [f"{title}-node-{client}" for client in range(CLIENTS)]
    for name, key, own in zip(names, keys, data, strict=True):
        deployment.start_node(name, {"data-folder": str(own)}, key=key)
    say(f"{title}: {CLIENTS} SuperNodes, each with its own data folder")
    deployment.start_run(title, run_config)
    log = deployment.wait(title, TIMEOUT, echo=lambda line: say(f"  {line}"))
    if not (out / "deployed" / "result.json").is_file():
        raise DeploymentError(f"{title} failed:\n{log[-4000:]}")
    for name in names:
        deployment.end(name)
    say(f"{title}: the same in one process, as a simulation")
    run(load_config(config, settings), out / "simulated", supernodes=CLIENTS)
    here, there = (load_run(out / name) for name in ("deployed", "simulated"))
    here, there = (one.metrics.to_pandas() for one in (here, there))
    # NaN where one of them has no figure, or not as many rounds: that is no equality
    loss = ((here["loss"] - there["loss"]) / there["loss"]).abs().max(skipna=False)
    accuracy = (here["test-accuracy"] - there["test-accuracy"]).abs().max(skipna=False)
    say(
        f"{title}: test accuracy {here['test-accuracy'].iat[-1]:.4f}, in the simulation "
        f"{there['test-accuracy'].iat[-1]:.4f}; losses differ by {loss:.1e} at most; "
        f"{here['seconds'].median():.1f} s a round"
    )
    return bool(loss <= LOSS_TOLERANCE and accuracy <= ACCURACY_TOLERANCE)


def run_demo(folder: Path) -> list[str]:
    """Run both methods with everything in `folder`; name those that differ in a simulation."""
    with Loopback(folder / "deployment") as deployment:
        say(f"SuperLink on {deployment.address}, TLS, registered keys only")
        keys = [deployment.register(f"node-{client}") for client in range(CLIENTS)]
        differing = [
            title
            for title, *method in METHODS
            if not is_equal(deployment, keys, title, *method, folder / title)
        ]
    if deployment.left():
        raise DeploymentError(f"still running: {[process.pid for process in deployment.left()]}")
    return differing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 1 if something failed or results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="new folder for everything; it is not removed")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="deploy-demo-"))
    try:
        differing = run_demo(folder.resolve())
    except DeploymentError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes were ended", file=sys.stderr)
        return 130
    finally:
        if not given.keep:
            remove(folder)
    say(f"{time.monotonic() - began:.0f} s in all; nothing is left running")
    if differing:
        print(f"not what the simulation gives: {', '.join(differing)}", file=sys.stderr)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
