"""The PyG module of saved models of LocalSage+ and FedSage+.

Imported when a model is read; that takes PyTorch and PyTorch Geometric, not Flower.
"""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import GCNConv

from flower_graph.outputs.build import SEED, WIDTH, built_with
from flower_graph.strategies.fed_sage.networks import MendingModel

__all__ = ["SageModel"]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, seed=SEED)
class SageModel(MendingModel):
    """A classifier on the graph that its generator has mended; arguments of ``MendingModel``."""

    convolution = GCNConv

    @staticmethod
    def prepared(edge_index: Tensor, num_nodes: int) -> Tensor:
        return edge_index
