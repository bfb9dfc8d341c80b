"""The client: the adaptor from ``NumPyClient`` to ClientApp, and state between messages."""
