"""PPFL-GNN as a method: server, clients, and figures for commands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context

from flower_graph.client.trust import trust_of
from flower_graph.config.common import checkpoint_settings
from flower_graph.data.description import check_clients
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import Clients, clients_path, load_overlapping_folder
from flower_graph.data.folders.party import RunFolder
from flower_graph.data.graph import ClientGraph
from flower_graph.data.partition.client_graphs import overlapping_graphs
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import DataError
from flower_graph.flower_compat import NumPyClient
from flower_graph.method import GraphMethod, Partition
from flower_graph.method.base import class_names
from flower_graph.outputs.client import client_folders
from flower_graph.strategies.ppfl.cohort_client import (
    EmbeddingClient,
    PublicNodeClient,
    SecureConsensusClient,
)
from flower_graph.strategies.ppfl.config import (
    APP,
    CLASSIFIERS,
    GAT,
    JUDGED,
    LOCAL,
    PPFLConfig,
    require_gensim,
)
from flower_graph.strategies.ppfl.evaluation import GraphJudge, check_labels
from flower_graph.strategies.ppfl.modules import GATCohort
from flower_graph.strategies.ppfl.newcomer import EMBEDDERS, join_graph
from flower_graph.strategies.ppfl.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
    SecureConsensus,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flower_graph.data.description import NewGraph
    from flower_graph.method.base import FinishedRun
    from flower_graph.strategies.ppfl.attack import EmbeddingAudit

# Section 4.1 (Zhang et al., 2023): 4 clients, 40 % public and 15 % private nodes.
OVERLAP_FIGURES = ("nodes-per-client", "public-per-client", "private-per-client")
OVERLAPS = {"cora": (1489, 1083, 406), "citeseer": (1829, 1330, 499)}


class PPFL(GraphMethod[PPFLConfig, ProcrustesAlignment]):
    """Every client has a graph; graphs overlap in public nodes."""

    name = APP
    schema = PPFLConfig
    heterophily = (
        "PPFL-GNN puts a node beside its neighbours: at homophily 0.1 it gained nothing over "
        "training alone, and both were near chance (`flower-graph docs results/heat-map`)"
    )
    tables = ("ppfl",)

    def build_strategy(
        self, config: PPFLConfig, out: Path | None, folder: RunFolder | None = None
    ) -> ProcrustesAlignment:
        if folder is None:  # the clients are in this process, too, or in others like it
            require_gensim(config)
        kind = LocalEmbedding if config.strategy.name == LOCAL else ProcrustesAlignment
        kind = SecureConsensus if config.masks_sums else kind
        saves = checkpoint_settings(config, out)
        strategy = kind(config.strategy, seed=config.seed, **saves)
        strategy.num_classes = self.num_classes(config, folder)
        return strategy

    def build_client(self, config: PPFLConfig, context: Context, out: Path | None) -> NumPyClient:
        require_gensim(config)
        here, folder = self.hosted(config, context)
        classes = self.num_classes(config, folder)
        names = class_names(self, config, folder)
        members = [make_member(graph, config, classes, names) for graph in here]
        where: dict[str, Any] = client_folders(context, out)
        if config.model.name == GAT:
            where["models"] = partial(GATCohort, here, config, classes)
        if not config.masks_sums:
            return PublicNodeClient(context, members, **where)
        trust = trust_of(context) if config.strategy.distrusts else None
        least = config.strategy.least_holders
        return SecureConsensusClient(context, members, trust=trust, least_holders=least, **where)

    def check(self, config: PPFLConfig, graphs: Sequence[ClientGraph]) -> None:
        check_labels(graphs, config.judge.folds)

    def load_graphs(self, config: PPFLConfig) -> list[ClientGraph]:
        folder, parts = clients_path(config.data), config.partition
        if folder is not None:
            how = ReadOptions.of(config.data)
            return load_overlapping_folder(folder, parts, config.seed, how)
        whole = cached_data(config)
        graphs = overlapping_graphs(whole, parts, config.seed)
        classes = Clients.of(graphs).num_classes  # by the clients' labels
        return Clients(graphs, classes, whole.classes, whole.notes, whole.treatment, whole, True)

    def partition(self, config: PPFLConfig, *, true_edges: bool = False) -> Partition:
        return super().partition(config)._replace(paper=paper_sizes(config))

    def final_figures(
        self, config: PPFLConfig, strategy: ProcrustesAlignment, folder: RunFolder | None = None
    ) -> dict[str, object]:
        measured = strategy.clients.measured
        judged = {
            name: {
                role: [value for _, value in sorted(measured.get(f"{name}-{role}", {}).items())]
                for role in JUDGED
            }
            for name in CLASSIFIERS
        }
        return {"bytes": strategy.session.exchange.ledger.payload, "judged": judged}

    def predict(
        self, config: PPFLConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        return join_graph(run, graph, client).probability

    def audit(self) -> EmbeddingAudit:
        from flower_graph.strategies.ppfl.attack import EmbeddingAudit

        return EmbeddingAudit()


METHOD = PPFL()


def paper_sizes(config: PPFLConfig) -> dict[str, int]:
    """Return the sizes of section 4.1, if the config asks for its shares."""
    shares = config.partition
    theirs = (shares.clients, shares.public_share, shares.private_share) == (4, 0.4, 0.15)
    sizes = OVERLAPS.get(config.data.name.lower().removeprefix("planetoid/"))
    return dict(zip(OVERLAP_FIGURES, sizes, strict=True)) if theirs and sizes else {}


def make_member(
    graph: ClientGraph, config: PPFLConfig, classes: int, names: Sequence[str] | None = None
) -> EmbeddingClient:
    """Make a client of its graph: ids, public rows, model and judge."""
    check_clients([graph])
    if graph.public is None:
        raise DataError(f"client {graph.client}: public is missing: must be bool [n]")
    return EmbeddingClient(
        number=graph.client,
        nodes=graph.nodes.numpy(),
        rows=graph.public.nonzero().flatten().numpy(),
        dimension=config.model.dimension,
        build=partial(EMBEDDERS[config.model.name], graph, config, classes),
        judge=GraphJudge(graph, config, names, classes),
    )
