"""existing-app: A Flower / PyTorch app."""

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Context

from existing_app.task import NUM_SHARED, Net, load_data
from existing_app.task import test as test_fn
from existing_app.task import train as train_fn
from flower_graph import EmbeddingClient, PublicNodeClient, make_client_app

HIDDEN = 16


class Embedding:
    """The app's own model: its hidden layer is shared, and pulled towards the others'."""

    def __init__(self, data, epochs, lr):
        torch.manual_seed(0)
        self.model, self.data, self.epochs, self.lr = Net(hidden=HIDDEN), data, epochs, lr

    def learn(self, rows, targets, server_round):
        """Train the model on local data."""

        def pull():
            hidden = self.model.embed(self.data.x, self.data.edge_index)[rows]
            return 1 - F.cosine_similarity(hidden, torch.from_numpy(targets)).mean()

        more = None if targets is None else pull
        return train_fn(self.model, self.data, self.epochs, self.lr, more)

    @torch.no_grad()
    def embed(self):
        """Return the embeddings of all nodes."""
        return self.model.embed(self.data.x, self.data.edge_index).numpy()

    def judge(self, embeddings, server_round, is_last):
        """Evaluate the model on local data."""
        return {"test": test_fn(self.model, self.data)[1]}

    def state_dict(self):
        """Return what lasts from round to round."""
        return self.model.state_dict()

    def load_state_dict(self, state):
        """Go on from it."""
        self.model.load_state_dict(state)


def client_fn(context: Context) -> PublicNodeClient:
    """Hold the local data."""
    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    data = load_data(partition_id, num_partitions)

    # Nodes that all hold are public
    lr, epochs = (context.run_config[key] for key in ("learning-rate", "local-epochs"))
    nodes, build = data.node.numpy(), lambda: Embedding(data, epochs, lr)
    public = np.flatnonzero(nodes < NUM_SHARED)
    return PublicNodeClient(context, [EmbeddingClient(partition_id, nodes, public, HIDDEN, build)])


# Flower ClientApp
app = make_client_app(client_fn)
