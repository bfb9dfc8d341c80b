"""Methods whose clients hold a graph each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from flwr.app import Context

from flower_graph.config.common import CutRunConfig
from flower_graph.data.baselines import Figures, client_baselines, own_baselines
from flower_graph.data.folders.client_folder import Clients, clients_path, load_folder
from flower_graph.data.folders.party import RunFolder, client_folder, graph_data, graphs_of, share
from flower_graph.data.gaps import Gaps, Uses
from flower_graph.data.partition.client_graphs import ClientGraph, partition_graph
from flower_graph.data.sources.datasets import cached_clients, cached_data
from flower_graph.method.base import C, G, Method, Partition, S

if TYPE_CHECKING:
    from flower_graph.data.partition.statistics import PartitionStatistics

P = TypeVar("P", bound=CutRunConfig)  # a schema with the common section `partition`


class OwnGraphMethod(Method[C, S], Generic[C, S, G]):
    """A method each of whose clients holds a graph of its own.

    Attributes
    ----------
    graph : type
        The dataclass of a client's graph.
    """

    graph: type[G]
    client, clients = "graph", "graphs"

    def load_graphs(self, config: C) -> list[G]:
        """Make the clients' graphs from the config's data, or read them.

        A method with data of its own returns ``Clients``, or a list from whose labels classes are
        counted.
        """
        raise NotImplementedError

    def statistics(self, config: C, graphs: list[G]) -> PartitionStatistics:
        raise NotImplementedError

    def graphs(self, config: C) -> list[G]:
        """Load the graphs of all clients, once a process, ordered by the clients' numbers."""
        return cached_clients(self.load_graphs, config)

    def data(self, config: C) -> Clients[G]:
        """Load the clients' graphs without the checks of a method that overrides ``graphs``."""
        return Clients.of(cached_clients(self.load_graphs, config))

    def hosted(self, config: C, context: Context) -> tuple[list[G], RunFolder | None]:
        folder = client_folder(config, context)
        if folder is not None:
            return graphs_of(folder, self.graph), folder
        everyone = self.graphs(config)
        return everyone[share(context, len(everyone))], None

    def num_clients(self, config: C, folder: RunFolder | None = None) -> int:
        return len(self.graphs(config)) if folder is None else folder.manifest.num_clients

    def num_classes(self, config: C, folder: RunFolder | None = None) -> int:
        return self.data(config).num_classes if folder is None else folder.manifest.classes

    def num_features(self, config: C, folder: RunFolder | None = None) -> int:
        if folder is not None:
            return folder.manifest.features
        return int(self.graphs(config)[0].x.shape[1])

    def baselines(self, config: C, folder: RunFolder | None = None) -> Figures:
        if folder is not None:
            return own_baselines(graphs_of(folder, self.graph))
        return client_baselines(self.data(config))

    def partition(self, config: C, *, true_edges: bool = False) -> Partition:
        graphs = self.data(config)
        data = graph_data(graphs, graphs.num_classes, class_names=graphs.classes)
        return Partition(self.statistics(config, graphs), data, self.baselines(config))


class GraphMethod(OwnGraphMethod[P, S, ClientGraph]):
    """A method whose clients hold a ``ClientGraph`` each, made by the section ``partition``."""

    graph = ClientGraph

    def graphless_ratio(self, config: P) -> float:
        """Return the share of clients without edges, for the default ``load_graphs``."""
        return 0.0

    def load_graphs(self, config: P) -> list[ClientGraph]:
        """Cut the clients' graphs out of the config's data, or read them.

        By default by the config's section ``partition``, a ``PartitionSection``; a folder as
        ``data.name`` has a file for each client.
        """
        folder, how = clients_path(config.data), config.partition
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
            gaps=Gaps.of(config.data),
            uses=Uses.of(config),
        )

    def statistics(self, config: P, graphs: list[ClientGraph]) -> PartitionStatistics:
        # Imported here, since clients do not need it.
        from flower_graph.data.partition.statistics import client_statistics

        return client_statistics(graphs, Clients.of(graphs).whole)
