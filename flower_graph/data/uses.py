"""The parts of a graph that a run uses besides features, edges and classes."""

from __future__ import annotations

from typing import NamedTuple

from flower_graph.config.common import RunConfig
from flower_graph.config.metrics import learns_values


class Uses(NamedTuple):
    """Which parts of a graph a run reads in another way, or at all."""

    targets: bool = False  # labels are numbers to learn
    weights: bool = False  # weights of edges count
    sparse: bool = False  # features of a generated graph may be CSR, if too many to be dense

    @classmethod
    def of(cls, config: RunConfig) -> Uses:
        return cls(learns_values(config), config.takes_edge_weights, config.takes_sparse)


PLAIN = Uses()
