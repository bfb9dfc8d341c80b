"""What a deployment that was set up wrongly says: which file, key or client, and what to do."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deployment_helpers import TIMEOUT, Case, Prepared, prepare, rounds_of

from deploy.credentials import make_server_credentials
from deploy.loopback import HOST, Loopback

TWO = Case("nfedgnn/cora", ("rounds=1", "model.hidden=4"), 2, nodes=6)
NODE = {"partition-id": 0, "num-partitions": 2}


def _ended(deployment: Loopback, name: str) -> str:
    """Wait for a SuperNode that gives up; return what it said."""
    assert deployment.processes[name].wait(timeout=90) != 0
    return deployment.log(name)


def test_a_supernode_without_the_right_credentials_ends_and_says_why(
    deployment: Loopback, keys: list[Path], tmp_path: Path
) -> None:
    make_server_credentials(tmp_path / "other", [HOST])
    none, other = tmp_path / "none.crt", tmp_path / "other" / "ca.crt"
    unknown = deployment.make_key("unknown")
    deployment.start_node("missing", NODE, key=keys[0], authority=none)
    deployment.start_node("other-ca", NODE, key=keys[0], authority=other)
    deployment.start_node("unregistered", NODE, key=unknown)
    # These are Flower's own words; docs/deployment.md says what they mean.
    assert "`--root-certificates` does not point to a file" in _ended(deployment, "missing")
    assert "certificate verify failed: unable to get local" in _ended(deployment, "other-ca")
    assert "Failed to activate SuperNode" in _ended(deployment, "unregistered")


@pytest.fixture
def expired(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A server whose certificate has expired: its port, and the authority."""
    past = datetime.now(UTC) - timedelta(days=1)
    make_server_credentials(tmp_path / "old", [HOST], expires=past)
    server = http.server.HTTPServer((HOST, 0), http.server.BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "old" / "server.crt", tmp_path / "old" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], tmp_path / "old" / "ca.crt"
    server.shutdown()
    server.server_close()


def test_a_supernode_does_not_talk_to_a_superlink_whose_certificate_has_expired(
    deployment: Loopback, keys: list[Path], expired: tuple[int, Path]
) -> None:
    port, authority = expired
    to_it = ["--superlink", f"{HOST}:{port}"]
    deployment.start_node("late", NODE, key=keys[0], authority=authority, options=to_it)
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
    assert "client 0 is hosted by node" in log
    assert "give each SuperNode a partition-id or a data-folder of its own" in log
    (line,) = rounds_of(twins.folder / "deployed")
    assert line["answered"] == 3  # the users of one of the two; nothing counts twice
    assert (twins.folder / "deployed" / "result.json").is_file()

    more = ["strategy.min_nodes=3", "strategy.timeout=8"]
    deployment.start_run("too-few", twins.settings("few", *more))
    log = deployment.wait("too-few", TIMEOUT)
    assert "waiting for 3 SuperNodes, 2 connected" in log
    assert "2 of at least 3 nodes connected within 8 s: start more SuperNodes" in log

    # The server reads bundled data; the SuperNodes have folders of the small graph.
    whole = {"config": "nfedgnn/cora", "overrides": "data.name=cora-linqs rounds=1"}
    out = {"output-dir": str(twins.folder / "other")}
    deployment.start_run("other-run", whole | out)
    log = deployment.wait("other-run", TIMEOUT)
    assert "data-folder" in log
    assert "data folder of another run: data.name" in log
    other = twins.settings("other-server", "data.normalize=false")
    deployment.start_run("other-server", other)
    log = deployment.wait("other-server", TIMEOUT)
    assert f"server-folder {twins.folder / 'data' / 'server'}: data folder of another run" in log
