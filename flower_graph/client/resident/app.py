"""The ClientApp that Flower calls. It passes each message to the process of the clients.

It imports neither PyTorch nor the engine: Flower starts a process for every message.
"""

import os
from collections.abc import Callable, Mapping

from flwr.app import Context, Message, UserConfigValue
from flwr.clientapp import ClientApp

from flower_graph.errors import ConfigError, brief
from flower_graph.flower_compat import owner_of_message
from flower_graph.wire.client_errors import on_ray

RESIDENT, IDLE = "resident", "resident-idle"  # keys of the node config
USUAL_IDLE = 600.0  # seconds


class ResidentClientApp(ClientApp):
    """Answers messages as another ``ClientApp`` does, in the process that keeps its clients.

    A SuperNode starts a process for each message. The first message then starts a worker, which
    keeps the clients until the run is over. Elsewhere the other app is called in this process.

    Parameters
    ----------
    reference : str
        The other app, ``"package.module:attribute"``; it is imported only where it answers.
    """

    def __init__(self, reference: str) -> None:
        super().__init__()
        self._reference = reference

    def __call__(self, message: Message, context: Context) -> Message:
        return home_of(self._reference, context)(message, context)


def home_of(reference: str, context: Context) -> Callable[[Message, Context], Message]:
    """Choose where a ``ClientApp`` answers: in a worker, or in this process."""
    from flower_graph.client.resident.worker import WorkerHome, load_app

    if on_ray():
        from flower_graph.client.resident.ray_workers import RayHome, workers_of  # needs Ray

        workers = workers_of(context.run_id)
        return RayHome(workers) if workers else load_app(reference)
    owner, idle = owner_of_message(), _idle(context.node_config)
    # A worker must notice when its SuperNode dies; only Linux tells it.
    if owner is None or idle is None or not hasattr(os, "pidfd_open"):
        return load_app(reference)
    return WorkerHome(reference, owner, idle)


def _idle(node_config: Mapping[str, UserConfigValue]) -> float | None:
    """Return seconds without a message after which a worker ends; None if none is wanted."""
    resident, idle = node_config.get(RESIDENT, True), node_config.get(IDLE, USUAL_IDLE)
    if not isinstance(resident, bool):
        raise ConfigError(f"node-config {RESIDENT}: {brief(resident)}; must be true or false")
    if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 < idle < 1e9:
        raise ConfigError(f"node-config {IDLE}: {brief(idle)}; must be seconds, more than 0")
    return float(idle) if resident else None
