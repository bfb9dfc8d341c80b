"""SuperLink and SuperNodes over TLS, in one file so that all share one SuperLink.

Each method gives what the simulation gives, to rounding: nFedGNN and FedGLS while SuperNodes and
the server die (in-process: ``tests/contracts``). What was set up wrongly is said: which file, key
or client, and what to do.
"""

from __future__ import annotations

import http.server
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deployment_helpers import (
    CASES,
    TIMEOUT,
    Case,
    Prepared,
    check_equal,
    check_kept,
    check_one_layer,
    check_outputs,
    prepare,
    rounds_of,
    start_nodes,
)
from federation import who_of
from psutil import NoSuchProcess, Process

from deploy.credentials import make_server_credentials
from deploy.loopback import HOST, Loopback

pytestmark = pytest.mark.usefixtures("pictures")  # those of a simulation are compared
CLIENT, SERVER = "flwr-clientapp", "flwr-serverapp"
WORKER = "flower_graph.client.resident"
TWO = Case("nfedgnn/cora", ("rounds=1", "model.hidden=4"), 2, nodes=6)
NODE = {"partition-id": 0, "num-partitions": 2}


# FedGLS, and nFedGNN of two: below, while something dies; FedSCem also in test_registered_keys.py
@pytest.mark.parametrize(
    "app",
    [
        pytest.param("fedscem", marks=pytest.mark.release),
        "fedgta",
        "nfedgnn-masked",
        "ppfl",
    ],
)
def test_each_method_gives_what_the_simulation_gives(
    deployment: Loopback, keys: list[Path], tmp_path: Path, app: str
) -> None:
    prepared = prepare(CASES[app], tmp_path / app)
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run(f"run-{app}", prepared.settings())
    log = deployment.wait(f"run-{app}", TIMEOUT)
    assert (prepared.folder / "deployed" / "result.json").is_file(), log + deployment.log(names[0])
    if app == "nfedgnn-masked":
        check_one_layer(prepared)
    else:
        check_equal(prepared)
    result = check_outputs(prepared)
    assert result["bytes"] == prepared.simulated["bytes"]
    assert result["rejected"] == 0
    if app == "fedgta":
        check_kept(prepared)


# Parties that are restarted or killed in mid-run -------------------------------------------------


def _until(condition: Callable[[], object], what: str, timeout: float = 200.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)  # looking through all processes of the machine takes time itself


def _rounds_done(prepared: Prepared) -> int:
    out = prepared.folder / "deployed"
    return len(rounds_of(out)) if (out / "metrics.jsonl").exists() else 0


@contextmanager
def _held(deployment: Loopback, node: str) -> Iterator[None]:
    """Suspend the ClientApp of a SuperNode's next message while it still starts.

    One that is there already may have answered: it would hold nothing up.
    """
    before = {process.pid for process in deployment.processes_of(node, CLIENT)}
    found: list[Process] = []

    def starts() -> bool:
        there = deployment.processes_of(node, CLIENT)
        found.extend(process for process in there if process.pid not in before)
        return bool(found)

    _until(starts, "no ClientApp")
    found[0].suspend()
    yield
    with suppress(NoSuchProcess):
        found[0].resume()


def _replies(deployment: Loopback, node: str) -> int:
    return deployment.log(node).count("Sent successfully")


def _received(deployment: Loopback, node: str) -> int:
    return deployment.log(node).count("Received successfully")


def _open_messages(deployment: Loopback) -> int:
    """Count the messages whose replies the ServerApp has not fetched: the SuperLink's table."""
    file = deployment.folder / "superlink" / "state.db"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as state:
        tables = {name for (name,) in state.execute("select name from sqlite_master")}
        query = "select count(*) from message_ins"
        # Flower 1.43: requests and replies stay, and fetched ones are cleared
        if "message_ins" not in tables:
            query = (
                "select sum(coalesce(reply_to_message_id, '') = '')"
                " - sum(coalesce(reply_to_message_id, '') <> '' and cleared) from message"
            )
        (count,) = state.execute(query).fetchone()
    return int(count)


