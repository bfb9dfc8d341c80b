"""The modules of nFedGNN's saved models that need PyTorch alone: a server's half, a user's half."""

from typing import Any

import torch
from torch import Tensor, nn

from flower_graph.config.rules import choice
from flower_graph.models import PairModel, SplitModel
from flower_graph.outputs.build import FLAG, HEADS, SHARE, SPLIT, WIDTH, built_with


@built_with(rows=choice(*SPLIT), hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)
class SplitPairs(PairModel):
    """A server's half for links: ``decoder(rows, pairs)`` gives logits of pairs.

    Parameters
    ----------
    rows : str or SplitModel
        The module that gives each node a row, or the name of its class.
    classes : int
        Numbers of a row.
    **more
        The module's other arguments, if it is given by name.
    """

    def __init__(self, rows: str | SplitModel, classes: int, **more: Any) -> None:
        module = SPLIT[rows](classes=classes, **more) if isinstance(rows, str) else rows
        super().__init__(module, classes)
        self.arguments = {"rows": type(module).__name__, **module.arguments}


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
