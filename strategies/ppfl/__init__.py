"""PPFL-GNN: clients whose graphs overlap."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.ppfl.cohort_client import (
        EmbeddingClient,
        PublicNodeClient,
        public_rows,
    )
    from flower_graph.strategies.ppfl.evaluation import judge_embeddings
    from flower_graph.strategies.ppfl.newcomer import (
        PublicSpace,
        join_graph,
        join_space,
        learn_beside,
    )
    from flower_graph.strategies.ppfl.secure_consensus import SecureConsensus
    from flower_graph.strategies.ppfl.secure_consensus_client import SecureConsensusClient
    from flower_graph.strategies.ppfl.strategy import LocalEmbedding, ProcrustesAlignment

__all__ = [
    "EmbeddingClient",
    "LocalEmbedding",
    "ProcrustesAlignment",
    "PublicNodeClient",
    "PublicSpace",
    "SecureConsensus",
    "SecureConsensusClient",
    "join_graph",
    "join_space",
    "judge_embeddings",
    "learn_beside",
    "public_rows",
]

__getattr__ = attach(__name__)
