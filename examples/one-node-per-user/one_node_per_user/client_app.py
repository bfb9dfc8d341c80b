"""one-node-per-user: A Flower / PyTorch app."""

from flwr.app import Context

from flower_graph import NodeClient, make_client_app
from one_node_per_user.task import own_users


def client_fn(context: Context) -> NodeClient:
    """Host users: each has its features, and a first layer of its own that it trains."""
    x, nodes = own_users(context)
    return NodeClient(context, x, nodes)


# Flower ClientApp
app = make_client_app(client_fn)
