"""Attacks on PPFL-GNN: find edges between public nodes, and the owners of private nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.audit.attacks import (
    NO_NOISE,
    Audit,
    Exchange,
    RecordingGrid,
    array_of,
    audit_rng,
    config_of,
    of_kind,
)
from flower_graph.audit.deviating import Deviation, of_sums
from flower_graph.audit.scores import Finding, ranking
from flower_graph.config.rules import require
from flower_graph.data.folders.client_folder import clients_path
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.ppfl.config import LOCAL, SECURE, PPFLConfig
from flower_graph.wire import keys
from flower_graph.wire.fields import split_rows

# Most pairs without an edge that are compared with pairs that have one
PAIRS = 20_000
Pairs = NDArray[np.int64]  # [e, 2] places of public nodes
Rows = NDArray[np.floating]


class Graph(NamedTuple):
    """The true graph, to score the attacks."""

    edges: NDArray[np.bool_]  # [n, n], symmetric
    public: NDArray[np.int64]  # [p] nodes that all clients hold, in the order of their embeddings
    owner: NDArray[np.int64]  # [n] the client that holds a node alone; -1 for others


def attack(exchanges: Sequence[Exchange], graph: Graph, rng: np.random.Generator) -> list[Finding]:
    """Guess the edges between public nodes, and each client's private nodes."""
    # The last embeddings that each client sent, ``[p, d]``, or else the last means that it got
    sizes, sent, got = dict[int, int](), dict[int, Rows](), dict[int, Rows]()
    for one in of_kind(exchanges, "query"):
        config = config_of(one.reply)
        sizes |= zip(config[keys.CLIENTS], config[keys.ROWS], strict=True)
    for one in of_kind(exchanges, "train"):
        asked = config_of(one.request)
        flags = dict(zip(asked[keys.CLIENTS], asked[keys.WITH_TARGETS], strict=True))
        for content, found in ((one.reply, sent), (one.request, got)):
            if keys.PUBLIC in content.array_records.get(keys.ARRAYS, ()):
                rows = array_of(content, keys.ARRAYS, keys.PUBLIC)
                parts = zip(
                    flags, split_rows(rows, [sizes[client] for client in flags]), strict=True
                )
                found |= {client: part for client, part in parts if flags[client] or found is sent}
    seen = sent or got
    if not seen:
        raise ValueError("neither embeddings nor means were recorded; two rounds are needed")
    near = {client: cosine_similarities(rows) for client, rows in seen.items()}
    inner = graph.edges[np.ix_(graph.public, graph.public)]
    upper = np.triu(np.ones_like(inner), 1)
    edges, absent = np.argwhere(inner & upper), _draw(np.argwhere(~inner & upper), rng)
    # Where a client has a private node between two public nodes that nothing public joins
    apart, private = ~inner & ~_joined(inner) & upper, []
    for client, cosines in near.items():
        behind = _joined(graph.edges[np.ix_(graph.public, graph.owner == client)])
        no = _draw(np.argwhere(apart & ~behind), rng)
        private.append((cosines, np.argwhere(apart & behind), no))
    # The owner of a private node: its public neighbours lie nearest there
    clients, scores, truth = sorted(near), [], []
    for node in np.flatnonzero(graph.owner >= 0):
        beside = np.flatnonzero(graph.edges[node, graph.public])
        if beside.size > 1:
            first, second = np.triu_indices(beside.size, 1)
            mean = [float(near[c][beside[first], beside[second]].mean()) for c in clients]
            # Rounded, so that equal embeddings are a tie, not a coin toss of the last bit.
            scores.append(np.round(np.array(mean) - np.mean(mean), 9))
            truth.append([client == graph.owner[node] for client in clients])
    if not scores:
        raise ValueError("no private node has two public neighbours: nothing can be asked")
    name = "between which public nodes a client has a private one (no public one, no edge)"
    linked = [(cosines, edges, absent) for cosines in near.values()]
    owner = "whose a private node is, whose public neighbours are known"
    return [
        _ranked("which public nodes have an edge", linked),
        _ranked(name, private),
        ranking(owner, np.stack(scores), np.array(truth)),
    ]


def _joined(edges: NDArray[np.bool_]) -> NDArray[np.bool_]:
    counts = edges.astype(np.float32)
    return (counts @ counts.T) > 0


def _draw(pairs: Pairs, rng: np.random.Generator) -> Pairs:
    is_few = len(pairs) <= PAIRS
    return pairs if is_few else pairs[rng.choice(len(pairs), PAIRS, replace=False)]


def _ranked(name: str, cases: Sequence[tuple[NDArray[np.float64], Pairs, Pairs]]) -> Finding:
    """Rank pairs by their cosines: of each client the true pairs, and pairs that are not."""
    scores, truth = list[NDArray[np.float64]](), list[bool]()
    for near, yes, no in cases:
        scores += [near[tuple(yes.T)], near[tuple(no.T)]]
        truth += [True] * len(yes) + [False] * len(no)
    return ranking(name, np.concatenate(scores), truth)


class EmbeddingAudit(Audit[PPFLConfig]):
    """The attacks on a run of PPFL-GNN."""

    notes = (
        "Pairs of public nodes are ranked by the cosine of their embeddings. For the last attack "
        "the attacker knows a private node's public neighbours and asks at which client these are "
        "nearest to each other. In the secure form the server takes the common mean for the "
        "embeddings of each client, so that whose a node is stays a guess by construction.",
    )

    def refuse(self, config: PPFLConfig) -> None:
        if config.strategy.name == LOCAL:
            raise ConfigError(f"strategy.name: {LOCAL} has no audit: its clients send nothing")
        allowed = "a data set or a file: the audit judges by the whole graph"
        require(clients_path(config.data) is None, "data.name", config.data.name, allowed)

    def counterparts(self, config: PPFLConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
        pairs = ["strategy.alignment=pairs"] if config.strategy.alignment == SECURE else []
        whole = ["strategy.participation=1", "strategy.absent=leave-out"]
        secure = [f"strategy.alignment={SECURE}", NO_NOISE, *whole]
        return [[], [*pairs, NO_NOISE], *([*pairs, *noise] for noise in noisy), secure]

    def shorten(self, config: PPFLConfig) -> list[str]:
        return ["judge.every=1000000", "judge.mlp=false"]

    def label(self, config: PPFLConfig) -> str:
        is_secure = config.strategy.alignment == SECURE
        return "secure sum" if is_secure else super().label(config)

    def deviations(self, config: PPFLConfig, method: Any) -> list[Deviation]:
        if config.strategy.alignment != SECURE:
            return []
        return of_sums(lambda strategy: strategy.sums.server)

    def attack(self, config: PPFLConfig, grid: RecordingGrid, method: Any) -> list[Finding]:
        data, graphs = cached_data(config), method.graphs(config)
        count = int(data.num_nodes)
        edges, owner = np.zeros((count, count), bool), np.full(count, -1)
        source, target = data.edge_index.numpy()
        edges[source, target] = edges[target, source] = True
        np.fill_diagonal(edges, False)
        for graph in graphs:
            owner[graph.nodes[~graph.public].numpy()] = graph.client
        public = graphs[0].nodes[graphs[0].public].numpy()
        return attack(grid.exchanges, Graph(edges, public, owner), audit_rng(config))
