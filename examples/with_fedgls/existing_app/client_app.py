"""existing-app: A Flower / PyTorch app."""

from flwr.app import Context

from existing_app.task import SETTINGS, load_data
from flower_graph import ClientGraph, StructureClient, make_client_app


def client_fn(context: Context) -> StructureClient:
    """Hold the local data."""
    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    data = load_data(partition_id, num_partitions)

    # The client without edges learns its own graph
    edges = data.edge_index if data.num_edges else None
    masks = (data.train_mask, data.val_mask, data.test_mask)
    graph = ClientGraph(partition_id, data.node, data.x, data.y, edges, None, *masks)
    return StructureClient(context, [graph], SETTINGS)


# Flower ClientApp
app = make_client_app(client_fn)
