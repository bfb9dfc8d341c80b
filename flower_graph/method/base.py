"""What a method is to the rest of the project.

A method is one object, ``METHOD`` in its module: a ``Method``, or a ``GraphMethod`` where each
client holds a graph of its own. Commands, Flower apps, reports and the audit ask it; nothing else
in the project knows which methods there are (``flower_graph.method.registry`` finds them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import Tensor

from flower_graph.config.common import RunConfig
from flower_graph.data.baselines import (
    Figures,
    client_baselines,
    graph_baselines,
    own_baselines,
)
from flower_graph.data.folders.client_files import clients_path
from flower_graph.data.folders.client_folder import Clients, load_folder
from flower_graph.data.folders.party import RunData, client_folder, graph_data, graphs_of, share
from flower_graph.data.folders.run_folder import RunFolder
from flower_graph.data.graph import Graph
from flower_graph.data.holdings import graphs_held, nodes_held
from flower_graph.data.new_graph import DataForm, NewGraph
from flower_graph.data.partition.client_graphs import ClientGraph, partition_graph
from flower_graph.data.sources.datasets import cached_clients, cached_data
from flower_graph.errors import DataError
from flower_graph.flower_compat import Mod
from flower_graph.outputs.build import build_module
from flower_graph.privacy.local import privacy_mods, withhold_measurements
from flower_graph.secure.parties.trust import FEWEST_PARTIES

if TYPE_CHECKING:
    from flower_graph.audit.attacks import Audit
    from flower_graph.data.partition.statistics import PartitionStatistics
    from flower_graph.outputs.files import SavedModels
    from flower_graph.records.rounds import RoundReport

__all__ = ["GraphMethod", "Method", "Partition"]

# What most methods have that makes training steadier
STEADYING = ("strategy.learning_rate", "strategy.local_epochs")


class Partition(NamedTuple):
    """What ``flower-graph partition`` prints and writes.

    Attributes
    ----------
    statistics : PartitionStatistics
        Figures and distributions of the cut.
    data : RunData
        What each party holds, for the data folders.
    note : str
        What a reader must know of these folders; it follows their number.
    baselines : dict or None
        As ``Method.baselines`` gives them.
    """

    statistics: PartitionStatistics
    data: RunData
    note: str = ""
    baselines: Figures | None = None


class Method:
    """One method: its settings, both its halves, and what commands must know of it.

    A method is a subclass that overrides what it does otherwise; ``build_strategy``,
    ``build_client``, ``num_clients`` and ``partition`` have no default here. ``config`` is always
    of the method's own schema, and ``folder`` the server's data folder, or None where the process
    makes the run's data itself. With a folder the server reads nothing else of the data.

    Attributes
    ----------
    name : str
        What ``app`` in a YAML says.
    schema : type[RunConfig]
        A dataclass with all settings and their defaults.
    client, clients : str
        What one client and several are called in log lines and summaries.
    measures : bool
        Whether clients measure anything of their own data that a privacy budget withholds.
    has_true_edges : bool
        Whether ``flower-graph partition --true-edges`` means something.
    heterophily : str
        What is known of the method on graphs whose neighbours are mostly of other classes, said as
        a warning where a run has such a graph.
    tables : sequence of str
        Names of the tables in ``conf/reproduce`` that are the method's, or paths of such files.
    """

    name: str
    schema: type[RunConfig]
    client = "client"
    clients = "clients"
    measures = True
    has_true_edges = False
    heterophily = ""
    tables: Sequence[str] = ()

    def build_strategy(self, config: Any, out: Path | None, folder: RunFolder | None = None) -> Any:
        """Build the server's half, with ``start`` and ``weights``.

        ``out`` is the output folder, if there is one.
        """
        raise NotImplementedError

    def build_client(self, config: Any, context: Context, out: Path | None) -> NumPyClient:
        """Build the client of one SuperNode, for all clients that it hosts."""
        raise NotImplementedError

    def num_clients(self, config: Any, folder: RunFolder | None = None) -> int:
        """Count the clients of the federation, all SuperNodes' together."""
        raise NotImplementedError

    def local_steps(self, config: Any) -> float:
        """Count the gradient steps of a client in a round; NaN where nobody says."""
        return float(getattr(config.strategy, "local_epochs", math.nan))

    def caveat(self, baselines: Figures) -> str:
        """Say why clients may reach more alone where a run has such baselines; by default nothing.

        ``flower-graph check`` prints it; ``docs/results/own-graph.md`` has where it was measured.
        """
        return ""

    def steadying(self, config: Any) -> Sequence[str]:
        """Name the settings to turn down when the loss rises: the learning rate and another."""
        return [key for key in STEADYING if hasattr(config.strategy, key.partition(".")[2])]

    def partition(self, config: Any, *, true_edges: bool = False) -> Partition:
        """Cut the data into clients; with `true_edges`, folders have those that clients lack."""
        raise NotImplementedError

    def long_work(self, config: Any, server_round: int) -> str:
        """Say what a round does that makes it longer than the others; "" of an ordinary one."""
        return ""

    def default_supernodes(self, config: Any) -> int | None:
        """Say how many SuperNodes a run has that does not say it; None: any number will do."""
        return None

    def least_memory(self, config: Any) -> int:
        """Say how many bytes clients' weights take at least, all in one process; 0: unknown."""
        return 0

    def mods(self, config: Any) -> tuple[list[Mod], list[Mod]]:
        """Build the mods of its ClientApp: around every message, and around training only."""
        around: list[Mod] = [withhold_measurements] if config.privacy.withholds else []
        return around, self.train_mods(config)

    def train_mods(self, config: Any) -> list[Mod]:
        """Build the mods that protect what clients send: by default weights of one client."""
        return privacy_mods(config.privacy, config.rounds)

    def final_figures(
        self, config: Any, strategy: Any, folder: RunFolder | None = None
    ) -> dict[str, Any]:
        """Give what ``result.json`` has and the rounds do not say."""
        return {}

    def as_graph(self, config: Any) -> Graph:
        """Give the data of all clients as one graph, for what is said of them before a run."""
        return cached_data(config)

    def holdings(self, config: Any) -> str:
        """Say in one line what the clients hold, and how many nodes train and are judged."""
        return nodes_held(self.as_graph(config), self.num_clients(config), self.clients)

    def baselines(self, config: Any) -> Figures:
        """Give figures to hold the run's accuracies against, in a simulation.

        By default those of the whole graph, whose masks say who trains and who is judged.

        Returns
        -------
        dict
            By name (``majority``, ``majority-per-client``, ``logistic-regression``,
            ``label-propagation``) and role (``test``, ``val``): accuracies, summed as the method's
            own; NaN where there are no labels. ``flower_graph.data.baselines`` says what each is.
        """
        return graph_baselines(cached_data(config))

    def own_baselines(self, config: Any, folder: RunFolder) -> Figures:
        """Give what a party's clients reach alone; empty where they have no features and labels."""
        return {}

    def class_names(self, config: Any, folder: RunFolder | None = None) -> Sequence[str] | None:
        """Name the run's classes, by their numbers; None where the numbers are their names."""
        return cached_data(config).classes if folder is None else folder.class_names

    def data_form(self, config: Any) -> DataForm | None:
        """Say what a new graph must be like; None where nobody knows what was done to features."""
        return form_of(cached_data(config), config)

    def predict(self, config: Any, models: SavedModels, graph: NewGraph, client: int) -> Tensor:
        """Predict the classes of nodes that the run has not seen, by one client's saved model.

        By default the model is called with features and edges; a method whose newcomers do
        something first (learn a graph, align) says so here.

        Parameters
        ----------
        models : SavedModels
            Those among which the client's is; ``build_module`` makes it.
        graph : NewGraph
            Features treated as the run's, edges if there are any.
        client : int
            Whose model; -1 for a server's.

        Returns
        -------
        Tensor
            Probabilities ``[n, k]``.
        """
        edges = self.edges_of(config, graph)
        with torch.no_grad():
            return build_module(models, client)(graph.x, edges).softmax(1)  # type: ignore[no-any-return]

    def edges_of(self, config: Any, graph: NewGraph) -> Tensor:
        """Give a new graph's edges; ``DataError`` if it has none."""
        edges = graph.edge_index
        if edges is None or not edges.numel():
            raise DataError(f"the graph has no edges, which the models of {config.app} need")
        return edges

    def predict_beside(self, run: Any, graph: NewGraph, client: int | None) -> Tensor:
        """Predict the nodes of a new graph by what a run left, a ``Run``.

        By default by the model of the client, or by the only one; a method whose newcomers need
        something else of the run than a model says so here.
        """
        saved, chosen = run.saved(client)
        return self.predict(run.config, saved, graph, chosen)

    def why_no_model(self, config: Any) -> str:
        """Say why a run has no model that is a module, after `no models`; by default nothing."""
        return ""

    def paper_figures(self, config: Any) -> dict[str, int]:
        """Give what the paper says of a partition, where the config asks for one of the paper's."""
        return {}

    def draw(self, out: Path, reports: Sequence[RoundReport], title: str) -> None:
        """Draw pictures of a run besides ``curves.png`` and ``participation.png`` into a folder."""

    def audit(self) -> Audit | None:
        """Give the attacks on what its clients send; None where there are none."""
        return None


