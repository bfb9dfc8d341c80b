"""The client: from a ``NumPyClient`` to a ClientApp, and what lasts between messages."""

from flower_graph.client.adaptor import make_client_app

__all__ = ["make_client_app"]
