"""SuperLink and SuperNodes over TLS, in one file so that all share one SuperLink.

Each method gives what the simulation gives, to rounding: nFedGNN and FedGLS while SuperNodes and
the server die (in-process: ``tests/contracts``). What was set up wrongly is said: which file, key
or client, and what to do. `make deploy-demo` runs the demo whole.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import who_of
from graph_helpers import small_graph
from lying_grid import FEDSCEM
from psutil import NoSuchProcess, Process

from deploy.credentials import make_server_credentials
from deploy.loopback import HOST, ROOT, Loopback, deal, remove
from flower_graph.apps.cli.launch import end_processes, marked_processes, write_app
from flower_graph.apps.cli.main import main as cli
from flower_graph.apps.run import run
from flower_graph.method.load import load_config
from flower_graph.method.run import latest_in
from flower_graph.outputs.files import Predictions

pytestmark = [
    pytest.mark.usefixtures("pictures"),  # those of a simulation are compared
    pytest.mark.deployment,
    pytest.mark.timeout(900),  # several processes start for each message
]
MARK = "FLOWER_GRAPH_TEST_MARK"
CLIENT, SERVER = "flwr-clientapp", "flwr-serverapp"
WORKER = "flower_graph.client.resident"
NODE = {"partition-id": 0, "num-partitions": 2}
OUTPUTS = {"config.yaml", "metrics.jsonl", "result.json"}
# What a simulation has in its output folder, and clients of a deployment in places of their own or,
# where it takes true edges of clients that have none, nobody
AT_CLIENTS = {"clients", "clients.csv", "data.json", "embeddings"}
TIMEOUT = 700.0  # seconds that one run may take on a busy machine


TWO = "partition.method=random partition.clients=2"
EGOS = "rounds=1 partition.min_nodes=5 partition.hops=1 partition.clients"
# Methods on a small graph: config, overrides, and its nodes
CASES = {
    "nfedgnn": ("nfedgnn/cora", "rounds=3 model.hidden=4 checkpoint_every=1", 9),
    "fedgls": ("fedgls/cora", f"rounds=5 graph.neighbours=3 {TWO}", 60),
    "fedscem": ("fedscem/cora", f"{EGOS}=3 strategy.alignment=plain", 60),
    "fedgta": ("fedgta/cora", f"rounds=2 checkpoint_every=1 {TWO}", 60),  # a model of each client
    "ppfl": ("ppfl/cora-gat", "rounds=1 partition.clients=2 judge.folds=2 judge.mlp=false", 150),
    "twins": ("nfedgnn/cora", "rounds=1 model.hidden=4", 9),
    "parties": ("fedscem/cora", f"{EGOS}=6 strategy.trust=malicious-server", 60),
}  # fmt: skip


@dataclass
class Prepared:
    """A case with its data assigned: what a run of it needs."""

    folder: Path
    clients: list[Path]  # the SuperNodes' data folders
    run: dict[str, str]  # config
    simulated: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.folder / "deployed"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return rounds_of(self.out) if (self.out / "metrics.jsonl").exists() else []

    def settings(self, *more: str, **others: Any) -> dict[str, str | bool]:
        """Return the run config."""
        return self.run | {"overrides": " ".join([self.run["overrides"], *more])} | others

    def result(self, log: str) -> dict[str, Any]:
        """Read the result of a run that has one."""
        file = self.out / "result.json"
        assert file.is_file(), log
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def prepare(name: str, folder: Path, supernodes: int = 2) -> Prepared:
    """Simulate a case, deal its data, and remove the graph, so that nobody can read it whole."""
    (config, overrides, nodes), folder = CASES[name], folder / name
    folder.mkdir()
    graph = folder / "graph.pt"
    torch.save(small_graph(nodes), graph)
    given = [*overrides.split(), f"data.name={graph}", "seed=2", f"strategy.min_nodes={supernodes}"]
    simulated = run(load_config(config, given), folder / "simulated", supernodes=supernodes)
    clients, settings = deal(config, given, folder, supernodes)
    graph.unlink()
    return Prepared(folder, clients, settings, simulated)


def until(condition: Callable[[], object], what: object, timeout: float = 200.0) -> None:
    """Wait for a condition; looking through all processes of the machine takes time itself."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def start_nodes(deployment: Loopback, prepared: Prepared, keys: list[Path]) -> list[str]:
    """Start one SuperNode for each data folder; return their names."""
    names = [f"{prepared.folder.name}-{number}" for number in range(len(prepared.clients))]
    for name, key, data in zip(names, keys, prepared.clients, strict=False):
        deployment.start_node(name, {"data-folder": str(data)}, key=key)
    return names


