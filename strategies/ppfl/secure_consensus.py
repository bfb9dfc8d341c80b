"""PPFL-GNN with a common mean that the server computes without seeing any client's embeddings.

The consensus form of the alignment (``strategy.py``) needs only the sum of the rotated embeddings.
So each client rotates its own embeddings, and the secure sum of ``flower_graph.secure`` adds them
up. The server learns this sum, and nothing else of the embeddings. ``W_i`` never leaves client
``i``.

Iteration ``t``, two exchanges:

1. server -> client ``i``: ``R``, the common mean of the last iteration, for its public nodes;
2. client: ``X'_i = R W_i^T``, trains with it as in the plain form, and embeds its graph;
3. client: ``W_i``, the orthogonal matrix with the least ``||X_i W_i - R||_F`` (equation 4);
4. client -> server: ``X_i W_i``, masked;
5. server: adds up, and in the second exchange takes the masks off; ``R`` = sum / holders, by node.

The plain form repeats steps 3 and 5 until ``R`` stands still. Here each iteration does them once
and starts from the last ``R``. The server never asks for a second sum of the same embeddings: with
as many sums as clients it could compute each client's part. The first ``R`` is random points. Their
mean is too blurred to learn from: clients rotate to it, and ``X'_i`` begins with iteration 3.

Nodes with too few holders are in no sum; a client keeps its own rows of them.

The clients' half is in ``secure_consensus_client.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.records.participation import NOT_READY, Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.node_config import LEAST_HOLDERS, USUAL_DIFFERENCE
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.round import Reason, Skipped
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.storage.reading import StateDict, Tree
from flower_graph.strategies.ppfl.claims import (
    ABSENT,
    MEANS,
    MEASURED,
    NOT_TOLD,
    Claims,
    SignedClaims,
    agreed_nodes,
    common_nodes,
    digests_of,
    fewest_holders,
    fewest_parties,
    find_slots,
    layout_of,
)
from flower_graph.strategies.ppfl.config import CONSENSUS, PRECISIONS
from flower_graph.strategies.ppfl.messages import (
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
    SumOrder,
)
from flower_graph.strategies.ppfl.strategy import ByClient, ProcrustesAlignment, mean_of
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.counts import as_counts, counts_size
from flower_graph.wire.exchange import Replies
from flower_graph.wire.keys import RING_WORD

LEARNT_FROM = 2  # sums before clients learn from the mean
Floats = NDArray[np.float64]


class CommonMean:
    """The server's mean of the rotated embeddings, by node."""

    def __init__(self, dropout: float) -> None:
        self.dropout, self.made = dropout, 0  # sums so far
        self.nodes: IntArray = np.zeros(0, np.int64)  # ids of the rows, ascending
        self.rows: FloatArray = np.zeros((0, 0), np.float32)
        self.slots: dict[int, IntArray] = {}  # the rows of each client's nodes

    def choose(
        self,
        nodes: IntArray,
        ids: Mapping[int, IntArray],
        there: Mapping[int, Iterable[int]],
        dimension: int,
    ) -> None:
        """Set the nodes of the next sum; a node that stays keeps its mean."""
        if not np.array_equal(nodes, self.nodes):
            rows = np.zeros((nodes.size, dimension), np.float32)
            at = find_slots(self.nodes, nodes)
            if self.made:
                rows[at[at != ABSENT]] = self.rows[at != ABSENT]
            self.nodes, self.rows = nodes, rows
        everyone = chain.from_iterable(there.values())
        self.slots = {client: find_slots(ids[client], self.nodes) for client in everyone}

    def of(self, client: int) -> FloatArray | None:
        """Return a client's rows; zeros for missing ones."""
        if not self.made:
            return None
        slots = self.slots[client]
        return np.where((slots != ABSENT)[:, None], self.rows[slots], np.float32(0))

    def take(self, total: Floats, contributors: Iterable[int]) -> None:
        holders = np.zeros(self.nodes.size)
        for client in contributors:
            slots = self.slots[client]
            holders[slots[slots != ABSENT]] += 1
        rows = total.reshape(self.nodes.size, -1)
        self.rows, self.made = (rows / holders[:, None]).astype(np.float32), self.made + 1

    def state_dict(self) -> dict[str, object]:
        arrays = {"nodes": torch.from_numpy(self.nodes), "mean": torch.from_numpy(self.rows)}
        return arrays | {"made": self.made}

    def load_state_dict(self, state: StateDict) -> None:
        self.nodes, self.rows = state["nodes"].numpy(), state["mean"].numpy()
        self.made = int(state["made"])


