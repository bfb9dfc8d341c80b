"""one-node-per-user: A Flower / PyTorch app."""

from functools import cache

import torch
from flwr.app import Context

from flower_graph import Graph, load_config, load_graph


@cache
def papers() -> Graph:
    """Load the Cora citation graph, which comes with flower-graph: nothing is downloaded."""
    return load_graph(load_config("quickstart").data)


def own_users(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features ``[n, f]`` of this SuperNode's users, and which nodes these are.

    The one function to replace for users of your own: in a deployment they are on this machine.
    """
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    x = papers().x
    nodes = torch.arange(part * len(x) // parts, (part + 1) * len(x) // parts)
    return x[nodes], nodes
