"""The ClientApp that Flower calls. It passes each message to the process of the clients.

It imports neither PyTorch nor the engine: Flower starts a process for every message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Protocol

from flwr.app import Context, Message, UserConfigValue
from flwr.clientapp import ClientApp

from flower_graph.errors import ConfigError, brief
from flower_graph.flower_compat import owner_of_message
from flower_graph.wire.client_errors import on_ray

RESIDENT, IDLE = "resident", "resident-idle"  # keys of the node config
USUAL_IDLE = 600.0  # seconds


class Home(Protocol):
    """Where the clients of one SuperNode live and answer messages."""

    def answer(self, message: Message, context: Context) -> Message:
        """Answer a message, and put the clients' state into the context."""
        ...


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
        return home_of(self._reference, self._here, context).answer(message, context)

    @cached_property
    def _here(self) -> InProcess:
        return InProcess(self._reference)


def home_of(reference: str, here: Home, context: Context) -> Home:
    """Choose where a ``ClientApp`` answers: `here`, in this process, or in a worker."""
    if on_ray():
        from flower_graph.client.resident.on_ray import RayHome, workers_of  # is there only there

        workers = workers_of(context.run_id)
        return RayHome(workers) if workers else here
    owner, idle = owner_of_message(), _idle(context.node_config)
    # A worker must notice when its SuperNode dies; only Linux tells it.
    if owner is None or idle is None or not hasattr(os, "pidfd_open"):
        return here
    from flower_graph.client.resident.launch import WorkerHome  # no need for it anywhere else

    return WorkerHome(reference, owner, idle)


class InProcess:
    """Clients that live in the process that Flower calls."""

    def __init__(self, reference: str) -> None:
        self._reference = reference

    @cached_property
    def _app(self) -> ClientApp:
        return load_app(self._reference)

    def answer(self, message: Message, context: Context) -> Message:
        return self._app(message, context)


def load_app(reference: str) -> ClientApp:
    """Import a ``ClientApp`` by its reference, ``"package.module:attribute"``."""
    module, _, attribute = reference.partition(":")
    app = getattr(import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} must be a ClientApp, is {type(app).__name__}")
    return app


def _idle(node_config: Mapping[str, UserConfigValue]) -> float | None:
    """Return seconds without a message after which a worker ends; None if none is wanted."""
    resident, idle = node_config.get(RESIDENT, True), node_config.get(IDLE, USUAL_IDLE)
    if not isinstance(resident, bool):
        raise ConfigError(f"node-config {RESIDENT}: {brief(resident)}; must be true or false")
    if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 < idle < 1e9:
        raise ConfigError(f"node-config {IDLE}: {brief(idle)}; must be seconds, more than 0")
    return float(idle) if resident else None
