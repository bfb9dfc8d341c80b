"""One SuperLink for all deployments of tests, and keys of three SuperNodes that it knows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.loopback import Loopback, remove


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes start for each message: the limit is longer than of other tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deployment)
            item.add_marker(pytest.mark.timeout(900))


# It ends with the file's tests: a SuperLink that waits takes a tenth of a core.
@pytest.fixture(scope="module")
def deployment() -> Iterator[Loopback]:
    """A SuperLink with TLS and registered keys; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="deployment-"))
    try:
        with Loopback(folder) as running:
            yield running
        assert running.left() == []
    finally:
        remove(folder)


@pytest.fixture(scope="module")
def keys(deployment: Loopback) -> list[Path]:
    """Private keys of three registered SuperNodes."""
    return [deployment.register(f"key-{number}") for number in range(3)]


@pytest.fixture(autouse=True)
def ended_nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """No SuperNode and no run of one test reaches the next."""
    if "deployment" not in request.fixturenames:
        yield
        return
    deployment: Loopback = request.getfixturevalue("deployment")
    yield
    for name, process in list(deployment.processes.items()):
        if name != "superlink" and process.poll() is None:
            deployment.end(name)
