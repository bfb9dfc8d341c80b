"""with-flower-graph: A Flower / PyTorch app."""

from flwr.app import Context

from flower_graph import make_client_app
from with_flower_graph.methods import chosen
from with_flower_graph.task import load_data


def client_fn(context: Context):
    """Hold the local data."""
    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    data = load_data(partition_id, num_partitions)
    lr, epochs = (context.run_config[key] for key in ("learning-rate", "local-epochs"))
    return chosen(context).client(context, partition_id, data, lr, epochs)


# Flower ClientApp
app = make_client_app(client_fn)
