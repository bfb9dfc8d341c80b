"""existing-app: A Flower / PyTorch app."""

from flwr.app import Context

from existing_app.task import load_data
from flower_graph import NodeClient, make_client_app


def client_fn(context: Context) -> NodeClient:
    """Hold the local data."""
    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    data = load_data(partition_id, num_partitions)

    # Every node of its own is a user, with its features and nothing else
    return NodeClient(context, data.x[data.own], data.node[data.own])


# Flower ClientApp
app = make_client_app(client_fn)
