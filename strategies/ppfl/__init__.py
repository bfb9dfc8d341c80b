"""PPFL-GNN: clients whose graphs overlap. Read ``algorithm.py`` first."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.ppfl.client import EmbeddingClient as EmbeddingClient
    from flower_graph.strategies.ppfl.client import PublicNodeClient as PublicNodeClient
    from flower_graph.strategies.ppfl.client import (
        SecureConsensusClient as SecureConsensusClient,
    )
    from flower_graph.strategies.ppfl.client import public_rows as public_rows
    from flower_graph.strategies.ppfl.evaluation import judge_embeddings as judge_embeddings
    from flower_graph.strategies.ppfl.method import PublicSpace as PublicSpace
    from flower_graph.strategies.ppfl.method import join_graph as join_graph
    from flower_graph.strategies.ppfl.method import join_space as join_space
    from flower_graph.strategies.ppfl.method import learn_beside as learn_beside
    from flower_graph.strategies.ppfl.strategy import LocalEmbedding as LocalEmbedding
    from flower_graph.strategies.ppfl.strategy import ProcrustesAlignment as ProcrustesAlignment
    from flower_graph.strategies.ppfl.strategy import SecureConsensus as SecureConsensus

__getattr__ = attach(__name__)
