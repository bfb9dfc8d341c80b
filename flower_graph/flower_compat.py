"""All names of Flower that this project uses besides Flower's public interface.

The public interface is ``__all__`` of ``flwr.app``, ``flwr.clientapp``, ``flwr.clientapp.mod``,
``flwr.serverapp`` and ``flwr.serverapp.strategy``; a test checks that other modules use no more.
The names below are imported on first use. A comment beside each says which Flower version has it
first, and a comment above each group what to do if a later version moves it.
"""

# ruff: noqa: E501, F401, I001  one name a line with its version, in groups

import logging
import sys
import time
from functools import partialmethod
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

from flower_graph import __version__
from flower_graph.errors import FlowerVersionError
from flower_graph.lazy import declared

if TYPE_CHECKING:
    # The base of clients, which Flower moves from place to place (MOVED). Gone: the three methods that
    # `client/adaptor.py` calls, as a class here.
    from flwr.client import NumPyClient  # 1.22

    # Types of mods. Gone: write the two `Callable`s out here.
    from flwr.clientapp.typing import ClientAppCallable  # 1.22
    from flwr.clientapp.typing import Mod  # 1.32, before in flwr.client.typing

    # Numbers and words on the wire. Gone: 1, 2 and "numpy.ndarray", as the protocol has them.
    from flwr.common.constant import SUPERLINK_NODE_ID  # 1.22
    from flwr.common.constant import ErrorCode  # 1.22
    from flwr.common.constant import SType  # 1.22

    # Messages and contexts as bytes, for the worker that answers a SuperNode's messages. Gone: what
    # the process that Flower starts for a message itself pulls and pushes them with.
    from flwr.common.serde import context_from_proto  # 1.22
    from flwr.common.serde import context_to_proto  # 1.22
    from flwr.common.serde import message_from_proto  # 1.22
    from flwr.common.serde import message_to_proto  # 1.22
    from flwr.proto.message_pb2 import Context as ContextProto  # 1.22
    from flwr.proto.message_pb2 import Message as MessageProto  # 1.22

    # Records as bytes, for a context that outlasts its SuperNode. Gone: what Flower's SuperNode
    # itself saves contexts with, once it does; until then arrays by `safetensors`, the rest as JSON.
    from flwr.common.serde import recorddict_from_proto  # 1.22
    from flwr.common.serde import recorddict_to_proto  # 1.22
    from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto  # 1.22

    # The mechanism of `LocalDpMod`. Gone: the mod itself, on one row at a time.
    from flwr.supercore.differential_privacy import add_gaussian_noise_inplace  # 1.32
    from flwr.supercore.differential_privacy import clip_inputs_inplace  # 1.32

    # What a `Grid` in one process gives Flower. Gone: what the abstract `Grid.set_run` then takes,
    # and whatever `Message(...)` then asks for the sender's identity.
    from flwr.supercore.run import Run  # 1.32, before in flwr.common.typing
    from flwr.supercore.task_identity import TaskIdentity  # 1.38

    # The actors of `flwr run`'s simulation. Gone: see whether what then has them replaces dead ones;
    # if not, leave out `replace_dead_actors`: after an actor's death each message fails.
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend  # 1.22
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool  # 1.22

    # For tests and benchmarks alone: Flower's clock, its run config and its grid. Gone: leave out
    # what is measured or tested with them.
    from flwr.app.message import message as flower_message  # 1.31
    from flwr.cli.build import build_fab_from_disk  # 1.25
    from flwr.common.config import fuse_dicts  # 1.22
    from flwr.common.config import parse_config_args  # 1.22
    from flwr.server.superlink.fleet.vce.vce_api import _register_nodes as register_nodes  # 1.22
    from flwr.server.utils.validator import validate_message  # 1.22
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign  # 1.24
    from flwr.superlink.grid.http_grid import HttpGrid  # 1.35

LOG = logging.getLogger(__name__)
# Where a name is in versions that lack the place above
MOVED = {"NumPyClient": ("flwr.compat.client", "flwr.compat.client.numpy_client")}
OLDEST, NEWEST = "1.39", "1.42"  # of those that `make test-versions` runs tests with


