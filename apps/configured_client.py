"""A ClientApp that hands every message to the method that the config names."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_graph.apps.run import client_app
from flower_graph.data.sources.names import fetching
from flower_graph.method.permits import configured_client, fetches
from flower_graph.wire.client_errors import boundary


class ConfiguredClientApp(ClientApp):
    """Hands messages to the ClientApp of the method; only the run config names the method."""

    def __call__(self, message: Message, context: Context) -> Message:
        with boundary(context), fetching(fetches(context)):
            return client_app(*configured_client(context))(message, context)


app = ConfiguredClientApp()
