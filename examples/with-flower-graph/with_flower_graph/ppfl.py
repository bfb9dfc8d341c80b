"""PPFL-GNN: the app keeps its model; its hidden layer is pulled to that of the other clients."""

import numpy as np
import torch
import torch.nn.functional as F

from flower_graph import EmbeddingClient, ProcrustesAlignment, PublicNodeClient
from with_flower_graph.task import NUM_SHARED, Net
from with_flower_graph.task import test as test_fn
from with_flower_graph.task import train as train_fn

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


def strategy(lr, epochs):
    """Build the server's half."""
    return ProcrustesAlignment()


def client(context, partition_id, data, lr, epochs):
    """Build a client; the nodes that all hold are public."""
    nodes = data.node.numpy()
    public = np.flatnonzero(nodes < NUM_SHARED)
    member = EmbeddingClient(
        partition_id, nodes, public, HIDDEN, lambda: Embedding(data, epochs, lr)
    )
    return PublicNodeClient(context, [member])
