"""Data sets: names, raw files, splits, checks and a generator.

PyTorch Geometric is imported only when a data set that needs it is built.
"""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.data.description import as_graph
    from flower_graph.data.graph import Graph, to_undirected
    from flower_graph.data.sources.datasets import load_data, load_graph
    from flower_graph.data.sources.generators import csbm
    from flower_graph.data.sources.names import known_names

__all__ = [
    "Graph",
    "as_graph",
    "csbm",
    "known_names",
    "load_data",
    "load_graph",
    "to_undirected",
]

__getattr__ = attach(__name__)
