"""The audit of PPFL-GNN: edges between public nodes, and the owners of private nodes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flower_graph.audit import attacks, suite
from flower_graph.audit.deviating import of_sums
from flower_graph.config.rules import require
from flower_graph.data.folders.client_folder import clients_path
from flower_graph.data.sources.datasets import cached_data
from flower_graph.ops.peers import cosine_similarities
from flower_graph.strategies.ppfl.config import ALIGNED, SECURE, PPFLConfig
from flower_graph.wire import keys

EMBEDDINGS, MEANS = "embeddings", "means"  # of public nodes: what a client sends, and what it gets


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

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, attacks.Floats]]:
        if message.kind != "train":
            return
        asked = attacks.config_of(message.request)
        (client,), (is_given,) = asked[keys.CLIENTS], asked[keys.WITH_TARGETS]
        for what, content in ((MEANS, message.request), (EMBEDDINGS, message.reply)):
            is_there = keys.PUBLIC in content.array_records.get(keys.ARRAYS, ())
            if is_there and (is_given or what == EMBEDDINGS):
                yield what, client, attacks.array_of(content, keys.ARRAYS, keys.PUBLIC)

    def findings(
        self, config: PPFLConfig, seen: attacks.Seen, method: Any
    ) -> list[attacks.Finding]:
        rows = seen.get(EMBEDDINGS) or seen.get(MEANS)
        if not rows:
            raise ValueError("neither embeddings nor means were recorded; two rounds are needed")
        near = {client: cosine_similarities(own[-1]) for client, own in rows.items()}
        graph, rng = whole_graph(config, method), attacks.audit_rng(config)
        name = "whose a private node is, whose public neighbours are known"
        return [*suite.edges_of_public(near, graph, rng), suite.owners(name, near, graph)]


def whole_graph(config: PPFLConfig, method: Any) -> suite.Graph:
    """Return the graph of all clients together, which no client has."""
    data, graphs = cached_data(config), method.graphs(config)
    n = int(data.num_nodes)
    edges, owner = np.zeros((n, n), bool), np.full(n, -1)
    source, target = data.edge_index.numpy()
    edges[source, target] = edges[target, source] = True
    np.fill_diagonal(edges, False)
    for graph in graphs:
        owner[graph.nodes[~graph.public]] = graph.client
    return suite.Graph(edges, graphs[0].nodes[graphs[0].public].numpy(), owner)
