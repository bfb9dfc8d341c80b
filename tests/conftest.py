"""Fixtures for all tests."""

import gc
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# The tests' tensors are tiny: more threads only wait for each other, 20 times as long when the
# machine has other work. It must be set before PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: on a machine that has other work, an example may take long.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("quick")


# Parts of the names of tests that start processes of Flower's, and which of them wait for another
ON_RAY = ("tests/test_existing_app.py", "tests/test_launch.py", "tests/test_cluster.py", "on_ray")
ELSEWHERE = {"tests/deployment/": "deployments", **dict.fromkeys(ON_RAY, "runs on Ray")}


def one_after_another(nodeid: str) -> str | None:
    """Say among which tests one is that are not run side by side."""
    return next((kind for part, kind in ELSEWHERE.items() if part in nodeid), None)


class _Files(LoadFileScheduling):
    """Deals out tests by files, but all deployments to one worker, and all runs on Ray to one.

    Each message of a deployment starts a process: beside two of them runs on Ray take minutes.
    Whole runs of shipped configs take minutes each, and are dealt out one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "tests/test_shipped.py" in nodeid:
            return nodeid
        return one_after_another(nodeid) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what starts processes of Flower's or needs data from outside the package.

    Of the former one run on Ray is marked ``fast``: `make test` has it too. What is marked
    ``release`` is slow as well, and `make test-slow` leaves it out.
    """
    for item in items:
        starts = item.get_closest_marker("flwr") or item.get_closest_marker("deployment")
        needs = "data_root" in getattr(item, "fixturenames", ())
        assert not starts or one_after_another(item.nodeid), item.nodeid
        if starts and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # of their processes, on a busy machine
        only_released = item.get_closest_marker("release")
        if needs or only_released or (starts and not item.get_closest_marker("fast")):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep the collector of garbage from walking through thousands of tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_log_levels() -> Iterator[None]:
    """Set the levels of the loggers back: commands set them for their process."""
    loggers = [logging.getLogger(name) for name in ("flower_graph", "flwr")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the identity without which Flower makes no messages."""
    from flower_graph.flower_compat import SUPERLINK_NODE_ID, TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, SUPERLINK_NODE_ID)


@pytest.fixture
def data_root() -> Path:
    """Folder of raw data outside the package; without it the test is skipped."""
    value = os.environ.get("FLOWER_GRAPH_DATA")
    if not value:
        pytest.skip("FLOWER_GRAPH_DATA is unset: no raw data outside the package")
    return Path(value)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Let every look-up of another machine fail at once: no test downloads or waits for a host."""
    look_up = socket.getaddrinfo

    def local(host: Any, *more: Any, **others: Any) -> Any:
        if host in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
            return look_up(host, *more, **others)
        raise socket.gaierror(socket.EAI_NONAME, "name lookup is switched off")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", local)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_state() -> Iterator[None]:
    """Keep clients' state and keys where no other process looks for them, until the tests end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="fg-", dir=memory, ignore_cleanup_errors=True)
    with folder as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWER_GRAPH_STATE", f"{name}/state")
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """Let files be whole in the kernel's memory alone: no test has the power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_pictures() -> Iterator[Callable[..., None]]:
    """Leave out every run's pictures, which take longer than a small run; give what draws them."""
    from flower_graph.report.writer import RunWriter

    draw = RunWriter._draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "_draw", lambda *_: None)
        yield draw


@pytest.fixture
def pictures(no_pictures: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test's runs draw their pictures."""
    from flower_graph.report.writer import RunWriter

    monkeypatch.setattr(RunWriter, "_draw", no_pictures)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep the axes of pictures instead of writing these."""
    from flower_graph.report import plots

    kept: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, *_: kept.extend(figure.axes))
    return kept
