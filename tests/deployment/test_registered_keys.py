"""SuperNodes with keys of their own over TLS, set up by the commands of docs/deployment.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deployment_helpers import TIMEOUT, Case, Prepared, prepare

from deploy.loopback import Loopback
from flower_graph.apps.cli.main import main as cli

FIVE = Case(
    "fedscem/cora",
    ("rounds=1", "partition.clients=5", "partition.min_nodes=6", "partition.hops=1"),
    5,
)


@pytest.fixture(scope="module")
def five(deployment: Loopback) -> list[Path]:
    """Private keys of five registered SuperNodes, by which the SuperLink knows them."""
    return [deployment.register(f"party-{number}") for number in range(5)]


def start_parties(deployment: Loopback, prepared: Prepared, keys: list[Path]) -> list[str]:
    """Make an identity for each client and the registry; start the SuperNodes with both."""
    places = prepared.clients()
    registry, names = prepared.folder / "registry.json", []
    for number, data in enumerate(places):
        identity = prepared.folder / f"identity-{number}"
        assert cli(["identity", "new", str(identity)]) == 0
        numbers = json.loads((data / "manifest.json").read_text("utf-8"))["clients"]
        grant = [
            "--clients",
            f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}",
        ]
        most = ["--most-clients", "1"] if number == 0 else []
        assert cli(["registry", "add", str(registry), f"{identity}.pub", *grant, *most]) == 0
    for number, (key, data) in enumerate(zip(keys, places, strict=True)):
        own = {"identity-key": str(prepared.folder / f"identity-{number}")}
        names.append(f"{prepared.folder.name}-{number}")
        node = {"data-folder": str(data), "registry": str(registry), **own}
        deployment.start_node(names[-1], node, key=key)
    return names


def test_a_run_that_wants_to_be_trusted_gets_nothing_and_every_log_says_why(
    deployment: Loopback, five: list[Path], tmp_path: Path
) -> None:
    prepared = prepare(FIVE, tmp_path / "parties")
    names = start_parties(deployment, prepared, five)
    deployment.start_run("trusting", prepared.settings())
    log = deployment.wait("trusting", TIMEOUT)
    why = "has a key of its own (identity-key) and takes part in no run"
    assert why in log
    assert "NoClientsError" in log
    for name in names:
        assert why in deployment.log(name)
    assert not (prepared.folder / "deployed" / "result.json").exists()
