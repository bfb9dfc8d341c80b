"""Attacks on PPFL-GNN: find edges between public nodes, and the owners of private nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.audit import attacks
from flower_graph.audit.deviating import of_sums
from flower_graph.config.rules import require
from flower_graph.data.folders.client_folder import clients_path
from flower_graph.data.sources.datasets import cached_data
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.ppfl.config import ALIGNED, SECURE, PPFLConfig
from flower_graph.wire import keys
from flower_graph.wire.codec import split_rows

# Most pairs without an edge that are compared with pairs that have one
PAIRS = 20_000
Pairs = NDArray[np.int64]  # [e, 2] places of public nodes
Nodes = NDArray[np.int64]
Edges = NDArray[np.bool_]  # [n, n] of the whole graph, symmetric
Near = Mapping[int, NDArray[np.float64]]  # cosines of public nodes, [p, p], by client


def last_rows(
    exchanges: Sequence[attacks.Exchange], *, sent: bool
) -> dict[int, NDArray[np.floating]]:
    """Return each client's last embeddings, ``[p, d]``, or the last means that it got."""
    result, sizes = dict[int, NDArray[np.floating]](), dict[int, int]()
    for one in attacks.of_kind(exchanges, "query"):
        config = attacks.config_of(one.reply)
        sizes |= zip(config[keys.CLIENTS], config[keys.ROWS], strict=True)
    for one in attacks.of_kind(exchanges, "train"):
        content, asked = one.reply if sent else one.request, attacks.config_of(one.request)
        if keys.PUBLIC not in content.array_records.get(keys.ARRAYS, ()):
            continue
        rows = attacks.array_of(content, keys.ARRAYS, keys.PUBLIC)
        parts = split_rows(rows, [sizes[client] for client in asked[keys.CLIENTS]])
        chosen = zip(asked[keys.CLIENTS], parts, asked[keys.WITH_TARGETS], strict=True)
        result |= {client: part for client, part, flag in chosen if flag or sent}
    return result


def attack(
    exchanges: Sequence[attacks.Exchange],
    edges: Edges,
    public: Nodes,
    owner: Nodes,
    rng: np.random.Generator,
) -> list[attacks.Finding]:
    """Guess the edges between public nodes, and each client's private nodes.

    ``public``: ``[p]`` nodes that all clients hold, in the order of their embeddings; ``owner``:
    ``[n]`` the client that holds a node alone, -1 for others.
    """
    seen = last_rows(exchanges, sent=True) or last_rows(exchanges, sent=False)
    if not seen:
        raise ValueError("neither embeddings nor means were recorded; two rounds are needed")
    near = {client: cosine_similarities(rows) for client, rows in seen.items()}
    inner = edges[np.ix_(public, public)]
    upper = np.triu(np.ones_like(inner), 1)

    def pairs(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        found = np.argwhere(chosen & upper)
        is_few = len(found) <= PAIRS
        return found if is_few else found[rng.choice(len(found), PAIRS, replace=False)]

    # Where a client has a private node between two public nodes that nothing public joins
    joined = np.argwhere(inner & upper), pairs(~inner)
    apart, private = ~inner & ~_joined(inner), []
    for client in near:
        behind = _joined(edges[np.ix_(public, owner == client)])
        no = pairs(apart & ~behind)
        private.append((np.argwhere(apart & behind & upper), no))
    name = "between which public nodes a client has a private one (no public one, no edge)"
    return [
        _ranked("which public nodes have an edge", near, [joined] * len(near)),
        _ranked(name, near, private),
        _owners(near, edges, public, owner),
    ]


def _owners(near: Near, edges: Edges, public: Nodes, owner: Nodes) -> attacks.Finding:
    clients = sorted(near)
    scores, truth = [], []
    for node in np.flatnonzero(owner >= 0):
        beside = np.flatnonzero(edges[node, public])
        if beside.size < 2:
            continue
        first, second = np.triu_indices(beside.size, 1)
        mean = [float(near[c][beside[first], beside[second]].mean()) for c in clients]
        # Rounded, so that equal embeddings are a tie, not a coin toss of the last bit.
        scores.append(np.round(np.array(mean) - np.mean(mean), 9))
        truth.append([client == owner[node] for client in clients])
    if not scores:
        raise ValueError("no private node has two public neighbours: nothing can be asked")
    name = "whose a private node is, whose public neighbours are known"
    return attacks.ranking(name, np.stack(scores), np.array(truth))


def _joined(edges: NDArray[np.bool_]) -> NDArray[np.bool_]:
    counts = edges.astype(np.float32)
    return (counts @ counts.T) > 0


def _ranked(name: str, near: Near, cases: Sequence[tuple[Pairs, Pairs]]) -> attacks.Finding:
    scores, truth = list[NDArray[np.float64]](), list[bool]()
    for cosines, (yes, no) in zip(near.values(), cases, strict=True):
        scores += [cosines[tuple(yes.T)], cosines[tuple(no.T)]]
        truth += [True] * len(yes) + [False] * len(no)
    return attacks.ranking(name, np.concatenate(scores), truth)


class EmbeddingAudit(attacks.Audit[PPFLConfig]):
    """The attacks on a run of PPFL-GNN."""

    notes = (
        "Pairs of public nodes are ranked by the cosine of their embeddings. For the last attack "
        "the attacker knows a private node's public neighbours and asks at which client these are "
        "nearest to each other. In the secure form the server takes the common mean for the "
        "embeddings of each client, so that whose a node is stays a guess by construction.",
    )
    audited = (ALIGNED,)  # with the other nothing is sent
    shorter = ("judge.every=1000000", "judge.mlp=false")

    def refuse(self, config: PPFLConfig) -> None:
        super().refuse(config)
        allowed = "a data set or a file: the audit judges by the whole graph"
        require(clients_path(config.data) is None, "data.name", config.data.name, allowed)

    def counterparts(self, config: PPFLConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
        pairs = ["strategy.alignment=pairs"] if config.strategy.alignment == SECURE else []
        whole = ["strategy.participation=1", "strategy.absent=leave-out"]
        secure = [f"strategy.alignment={SECURE}", attacks.NO_NOISE, *whole]
        return [[], [*pairs, attacks.NO_NOISE], *([*pairs, *noise] for noise in noisy), secure]

    def label(self, config: PPFLConfig) -> str:
        is_secure = config.strategy.alignment == SECURE
        return "secure sum" if is_secure else super().label(config)

    def deviations(self, config: PPFLConfig, method: Any) -> list[attacks.Deviation]:
        if config.strategy.alignment != SECURE:
            return []
        return of_sums(lambda strategy: strategy.sums.server)

    def attack(
        self, config: PPFLConfig, grid: attacks.RecordingGrid, method: Any
    ) -> list[attacks.Finding]:
        data, graphs = cached_data(config), method.graphs(config)
        n = int(data.num_nodes)
        edges, owner = np.zeros((n, n), bool), np.full(n, -1)
        source, target = data.edge_index.numpy()
        edges[source, target] = edges[target, source] = True
        np.fill_diagonal(edges, False)
        for graph in graphs:
            owner[graph.nodes[~graph.public]] = graph.client
        public = graphs[0].nodes[graphs[0].public].numpy()
        return attack(grid.exchanges, edges, public, owner, attacks.audit_rng(config))
