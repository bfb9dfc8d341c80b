"""The modules of nFedGNN's saved models: the server's half, as it was trained, and a user's half.

The server's half takes latent vectors instead of features: its first layer has no linear map, since
that map is at the users.
"""

from __future__ import annotations

from torch import Tensor, nn

from flower_graph.models import PairModel, SplitGAT, SplitGCN, SplitSAGE
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


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerGCN(SplitGCN):
    """The server's half of a two-layer GCN."""


@built_with(hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)
class ServerGAT(SplitGAT):
    """The server's half of a two-layer GAT."""


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerSAGE(SplitSAGE):
    """The server's half of a two-layer GraphSAGE with the mean of the neighbours."""


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerGCNPairs(PairModel):
    """``ServerGCN`` for links: it gives rows, and ``decoder(rows, pairs)`` logits of pairs."""

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__(ServerGCN(hidden, classes, dropout), classes)


@built_with(hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)
class ServerGATPairs(PairModel):
    """``ServerGAT`` for links: it gives rows, and ``decoder(rows, pairs)`` logits of pairs."""

    def __init__(self, hidden: int, heads: int, classes: int, dropout: float = 0.6) -> None:
        super().__init__(ServerGAT(hidden, heads, classes, dropout), classes)


@built_with(hidden=WIDTH, classes=WIDTH, dropout=SHARE)
class ServerSAGEPairs(PairModel):
    """``ServerSAGE`` for links: it gives rows, and ``decoder(rows, pairs)`` logits of pairs."""

    def __init__(self, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__(ServerSAGE(hidden, classes, dropout), classes)
