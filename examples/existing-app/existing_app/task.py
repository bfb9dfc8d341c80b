"""existing-app: A Flower / PyTorch app."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import subgraph

NUM_NODES, NUM_SHARED, NUM_FEATURES, NUM_CLASSES = 240, 72, 16, 4


class Net(nn.Module):
    """A GCN of two layers."""

    def __init__(self, num_features: int = NUM_FEATURES, hidden: int = 16):
        super().__init__()
        self.conv1 = GCNConv(num_features, hidden)
        self.conv2 = GCNConv(hidden, NUM_CLASSES)

    def embed(self, x, edge_index):
        """Return the hidden layer."""
        return F.relu(self.conv1(x, edge_index))

    def forward(self, x, edge_index):
        """Return the logits."""
        return self.conv2(self.embed(x, edge_index), edge_index)


def make_graph(seed: int = 0) -> Data:
    """Draw a graph with four communities, and features that tell them apart, though not well."""
    draw = torch.Generator().manual_seed(seed)
    node = torch.arange(NUM_NODES)
    y = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=draw)
    chance = torch.where(y[:, None] == y, 0.12, 0.01)
    upper = (torch.rand(NUM_NODES, NUM_NODES, generator=draw) < chance).triu(1)
    centre = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=draw)
    x = centre[y] + 2.5 * torch.randn(NUM_NODES, NUM_FEATURES, generator=draw)
    role = torch.randint(10, (NUM_NODES,), generator=draw)  # a fifth trains, a half tests
    masks = {"train_mask": role < 2, "val_mask": (role > 1) & (role < 5), "test_mask": role > 4}
    return Data(x=x, y=y, edge_index=(upper | upper.T).nonzero().T, node=node, **masks)


def load_data(partition_id: int, num_partitions: int) -> Data:
    """Load partition data: nodes of its own, and those that all hold.

    The last client does not know who is linked with whom.
    """
    graph = make_graph()
    own = graph.node % num_partitions == partition_id
    chosen = own | (graph.node < NUM_SHARED)
    edge_index, _ = subgraph(chosen, graph.edge_index, relabel_nodes=True)
    if partition_id == num_partitions - 1:
        edge_index = edge_index[:, :0]
    masks = {name: graph[name][chosen] for name in ("train_mask", "val_mask", "test_mask")}
    fields = {name: graph[name][chosen] for name in ("x", "y", "node")}
    return Data(edge_index=edge_index, own=own[chosen], **fields, **masks)


def train(net: Net, data: Data, epochs: int, lr: float) -> float:
    """Train the model on the training nodes."""
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        logits = net(data.x, data.edge_index)
        loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: Net, data: Data) -> tuple[float, float]:
    """Validate the model on the test nodes."""
    net.eval()
    logits, y = net(data.x, data.edge_index)[data.test_mask], data.y[data.test_mask]
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def alone(num_partitions: int, epochs: int, lr: float) -> float:
    """Let every client train by itself; return their mean test accuracy."""
    accuracies = []
    for partition_id in range(num_partitions):
        torch.manual_seed(0)
        net, data = Net(), load_data(partition_id, num_partitions)
        train(net, data, epochs, lr)
        accuracies.append(test(net, data)[1])
    return sum(accuracies) / num_partitions
