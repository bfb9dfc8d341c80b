"""The interface between a method and the rest of the project.

A method is one object, ``METHOD`` in its module: a ``Method``, or a ``GraphMethod`` if each client
holds a graph of its own. Commands, Flower apps, reports and the audit use this interface; nothing
else in the project knows which methods there are (``flower_graph.method.registry`` finds them).
What follows from settings alone, such as the steps of a round, is a property of the method's
schema (``flower_graph.config.common.RunConfig``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from flwr.app import Context
from torch import Tensor

from flower_graph.client.learner import takes_weights
from flower_graph.config.common import VALUES, RunConfig
from flower_graph.data.baselines import Figures, client_baselines, graph_baselines, own_baselines
from flower_graph.data.description import DataForm, NewGraph
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import Clients, clients_path, load_folder
from flower_graph.data.folders.party import (
    RunData,
    RunFolder,
    client_folder,
    graph_data,
    graphs_of,
    share,
)
from flower_graph.data.graph import ClientGraph, Graph, Scale
from flower_graph.data.partition.client_graphs import partition_graph
from flower_graph.data.sources.datasets import cached_clients, cached_data
from flower_graph.flower_compat import Mod, NumPyClient
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import Embeddings, Predictions, SavedModels
from flower_graph.privacy.noise import privacy_mods, require_one_client

if TYPE_CHECKING:
    from flower_graph.audit.attacks import Audit
    from flower_graph.data.partition.statistics import Description
    from flower_graph.server.round_loop import RoundLoop

C = TypeVar("C", bound=RunConfig)  # a method's schema
S = TypeVar("S", bound="RoundLoop")  # its server's half


class Partition(NamedTuple):
    """The output of ``flower-graph partition``."""

    statistics: Description
    """Figures and distributions of the partition."""
    data: RunData
    """The data of each party, for the data folders."""
    baselines: Figures
    """As from ``Method.baselines``."""
    note: str = ""
    """A remark about these folders, printed after their number."""
    paper: Mapping[str, int] = MappingProxyType({})
    """The paper's figures, if the config asks for the paper's partition."""


class FinishedRun(Protocol):
    """What a method reads of a finished run: a part of ``flower_graph.method.run.Run``."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def data(self) -> DataForm: ...
    @property
    def clients(self) -> list[int]: ...
    @property
    def are_own(self) -> bool: ...
    def saved(self, client: int | None = None) -> tuple[SavedModels, int]: ...
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
    """

    name: str
    """The value of ``app`` in a YAML."""
    schema: type[C]
    """A dataclass with all settings and their defaults."""
    client, clients = "client", "clients"
    """The words for one client and for several in log lines and summaries."""
    has_true_edges = False
    """Whether ``flower-graph partition --true-edges`` has an effect."""
    needs_variety = False
    """Whether clients may do better alone if their nodes are mostly of one class
    (``docs/results/own-graph.md``); ``flower-graph check`` then warns."""
    heterophily = ""
    """A warning about graphs whose neighbours are mostly of other classes, printed for such."""
    tables: Sequence[str] = ()
    """Names of the method's tables in ``apps/reproduce/papers``, or paths of such files."""
    attacks = ""
    """Module and class of the method's audit, as ``package.module:MyAudit``; "": there is none."""

    def build_strategy(self, config: C, out: Path | None, folder: RunFolder | None = None) -> S:
        raise NotImplementedError

    def build_client(self, config: C, context: Context, out: Path | None) -> NumPyClient:
        raise NotImplementedError

    def num_clients(self, config: C, folder: RunFolder | None = None) -> int:
        raise NotImplementedError

    def partition(self, config: C, *, true_edges: bool = False) -> Partition:
        """Partition the data; with `true_edges`, folders have the edges that clients lack."""
        raise NotImplementedError

    def train_mods(self, config: C) -> list[Mod]:
        """Build the mods that protect what clients send, by default the weights of one client."""
        return privacy_mods(config.privacy, config.rounds)

    def final_figures(
        self, config: C, strategy: S, folder: RunFolder | None = None
    ) -> dict[str, object]:
        """Return the entries of ``result.json`` that are not in the rounds."""
        return {"bytes": strategy.payload}

    def judge_all(self, config: C, strategy: S, out: Path) -> dict[str, object]:
        """Judge the models that a simulation left, for ``evaluate: [own, all]``.

        Asked only where the schema ``judges_all``. ``OutputError`` if a model is not there.
        """
        raise NotImplementedError

    def data(self, config: C) -> Graph | Clients:
        """Load the data of all clients, once a process: one graph, or a graph each."""
        return cached_data(config)

    def baselines(self, config: C, folder: RunFolder | None = None) -> Figures:
        """Return the baselines' accuracies: in a simulation of all, with a folder of its clients.

        By name (``majority``, ``majority-per-client``, ``logistic-regression``,
        ``label-propagation``) and role (``test``, ``val``), averaged as the method's own; NaN
        without labels; by default those on the whole graph and its masks, and none of a folder.
        ``flower_graph.data.baselines`` defines them.
        """
        return graph_baselines(cached_data(config)) if folder is None else {}

    def predict(self, config: C, run: FinishedRun, graph: NewGraph, client: int | None) -> Tensor:
        """Predict nodes that a run has not seen, by default by the client's or the only model.

        A method whose newcomers need more than a model overrides this. ``graph`` has features
        treated as the run's, and edges if there are any; ``client`` is the one that was asked for,
        -1 for a server's model. Returns probabilities ``[n, k]``; for a regression numbers ``[n]``
        in their own unit.
        """
        module, scale = build_module(*run.saved(client)), run.data.scale
        takes = graph.edge_weight is not None and takes_weights(module)
        with torch.no_grad():
            said = module(graph.x, graph.needed_edges(), *([graph.edge_weight] if takes else []))
        return said.softmax(1) if scale is None else scale.undo(said[:, 0])

    def audit(self) -> Audit[C] | None:
        return resolve_name(self.attacks)() if self.attacks else None


