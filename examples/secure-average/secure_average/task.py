"""secure-average: A Flower / PyTorch app."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A network of two layers for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Load partition data: handwritten digits, of which a fifth tests."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[partition_id::num_partitions], dtype=torch.float32) / 16
    y = torch.tensor(labels[partition_id::num_partitions])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(partition_id))
    test, train = order[: len(y) // 5], order[len(y) // 5 :]
    trainloader = DataLoader(TensorDataset(x[train], y[train]), batch_size=32)
    return trainloader, DataLoader(TensorDataset(x[test], y[test]), batch_size=32)


def train(net: Net, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train the model on the training set."""
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(trainloader) / epochs


@torch.no_grad()
def test(net: Net, testloader: DataLoader) -> tuple[float, float]:
    """Validate the model on the test set."""
    net.eval()
    loss, correct, count = 0.0, 0, 0
    for x, y in testloader:
        logits = net(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += int((logits.argmax(1) == y).sum())
        count += len(y)
    return loss / count, correct / count
