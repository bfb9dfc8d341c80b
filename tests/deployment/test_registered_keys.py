"""SuperNodes with keys of their own over TLS, set up by the commands of docs/deployment.md."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from deployment_helpers import TIMEOUT, Case, Prepared, prepare, rounds_of
from lying_grid import FEDSCEM, REPEATED, unrefused

from deploy.loopback import Loopback
from flower_graph.apps.cli.main import main as cli

PARTIES = 6  # one may be missing
SIX = Case(
    "fedscem/cora",
    ("rounds=1", "partition.clients=6", "partition.min_nodes=6", "partition.hops=1"),
    PARTIES,
)
DISTRUSTS = "strategy.trust=malicious-server"
# A server that tries its lies on clients between the honest messages of a run
LIAR = """
import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lying_grid import FEDSCEM, LyingGrid

from flower_graph.apps.client_app import app
from flower_graph.apps.server_app import main

client_app = app
server_app = ServerApp()


class Enough(BaseException):
    pass


class Short(LyingGrid):
    # Ends the run once so many lies were told; 0: it tells all

    def push_messages(self, messages):
        if len(self.said) >= self.most > 0:
            raise Enough
        return super().push_messages(messages)


@server_app.main()
def lie(grid: Grid, context: Context) -> None:
    lying = Short(grid, FEDSCEM)
    lying.most = context.run_config["lies"]
    try:
        main(lying, context)
    except Enough:
        pass
    finally:
        Path(context.run_config["said"]).write_text(json.dumps(lying.said))
"""
ABOUT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "liar"
version = "1.0.0"
description = "A server that lies"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "flower-graph"

[tool.flwr.app.components]
serverapp = "liar:server_app"
clientapp = "liar:client_app"

[tool.flwr.app.config]
config = ""
overrides = ""
output-dir = ""
server-folder = ""
said = ""
lies = 0
"""


def lying_app(folder: Path) -> Path:
    """Write the app of a server that lies, with this project's clients."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(ABOUT)
    (folder / "liar.py").write_text(LIAR)
    shutil.copy(Path(__file__).parents[1] / "hostile" / "lying_grid.py", folder)
    return folder


def make_registry(prepared: Prepared) -> Path:
    """Make an identity for each client, and the registry of all."""
    registry = prepared.folder / "registry.json"
    for number, data in enumerate(prepared.clients()):
        identity = prepared.folder / f"identity-{number}"
        assert cli(["identity", "new", str(identity)]) == 0
        (client,) = json.loads((data / "manifest.json").read_text("utf-8"))["clients"]
        most = ["--most-clients", "1"] if number == 0 else []
        added = ["registry", "add", str(registry), f"{identity}.pub", "--clients", str(client)]
        assert cli([*added, *most]) == 0
    return registry


def start_parties(deployment: Loopback, prepared: Prepared, registry: Path) -> list[str]:
    """Start a SuperNode with a key and the registry for each data folder."""
    names = []
    for number, data in enumerate(prepared.clients()):
        own = {"identity-key": str(prepared.folder / f"identity-{number}")}
        node = {"data-folder": str(data), "registry": str(registry), **own}
        names.append(f"party-{number}")
        deployment.start_node(names[-1], node, key=deployment.register(f"key-{number}"))
    return names


def lied_to(
    deployment: Loopback, folder: Path, lies: int
) -> tuple[Prepared, dict[str, str | None], str, list[str]]:
    """Run the server that lies; give the run, what was answered, its log and the SuperNodes."""
    prepared = prepare(SIX, folder / "parties", DISTRUSTS)
    registry = make_registry(prepared)
    names = start_parties(deployment, prepared, registry)
    said = prepared.folder / "said.json"
    words = {"said": str(said), "lies": lies}
    settings = prepared.settings("deployed", f"strategy.registry={registry}", **words)
    deployment.start_run("lying", settings, lying_app(folder / "liar"))
    log = deployment.wait("lying", 2 * TIMEOUT)
    assert said.is_file(), log
    return prepared, json.loads(said.read_text()), log, names


def test_parties_know_each_other_by_their_registry_and_refuse_the_first_lies(
    deployment: Loopback, tmp_path: Path
) -> None:
    """An alignment and the list of parties, by identities and a registry as users make them."""
    _, found, log, _ = lied_to(deployment, tmp_path, 5)
    assert len(found) >= 5, log  # some lies are told in one message
    told = [lie for lie in FEDSCEM if lie.kind in found]
    assert len(told) == len(found)
    for lie in told:
        assert re.search(lie.says, found[lie.kind] or ""), (lie.kind, found[lie.kind])


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_server_that_lies_is_refused_and_the_run_goes_on_without_its_lies(
    deployment: Loopback, tmp_path: Path
) -> None:
    # A hundred messages, a process each
    prepared, found, log, names = lied_to(deployment, tmp_path, 0)
    assert unrefused(found, FEDSCEM) == {}, log
    logs = "\n".join(deployment.log(name) for name in names)
    for says in (*(one[-1] for one in REPEATED), *(lie.says for lie in FEDSCEM)):
        assert re.search(says, logs), says
    # The honest messages between them made the run that a simulation makes.
    (here,), (there,) = (rounds_of(prepared.folder / out) for out in ("deployed", "simulated"))
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
    assert (here["answered"], there["answered"]) == (PARTIES, PARTIES)
