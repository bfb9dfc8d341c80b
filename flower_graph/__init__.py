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
    from flower_graph.apps.in_python import run as run
    from flower_graph.client.adaptor import make_client_app as make_client_app
    from flower_graph.client.learner import SharedModule as SharedModule
    from flower_graph.client.module_client import ModuleClient as ModuleClient
    from flower_graph.client.resident import ResidentClientApp as ResidentClientApp
    from flower_graph.data import Graph as Graph
    from flower_graph.data import load_data as load_data
    from flower_graph.data import load_graph as load_graph
    from flower_graph.data.folders.client_folder import (
        client_graph_from_data as client_graph_from_data,
    )
    from flower_graph.data.folders.client_folder import ego_from_data as ego_from_data
    from flower_graph.data.graph import ClientGraph as ClientGraph
    from flower_graph.data.partition.client_graphs import overlapping_graphs as overlapping_graphs
    from flower_graph.data.partition.client_graphs import partition_graph as partition_graph
    from flower_graph.method import load_config as load_config
    from flower_graph.method.compare import compare as compare
    from flower_graph.method.module_method import ModuleFedAvg as ModuleFedAvg
    from flower_graph.method.run import Run as Run
    from flower_graph.method.run import load_run as load_run
    from flower_graph.models import SplitGCN as SplitGCN
    from flower_graph.ops import procrustes as procrustes
    from flower_graph.ops.procrustes import Consensus as Consensus
    from flower_graph.ops.procrustes import align_pairs as align_pairs
    from flower_graph.ops.procrustes import alignment_precision as alignment_precision
    from flower_graph.ops.procrustes import consensus as consensus
    from flower_graph.ops.procrustes import orthogonal_procrustes as orthogonal_procrustes
    from flower_graph.secure.sum.client import SecureSumClient as SecureSumClient
    from flower_graph.server import sums as secure_sum  # noqa: F401
    from flower_graph.server.averaging import ReportedFedAvg as ReportedFedAvg
    from flower_graph.server.averaging import client_means as client_means
    from flower_graph.server.sums import PartySums as PartySums
    from flower_graph.server.sums import SecureSum as SecureSum
    from flower_graph.server.sums import SumServer as SumServer
    from flower_graph.simulation import InProcessGrid as InProcessGrid
    from flower_graph.strategies import *  # noqa: F403  as that package exports them
    from flower_graph.wire.exchange import Exchange as Exchange


def __getattr__(name: str) -> object:
    from flower_graph.lazy import attach

    return attach(__name__)(name)


def __dir__() -> list[str]:
    from flower_graph.lazy import declared

    return sorted({*globals(), *declared(__name__)})
