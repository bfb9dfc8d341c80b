"""The modules of nFedGNN's saved models: the server's half, and a user's half.

Each is the module that was trained. It needs PyTorch, not Flower.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flower_graph.config.rules import choice
from flower_graph.models import PairModel, SplitGAT, SplitGCN, SplitSAGE
from flower_graph.outputs.build import FLAG, HEADS, SHARE, WIDTH, built_with

__all__ = ["SplitGAT", "SplitGCN", "SplitPairs", "SplitSAGE", "UserModel"]

SPLIT = {kind.__name__: kind for kind in (SplitGCN, SplitGAT, SplitSAGE)}
RULES = {"hidden": WIDTH, "classes": WIDTH, "dropout": SHARE}

for kind in (SplitGCN, SplitSAGE):
    built_with(**RULES)(kind)
built_with(heads=HEADS, **RULES)(SplitGAT)


@built_with(rows=choice(*SPLIT), heads=HEADS, **RULES)
class SplitPairs(PairModel):
    """A server's half for links: ``decoder(rows, pairs)`` gives logits of pairs.

    Parameters
    ----------
    rows : str
        Name of the module that gives each node a row.
    classes : int
        Numbers of a row.
    **more
        The module's other arguments.
    """

    def __init__(self, rows: str, classes: int, **more: Any) -> None:  # as the module has them
        super().__init__(SPLIT[rows](classes=classes, **more), classes)


@built_with(features=WIDTH, latent_size=WIDTH, bias=FLAG)
class UserModel(nn.Module):
    """A user's half: a linear map of its features.

    Parameters
    ----------
    features, latent_size : int
        Numbers of a user, and of its latent vector.
    bias : bool
        Whether the map has a bias, the last row of its weight.
    """

    def __init__(self, features: int, latent_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features + bias, latent_size))

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """Return latent vectors ``[n, h]`` of features ``[n, f]``; edges play no part."""
        weight, bias = self.weight.tensor_split([x.shape[1]])
        return x @ weight + bias.sum(0)
