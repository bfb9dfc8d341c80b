"""Flower's simulation goes on when a process of its is killed, or a machine has room no more."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flower_graph import flower_compat
from flower_graph.flower_compat import BasicActorPool, ClientAppActor, replace_dead_actors

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
def pool(ray: Any) -> Iterator[Any]:
    """Make a pool of Flower's with two actors."""
    replace_dead_actors()
    pool = BasicActorPool(ClientAppActor, {"num_cpus": 1}, {})
    pool.add_actors_to_pool(pool.actors_capacity)
    yield pool
    pool.terminate_all_actors()
    _wait_until(lambda: ray.available_resources().get("CPU") == 2)


def _ask(pool: Any, message: str = "") -> Any:
    """Send a message as Flower's `RayBackend.process_message` does; return who answers."""

    def app(message: str, context: None) -> int:
        if message == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        return os.getpid()

    future = pool.submit(
        lambda actor, *job: actor.run.remote(*job), (lambda: app, message, "0", None)
    )
    try:
        return pool.fetch_result_and_return_actor_to_pool(future)[0]
    except Exception:
        pool.add_actor_back_to_pool(future)
        raise


def _wait_until(is_so: Any) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_killed_actor_costs_its_message_alone(ray: Any, pool: Any) -> None:
    before = {*_at_once(pool, 4)}
    assert len(before) == 2
    with pytest.raises(ray.exceptions.RayActorError):
        _ask(pool, "die")
    assert len({*_at_once(pool, 8)} & before) == 1
    _wait_until(lambda: len(pool.pool) + len(flower_compat._STARTING) == 2)
    after = {*_at_once(pool, 8)}
    assert len(after) == 2 and len(after & before) == 1


@pytest.mark.release
def test_without_room_for_another_the_rest_take_all_messages(
    ray: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ClientAppActor.options(num_cpus=3)  # type: ignore[attr-defined]
    pool.create_actor_fn = lambda: more.remote()
    with pytest.raises(ray.exceptions.RayActorError):
        _ask(pool, "die")
    assert len({*_at_once(pool, 8)}) == 1
    with pytest.raises(ray.exceptions.RayActorError):
        _ask(pool, "die")
    monkeypatch.setattr(flower_compat, "ACTOR_WAIT", 0.5)
    with pytest.raises(IndexError):
        _ask(pool)
    for actor in flower_compat._STARTING.values():
        ray.kill(actor)
    flower_compat._STARTING.clear()


def _at_once(pool: Any, count: int) -> list[int]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda _: _ask(pool), range(count)))
