"""PPFL-GNN as a method: server, clients, and figures for commands."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.trust import trust_of
from flower_graph.config.common import checkpoint_settings
from flower_graph.data.description import NewGraph, check_clients
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import (
    Clients,
    clients_path,
    identities_in,
    load_overlapping_folder,
)
from flower_graph.data.folders.party import RunFolder
from flower_graph.data.graph import ClientGraph
from flower_graph.data.partition.client_graphs import overlapping_graphs
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import DataError, OutputError
from flower_graph.flower_compat import NumPyClient
from flower_graph.method.base import FinishedRun, GraphMethod, Partition
from flower_graph.ops.procrustes import alignment_precision, orthogonal_procrustes
from flower_graph.outputs.client import client_folders
from flower_graph.rng import derive_seed
from flower_graph.strategies.ppfl.algorithm import EmbeddingModel, FloatArray, IntArray
from flower_graph.strategies.ppfl.client import (
    EmbeddingClient,
    PublicNodeClient,
    SecureConsensusClient,
    public_rows,
)
from flower_graph.strategies.ppfl.config import (
    APP,
    CLASSIFIERS,
    DEEPWALK,
    GAT,
    JUDGED,
    LOCAL,
    SVC,
    PPFLConfig,
    require_gensim,
)
from flower_graph.strategies.ppfl.evaluation import GraphJudge, check_labels, untrained
from flower_graph.strategies.ppfl.modules import DeepWalk, GATCohort
from flower_graph.strategies.ppfl.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
    SecureConsensus,
)

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
    attacks = "flower_graph.strategies.ppfl.attack:EmbeddingAudit"

    def build_strategy(
        self, config: PPFLConfig, out: Path | None, folder: RunFolder | None = None
    ) -> ProcrustesAlignment:
        if folder is None:  # the clients are in this process, too, or in others like it
            require_gensim(config)
        kind = LocalEmbedding if config.strategy.name == LOCAL else ProcrustesAlignment
        kind = SecureConsensus if config.masks_sums else kind
        saves = checkpoint_settings(config, out)
        strategy = kind(config.strategy, seed=config.seed, **saves)
        strategy.num_classes = self.whole(config, folder).classes
        return strategy

    def build_client(self, config: PPFLConfig, context: Context, out: Path | None) -> NumPyClient:
        require_gensim(config)
        here, whole = self.hosted(config, context)
        classes, names = whole.classes, whole.class_names
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
        return super().final_figures(config, strategy) | {"judged": judged}

    def predict(
        self, config: PPFLConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        return join_graph(run, graph, client).probability


METHOD = PPFL()


def paper_sizes(config: PPFLConfig) -> dict[str, int]:
    """Return the sizes of section 4.1, if the config asks for its shares."""
    shares = config.partition
    theirs = (shares.clients, shares.public_share, shares.private_share) == (4, 0.4, 0.15)
    sizes = OVERLAPS.get(config.data.name.lower().removeprefix("planetoid/"))
    return dict(zip(OVERLAP_FIGURES, sizes, strict=True)) if theirs and sizes else {}


def embedder(graph: ClientGraph, config: PPFLConfig, classes: int) -> DeepWalk | GATCohort:
    """Make the embedding model of one client."""
    if config.model.name == DEEPWALK:
        return DeepWalk(graph, config)
    return GATCohort([graph], config, classes)


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
        build=partial(embedder, graph, config, classes),
        judge=GraphJudge(graph, config, names, classes),
    )


LOG = logging.getLogger(__name__)
HELD_BACK = 0.2  # share of the common nodes on which the alignment is measured


class PublicSpace(NamedTuple):
    """Public nodes in a client's space, or in the common one."""

    nodes: NDArray[np.generic]  # [p] their ids, or names
    # [p, d] float32: of a client's file of embeddings, or `means-N` of the server's weights
    embeddings: FloatArray

    def common(self, nodes: NDArray[np.generic]) -> tuple[IntArray, IntArray]:
        return np.intersect1d(nodes, self.nodes, return_indices=True)[1:]

    def split(
        self, nodes: NDArray[np.generic], share: float, seed: int
    ) -> tuple[PublicSpace, PublicSpace]:
        """Return the nodes that a new graph has too; hold a share of them out."""
        _, there = self.common(nodes)
        if not there.size:
            count = self.nodes.size
            raise DataError(f"none of the graph's {nodes.size} nodes is among the {count} public")
        order = np.random.default_rng(derive_seed(seed, "held-back")).permutation(there)
        held, rest = np.split(order, [round(share * len(order))])
        kept, out = (PublicSpace(self.nodes[one], self.embeddings[one]) for one in (rest, held))
        return kept, out


class Joined(NamedTuple):
    """A new graph in a client's space."""

    embeddings: FloatArray  # [n, d] of all its nodes, in the space that was joined
    rotation: FloatArray  # [d, d] the orthogonal map from its own space
    common: int  # number of public nodes that were aligned
    # P@1, 5 and 10 of the public nodes that were held back; empty with fewer than two
    precision: Mapping[int, float]
    # Of ``join_graph``: [n, k] of the classes, by an SVC of the client's embeddings; and the client
    probability: Tensor = torch.zeros(0)
    client: int = -1


