"""PPFL-GNN: clients whose graphs overlap."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.procrustes_alignment.cohort_client import (
        EmbeddingClient,
        PublicNodeClient,
        public_rows,
    )
    from flower_graph.strategies.procrustes_alignment.secure_consensus import (
        SecureConsensus,
        SecureConsensusClient,
    )
    from flower_graph.strategies.procrustes_alignment.strategy import (
        LocalEmbedding,
        ProcrustesAlignment,
    )

__all__ = [
    "EmbeddingClient",
    "LocalEmbedding",
    "ProcrustesAlignment",
    "PublicNodeClient",
    "SecureConsensus",
    "SecureConsensusClient",
    "public_rows",
]

__getattr__ = attach(__name__)