def test_a_supernode_is_restarted_and_later_killed(
    deployment: Loopback, keys: list[Path], tmp_path: Path
) -> None:
    """One run of FedGLS: restarted between two messages, killed in mid-training, there at the end.

    One SuperNode is enough to go on.
    """
    prepared = prepare(CASES["fedgls"], tmp_path / "faults")
    first, other = start_nodes(deployment, prepared, keys)
    deployment.start_run("faults", prepared.settings("deployed", "strategy.min_nodes=1"))
    _until(lambda: _rounds_done(prepared) >= 1, "no round")

    # The other one is held back, so that nothing is asked of the first while it is away.
    with _held(deployment, other):
        sent = _replies(deployment, other)
        _until(lambda: _replies(deployment, first) > sent, "the first has no reply")
        # Flower drops a reply whose SuperNode has gone before the ServerApp fetched it.
        _until(lambda: _open_messages(deployment) == 1, "the reply is not fetched")
        deployment.end(first)
        again = _come_back(deployment, prepared, keys[0], "restarted")
        assert _replies(deployment, other) == sent
    _until(lambda: _rounds_done(prepared) >= 2, "no second round")
    assert _replies(deployment, first) >= 1
    assert _replies(deployment, again) >= 1

    with _held(deployment, again):
        done = _rounds_done(prepared)
        assert len(deployment.processes_of(again, WORKER)) == 1
        deployment.processes[again].kill()  # the SuperNode alone: its worker notices
        _until(lambda: not deployment.processes_of(again, WORKER), "its worker stays", 10.0)
        deployment.kill(again)
    _until(lambda: _rounds_done(prepared) > done, "the SuperLink does not notice")
    with _held(deployment, other):  # the last round waits until the killed one is back
        _come_back(deployment, prepared, keys[0], "killed")
    deployment.wait("faults", TIMEOUT)

    _until(lambda: not deployment.processes_of(other, WORKER), "a worker outlives its run", 60.0)
    assert list((deployment.folder / "state").rglob("resident-*")) == []
    check_equal(prepared, rounds=2)  # its optimiser and its learnt graph were where they had been
    rounds = rounds_of(prepared.folder / "deployed")
    assert [one["round"] for one in rounds] == [1, 2, 3, 4, 5]
    took_part = [who_of(one["participation"]) for one in rounds]
    assert any(set(one.failed) == {0} and one.answered == {1} for one in took_part[2:])
    assert took_part[-1].answered == {0, 1}
    for entry in took_part:  # nobody is lost and nobody counts twice
        assert entry.answered | set(entry.failed) | set(entry.left_out) == {0, 1}
    check_outputs(prepared)


def _come_back(deployment: Loopback, prepared: Prepared, key: Path, after: str) -> str:
    """Start the first SuperNode again, with its key and its data folder; return its name."""
    name = f"{after}-came-back"
    deployment.start_node(name, {"data-folder": str(prepared.clients()[0])}, key=key)
    _until(lambda: "SuperNode ID" in deployment.log(name), "it did not come back")
    return name


def test_a_killed_serverapp_is_resumed_and_ends_where_the_undisturbed_run_ends(
    deployment: Loopback, keys: list[Path], tmp_path: Path
) -> None:
    prepared = prepare(CASES["nfedgnn"], tmp_path / "resumed")
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run("killed-server", prepared.settings())
    _until(lambda: _rounds_done(prepared) >= 2, "no two rounds")
    # The query, and three rounds: a SuperNode that is still fetching a message waits for a minute.
    _until(lambda: all(_received(deployment, name) == 4 for name in names), "no third round")
    (server,) = deployment.processes_of("superlink", SERVER)
    server.kill()
    deployment.kill("killed-server")
    assert not (prepared.folder / "deployed" / "result.json").exists()
    deployment.start_run("resumed", prepared.settings(resume=True))
    log = deployment.wait("resumed", TIMEOUT)
    assert (prepared.folder / "deployed" / "result.json").is_file(), log
    check_equal(prepared)
    check_outputs(prepared)