class SecureConsensus(ProcrustesAlignment):
    """The server: adds up embeddings that clients have rotated, and sends the mean back.

    All SuperNodes are asked in every iteration: sums over changing clients could be compared.

    Parameters
    ----------
    rotations_only, min_nodes, checkpoint_dir, checkpoint_every
        As of ``ProcrustesAlignment``; a checkpoint has everything but keys.
    limit, resolution : float
        Largest size of a number in an embedding, and the step to which it is rounded; a client
        with a larger number is left out of the sum.
    dropout : float
        Share of the clients that may be missing from a sum. If more are missing, the iteration has
        no mean. A node is in no sum if only one of its holders might remain.
    seed : int
        Seed of the first points, to which all clients rotate.
    registry : Path or str, optional
        The file of the SuperNodes' keys, where clients do not trust the server.
    least_holders : int
        Least number of clients, or SuperNodes with keys, that hold a summed node; 2 or more.
    differ_by : int
        Least number of SuperNodes by which two of these sums differ; see ``PartySums``.
    """

    idle = NOT_READY  # all clients are asked that can be in the sum
    wants_embeddings = False  # what the base class reads from replies

    def __init__(
        self,
        *,
        rotations_only: bool = False,
        limit: float = 32.0,
        resolution: float = 2.0**-16,
        dropout: float = 0.3,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        registry: Path | str | None = None,
        least_holders: int = LEAST_HOLDERS,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        super().__init__(
            alignment=CONSENSUS,
            rotations_only=rotations_only,
            min_nodes=min_nodes,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        self._ring: dict[str, Any] = {"limit": limit, "resolution": resolution}
        self.mean, self._least = CommonMean(dropout), least_holders
        self.contributors: list[int] = []  # to the last sum
        self._skipped, self._named = "", 0
        self._parts = 0, 0, 0  # numbers of a sum: rows, measurements, counts
        self._measured = dict[str, float]()
        self._parties = None
        if registry is not None:
            self._parties = PartySums(registry, dropout=dropout, differ_by=differ_by)
            self.clients.claims = SignedClaims(self._parties.registry, lambda: self._run_id)

    @cached_property
    def sums(self) -> SecureSum:
        return SecureSum(
            self.session.exchange,
            **self._ring,
            server=self._parties or SumServer(dropout=self.mean.dropout),
            timeout=self.session.timeout,
            min_nodes=self.session.min_nodes,
        )

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        there, mean, known = self.there(server_round), self.mean, self.clients
        nodes, claims = self._nodes(self.sums.prepare(server_round, there))
        mean.choose(nodes, known.ids, there, known.dimension)
        order = SumOrder([], self.session.seed, mean.made >= LEARNT_FROM, self.rotations_only)
        told, shown, measured = NOT_TOLD, {}, 0
        if claims is not None:
            claims.means = digests_of(mean.rows) if mean.made else claims.means
            told, shown, measured = (nodes, claims.means), claims.to_config(), 2 * len(MEASURED)
        self._parts = mean.rows.size, measured, counts_size(*self.counted)
        layout = layout_of(*told, known.dimension, server_round, order)
        entries = self.sums.requests(sum(self._parts), MEANS, layout)
        requests, self.entries = dict[int, PublicRequest](), {}
        for node in [node for node in there if node in entries]:
            slots = [mean.slots[client] for client in there[node]]
            self.entries[node] = entries[node] | replace(order, slots=slots).to_config() | shown
            requests[node] = self.request(server_round, there[node], there[node], mean.of)
        return requests

    @property
    def _run_id(self) -> int:
        return self.session.exchange.grid.run.run_id

    def _nodes(self, ready: Sequence[int]) -> tuple[IntArray, Claims | None]:
        """Choose the nodes of the next sum, for untrusting clients with the claims of all."""
        signed, claims = self.clients.claims, None
        if signed is None or self._parties is None:
            holders, fewest = len(ready), fewest_holders(len(ready), self.mean.dropout, self._least)
            nodes = common_nodes([self.clients.ids[client] for client in ready], fewest)
        else:
            held = signed.of(self._parties.members)
            claims = Claims.of(held, signed.signatures)
            holders, fewest = len(held), max(self._least, fewest_parties(len(held)))
            nodes = agreed_nodes(held, self._least) if held else self.mean.nodes
        if holders > 1 and not nodes.size:
            why = "a sum could be one client's embedding; lower dropout, or align in the clear"
            raise ValueError(f"no public node has {fewest} holders among {holders}: {why}")
        return nodes, claims

    def read(self, node: int, content: RecordDict) -> PublicReply:
        # What clients count is in the sum.
        request = replace(self.requests[node], wants_embeddings=False, counting="")
        reply = PublicReply.from_record(content, request)
        self.sums.take(node, content)
        return reply

    def reply_bytes(self, numbers: int = 0) -> int:
        lengths = (int(entries["mask-length"]) for entries in self.entries.values())
        return super().reply_bytes(numbers + max(lengths, default=0))

    def state(self) -> dict[str, object]:
        state: Tree = super().state()
        kept = self.mean.state_dict() | {"excluded": sorted(self.sums.server.excluded)}
        return state | {"strategy": state["strategy"] | kept}

    def load_state(self, state: StateDict) -> None:
        super().load_state(state)
        self.mean.load_state_dict(state["strategy"])
        self.sums.server.exclude(state["strategy"].get("excluded", ()))

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        for entry in replies.rejected:
            if entry.kind is Kind.STATE_LOST:
                self.sums.forget(entry.node_id)  # its keys are lost too
        self._skipped = ""
        report = super().learn(server_round, replies)
        report.skipped = self._skipped
        blamed = self.sums.server.blamed
        for one in blamed[self._named :]:
            report.rejected.append({"client": one.client, "reason": _without_number(one)})
        self._named = len(blamed)
        rejected = self.sums.take_rejected()
        report.rejected += [{"node": one.node_id, "reason": one.reason} for one in rejected]
        return report

    def participation(self, answered: Collection[int], failed: Mapping[int, str]) -> Participation:
        # Without a sum, the clients' measurements are still used.
        used = answered if self._skipped else set(answered) & set(self.contributors)
        blamed = self.sums.server.blamed[self._named :]
        local = {one.client: _without_number(one) for one in blamed if one.client is not None}
        return super().participation(used, local | dict(failed))

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do step 5, and return the distances to the mean that clients report."""
        summed = self.sums.close(server_round)
        self.contributors, self._measured = [], {}
        if isinstance(summed, Skipped):
            self._skipped = f"no sum: {_without_number(summed.reason)}"
            return {}
        self.contributors = summed.contributors.tolist()
        rows, measured, counts = np.split(summed.values, np.cumsum(self._parts)[:2])
        self.mean.take(rows, self.contributors)
        if counts.size:  # a node is one step of the sum's numbers
            steps = counts * 2.0 ** Ring.fit(2, **self._ring).fraction_bits
            self.counts = as_counts(np.rint(steps).astype(np.int64), *self.counted)
        if self._parties is None:
            shown = self.clients.measured
            means = {name: mean_of(shown[name].values()) for name in PRECISIONS if name in shown}
        else:
            sums, holders = measured.reshape(2, len(MEASURED)).tolist()
            each = zip(MEASURED, sums, holders, strict=True)
            means = self._measured = {name: one / of for name, one, of in each if of >= 1}
        return {name: means[name] for name in PRECISIONS if name in means}

    def averages(self, measured: ByClient) -> Mapping[str, float]:
        return super().averages(measured) if self._parties is None else self._measured

    def came(self, node: int) -> tuple[str, int]:
        summed = set(self.requests[node].clients) & set(self.contributors)
        return "sums", len(summed) * self.mean.rows.size * (self.entries[node][RING_WORD] // 8)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return ``mean`` ``[u, d]`` and its ids ``nodes`` ``[u]``; empty before the first sum."""
        return {"mean": self.mean.rows, "nodes": self.mean.nodes} if self.mean.made else {}


def _without_number(reason: Reason) -> str:
    """Return a reason without the number of the sum, which is not the round's."""
    return str(replace(reason, round=None))
