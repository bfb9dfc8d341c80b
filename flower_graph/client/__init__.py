"""The client: from a ``NumPyClient`` to a ClientApp, and what lasts between messages."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.client.adaptor import make_client_app

__all__ = ["make_client_app"]

__getattr__ = attach(__name__)
