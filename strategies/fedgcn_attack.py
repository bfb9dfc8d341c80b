"""The audit of FedGCN: what sums of neighbours tell a client, and what they tell the server."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from flower_graph.audit import attacks
from flower_graph.config.rules import require
from flower_graph.secure.ring import SIGNED
from flower_graph.strategies.fedgcn import (
    NO_SLOT,
    FedGCNConfig,
    Near,
    SumsRequest,
    own_parts,
)

SENT = "sums"
EDGES = 300  # edges between clients that are attacked in a run
SERVER = "which features a node has, from the sum of its neighbour: the server"
CLIENT = "which features a node has, from the sum of its neighbour: the neighbour's client"


class SumsAudit(attacks.Audit[FedGCNConfig]):
    """The attacks on a run of FedGCN; models are as FedAvg's, whose audit is FedGLS's."""

    rounds = 2
    notes = (
        "Of an edge between two clients the attacker wants the features of one end, and reads the "
        "sum of the other end. The client there takes off its own part, and a larger number stands "
        "for a likelier feature: it has the key of the pads. The server reads the words that it "
        "relays, under their pads. "
        "A sum with a part of three clients or more (`least_holders: 3`) tells a client less.",
    )

    def refuse(self, config: FedGCNConfig) -> None:
        super().refuse(config)
        allowed = "1 or 2: without hops there are no sums"
        require(config.strategy.hops > 0, "strategy.hops", config.strategy.hops, allowed)

    def counterparts(self, config: FedGCNConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
        return [[], ["strategy.least_holders=3"]]

    def label(self, config: FedGCNConfig) -> str:
        return f"sums of {config.strategy.least_holders} clients or more"

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, SumsRequest]]:
        if message.kind == "train.sums":
            records = message.request.array_records.values()
            arrays = [array.numpy() for record in records for array in record.values()]
            entries = attacks.config_of(message.request)
            yield SENT, message.place, SumsRequest.from_numpy(arrays, entries)

    def findings(
        self, config: FedGCNConfig, seen: attacks.Seen, method: Any
    ) -> list[attacks.Finding]:
        graphs, rng = method.graphs(config), attacks.audit_rng(config)
        near = [Near.of(graph, config.strategy.hops) for graph in graphs]
        parts = [own_parts(g.x.to_dense(), one) for g, one in zip(graphs, near, strict=True)]
        nodes = [torch.cat([g.nodes, one.foreign]) for g, one in zip(graphs, near, strict=True)]
        size, width = 1 + int(torch.cat(nodes).max()), parts[0].shape[1]
        x, sums = torch.zeros(size, width - 1), torch.zeros(size, width)
        for graph, part, ids in zip(graphs, parts, nodes, strict=True):
            x[graph.nodes] = graph.x.to_dense()
            sums.index_add_(0, ids, part)
        of_client, of_server, truth = [], [], []
        each = zip(seen.of(SENT, len(graphs)), near, parts, nodes, strict=True)
        for (sent,), one, part, ids in each:
            words = sent.hidden.words.view(SIGNED[sent.hidden.ring.word]).reshape(-1, width)
            slotted = one.wanted[torch.from_numpy(sent.slots != NO_SLOT)].tolist()
            row = dict(zip(slotted, words, strict=True))
            for foreign, own in one.cut.T.tolist():
                if own in row:
                    of_client.append((sums[ids[own]] - part[own])[:-1].numpy())
                    of_server.append(row[own][:-1])
                    truth.append((x[ids[foreign]] != 0).numpy())
        drawn = rng.choice(len(truth), min(EDGES, len(truth)), replace=False).tolist()
        right = np.stack([truth[k] for k in drawn])
        pairs = (CLIENT, of_client), (SERVER, of_server)
        return [attacks.ranking(n, np.stack([rows[k] for k in drawn]), right) for n, rows in pairs]
