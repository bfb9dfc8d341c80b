"""The PyG modules of nFedGNN's saved models: the server's half, and a user's half.

The server's half takes latent vectors instead of features: its first layer has no linear map, since
that map is at the users. Imported when a model is read; needs PyTorch and PyTorch Geometric, not
Flower.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from flower_graph.models import PairDecoder
from flower_graph.outputs.build import FLAG, HEADS, SHARE, WIDTH, built_with

__all__ = ["ServerGAT", "ServerGCN", "ServerSAGE", "UserModel"]


@built_with(features=WIDTH, latent_size=WIDTH, bias=FLAG)
class UserModel(nn.Module):
    """A user's half: a linear map of its features.

    Parameters
    ----------
    features, latent_size : int
        Numbers of a user, and of its latent vector.
    bias : bool
        Whether the map has a bias.
    """

    def __init__(self, features: int, latent_size: int, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(features, latent_size, bias=bias)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return latent vectors ``[n, h]`` of features ``[n, f]``; edges play no part."""
        return self.linear(x)  # type: ignore[no-any-return]


class _Bias(nn.Module):
    """The rest of a layer's linear map where the map itself is at the users."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerGCN(nn.Module):
    """The server's half of a two-layer GCN.

    Parameters
    ----------
    hidden, classes : int
        Numbers of a latent vector, and classes.
    dropout : float
        Dropout on the input of both layers; in training mode alone.
    """

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = GCNConv(hidden, hidden)
        self.conv1.lin = nn.Identity()
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from latent vectors ``[n, h]`` and edges ``[2, e]``."""
        x = functional.dropout(x, self.dropout, self.training)
        x = functional.relu(self.conv1(x, edge_index))
        x = functional.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)  # type: ignore[no-any-return]


@built_with(hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)
class ServerGAT(nn.Module):
    """The server's half of a two-layer GAT.

    Parameters
    ----------
    hidden, heads, classes : int
        Numbers of each head, heads of the first layer, and classes.
    dropout : float
        Dropout on both layers' input and attention; in training mode alone.
    """

    def __init__(self, hidden: int, heads: int, classes: int, dropout: float = 0.6) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = GATConv(hidden * heads, hidden, heads, dropout=dropout)
        self.conv1.lin = nn.Identity()
        self.conv2 = GATConv(hidden * heads, classes, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from latent vectors ``[n, heads * hidden]``, head by head."""
        x = functional.dropout(x, self.dropout, self.training)
        x = functional.elu(self.conv1(x, edge_index))
        x = functional.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)  # type: ignore[no-any-return]


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerSAGE(nn.Module):
    """The server's half of a two-layer GraphSAGE with the mean of the neighbours.

    Parameters
    ----------
    hidden, classes : int
        Half the numbers of a latent vector, and classes.
    dropout : float
        Dropout on the input of both layers; in training mode alone.
    """

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = SAGEConv(hidden, hidden)
        self.conv1.lin_l, self.conv1.lin_r = _Bias(hidden), nn.Identity()
        self.conv2 = SAGEConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from vectors ``[n, 2 h]``: a node's own, then for others."""
        own, sent = functional.dropout(x, self.dropout, self.training).chunk(2, dim=1)
        x = functional.relu(self.conv1((sent, own), edge_index))
        x = functional.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)  # type: ignore[no-any-return]


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerGCNPairs(ServerGCN):
    """``ServerGCN`` for links: ``decoder(rows, pairs)`` gives logits of pairs."""

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__(hidden, classes, dropout)
        self.decoder = PairDecoder(classes)


@built_with(hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)
class ServerGATPairs(ServerGAT):
    """``ServerGAT`` for links: ``decoder(rows, pairs)`` gives logits of pairs."""

    def __init__(self, hidden: int, heads: int, classes: int, dropout: float = 0.6) -> None:
        super().__init__(hidden, heads, classes, dropout)
        self.decoder = PairDecoder(classes)


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerSAGEPairs(ServerSAGE):
    """``ServerSAGE`` for links: ``decoder(rows, pairs)`` gives logits of pairs."""

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__(hidden, classes, dropout)
        self.decoder = PairDecoder(classes)
