"""Flower strategies and clients for federated learning on graphs with tiny clients.

An app of your own finds what it needs here under short names. Each name is imported on first use.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("fcntl") is None:  # files are locked by it
    raise ImportError(f"flower-graph runs on Linux, not on {sys.platform}; on Windows use WSL")

# OpenMP reads it when torch loads. Threads that spin while they wait take the cores from each
# other, and on a busy machine a round of 15 ms then takes ten times as long.
torch_was_loaded = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"

# In a checkout `strategies`, `apps` and `conf` lie beside this package; a wheel installs them
# inside it. Looking in the parent folder too makes `flower_graph.strategies` the one name for both.
# Only in a checkout: beside an installed package there may be anybody's `apps`.
if (above := Path(__file__).resolve().parent.parent).joinpath("pyproject.toml").is_file():
    __path__.append(str(above))

TYPE_CHECKING = False  # type checkers know this name; `typing` itself takes as long as the rest
if TYPE_CHECKING:
    from flower_graph.apps.in_python import run
    from flower_graph.client.adaptor import make_client_app
    from flower_graph.client.module_client import ModuleClient, ModuleSettings
    from flower_graph.client.resident.app import ResidentClientApp
    from flower_graph.data import Graph, load_data, load_graph
    from flower_graph.data.folders.client_folder import client_graph_from_data, ego_from_data
    from flower_graph.data.partition.client_graphs import ClientGraph, partition_graph
    from flower_graph.data.partition.ego_networks import EgoNetwork, partition_egos
    from flower_graph.data.partition.overlapping import OverlappingGraph, overlapping_graphs
    from flower_graph.method import load_config
    from flower_graph.method.compare import compare
    from flower_graph.method.module_method import ModuleFedAvg
    from flower_graph.method.run import Run, load_run
    from flower_graph.models import SplitGCN
    from flower_graph.ops import (
        Consensus,
        align_pairs,
        alignment_precision,
        consensus,
        orthogonal_procrustes,
        procrustes,
    )
    from flower_graph.secure.client import SecureSumClient
    from flower_graph.secure.parties.server import PartySums
    from flower_graph.secure.sum import service as secure_sum
    from flower_graph.secure.sum.server import SumServer
    from flower_graph.secure.sum.service import SecureSum
    from flower_graph.server.averaging import ReportedFedAvg
    from flower_graph.simulation import InProcessGrid
    from flower_graph.strategies import (
        CommonLayerClient,
        EgoFedAvg,
        EgoFedProx,
        EgoModelClient,
        EgoNetworkClient,
        EgoSettings,
        EmbeddingClient,
        FedGTA,
        FedGTAClient,
        FedGTASection,
        FedProto,
        FedPUB,
        FedPUBClient,
        FedPUBSection,
        FedSage,
        LearnerSettings,
        LocalClient,
        LocalEmbedding,
        LocalSage,
        LocalTraining,
        MaskedEmbeddingAveraging,
        NodeClient,
        ProcrustesAlignment,
        PrototypeClient,
        PublicNodeClient,
        PublicSpace,
        SageClient,
        SecureConsensus,
        SecureConsensusClient,
        SelfTraining,
        SharewiseFedAvg,
        SplitGradientRelay,
        StructureClient,
        StructureFedAvg,
        StructureSettings,
        SummedGradientRelay,
        UserSettings,
        initial_arrays,
        join_graph,
        join_space,
        judge_embeddings,
        learn_beside,
        public_rows,
    )
    from flower_graph.wire.averaging import client_means
    from flower_graph.wire.exchange import Exchange

__all__ = [
    "ClientGraph",
    "CommonLayerClient",
    "Consensus",
    "EgoFedAvg",
    "EgoFedProx",
    "EgoModelClient",
    "EgoNetwork",
    "EgoNetworkClient",
    "EgoSettings",
    "EmbeddingClient",
    "Exchange",
    "FedGTA",
    "FedGTAClient",
    "FedGTASection",
    "FedPUB",
    "FedPUBClient",
    "FedPUBSection",
    "FedProto",
    "FedSage",
    "Graph",
    "InProcessGrid",
    "LearnerSettings",
    "LocalClient",
    "LocalEmbedding",
    "LocalSage",
    "LocalTraining",
    "MaskedEmbeddingAveraging",
    "ModuleClient",
    "ModuleFedAvg",
    "ModuleSettings",
    "NodeClient",
    "OverlappingGraph",
    "PartySums",
    "ProcrustesAlignment",
    "PrototypeClient",
    "PublicNodeClient",
    "PublicSpace",
    "ReportedFedAvg",
    "ResidentClientApp",
    "Run",
    "SageClient",
    "SecureConsensus",
    "SecureConsensusClient",
    "SecureSum",
    "SecureSumClient",
    "SelfTraining",
    "SharewiseFedAvg",
    "SplitGCN",
    "SplitGradientRelay",
    "StructureClient",
    "StructureFedAvg",
    "StructureSettings",
    "SumServer",
    "SummedGradientRelay",
    "UserSettings",
    "align_pairs",
    "alignment_precision",
    "client_graph_from_data",
    "client_means",
    "compare",
    "consensus",
    "ego_from_data",
    "initial_arrays",
    "join_graph",
    "join_space",
    "judge_embeddings",
    "learn_beside",
    "load_config",
    "load_data",
    "load_graph",
    "load_run",
    "make_client_app",
    "orthogonal_procrustes",
    "overlapping_graphs",
    "partition_egos",
    "partition_graph",
    "procrustes",
    "public_rows",
    "run",
    "secure_sum",
]


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
