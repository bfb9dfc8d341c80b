"""The client: the adaptor from ``NumPyClient`` to ClientApp, and state between messages."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.client.adaptor import make_client_app

__all__ = ["make_client_app"]

__getattr__ = attach(__name__)