class GraphMethod(Method[C, S]):
    """A method each of whose clients holds a ``ClientGraph``."""

    client, clients = "graph", "graphs"
    identified = False
    """Whether nodes have identities, by which clients know that they hold the same node."""
    keeps_cut = False
    """Whether clients know their edges to other clients' nodes."""

    def graphless_ratio(self, config: C) -> float:
        """Return the share of clients without edges, for the default ``load_graphs``."""
        return 0.0

    def load_graphs(self, config: C) -> list[ClientGraph]:
        """Cut the clients' graphs out of the config's data, or read them.

        By default by the section ``partition`` of a ``CutRunConfig``; a folder as ``data.name`` has
        a file for each client. A method with data of its own returns ``Clients``, or a list from
        whose labels classes are counted.
        """
        settings: Any = config  # with a section that not every schema has
        folder, how = clients_path(config.data), settings.partition
        ratio = self.graphless_ratio(config)
        if folder is not None:
            given = ReadOptions.of(config)
            return load_folder(folder, how, config.seed, given, ratio, identified=self.identified)
        graph = cached_data(config)
        cut = partition_graph(graph, how, ratio, config.seed, keeps_cut=self.keeps_cut)
        return Clients.cut(cut, graph, is_identified=self.identified)

    def graphs(self, config: C) -> list[ClientGraph]:
        """Load the graphs of all clients, once a process, ordered by the clients' numbers."""
        graphs = cached_clients(self.load_graphs, config)
        self.check(config, graphs)
        return graphs

    def check(self, config: C, graphs: Sequence[ClientGraph]) -> None:
        """Refuse graphs that the method cannot train on: of all clients, or those of a folder."""

    def data(self, config: C) -> Clients:
        """Load the clients' graphs without ``check``."""
        return Clients.of(cached_clients(self.load_graphs, config))

    def hosted(self, config: C, context: Context) -> tuple[list[ClientGraph], RunFolder]:
        """Return the graphs of a SuperNode's clients, and what it knows of the ``whole``."""
        folder = client_folder(config, context)
        if folder is None:
            graphs, whole = self.graphs(config), self.run_data(config).server
            here = graphs[share(context, len(graphs))]
        else:
            here, whole = graphs_of(folder), folder
            self.check(config, here)
        if config.needs_own_nodes:
            require_one_client(config.privacy, [graph.client for graph in here])
        return here, whole

    def run_data(self, config: C) -> RunData:
        """Assign the data to the parties, for ``partition`` and ``whole``."""
        return graph_data(self.data(config))

    def whole(self, config: C, folder: RunFolder | None = None) -> RunFolder:
        """Return what a party knows of the whole run: of its folder, or in a simulation of all."""
        if folder is None:
            self.graphs(config)  # which are checked
        return folder or self.run_data(config).server

    def num_clients(self, config: C, folder: RunFolder | None = None) -> int:
        return self.whole(config, folder).num_clients

    def baselines(self, config: C, folder: RunFolder | None = None) -> Figures:
        if folder is not None:
            return own_baselines(graphs_of(folder))
        return client_baselines(self.data(config))

    def partition(self, config: C, *, true_edges: bool = False) -> Partition:
        from flower_graph.data.partition.statistics import client_statistics  # no client needs it

        graphs = self.data(config)
        figures, guesses = client_statistics(graphs, graphs.whole), self.baselines(config)
        return Partition(figures, self.run_data(config), guesses)


# Of a run's data ----------------------------------------------------------------------------------


def as_graph(data: Graph | Clients) -> Graph:
    """Return the data of all clients as one graph, for the description before a run."""
    return data.as_graph() if isinstance(data, Clients) else data


def judged_on(data: Graph | Clients) -> str:
    """Return a digest of the test nodes and their labels, by which runs are compared."""
    graph = as_graph(data)
    if graph.test_mask is None:
        return ""
    nodes = graph.test_mask.nonzero()[:, 0]
    told = torch.cat([nodes, graph.y[nodes]]).numpy().tobytes()
    return blake2b(told, digest_size=8).hexdigest()


def data_form(config: RunConfig, data: Graph | Clients) -> DataForm | None:
    """Return the form of a new graph; None if the treatment of features is not known."""
    if data.treatment is None:
        return None
    graphs = data if isinstance(data, Clients) and config.takes_edge_weights else []
    return DataForm(
        data.treatment,
        data.num_classes,
        data.classes,
        ReadOptions.of(config.data),
        weights=any(graph.edge_weight is not None for graph in graphs),
        scale=scale_of(graphs) if getattr(config, "task", "") == VALUES else None,
    )


def scale_of(graphs: Sequence[ClientGraph]) -> Scale:
    """Return the scale of all clients' training numbers."""
    return Scale.of(g.targets[g.train_mask] for g in graphs if g.targets is not None)
