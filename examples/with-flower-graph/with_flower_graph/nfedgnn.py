"""nFedGNN: each node is a user with its own features alone; the server has edges and labels."""

import torch

from flower_graph import NodeClient, SplitGradientRelay
from with_flower_graph.task import Net, make_graph

LATENT_SIZE = 16


def strategy(lr, epochs):
    """Build the server's half: the app's model works on the users' latent vectors."""
    torch.manual_seed(0)
    model = Net(num_features=LATENT_SIZE)
    return SplitGradientRelay(
        make_graph(), model, latent_size=LATENT_SIZE, reg_weight=1.0, learning_rate=lr
    )


def client(context, partition_id, data, lr, epochs):
    """Build the users of one SuperNode: the nodes that are its own."""
    return NodeClient(context, data.x[data.own], data.node[data.own])
