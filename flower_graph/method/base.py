"""The interface between a method and the rest of the project.

A method is one object, ``METHOD`` in its module: a ``Method``, or a ``GraphMethod`` if each client
holds a graph of its own. Commands, Flower apps, reports and the audit use this interface; nothing
else in the project knows which methods there are (``flower_graph.method.registry`` finds them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from flwr.app import Context
from torch import Tensor, nn

from flower_graph.client.learner import takes_weights
from flower_graph.config.common import RunConfig
from flower_graph.data.baselines import (
    Figures,
    graph_baselines,
)
from flower_graph.data.features import Gaps
from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.folders.party import RunData, RunFolder
from flower_graph.data.graph import ClientGraph, Graph
from flower_graph.data.new_graph import DataForm, NewGraph
from flower_graph.data.partition.statistics import nodes_held
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import DataError
from flower_graph.flower_compat import Mod, NumPyClient
from flower_graph.outputs.build import build_module
from flower_graph.privacy.local import privacy_mods, withhold_measurements

if TYPE_CHECKING:
    from flower_graph.audit.attacks import Audit
    from flower_graph.data.partition.statistics import PartitionStatistics
    from flower_graph.outputs.files import Embeddings, Predictions, SavedModels
    from flower_graph.records.rounds import RoundReport
    from flower_graph.server.round_loop import RoundLoop

C = TypeVar("C", bound=RunConfig)  # a method's schema
G = TypeVar("G", bound=ClientGraph)  # a client's graph, where clients have some
C_co = TypeVar("C_co", bound=RunConfig, covariant=True)
S = TypeVar("S", bound="RoundLoop")  # its server's half

# Settings of most methods that make training steadier when they are lowered
STEADYING = ("strategy.learning_rate", "strategy.local_epochs")


class Partition(NamedTuple):
    """The output of ``flower-graph partition``.

    Attributes
    ----------
    statistics : PartitionStatistics
        Figures and distributions of the partition.
    data : RunData
        The data of each party, for the data folders.
    note : str
        A remark about these folders, printed after their number.
    baselines : dict or None
        As from ``Method.baselines``.
    """

    statistics: PartitionStatistics
    data: RunData
    note: str = ""
    baselines: Figures | None = None


class FinishedRun(Protocol[C_co]):
    """A finished run as a method reads it: a ``Run`` with the method's own schema."""

    @property
    def config(self) -> C_co: ...

    @property
    def data(self) -> DataForm: ...

    @property
    def clients(self) -> list[int]:
        """Clients whose models are here; -1 is the server."""

    @property
    def are_own(self) -> bool: ...

    def saved(self, client: int | None = None) -> tuple[SavedModels, int]:
        """Return the saved models that include the client's, and their client number."""

    def all_saved(self) -> list[SavedModels]: ...

    def embeddings(self, client: int | None = None) -> Embeddings: ...

    def predictions(self, client: int | None = None) -> Predictions: ...