def __getattr__(name: str) -> Any:
    if name not in declared(__name__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = declared(__name__)[name]
    for other in (module, *MOVED.get(name, ())):
        try:
            return getattr(import_module(other), there)
        except (ImportError, AttributeError) as error:
            first = error
    raise FlowerVersionError(
        f"{module}.{there}, which flower-graph {__version__} needs, is not in flwr "
        f"{_installed()} ({first}); tested are flwr {OLDEST} to {NEWEST}: "
        f"pip install 'flwr[simulation]=={NEWEST}.*'"
    ) from first


def identify(run_id: int) -> None:
    """Fill in the process's identity, without which Flower makes no messages."""
    identity = __getattr__("TaskIdentity")
    for part, value in (
        ("run_id", run_id),
        ("node_id", __getattr__("SUPERLINK_NODE_ID")),
        ("task_id", 1),
    ):
        if getattr(identity, f"_{part}") is None:
            setattr(identity, part, value)


# Any: Flower's message, of which nothing but this is not public
def stamp(message: Any, **parts: object) -> None:
    """Set the fields that Flower fills in when it sends a message, such as ``run_id``."""
    # 1.22. Gone: what `InMemoryGrid.push_messages` then does.
    message.metadata.__dict__.update({f"_{name}": value for name, value in parts.items()})


# Any: Flower's grid and its messages
def pull(grid: Any, message_ids: list[str]) -> tuple[list[Any], dict[str, int]]:
    """Pull replies. Also return the messages whose reply could not be read, with its sender."""
    # Flower's grid asks for a list of replies, and then for the objects of each. Where these are gone
    # it gives an error up to 1.42; from 1.43 on it logs the reply's id, and nobody hears of it again.
    # Gone: nothing; such a SuperNode is waited for until the timeout.
    client, told = getattr(grid, "_runtime_client", None), dict[str, int]()  # 1.35
    if client is None:
        return list(grid.pull_messages(message_ids)), told
    ask = client.PullMessages

    def noted(request: Any) -> Any:
        answer = ask(request)
        about = [one.metadata for one in answer.messages_list]
        told.update({one.reply_to_message_id: one.src_node_id for one in about})
        return answer

    client.PullMessages = noted
    try:
        replies = list(grid.pull_messages(message_ids))
    finally:
        del client.PullMessages
    for reply in replies:
        told.pop(reply.metadata.reply_to_message_id, None)
    return replies, told


def owner_of_message() -> int | None:
    """Return the process that has Flower start one a message; None if it did not start this one.

    Also None where Flower installs an app's packages for one message and removes them again.
    """
    # 1.39. Gone: what `flwr-clientapp` is then called with; without it clients are not resident.
    if "flwr.supernode.runtime.run_clientapp" not in sys.modules:
        return None
    if "--allow-runtime-dependency-installation" in sys.argv or "--parent-pid" not in sys.argv:
        return None
    return int(sys.argv[sys.argv.index("--parent-pid") + 1])


# Flower's pool has as many actors as it began with, and puts one that is dead back on top, so that
# each later message fails. Here one that dies is replaced, and where its machine went, the others
# that it had are too: all that are idle then have to answer before they are in the pool again. New
# ones come in as they start, which on a cluster that has lost a machine may be never.
Theirs = Any  # Flower's backend, pool, messages and jobs, Ray's references and actors
ACTOR_WAIT = 60.0  # seconds without any actor after which a message fails
ACTOR_LOOK = 0.05  # seconds between two looks for an idle actor


def replace_dead_actors() -> None:
    """Make Flower's simulation, if it runs in this process, replace each actor that dies."""
    if "flwr.server.superlink.fleet.vce.vce_api" not in sys.modules:
        return
    pool = __getattr__("BasicActorPool")
    if not isinstance(vars(pool)["submit"], partialmethod):
        pool.submit = partialmethod(_submit, pool.submit)
        fetch = pool.fetch_result_and_return_actor_to_pool
        pool.fetch_result_and_return_actor_to_pool = partialmethod(_fetch, fetch)
        pool.add_actor_back_to_pool = _add_back
        backend = __getattr__("RayBackend")
        backend.process_message = partialmethod(_process, backend.process_message)


def _process(backend: Theirs, flowers: Theirs, message: Theirs, context: Theirs) -> Theirs:
    """Process a message. If its actor is dead, process it again with the original context."""
    from ray.exceptions import RayActorError

    try:
        return flowers(backend, message, context)
    except RayActorError:
        return flowers(backend, message, context)


def _submit(pool: Theirs, flowers: Theirs, actor_fn: Theirs, job: Theirs) -> Theirs:
    end = time.monotonic() + ACTOR_WAIT
    while True:
        try:
            return flowers(pool, actor_fn, job)
        except IndexError:  # no actor is idle
            if pool._future_to_actor:
                end = time.monotonic() + ACTOR_WAIT
            elif time.monotonic() > end:
                raise
        time.sleep(ACTOR_LOOK)


def _fetch(pool: Theirs, flowers: Theirs, future: Theirs) -> Theirs:
    """Fetch a reply. If its actor is dead, start another."""
    from ray.exceptions import RayActorError

    try:
        return flowers(pool, future)
    except RayActorError:
        _replace(pool, pool._future_to_actor.pop(future))
        raise


def _add_back(pool: Theirs, future: Theirs) -> None:
    if (actor := pool._future_to_actor.pop(future, None)) is not None:
        pool.pool.append(actor)


def _replace(pool: Theirs, actor: Theirs) -> None:
    import ray

    LOG.warning("an actor of Flower's is dead; another is started")
    ray.kill(actor)
    awaited = [pool.create_actor_fn()]
    while pool.pool:
        awaited.append(pool.pool.pop())
    for one in awaited:
        Thread(target=_take_in, args=(pool, one), daemon=True).start()


def _take_in(pool: Theirs, actor: Theirs) -> None:
    """Wait for an actor's answer, and put it into the pool."""
    import ray
    from ray.exceptions import RayActorError

    try:
        ray.get(actor.__ray_ready__.remote())
        pool.pool.append(actor)
    except RayActorError:
        _replace(pool, actor)


def is_simulation(grid: object) -> bool:
    """Whether a ServerApp's grid is that of Flower's simulation, whose clients are actors of Ray."""
    # 1.31. Gone: that a ServerApp runs in the process that starts Ray.
    module = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def _installed() -> str:
    import flwr

    return str(flwr.__version__)
