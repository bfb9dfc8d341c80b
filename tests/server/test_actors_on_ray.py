"""Flower's simulation goes on when a process of its is killed."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flower_graph import flower_compat
from flower_graph.flower_compat import RayBackend, replace_dead_actors

pytestmark = pytest.mark.flwr


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Start Ray with two processors."""
    import ray

    _ = flower_compat.register_nodes  # this is now a process of Flower's simulation
    folder = tempfile.mkdtemp(prefix="t-")
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    yield ray
    ray.shutdown()
    shutil.rmtree(folder)


@pytest.fixture
def backend(ray: Any) -> Iterator[Any]:
    """Make Flower's backend with two actors, whose ClientApp answers with its process's number."""

    def app(message: Path | None, context: Any) -> int:
        if message is not None and message.exists():
            message.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        return os.getpid()

    replace_dead_actors()
    backend = RayBackend({"client_resources": {"num_cpus": 1}})
    backend.build(lambda: app)  # type: ignore[arg-type, return-value]
    yield backend
    assert backend.pool is not None
    backend.pool.terminate_all_actors()
    _wait_until(lambda: ray.available_resources().get("CPU") == 2)


def _ask(backend: Any, message: Path | None = None) -> Any:
    """Send a message; with a file's path, an actor that finds it removes it and dies."""
    context = SimpleNamespace(node_config={"partition-id": 0})
    return backend.process_message(message, context)[0]


def _at_once(backend: Any, count: int) -> list[int]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda _: _ask(backend), range(count)))


def _wait_until(is_so: Any) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_message_whose_actor_is_killed_goes_to_another(backend: Any, tmp_path: Path) -> None:
    before = {*_at_once(backend, 4)}
    assert len(before) == 2
    (poison := tmp_path / "poison").touch()
    left = _ask(backend, poison)
    assert left in before and not poison.exists()
    assert {*_at_once(backend, 8)} & before == {left}
    _wait_until(lambda: len(backend.pool.pool) == 2 or _ask(backend) not in before)
    after = {*_at_once(backend, 8)}
    assert len(after) == 2 and after & before == {left}
