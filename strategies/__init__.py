"""One file or folder for each paper, with both halves of its algorithm."""

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fed_gta import FedGTA, FedGTAClient, FedGTASection
    from flower_graph.strategies.fed_pub import FedPUB, FedPUBClient, FedPUBSection
    from flower_graph.strategies.fed_sage import FedSage, LocalSage, SageClient
    from flower_graph.strategies.fedgls import (
        FedProto,
        LearnerSettings,
        LocalClient,
        LocalTraining,
        PrototypeClient,
        SharewiseFedAvg,
        StructureClient,
        StructureFedAvg,
        StructureSettings,
        initial_arrays,
    )
    from flower_graph.strategies.fedscem import (
        EgoFedAvg,
        EgoFedProx,
        EgoModelClient,
        EgoNetworkClient,
        EgoSettings,
        MaskedEmbeddingAveraging,
        SelfTraining,
    )
    from flower_graph.strategies.nfedgnn import (
        CommonLayerClient,
        NodeClient,
        SplitGradientRelay,
        SummedGradientRelay,
        UserSettings,
    )
    from flower_graph.strategies.ppfl import (
        EmbeddingClient,
        LocalEmbedding,
        ProcrustesAlignment,
        PublicNodeClient,
        PublicSpace,
        SecureConsensus,
        SecureConsensusClient,
        join_graph,
        join_space,
        judge_embeddings,
        learn_beside,
        public_rows,
    )

__all__ = [
    "CommonLayerClient",
    "EgoFedAvg",
    "EgoFedProx",
    "EgoModelClient",
    "EgoNetworkClient",
    "EgoSettings",
    "EmbeddingClient",
    "FedGTA",
    "FedGTAClient",
    "FedGTASection",
    "FedPUB",
    "FedPUBClient",
    "FedPUBSection",
    "FedProto",
    "FedSage",
    "LearnerSettings",
    "LocalClient",
    "LocalEmbedding",
    "LocalSage",
    "LocalTraining",
    "MaskedEmbeddingAveraging",
    "NodeClient",
    "ProcrustesAlignment",
    "PrototypeClient",
    "PublicNodeClient",
    "PublicSpace",
    "SageClient",
    "SecureConsensus",
    "SecureConsensusClient",
    "SelfTraining",
    "SharewiseFedAvg",
    "SplitGradientRelay",
    "StructureClient",
    "StructureFedAvg",
    "StructureSettings",
    "SummedGradientRelay",
    "UserSettings",
    "initial_arrays",
    "join_graph",
    "join_space",
    "judge_embeddings",
    "learn_beside",
    "public_rows",
]

__getattr__ = attach(__name__)