def rounds_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check_equal(prepared: Prepared, rounds: int | None = None) -> None:
    """Hold the first rounds of the deployment, or all, against those of the simulation."""
    here, there = (rounds_of(prepared.folder / out)[:rounds] for out in ("deployed", "simulated"))
    assert [one["round"] for one in here] == [one["round"] for one in there]
    near = dict.fromkeys(("loss", "cross-entropy", "regulariser"), 1e-4)
    near |= dict.fromkeys(("train-accuracy", "val-accuracy", "test-accuracy"), 0.0)
    for deployed, simulated in zip(here, there, strict=True):
        for key, rel in near.items():
            said = simulated[key]  # None: not measured, in neither
            close = said if said is None else pytest.approx(said, rel=rel, abs=1e-6)
            assert deployed[key] == close, key
        for key in ("asked", "answered", "rejected", "bytes"):
            assert deployed[key] == simulated[key], key


def check_outputs(prepared: Prepared, log: str) -> dict[str, Any]:
    """Hold the files of the deployment against those of the simulation; return the result."""
    result = prepared.result(log)
    # Of nFedGNN's users the server itself knows what it predicts: their table is its own.
    at_clients = AT_CLIENTS - ({"clients.csv"} if "nfedgnn" in prepared.run["config"] else set())
    simulated = {path.name for path in (prepared.folder / "simulated").iterdir()}
    found = {path.name for path in prepared.out.iterdir()}
    assert found == simulated - at_clients >= OUTPUTS
    assert (result["engine"], result["clients"]) == ("flwr", prepared.simulated["clients"])
    return result


def check_kept(prepared: Prepared, result: dict[str, Any]) -> None:
    """Hold what clients predict, where they live, against the accuracies that the server has."""
    runs = [latest_in(folder) for folder in prepared.clients]
    found = Predictions.join([one.predictions() for one in runs])
    assert all(one.model(one.predictions().client[0]) is not None for one in runs)
    for role in ("val", "test"):
        accuracy = found.of_role(role).accuracy()
        assert accuracy == pytest.approx(result[f"{role}-accuracy"], abs=1e-12), role