class Method(Generic[C, S]):
    """A method: its settings, its two halves, and its answers to commands.

    A method is a subclass of ``Method[C, S]`` that overrides defaults: ``config`` is always of the
    method's own schema ``C``, and ``build_strategy`` returns an ``S``. ``build_strategy``,
    ``build_client``, ``num_clients`` and ``partition`` have no default. ``folder`` is the server's
    data folder, or None if the process loads the run's data itself. With a folder the server reads
    no other data; ``out`` is the output folder, if there is one.

    Attributes
    ----------
    name : str
        The value of ``app`` in a YAML.
    schema : type[RunConfig]
        A dataclass with all settings and their defaults.
    client, clients : str
        The words for one client and for several in log lines and summaries.
    measures : bool
        Whether clients measure anything on their data that a privacy budget withholds.
    has_true_edges : bool
        Whether ``flower-graph partition --true-edges`` has an effect.
    heterophily : str
        A warning about graphs whose neighbours are mostly of other classes, printed if a run has
        such a graph.
    tables : sequence of str
        Names of the method's tables in ``apps/reproduce/papers``, or paths of such files.
    """

    name: str
    schema: type[C]
    client = "client"
    clients = "clients"
    measures = True
    has_true_edges = False
    heterophily = ""
    tables: Sequence[str] = ()

    def build_strategy(self, config: C, out: Path | None, folder: RunFolder | None = None) -> S:
        raise NotImplementedError

    def build_client(self, config: C, context: Context, out: Path | None) -> NumPyClient:
        raise NotImplementedError

    def num_clients(self, config: C, folder: RunFolder | None = None) -> int:
        raise NotImplementedError

    def local_steps(self, config: C) -> float:
        """Return the number of gradient steps of a client in a round; NaN if unknown."""
        return float(getattr(config.strategy, "local_epochs", math.nan))

    def caveat(self, baselines: Figures) -> str:
        """Return a warning if clients may do better alone, given the baselines; empty by default.

        ``flower-graph check`` prints it; ``docs/results/own-graph.md`` has the measurements.
        """
        return ""

    def steadying(self, config: C) -> Sequence[str]:
        """Name the settings to lower when the loss rises."""
        return [key for key in STEADYING if hasattr(config.strategy, key.partition(".")[2])]

    def partition(self, config: C, *, true_edges: bool = False) -> Partition:
        """Partition the data; with `true_edges`, folders have the edges that clients lack."""
        raise NotImplementedError

    def long_work(self, config: C, server_round: int) -> str:
        """Return the work that makes a round longer than others; "" for an ordinary round."""
        return ""

    def default_supernodes(self, config: C) -> int | None:
        return None

    def least_memory(self, config: C) -> int:
        """Return the least bytes of all clients' weights in one process; 0 if unknown."""
        return 0

    def mods(self, config: C) -> tuple[list[Mod], list[Mod]]:
        """Build the mods of the ClientApp: around every message, and around training only."""
        around: list[Mod] = [withhold_measurements] if config.privacy.withholds else []
        return around, self.train_mods(config)

    def train_mods(self, config: C) -> list[Mod]:
        """Build the mods that protect what clients send, by default the weights of one client."""
        return privacy_mods(config.privacy, config.rounds)

    def final_figures(
        self, config: C, strategy: S, folder: RunFolder | None = None
    ) -> dict[str, object]:
        """Return the entries of ``result.json`` that are not in the rounds."""
        return {}

    def data(self, config: C) -> Graph | Clients[Any]:
        """Load the data of all clients, once a process: one graph, or a graph each."""
        return cached_data(config)

    def as_graph(self, config: C) -> Graph:
        """Return the data of all clients as one graph, for the description before a run."""
        data = self.data(config)
        return data.as_graph() if isinstance(data, Clients) else data

    def judged_on(self, config: C) -> str:
        """Return a digest of the test nodes and their labels, by which runs are compared."""
        graph = self.as_graph(config)
        if graph.test_mask is None:
            return ""
        nodes = graph.test_mask.nonzero()[:, 0]
        told = torch.cat([nodes, graph.y[nodes]]).numpy().tobytes()
        return blake2b(told, digest_size=8).hexdigest()

    def class_counts(self, config: C) -> list[list[int]]:
        """Count each client's nodes by class; nothing where a client is a node."""
        return []

    def holdings(self, config: C) -> str:
        """Describe in one line what the clients hold, and how many nodes train and evaluate."""
        return nodes_held(self.as_graph(config), self.num_clients(config), self.clients)

    def baselines(self, config: C) -> Figures:
        """Return the baselines' accuracies, in a simulation.

        By name (``majority``, ``majority-per-client``, ``logistic-regression``,
        ``label-propagation``) and role (``test``, ``val``), averaged as the method's own; NaN
        without labels; by default those on the whole graph and its masks.
        ``flower_graph.data.baselines`` defines them.
        """
        return graph_baselines(cached_data(config))

    def own_baselines(self, config: C, folder: RunFolder) -> Figures:
        """Return the baselines of a party's clients; empty if they lack features or labels."""
        return {}

    def class_names(self, config: C, folder: RunFolder | None = None) -> Sequence[str] | None:
        """Return the names of the classes, by number; None if the numbers are the names."""
        return self.data(config).classes if folder is None else folder.class_names

    def data_form(self, config: C) -> DataForm | None:
        """Return the form of a new graph; None if the treatment of features is not known."""
        data = self.data(config)
        if data.treatment is None:
            return None
        return DataForm(data.treatment, data.num_classes, data.classes, Gaps.of(config.data))

    def predict(self, config: C, models: SavedModels, graph: NewGraph, client: int) -> Tensor:
        """Predict the classes of nodes that the run has not seen, by one client's saved model.

        By default calls the model with features and edges. A method whose newcomers first learn a
        graph or align embeddings overrides this.

        Parameters
        ----------
        models : SavedModels
            Models that include the client's; ``build_module`` builds it.
        graph : NewGraph
            Features treated as the run's, edges if there are any.
        client : int
            The client; -1 for a server's model.

        Returns
        -------
        Tensor
            Probabilities ``[n, k]``.
        """
        edges = self.edges_of(config, graph)
        with torch.no_grad():
            return called(build_module(models, client), graph, edges).softmax(1)

    def edges_of(self, config: C, graph: NewGraph) -> Tensor:
        edges = graph.edge_index
        if edges is None or not edges.numel():
            raise DataError(f"the graph has no edges, which the models of {config.app} need")
        return edges

    def predict_beside(self, run: FinishedRun[C], graph: NewGraph, client: int | None) -> Tensor:
        """Predict the nodes of a new graph from the outputs of a ``Run``.

        By default by the client's model, or by the only one. A method whose newcomers need more
        than a model overrides this.
        """
        saved, chosen = run.saved(client)
        return self.predict(run.config, saved, graph, chosen)

    def why_no_model(self, config: C) -> str:
        """Return why a run has no module as a model, to follow `no models`; empty by default."""
        return ""

    def paper_figures(self, config: C) -> dict[str, int]:
        """Return the paper's figures of a partition, if the config asks for one of the paper's."""
        return {}

    def draw(self, out: Path, reports: Sequence[RoundReport], title: str) -> None:
        """Draw pictures of a run besides ``curves.png`` and ``participation.png`` into a folder."""

    def audit(self) -> Audit[C, Self] | None:
        return None


def called(module: nn.Module, graph: NewGraph, edges: Tensor) -> Tensor:
    """Call a saved module on a new graph, with weights of edges if the run's had some."""
    weight = graph.edge_weight
    if weight is None or not takes_weights(module):
        return module(graph.x, edges)  # type: ignore[no-any-return]
    return module(graph.x, edges, weight)  # type: ignore[no-any-return]
