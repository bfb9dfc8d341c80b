"""One file or folder for each paper, with both halves of its algorithm."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fed_gta import FedGTA as FedGTA
    from flower_graph.strategies.fed_gta import FedGTAClient as FedGTAClient
    from flower_graph.strategies.fed_gta import FedGTASection as FedGTASection
    from flower_graph.strategies.fed_pub import FedPUB as FedPUB
    from flower_graph.strategies.fed_pub import FedPUBClient as FedPUBClient
    from flower_graph.strategies.fed_pub import FedPUBSection as FedPUBSection
    from flower_graph.strategies.fed_sage import FedSage as FedSage
    from flower_graph.strategies.fed_sage import LocalSage as LocalSage
    from flower_graph.strategies.fed_sage import SageClient as SageClient
    from flower_graph.strategies.fedgls import FedGLSSection as FedGLSSection
    from flower_graph.strategies.fedgls import GraphSection as GraphSection
    from flower_graph.strategies.fedgls import StructureClient as StructureClient
    from flower_graph.strategies.fedgls import StructureFedAvg as StructureFedAvg
    from flower_graph.strategies.fedgls import StructureSettings as StructureSettings
    from flower_graph.strategies.fedgls import initial_arrays as initial_arrays
    from flower_graph.strategies.fedscem import EgoFedAvg as EgoFedAvg
    from flower_graph.strategies.fedscem import EgoFedProx as EgoFedProx
    from flower_graph.strategies.fedscem import EgoModelClient as EgoModelClient
    from flower_graph.strategies.fedscem import EgoNetworkClient as EgoNetworkClient
    from flower_graph.strategies.fedscem import EgoSettings as EgoSettings
    from flower_graph.strategies.fedscem import MaskedEmbeddingAveraging as MaskedEmbeddingAveraging
    from flower_graph.strategies.fedscem import SelfTraining as SelfTraining
    from flower_graph.strategies.nfedgnn import CommonLayerClient as CommonLayerClient
    from flower_graph.strategies.nfedgnn import NodeClient as NodeClient
    from flower_graph.strategies.nfedgnn import SplitGradientRelay as SplitGradientRelay
    from flower_graph.strategies.nfedgnn import SummedGradientRelay as SummedGradientRelay
    from flower_graph.strategies.nfedgnn import UserSettings as UserSettings
    from flower_graph.strategies.ppfl import EmbeddingClient as EmbeddingClient
    from flower_graph.strategies.ppfl import LocalEmbedding as LocalEmbedding
    from flower_graph.strategies.ppfl import ProcrustesAlignment as ProcrustesAlignment
    from flower_graph.strategies.ppfl import PublicNodeClient as PublicNodeClient
    from flower_graph.strategies.ppfl import PublicSpace as PublicSpace
    from flower_graph.strategies.ppfl import SecureConsensus as SecureConsensus
    from flower_graph.strategies.ppfl import SecureConsensusClient as SecureConsensusClient
    from flower_graph.strategies.ppfl import join_graph as join_graph
    from flower_graph.strategies.ppfl import join_space as join_space
    from flower_graph.strategies.ppfl import judge_embeddings as judge_embeddings
    from flower_graph.strategies.ppfl import learn_beside as learn_beside
    from flower_graph.strategies.ppfl import public_rows as public_rows

__getattr__ = attach(__name__)
