"""The module of saved models of LocalSage+ and FedSage+, which needs PyTorch alone."""

from __future__ import annotations

from flower_graph.outputs.build import SEED, WIDTH, built_with
from flower_graph.strategies.fed_sage.networks import MendingModel

__all__ = ["SageModel"]


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, seed=SEED)
class SageModel(MendingModel):
    """A classifier on the graph that its generator has mended; arguments of ``MendingModel``."""
