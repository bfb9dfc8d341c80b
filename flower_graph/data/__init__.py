"""Data sets: names, raw files, splits, checks and a generator.

Importing this package imports nothing else. PyTorch Geometric is imported when a data set is built
that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.data.description import as_graph, check_data
    from flower_graph.data.graph import Graph, normalize_rows, to_undirected
    from flower_graph.data.sources.cache import CACHE_VARIABLE
    from flower_graph.data.sources.datasets import DataSettings, describe, load_data, load_graph
    from flower_graph.data.sources.generators import SparseGraph, csbm, csbm_sparse
    from flower_graph.data.sources.names import check_name, known_names
    from flower_graph.data.splits import (
        Masks,
        geom_gcn_split,
        random_split,
        ratio_split,
        select_column,
    )
    from flower_graph.storage.places import ROOT_VARIABLE

__all__ = [
    "CACHE_VARIABLE",
    "ROOT_VARIABLE",
    "DataSettings",
    "Graph",
    "Masks",
    "SparseGraph",
    "as_graph",
    "check_data",
    "check_name",
    "csbm",
    "csbm_sparse",
    "describe",
    "geom_gcn_split",
    "known_names",
    "load_data",
    "load_graph",
    "normalize_rows",
    "random_split",
    "ratio_split",
    "select_column",
    "to_undirected",
]

__getattr__ = attach(__name__)