# It ends with the file's tests: a SuperLink that waits takes a tenth of a core.
@pytest.fixture(scope="module")
def link() -> Iterator[Loopback]:
    """A SuperLink with TLS and registered keys; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="deployment-"))
    try:
        with Loopback(folder) as running:
            yield running
        assert running.left() == []
    finally:
        remove(folder)


@pytest.fixture(scope="module")
def keys(link: Loopback) -> list[Path]:
    """Private keys of three registered SuperNodes."""
    return [link.register(f"key-{number}") for number in range(3)]


@pytest.fixture
def deployment(link: Loopback) -> Iterator[Loopback]:
    """The SuperLink, where no SuperNode and no run of one test reaches the next."""
    yield link
    for name, process in list(link.processes.items()):
        if name != "superlink" and process.poll() is None:
            link.end(name)
    for server in link.processes_of("superlink", SERVER):  # of a run whose test failed
        server.kill()


# Runs ---------------------------------------------------------------------------------------------


# FedGLS, nFedGNN and FedSCem: below, while something dies or lies
@pytest.mark.release
@pytest.mark.parametrize("app", ["fedgta", "fedscem", "ppfl"])
def test_each_method_gives_what_the_simulation_gives(
    deployment: Loopback, keys: list[Path], tmp_path: Path, app: str
) -> None:
    prepared = prepare(app, tmp_path)
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run(f"run-{app}", prepared.settings())
    log = deployment.wait(f"run-{app}", TIMEOUT)
    result = check_outputs(prepared, log + deployment.log(names[0]))
    check_equal(prepared)
    assert (result["bytes"], result["rejected"]) == (prepared.simulated["bytes"], 0)
    if app == "fedgta":
        check_kept(prepared, result)


# Parties that are restarted or killed in mid-run -------------------------------------------------


@contextmanager
def _held(deployment: Loopback, node: str) -> Iterator[None]:
    """Suspend the ClientApp of a SuperNode's next message while it still starts.

    One that is there already may have answered: it would hold nothing up.
    """
    before = deployment.processes_of(node, CLIENT)
    found: list[Process] = []

    def starts() -> bool:
        found.extend(p for p in deployment.processes_of(node, CLIENT) if p not in before)
        return bool(found)

    until(starts, "no ClientApp")
    found[0].suspend()
    yield
    with suppress(NoSuchProcess):
        found[0].resume()


def _replies(deployment: Loopback, node: str, word: str = "Sent") -> int:
    return deployment.log(node).count(f"{word} successfully")


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
    prepared = prepare("fedgls", tmp_path)
    first, other = start_nodes(deployment, prepared, keys)
    deployment.start_run("faults", prepared.settings("strategy.min_nodes=1"))
    until(lambda: len(prepared.rounds) >= 1, "no round")

    # The other one is held back, so that nothing is asked of the first while it is away.
    with _held(deployment, other):
        sent = _replies(deployment, other)
        until(lambda: _replies(deployment, first) > sent, "the first has no reply")
        # Flower drops a reply whose SuperNode has gone before the ServerApp fetched it.
        until(lambda: _open_messages(deployment) == 1, "the reply is not fetched")
        deployment.end(first)
        again = _come_back(deployment, prepared, keys[0], "restarted")
        assert _replies(deployment, other) == sent
    until(lambda: len(prepared.rounds) >= 2, "no second round")
    assert _replies(deployment, first) >= 1
    # Round 2's last message may have been held: the restarted one is then asked in round 3.
    until(lambda: _replies(deployment, again) >= 1, "the restarted one answers nothing")

    with _held(deployment, again):
        done = len(prepared.rounds)
        assert len(deployment.processes_of(again, WORKER)) == 1
        deployment.processes[again].kill()  # the SuperNode alone: its worker notices
        until(lambda: not deployment.processes_of(again, WORKER), "its worker stays", 10.0)
        deployment.kill(again)
    until(lambda: len(prepared.rounds) > done, "the SuperLink does not notice")
    with _held(deployment, other):  # the last round waits until the killed one is back
        _come_back(deployment, prepared, keys[0], "killed")
    log = deployment.wait("faults", TIMEOUT)

    until(lambda: not deployment.processes_of(other, WORKER), "a worker outlives its run", 60.0)
    assert list((deployment.folder / "state").rglob("resident-*")) == []
    check_equal(prepared, rounds=2)  # its optimiser and its learnt graph were where they had been
    assert [one["round"] for one in prepared.rounds] == [1, 2, 3, 4, 5]
    took_part = [who_of(one["participation"]) for one in prepared.rounds]
    assert any(set(one.failed) == {0} and one.answered == {1} for one in took_part[2:])
    assert took_part[-1].answered == {0, 1}
    for entry in took_part:  # nobody is lost and nobody counts twice
        assert entry.answered | set(entry.failed) | set(entry.left_out) == {0, 1}
    check_outputs(prepared, log)


def _come_back(deployment: Loopback, prepared: Prepared, key: Path, after: str) -> str:
    """Start the first SuperNode again, with its key and its data folder; return its name."""
    name = f"{after}-came-back"
    deployment.start_node(name, {"data-folder": str(prepared.clients[0])}, key=key)
    until(lambda: "SuperNode ID" in deployment.log(name), "it did not come back")
    return name


def test_a_killed_serverapp_is_resumed_and_ends_where_the_undisturbed_run_ends(
    deployment: Loopback, keys: list[Path], tmp_path: Path
) -> None:
    prepared = prepare("nfedgnn", tmp_path)
    names = start_nodes(deployment, prepared, keys)
    deployment.start_run("killed-server", prepared.settings())
    until(lambda: len(prepared.rounds) >= 2, "no two rounds")
    # The query, and three rounds: a SuperNode that is still fetching a message waits for a minute.
    until(
        lambda: all(_replies(deployment, name, "Received") >= 4 for name in names), "no third round"
    )
    (server,) = deployment.processes_of("superlink", SERVER)
    server.kill()
    deployment.kill("killed-server")
    assert not (prepared.out / "result.json").exists()
    deployment.start_run("resumed", prepared.settings(resume=True))
    check_outputs(prepared, deployment.wait("resumed", TIMEOUT))
    check_equal(prepared)


# Set up wrongly ----------------------------------------------------------------------------------


def _ended(deployment: Loopback, name: str) -> str:
    assert deployment.processes[name].wait(timeout=90) != 0
    return deployment.log(name)


def test_a_supernode_without_the_right_credentials_ends_and_says_why(
    deployment: Loopback, keys: list[Path], tmp_path: Path
) -> None:
    make_server_credentials(tmp_path / "other", [HOST])
    none, other = tmp_path / "none.crt", tmp_path / "other" / "ca.crt"
    deployment.start_node("missing", NODE, key=keys[0], authority=none)
    deployment.start_node("other-ca", NODE, key=keys[0], authority=other)
    deployment.start_node("unregistered", NODE, key=deployment.make_key("unknown"))
    # These are Flower's own words; docs/deployment.md says what they mean.
    assert "`--root-certificates` does not point to a file" in _ended(deployment, "missing")
    assert "certificate verify failed: unable to get local" in _ended(deployment, "other-ca")
    assert "Failed to activate SuperNode" in _ended(deployment, "unregistered")


def test_wrong_folders_are_named(deployment: Loopback, keys: list[Path], tmp_path: Path) -> None:
    """Two SuperNodes with the same users; folders of another run."""
    twins = prepare("twins", tmp_path)
    for number in range(2):
        # Each keeps its state apart, as on a machine of its own.
        node = {"data-folder": str(twins.clients[0]), "state-dir": str(tmp_path / f"{number}")}
        deployment.start_node(f"twin-{number}", node, key=keys[number])

    def log_of(name: str, settings: dict[str, str | bool]) -> str:
        deployment.start_run(name, settings)
        return deployment.wait(name, TIMEOUT)

    log = log_of("same-users", twins.settings())
    assert "client 0 is claimed by node" in log
    assert "give each SuperNode a partition-id or a data-folder of its own" in log
    assert not (twins.out / "result.json").exists()

    # The server reads bundled data; the SuperNodes have folders of the small graph.
    whole = {"config": "nfedgnn/cora", "overrides": "data.name=cora-linqs rounds=1"}
    log = log_of("other-run", whole | {"output-dir": str(twins.folder / "other")})
    assert "data-folder" in log and "data folder of another run: data.name" in log


# Keys of their own, and a server that lies --------------------------------------------------------


PARTIES = 6  # one may be missing
# A server that tries its lies on clients between the honest messages of a run
LIAR = """
import json
from pathlib import Path

