"""The process that clients live in: it answers their messages, and keeps what needs no reload."""

from importlib import import_module

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_graph.wire.client_errors import boundary


def load_app(reference: str) -> ClientApp:
    """Import a ``ClientApp`` by its reference, ``"package.module:attribute"``."""
    module, _, attribute = reference.partition(":")
    app = getattr(import_module(module), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{reference} must be a ClientApp, is {type(app).__name__}")
    return app


class Home:
    """Clients of one run that live in this process: it keeps their contexts between messages."""

    # A context's attribute ``live`` has what is not to be read anew from its state
    def __init__(self, reference: str) -> None:
        self._reference, self._contexts = reference, dict[int, Context]()  # by node id

    def __call__(self, message: Message, context: Context) -> Message:
        kept = self._contexts.setdefault(context.node_id, context)
        vars(kept).update(vars(context))
        try:
            with boundary(kept):  # what an app of its own tells, it decides itself
                app = load_app(self._reference)
            return app(message, kept)
        finally:
            context.state = kept.state
