"""existing-app: A Flower / PyTorch app."""

from flwr.app import Context

from existing_app.task import load_data
from flower_graph import EgoNetwork, EgoNetworkClient, make_client_app


def client_fn(context: Context) -> EgoNetworkClient:
    """Hold the local data."""
    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    data = load_data(partition_id, num_partitions)

    # Nodes are known by the same number at all clients; any of them may be the ego
    masks = (data.train_mask, data.val_mask, data.test_mask)
    graph = (data.node, data.edge_index, data.x, data.y)
    return EgoNetworkClient(context, [EgoNetwork(partition_id, int(data.node[0]), *graph, *masks)])


# Flower ClientApp
app = make_client_app(client_fn)