from flwr.serverapp import ServerApp
from lying_grid import FEDSCEM, Enough, LyingGrid

from flower_graph.apps.client_app import app
from flower_graph.apps.server_app import main

client_app = app
server_app = ServerApp()


@server_app.main()
def lie(grid, context):
    lying = LyingGrid(grid, FEDSCEM, 5)
    try:
        main(lying, context)
    except Enough:
        pass
    finally:
        Path(context.run_config["said"]).write_text(json.dumps(lying.said))
"""


def make_registry(prepared: Prepared) -> Path:
    """Make an identity for each client, and the registry of all."""
    registry = prepared.folder / "registry.json"
    for number, data in enumerate(prepared.clients):
        identity = prepared.folder / f"identity-{number}"
        assert cli(["identity", "new", str(identity)]) == 0
        (client,) = json.loads((data / "manifest.json").read_text("utf-8"))["clients"]
        most = ["--most-clients", "1"] if number == 0 else []
        added = ["registry", "add", str(registry), f"{identity}.pub", "--clients", str(client)]
        assert cli([*added, *most]) == 0
    return registry


def test_a_server_that_lies_is_refused(deployment: Loopback, tmp_path: Path) -> None:
    """Five lies: of an alignment and the list of parties."""
    known = dict.fromkeys(("config", "overrides", "output-dir", "server-folder", "said"), "")
    app = write_app(tmp_path / "liar", known, "liar:server_app", "liar:client_app")
    (app / "liar.py").write_text(LIAR)
    shutil.copy(Path(__file__).parents[1] / "hostile" / "lying_grid.py", app)
    prepared = prepare("parties", tmp_path, PARTIES)
    registry, said = make_registry(prepared), prepared.folder / "said.json"
    names = [f"party-{number}" for number in range(PARTIES)]
    for number, (name, data) in enumerate(zip(names, prepared.clients, strict=True)):
        own = {"identity-key": str(prepared.folder / f"identity-{number}")}
        node = {"data-folder": str(data), "registry": str(registry), **own}
        deployment.start_node(name, node, key=deployment.register(f"key-of-{name}"))
    settings = prepared.settings(f"strategy.registry={registry}", said=str(said))
    deployment.start_run("lying", settings, app)
    log = deployment.wait("lying", 2 * TIMEOUT)
    assert said.is_file(), log
    found = json.loads(said.read_text())
    told = [lie for lie in FEDSCEM if lie.kind in found]
    assert len(told) == len(found) >= 5, log  # some lies are told in one message
    for lie in told:
        assert re.search(lie.says, found[lie.kind] or ""), (lie.kind, found[lie.kind])


# The demo -----------------------------------------------------------------------------------------


@pytest.mark.release
def test_an_interrupted_demo_ends_its_processes_and_removes_its_folder(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {MARK: mark, "TMPDIR": str(tmp_path / "temporary")}
    log, command = tmp_path / "log", [sys.executable, str(ROOT / "deploy" / "demo.py")]
    with log.open("wb") as out:
        demo = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        until(lambda: "PPFL-GNN: 4 SuperNodes" in log.read_text() or demo.poll(), log, 300)
        assert len(marked_processes(MARK, mark)) >= 6  # the SuperLink, four SuperNodes, theirs
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=90) == 130
        assert [one for one in marked_processes(MARK, mark) if one.pid != demo.pid] == []
        assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        end_processes(MARK, mark)
        demo.wait(timeout=30)


@pytest.mark.release
def test_an_app_with_a_secure_average_goes_on_without_a_supernode_that_died(
    deployment: Loopback, keys: list[Path]
) -> None:
    for number, key in enumerate(keys):
        about = {"partition-id": number, "num-partitions": len(keys)}
        deployment.start_node(f"digits-{number}", about, key=key)
    app = ROOT / "examples" / "secure-average"
    deployment.start_run("digits", {"num-server-rounds": 4}, app)
    until(lambda: "[ROUND 2/" in deployment.log("digits"), "round 2")
    deployment.kill("digits-2")
    log = deployment.wait("digits", TIMEOUT)
    # The round is lost if the SuperNode died before its vector was there
    assert log.count("aggregate_train: Received 1 results") >= 3
    assert float(re.findall(r"after 4 rounds: ([\d.]+)%", log)[0]) > 80
