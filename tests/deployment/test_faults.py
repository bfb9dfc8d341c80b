"""Parties that are restarted or killed in mid-run, for real; in-process: tests/faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from deployment_helpers import (
    CASES,
    TIMEOUT,
    Case,
    Prepared,
    check_equal,
    prepare,
    rounds_of,
    start_nodes,
)
from psutil import Process

from deploy.loopback import Loopback
from flower_graph.participation import Participation

CLIENT, SERVER = "flwr-clientapp", "flwr-serverapp"
FEDGLS = CASES["fedgls"]
Outcome = Callable[[str, str, str], None]


def _until(condition: Callable[[], object], what: str, timeout: float = 200.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _rounds_done(prepared: Prepared) -> int:
    out = prepared.folder / "deployed"
    return len(rounds_of(out)) if (out / "metrics.jsonl").exists() else 0


def _suspended(deployment: Loopback, node: str) -> Process:
    """Suspend a SuperNode's ClientApp as soon as there is one."""
    found: list[Process] = []
    _until(lambda: found.extend(deployment.processes_of(node, CLIENT)) or found, "no ClientApp")
    found[0].suspend()
    return found[0]


def _replies(deployment: Loopback, node: str) -> int:
    return deployment.log(node).count("Sent successfully")


def test_a_supernode_restarted_between_two_messages_goes_on_as_if_nothing_had_been(
    deployment: Loopback, keys: list[Path], tmp_path: Path, outcome: Outcome
) -> None:
    prepared = prepare(FEDGLS, tmp_path / "restarted")
    restarted, other = start_nodes(deployment, prepared, keys)
    deployment.start_run("restarted", prepared.settings())
    _until(lambda: _rounds_done(prepared) >= 1, "no round")
    # The other one is held back, so that nothing is asked of the first while it is away.
    held = _suspended(deployment, other)
    sent = _replies(deployment, other)
    _until(lambda: _replies(deployment, restarted) > sent, "the first has no reply")
    deployment.end(restarted)
    data = {"data-folder": str(prepared.clients()[0])}
    deployment.start_node("came-back", data, key=keys[0])
    _until(lambda: "SuperNode ID" in deployment.log("came-back"), "it did not come back")
    held.resume()
    deployment.wait("restarted", TIMEOUT)
    assert "Receiving: train message" in deployment.log("came-back") + deployment.log(restarted)
    assert _replies(deployment, "came-back") >= 1
    check_equal(prepared)  # its optimiser and its learnt graph are where they were
    outcome(
        "a SuperNode is restarted in mid-run",
        "FedGLS, deployed",
        "stopped between two messages and started with the same key: the figures are those of the "
        "simulation",
    )


def test_a_supernode_killed_in_mid_training_is_left_out_and_comes_back(
    deployment: Loopback, keys: list[Path], tmp_path: Path, outcome: Outcome
) -> None:
    case = Case(FEDGLS.config, (*FEDGLS.overrides[1:], "rounds=5"), 2)
    prepared = prepare(case, tmp_path / "killed")
    killed, _ = start_nodes(deployment, prepared, keys)
    # One SuperNode is enough to go on.
    deployment.start_run("killed", prepared.settings("deployed", "strategy.min_nodes=1"))
    _until(lambda: _rounds_done(prepared) >= 1, "no round")
    _suspended(deployment, killed)
    deployment.kill(killed)
    _come_back(deployment, prepared, keys[0])
    deployment.wait("killed", TIMEOUT)
    rounds = rounds_of(prepared.folder / "deployed")
    assert [one["round"] for one in rounds] == [1, 2, 3, 4, 5]
    took_part = [Participation.from_record(one["participation"]) for one in rounds]
    assert any(set(one.failed) == {0} and one.answered == {1} for one in took_part)
    assert took_part[0].answered == took_part[-1].answered == {0, 1}
    for entry in took_part:  # nobody is lost and nobody counts twice
        assert entry.answered | set(entry.failed) | set(entry.left_out) == {0, 1}
    missed = sum(bool(one.failed or one.left_out) for one in took_part)
    outcome(
        "a client's process is killed (SIGKILL) in mid-training",
        "FedGLS, deployed",
        "SuperNode and ClientApp killed, started again as soon as the SuperLink allows: missing "
        f"in {missed} of 5 rounds and named in them, there in the last",
    )


def _come_back(deployment: Loopback, prepared: Prepared, key: Path) -> None:
    """Start a killed SuperNode again until the SuperLink has noticed that it was gone."""
    data = {"data-folder": str(prepared.clients()[0])}
    for attempt in range(40):
        name = f"again-{attempt}"
        deployment.start_node(name, data, key=key)
        process = deployment.processes[name]
        _until(
            lambda name=name, process=process: (
                process.poll() is not None or "SuperNode ID" in deployment.log(name)
            ),
            "neither there nor refused",
        )
        if process.poll() is None:
            return
        assert "Failed to activate SuperNode" in deployment.log(name)
    raise AssertionError("it could not come back")


def test_a_killed_serverapp_is_resumed_and_ends_where_the_undisturbed_run_ends(
    deployment: Loopback, keys: list[Path], tmp_path: Path, outcome: Outcome
) -> None:
    case = Case("nfedgnn/cora", ("rounds=4", "model.hidden=4", "checkpoint_every=1"), 2, nodes=6)
    prepared = prepare(case, tmp_path / "resumed")
    start_nodes(deployment, prepared, keys)
    deployment.start_run("killed-server", prepared.settings())
    _until(lambda: _rounds_done(prepared) >= 2, "no two rounds")
    (server,) = deployment.processes_of("superlink", SERVER)
    server.kill()
    deployment.kill("killed-server")
    assert not (prepared.folder / "deployed" / "result.json").exists()
    deployment.start_run("resumed", prepared.settings(resume=True))
    log = deployment.wait("resumed", TIMEOUT)
    assert (prepared.folder / "deployed" / "result.json").is_file(), log
    check_equal(prepared)
    outcome(
        "the server is killed (SIGKILL) between checkpoint and send",
        "nFedGNN, deployed",
        "ServerApp killed in a run and resumed: the figures are those of the simulation",
    )
