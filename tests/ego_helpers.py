"""Small ego-networks with everything odd among them.

Twelve clients hold parts of a graph of 40 nodes; ``ODD`` names what is special about some.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from flower_graph.data.graph import ClientGraph
from flower_graph.strategies.fedscem.algorithm import Shared
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import first_model

NODES, FEATURES, CLASSES, HIDDEN, PROJECTION = 40, 7, 3, 5, 4
SETTINGS = EgoSettings(
    FEATURES,
    CLASSES,
    hidden=HIDDEN,
    projection=PROJECTION,
    learning_rate=0.005,
    weight_decay=0.01,
    seed=3,
    mu=0.7,
    tau=0.5,
)
ODD = {"one node": 3, "no edges": 5, "no training": 7, "nothing shared": 9, "no features": 11}


def toy_egos() -> list[ClientGraph]:
    """Make the clients; their numbers are 100, 101, ..."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(NODES, FEATURES, generator=draw)
    x *= torch.rand(NODES, FEATURES, generator=draw) < 0.4
    y = torch.randint(CLASSES, (NODES,), generator=draw)
    upper = (torch.rand(NODES, NODES, generator=draw) < 0.15).triu(1)
    return [_ego(place, x, y, upper | upper.T, draw) for place in range(12)]


def _ego(place: int, x: Tensor, y: Tensor, edges: Tensor, draw: torch.Generator) -> ClientGraph:
    count = 1 if place == ODD["one node"] else 4 + place
    nodes = torch.randperm(30, generator=draw)[:count].sort().values
    if place == ODD["nothing shared"]:
        nodes = torch.arange(30, NODES)
    if place == ODD["no features"]:
        x = torch.zeros_like(x)
    own, y = edges[nodes][:, nodes], y[nodes]
    role = torch.randint(3, (nodes.numel(),), generator=draw)
    role[0] = 0
    if place == ODD["no edges"]:
        own = torch.zeros_like(own)
    if place == ODD["no training"]:
        role[role == 0], y = 1, torch.where(torch.arange(nodes.numel()) < 2, -1, y)
    masks = [(role == k) & (y >= 0) for k in range(3)]
    return ClientGraph(100 + place, nodes, x[nodes], y, own.nonzero().T, None, *masks)


def toy_shared(egos: Sequence[ClientGraph]) -> Shared:
    """Give these clients means of the nodes that several of all twelve hold; the same each time."""
    counts = torch.bincount(torch.cat([ego.nodes for ego in toy_egos()]), minlength=NODES)
    means = torch.rand(NODES, HIDDEN, generator=torch.Generator().manual_seed(1))
    nodes = torch.cat([ego.nodes for ego in egos])
    place = (counts[nodes] > 1).nonzero().flatten()
    return Shared(place, means[nodes[place]])


def start_of(settings: EgoSettings = SETTINGS) -> Tensor:
    """Give the model that all clients start from, flat."""
    return parameters_to_vector(first_model(settings).parameters()).detach()
