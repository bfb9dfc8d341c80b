"""The ClientApp: builds the client that the config names, for every message."""

from flwr.app import Context

from flower_graph.apps.nfedgnn import build_client, configured
from flower_graph.client import make_client_app
from flower_graph.strategies.split_gradient_relay import ACTIONS, NodeClient


def client_fn(context: Context) -> NodeClient:
    """Build the client of this SuperNode."""
    config, out = configured(context)
    return build_client(config, context, out)


app = make_client_app(client_fn, actions=ACTIONS)