# Set up wrongly ----------------------------------------------------------------------------------


def _ended(deployment: Loopback, name: str) -> str:
    """Wait for a SuperNode that gives up; return what it said."""
    assert deployment.processes[name].wait(timeout=90) != 0
    return deployment.log(name)


@pytest.fixture
def expired(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server whose certificate has expired: its address, and the authority."""
    past = datetime.now(UTC) - timedelta(days=1)
    make_server_credentials(tmp_path / "old", [HOST], expires=past)
    server = http.server.HTTPServer((HOST, 0), http.server.BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "old" / "server.crt", tmp_path / "old" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"{HOST}:{server.server_port}", tmp_path / "old" / "ca.crt"
    server.shutdown()
    server.server_close()


def test_a_supernode_without_the_right_credentials_ends_and_says_why(
    deployment: Loopback, keys: list[Path], tmp_path: Path, expired: tuple[str, Path]
) -> None:
    make_server_credentials(tmp_path / "other", [HOST])
    none, other = tmp_path / "none.crt", tmp_path / "other" / "ca.crt"
    unknown = deployment.make_key("unknown")
    deployment.start_node("missing", NODE, key=keys[0], authority=none)
    deployment.start_node("other-ca", NODE, key=keys[0], authority=other)
    deployment.start_node("unregistered", NODE, key=unknown)
    to_it = ["--superlink", expired[0]]
    deployment.start_node("late", NODE, key=keys[0], authority=expired[1], options=to_it)
    # These are Flower's own words; docs/deployment.md says what they mean.
    assert "`--root-certificates` does not point to a file" in _ended(deployment, "missing")
    assert "certificate verify failed: unable to get local" in _ended(deployment, "other-ca")
    assert "Failed to activate SuperNode" in _ended(deployment, "unregistered")
    assert "certificate has expired" in _ended(deployment, "late")


@pytest.fixture
def twins(deployment: Loopback, keys: list[Path], tmp_path: Path) -> Prepared:
    """Two SuperNodes that were both given the first client's folder."""
    prepared = prepare(TWO, tmp_path / "twins")
    first = str(prepared.clients()[0])
    for number in range(2):
        # Each keeps its state apart, as on a machine of its own.
        node = {"data-folder": first, "state-dir": str(tmp_path / f"state-{number}")}
        deployment.start_node(f"twin-{number}", node, key=keys[number])
    return prepared


def test_wrong_folders_and_missing_supernodes_are_named(
    deployment: Loopback, twins: Prepared
) -> None:
    """Two SuperNodes with the same users; too few SuperNodes; folders of another run."""
    deployment.start_run("same-users", twins.settings())
    log = deployment.wait("same-users", TIMEOUT)
    assert "client 0 is claimed by node" in log
    assert "give each SuperNode a partition-id or a data-folder of its own" in log
    assert not (twins.folder / "deployed" / "result.json").exists()

    more = ["strategy.min_nodes=3", "strategy.timeout=8"]
    deployment.start_run("too-few", twins.settings("few", *more))
    log = deployment.wait("too-few", TIMEOUT)
    assert "waiting for 3 SuperNodes, 2 connected" in log
    assert "2 of at least 3 nodes connected within 8 s (strategy.min_nodes" in log

    # The server reads bundled data; the SuperNodes have folders of the small graph.
    whole = {"config": "nfedgnn/cora", "overrides": "data.name=cora-linqs rounds=1"}
    out = {"output-dir": str(twins.folder / "other")}
    deployment.start_run("other-run", whole | out)
    log = deployment.wait("other-run", TIMEOUT)
    assert "data-folder" in log
    assert "data folder of another run: data.name" in log
    other = twins.settings("other-server", "data.features=as-is")
    deployment.start_run("other-server", other)
    log = deployment.wait("other-server", TIMEOUT)
    assert f"server-folder {twins.folder / 'data' / 'server'}: data folder of another run" in log