class GraphMethod(Method):
    """A method each of whose clients holds a graph of its own.

    Attributes
    ----------
    graph : type
        The dataclass of a client's graph.
    """

    graph: type[Any] = ClientGraph
    client, clients = "graph", "graphs"

    def graphless_ratio(self, config: Any) -> float:
        """Say which share of the clients has no edges; of the default ``load_graphs``."""
        return 0.0

    def load_graphs(self, config: Any) -> list[Any]:
        """Cut the clients' graphs out of the config's data, or read them.

        By default as the config's section ``partition`` says, a ``PartitionSection``; where
        ``data.name`` is a folder, it has a file for each client. A method that reads data of its
        own gives ``Clients``, or a list whose labels say how many classes there are.
        """
        folder, how = clients_path(config.data.name), config.partition
        ratio = self.graphless_ratio(config)
        if folder is None:
            graph = cached_data(config)
            return Clients.cut(partition_graph(graph, how, ratio, config.seed), graph)
        return load_folder(
            folder,
            how.ratios,
            config.seed if how.seed is None else how.seed,
            train_share=how.train_share,
            graphless_ratio=ratio,
            features=config.data.features,
            no_features=config.data.no_features,
        )

    def statistics(self, config: Any, graphs: list[Any]) -> PartitionStatistics:
        """Describe the clients' graphs."""
        # Imported here, as a client needs none of it.
        from flower_graph.data.partition.statistics import client_statistics

        return client_statistics(graphs, Clients.of(graphs).whole)

    def graphs(self, config: Any) -> list[Any]:
        """Make the graphs of all clients once a process, in the order of the clients' numbers."""
        return cached_clients(self.load_graphs, config)

    def hosted(self, config: Any, context: Context) -> tuple[list[Any], RunFolder | None]:
        """Give the graphs of one SuperNode, and the folder that they come from if they do."""
        folder = client_folder(config, context)
        if folder is not None:
            return graphs_of(folder, self.graph), folder
        everyone = self.graphs(config)
        return everyone[share(context, len(everyone))], None

    def default_supernodes(self, config: Any) -> int | None:
        """Give each client a SuperNode of its own where replies get noise."""
        fewest = FEWEST_PARTIES if config.strategy.distrusts else None
        return self.num_clients(config) if config.privacy.is_on else fewest

    def num_clients(self, config: Any, folder: RunFolder | None = None) -> int:
        """Count the clients."""
        return len(self.graphs(config)) if folder is None else folder.manifest.num_clients

    def num_classes(self, config: Any, folder: RunFolder | None = None) -> int:
        """Count the classes of the whole run: a client may lack one."""
        if folder is not None:
            return folder.manifest.classes
        return Clients.of(self.graphs(config)).num_classes

    def class_names(self, config: Any, folder: RunFolder | None = None) -> Sequence[str] | None:
        """Name the run's classes, by their numbers; None where the numbers are their names."""
        return Clients.of(self.graphs(config)).classes if folder is None else folder.class_names

    def as_graph(self, config: Any) -> Graph:
        """Give the data of all clients as one graph: the one that they were cut out of, if any."""
        return Clients.of(self.graphs(config)).as_graph()

    def holdings(self, config: Any) -> str:
        """Say in one line what the clients hold, and how many nodes train and are judged."""
        graphs = Clients.of(self.graphs(config))
        return graphs_held(graphs, self.clients, is_cut=graphs.whole is not None)

    def data_form(self, config: Any) -> DataForm | None:
        """Say what a new graph must be like: as the graph of all, or as the clients' own."""
        return form_of(Clients.of(cached_clients(self.load_graphs, config)), config)

    def num_features(self, config: Any, folder: RunFolder | None = None) -> int:
        """Count the features of a node."""
        if folder is not None:
            return folder.manifest.features
        return int(self.graphs(config)[0].x.shape[1])

    def baselines(self, config: Any) -> Figures:
        """Give figures to hold the run's accuracies against: those of the clients' graphs."""
        return client_baselines(self.graphs(config))

    def own_baselines(self, config: Any, folder: RunFolder) -> Figures:
        """Give what a party's clients reach alone."""
        return own_baselines(graphs_of(folder, self.graph))

    def partition(self, config: Any, *, true_edges: bool = False) -> Partition:
        """Cut the data into clients, each of which is given its graph."""
        graphs = Clients.of(cached_clients(self.load_graphs, config))
        data = graph_data(graphs, graphs.num_classes, class_names=graphs.classes)
        figures = client_baselines(graphs)
        return Partition(self.statistics(config, graphs), data, baselines=figures)


def form_of(data: Any, config: RunConfig) -> DataForm | None:
    """Say what a graph must be like that comes after a run's graph or clients."""
    if data.treatment is None:
        return None
    return DataForm(data.treatment, data.num_classes, data.classes, config.data.no_features)