def learn_beside(
    model: EmbeddingModel,
    nodes: NDArray[np.generic],
    space: PublicSpace | None,
    rounds: Iterable[int],
) -> None:
    """Train a new graph's model locally: alone, or pulled to fixed public nodes.

    Parameters
    ----------
    model : EmbeddingModel
        Of the new graph; trained in place.
    nodes : ndarray
        ``[n]`` ids of its nodes.
    space : PublicSpace or None
        The space to which the model is pulled. From the second round on the space is rotated into
        the model's own, and a round does both halves of an iteration (``algorithm.py``). None: the
        model learns alone.
    rounds : iterable of int
        The numbers of its rounds, from 1 on.
    """
    here, there = (np.empty(0, np.int64),) * 2 if space is None else space.common(nodes)
    for number in rounds:
        targets: FloatArray | None = None
        if space is not None and number > 1:
            shared, own = space.embeddings[there], model.embed()[here]
            targets = shared @ orthogonal_procrustes(shared, own)
        model.learn(here, targets, number)


def join_space(
    embeddings: FloatArray,
    nodes: NDArray[np.generic],
    space: PublicSpace,
    held: PublicSpace | None = None,
) -> Joined:
    """Rotate a new graph's embeddings into an existing space, by the common public nodes.

    Parameters
    ----------
    embeddings : ndarray
        ``[n, d]`` float32, of all nodes of the new graph, in its own space.
    nodes : ndarray
        ``[n]`` ids of these.
    space : PublicSpace
        Public nodes in the space to join; ``ValueError`` if none is common.
    held : PublicSpace, optional
        Other public nodes, which measure the alignment (``PublicSpace.split``).

    Returns
    -------
    Joined
        The embeddings in that space, and the precision of the alignment.
    """
    here, there = space.common(nodes)
    own, shared = embeddings[here], space.embeddings[there]
    rotation = orthogonal_procrustes(own, shared)
    precision = dict[int, float]()
    if held is not None and held.nodes.size > 1:
        local, other = held.common(nodes)
        precision = alignment_precision(embeddings[local], held.embeddings[other], rotation)
    return Joined(embeddings @ rotation, rotation, len(here), precision)


def join_graph(run: FinishedRun, graph: NewGraph, client: int | None = None) -> Joined:
    """Train a new graph's model locally, and align it with one of a run's clients.

    The model trains with the run's settings, for as many rounds. It is pulled to the public nodes
    that the graph shares with the client. A fifth of these nodes is held back, to measure the
    alignment.

    Parameters
    ----------
    run : Run
        Of PPFL-GNN; its clients' embeddings and predictions are read.
    graph : NewGraph
        As ``read_new_graph`` reads it; ``n_id``, ``identity`` or ``names`` identify its nodes. A
        GAT learns from its labels, of ``train_mask`` alone if it has one.
    client : int, optional
        The client whose space is joined; by default the first.

    Returns
    -------
    Joined
        Embeddings and classes of all its nodes.

    Raises
    ------
    DataError, OutputError
        If the graph has no edges, no common node or, for a GAT, no label; if the run left no
        embeddings, or no predictions of labelled nodes.
    """
    every = run.embeddings()
    client = int(every.client.min()) if client is None else client
    placed, predictions = run.embeddings(client), run.predictions(client)
    config, classes = run.config, run.data.num_classes
    if not isinstance(config, PPFLConfig):
        raise OutputError(f"app: {config.app} has no spaces to lie in; the run's must be {APP}")
    n = len(graph.x)
    numbers, words = identities_in({"names": graph.names, **graph.values}, n)
    nodes, named = (
        (numbers.numpy(), placed.number) if words is None else (np.array(words), placed.node)
    )
    number, edges = int(every.client.max()) + 1, graph.needed_edges()
    new = ClientGraph.bare(number, graph.x, graph.y, edges, numbers)
    new = replace(new, train_mask=graph.trains)
    check_clients([new])
    whole = PublicSpace(named[placed.public], placed.embeddings[placed.public])
    space, out = whole.split(nodes, HELD_BACK, config.seed)
    model = embedder(new, config, classes)
    learn_beside(model, nodes, space, range(1, config.rounds + 1))
    joined = join_space(model.embed(), nodes, space, out)
    near = ", ".join(f"P@{k} {share:.3f}" for k, share in joined.precision.items())
    aligned = client, joined.common, out.nodes.size, near or "nothing measured"
    LOG.info("beside client %d by %d public nodes; of %d others: %s", *aligned)
    # Nodes that the client learnt from lie nearer to their classes than others do.
    fold = np.array(-1) if predictions.fold is None else predictions.fold
    found = predictions.rows((predictions.label >= 0) & (fold >= 0))
    if not found.label.size:
        raise OutputError("no judged node of the client has a label, from which classes are learnt")
    from sklearn.calibration import CalibratedClassifierCV

    rows = public_rows(placed.node, found.node)
    svc = CalibratedClassifierCV(untrained(SVC), ensemble=False, cv=config.judge.folds)
    svc.fit(placed.embeddings[rows].astype(np.float64), found.label)
    probability = torch.zeros(n, classes)
    shares = svc.predict_proba(joined.embeddings.astype(np.float64))
    probability[:, torch.from_numpy(svc.classes_)] = torch.from_numpy(shares).float()
    return joined._replace(probability=probability, client=client)
