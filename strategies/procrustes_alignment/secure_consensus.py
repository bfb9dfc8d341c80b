"""PPFL-GNN with a common mean that the server computes without seeing anybody's embeddings.

The consensus form of the alignment (``procrustes_alignment.py``) needs of the clients only a sum,
once each has turned its embeddings itself. So clients turn, and the secure sum of
``flower_graph.secure`` adds up: the server learns the sum over the clients, and nothing else of
their embeddings. ``W_i`` never leaves client ``i``.

Iteration ``t``, two exchanges:

1. server -> client ``i``: ``R``, the common mean of the last iteration, for its public nodes;
2. client: ``X'_i = R W_i^T``, trains with it as in the plain form, and embeds its graph;
3. client: ``W_i``, the orthogonal matrix with the least ``||X_i W_i - R||_F`` (equation 4);
4. client -> server: ``X_i W_i``, masked;
5. server: adds up, and in the second exchange takes the masks off; ``R`` = sum / holders, by node.

The plain form repeats steps 3 and 5 until ``R`` stands. Here each iteration does them once and goes
on from the last one's ``R``: of the same embeddings no second sum is ever asked for, since as many
sums as clients would tell the clients apart. The first ``R`` is random points. The mean that they
lead to is too blurred to learn from: it is turned to, and ``X'_i`` begins with iteration 3.

Nodes with too few holders for a sum are left out; of these a client keeps its own rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from numpy.typing import NDArray

from flower_graph.client.state import Tensors
from flower_graph.errors import says_lost
from flower_graph.messages.arrays import decode_array
from flower_graph.messages.fields import Resume
from flower_graph.messages.keys import RING_WORD
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.report.rounds import RoundReport
from flower_graph.rng import derive_seed
from flower_graph.secure.sum.masking_client import MaskingClient
from flower_graph.secure.sum.server import Skipped
from flower_graph.secure.sum.service import SecureSum
from flower_graph.server.exchange import Replies
from flower_graph.server.ledger import NOT_READY, Participation
from flower_graph.server.round_strategy import OwnRounds
from flower_graph.strategies.procrustes_alignment.cohort_client import (
    EmbeddingClient,
    PublicNodeClient,
)
from flower_graph.strategies.procrustes_alignment.config import CONSENSUS
from flower_graph.strategies.procrustes_alignment.messages import (
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
    SumOrder,
)
from flower_graph.strategies.procrustes_alignment.server_state import (
    ABSENT,
    NEAREST,
    CommonMean,
    Floats,
    mean_of,
)
from flower_graph.strategies.procrustes_alignment.strategy import ProcrustesAlignment

ROTATIONS = "public-rotations"  # in Context.state: W_i of each client
LEARNT_FROM = 2  # sums that a mean needs behind it before clients learn from it

# Client ------------------------------------------------------------------------------------------


class SecureConsensusClient(PublicNodeClient, MaskingClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context; models, keys and rotations live behind it.
    members : sequence of EmbeddingClient
        The clients; their embedding models are those of ``PublicNodeClient``.
    **folders : Path, optional
        ``save_to``, ``checkpoint_dir`` and ``output_dir``, as of ``PublicNodeClient``.
        Checkpoints have the rotations too, and never keys.
    """

    def __init__(
        self, context: Context, members: Sequence[EmbeddingClient], **folders: Path | None
    ) -> None:
        super().__init__(context, members, **folders)
        MaskingClient.__init__(self, context, list(self.members))

    def save(self, server_round: int, run: str, more: Tensors | None = None) -> str:
        """Write models and rotations; return why it cannot be done, or nothing."""
        turns = {str(client): torch.from_numpy(w) for client, w in self._rotations().items()}
        return super().save(server_round, run, turns | (more or {}))

    def resume(self, resume: Resume) -> Tensors | None:
        """Go on from models and rotations."""
        turns = super().resume(resume)
        if turns is not None:
            self._keep_rotations({int(client): turn.numpy() for client, turn in turns.items()})
        return turns

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Turn the mean back, train, embed, measure, turn and mask (steps 2 to 4)."""
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        order = SumOrder.from_config(config, sizes=[ids.size for ids in request.nodes])
        self.keys()  # before anything is trained: without keys there is no round
        kept = self._rotations()
        targets = [
            self._own_space(client, mean, kept.get(client)) if order.is_target else None
            for client, mean in zip(request.clients, request.targets, strict=True)
        ]
        reply = self.round(replace(request, targets=targets))
        rotated = rotate(request, order, reply, int(config["mask-length"]))
        masked, entries = self.masked(config, {c: one.vector for c, one in rotated.items()})
        self._keep_rotations(kept | {client: one.rotation for client, one in rotated.items()})
        near = {client: one.precision for client, one in rotated.items() if one.precision}
        for k in NEAREST if near else ():
            of_all = [near.get(client, {}).get(k, math.nan) for client in request.clients]
            reply.judged[f"precision-{k}"] = of_all
        if request.saves:
            reply.not_saved = self.save(request.server_round, request.run)
        reply.request = replace(request, wants_embeddings=False)
        _, weight, metrics = reply.to_numpy()
        return [masked.total], weight, metrics | entries

    def _own_space(
        self, client: int, mean: FloatArray | None, turn: NDArray[Any] | None
    ) -> FloatArray | None:
        """Turn the common mean into a client's space; rows that have none are its own."""
        if mean is None or turn is None:
            return None
        target: FloatArray = (mean @ turn.T).astype(np.float32)
        if (missing := ~mean.any(1)).any():
            with self.opened() as models:
                local = models[client].embed()[self.members[client].rows]
            target[missing] = local[missing]
        return target

    def _keep_rotations(self, kept: Mapping[int, NDArray[Any]]) -> None:
        arrays = {str(client): Array(w) for client, w in kept.items()}
        self.context.state[ROTATIONS] = ArrayRecord(arrays)

    def _rotations(self) -> dict[int, NDArray[Any]]:
        record = self.context.state.array_records.get(ROTATIONS, ArrayRecord())
        return {int(name): decode_array(name, array) for name, array in record.items()}


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw what everybody turns to before there is a mean, ``[u, d]`` normal."""
    # Any fixed points do: clients that embed alike turn alike, and so come to lie on each other.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


def rotation(embeddings: Floats, points: Floats, rotations_only: bool) -> Floats:
    """Find the orthogonal ``W`` that brings a client's rows nearest to common points."""
    # embeddings, points [p, d]
    if not len(embeddings):
        return np.eye(points.shape[1])
    return orthogonal_procrustes(embeddings, points, rotations_only=rotations_only)


class Rotated(NamedTuple):
    """A client's embeddings beside those of the others."""

    rotation: Floats  # ``W_i``
    vector: Floats  # its part of the sum
    precision: Mapping[int, float]  # how near they came to the common mean; empty without one


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> dict[int, Rotated]:
    """Bring each client's rows nearest to the common mean, or to the first points without one."""
    start = first_points(order.seed, length // request.dimension, request.dimension)
    result = {}
    for index, client in enumerate(request.clients):
        x, mean, slots = reply.embeddings[index], request.targets[index], order.slots[index]
        if x is None:
            continue
        here, local = slots != ABSENT, x.astype(np.float64)
        points = start[slots[here]] if mean is None else mean[here].astype(np.float64)
        turn, near = rotation(local[here], points, order.rotations_only), dict[int, float]()
        if mean is not None and here.any():
            near = alignment_precision(local[here], points, turn, NEAREST)
        result[client] = Rotated(turn, sum_vector(local @ turn, slots, length), near)
    return result


def sum_vector(turned: Floats, slots: IntArray, length: int) -> Floats:
    """Lay a client's turned rows ``[p, d]`` at their slots, zeros elsewhere, ``[length]``."""
    dimension = turned.shape[1]
    here = slots != ABSENT
    chosen = slots[here]
    count = length // dimension
    if length % dimension or np.unique(chosen).size != chosen.size:
        raise ValueError(f"{length} numbers for rows of {dimension}, or a slot named twice")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < count:
        raise ValueError(f"slots from {chosen.min()} to {chosen.max()}, must be 0 to {count - 1}")
    rows = np.zeros((count, dimension))
    rows[chosen] = turned[here]
    return rows.ravel()


# Server ------------------------------------------------------------------------------------------


class SecureConsensus(OwnRounds, ProcrustesAlignment):
    """The server: adds up embeddings that clients have turned, and sends the mean back.

    All SuperNodes are asked in every iteration: sums over changing clients could be compared.

    Parameters
    ----------
    rotations_only : bool
        Leave reflections out.
    limit, resolution : float
        Largest size of a number in an embedding, and the step to which it is rounded; a client
        with a larger number is left out of the sum.
    dropout : float
        Share of the clients that may be missing from a sum; with more the iteration has no mean,
        and nodes with so few holders that one alone might remain are in no sum.
    min_nodes : int
        SuperNodes to wait for before a round.
    seed : int
        Seed of the points that everybody turns to at first.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything but keys; 0 for never.
    """

    idle = NOT_READY  # all are asked that can be in the sum
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
        self.mean = CommonMean(dropout)
        self.contributors: list[int] = []  # to the last sum
        self._skipped, self._named = "", 0

    @cached_property
    def sums(self) -> SecureSum:
        """The secure sums, over the session's exchange."""
        return SecureSum(
            self.session.exchange,
            **self._ring,
            dropout=self.mean.dropout,
            timeout=self.session.timeout,
            min_nodes=self.session.min_nodes,
        )

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        """Step 1: write the round's requests, with the common mean and what masks need."""
        there, mean = self.there(server_round), self.mean
        mean.choose(
            self.clients.ids, there, self.sums.prepare(server_round, there), self.clients.dimension
        )
        entries = self.sums.requests(mean.rows.size)
        requests, self.entries = dict[int, PublicRequest](), {}
        for node in (node for node in there if node in entries):
            slots = [mean.slots[client] for client in there[node]]
            is_target = mean.made >= LEARNT_FROM
            order = SumOrder(slots, self.session.seed, is_target, self.rotations_only)
            self.entries[node] = entries[node] | order.to_config()
            requests[node] = self.request(server_round, there[node], mean.of)
        return requests

    def read(self, node: int, content: RecordDict) -> PublicReply:
        """Read what clients say, and take their part of the sum."""
        request = replace(self.requests[node], wants_embeddings=False)
        reply = PublicReply.from_record(content, request)
        self.sums.take(node, content)
        return reply

    def reply_bytes(self, numbers: int = 0) -> int:
        """Return the most bytes of a reply to this round's requests, with its part of the sum."""
        lengths = (int(entries["mask-length"]) for entries in self.entries.values())
        return super().reply_bytes(numbers + max(lengths, default=0))

    def state(self) -> dict[str, Any]:
        """Return what the server must find again: the common mean."""
        state = super().state()
        return state | {"strategy": state["strategy"] | self.mean.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        super().load_state(state)
        self.mean.load_state_dict(state["strategy"])

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do step 5 with what came, and say what the round gave."""
        for entry in replies.rejected:
            if says_lost(entry.reason):
                self.sums.forget(entry.node_id)  # its keys are lost, too
        self._skipped = ""
        report = super().learn(server_round, replies)
        report.skipped = self._skipped
        blamed = self.sums.blamed
        for client, why in blamed[self._named :]:
            report.rejected.append({"client": client, "reason": _without_number(why)})
        self._named = len(blamed)
        rejected = self.sums.rejected
        report.rejected += [{"node": one.node_id, "reason": one.reason} for one in rejected]
        rejected.clear()
        return report

    def participation(self, answered: Collection[int], failed: Mapping[int, str]) -> Participation:
        """Say what became of every client; those that are not in a sum that was made fail."""
        # Where there is no sum, what the clients measured was used all the same.
        used = answered if self._skipped else set(answered) & set(self.contributors)
        blamed = self.sums.blamed[self._named :]
        local = {client: _without_number(why) for client, why in blamed}
        return super().participation(used, local | dict(failed))

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do step 5, and return how near clients came to the mean, as they say."""
        summed = self.sums.close(server_round)
        self.contributors = []
        if isinstance(summed, Skipped):
            self._skipped = f"no sum: {_without_number(summed.reason)}"
            return {}
        self.contributors = summed.contributors.tolist()
        self.mean.take(summed.values, self.contributors)
        names = [f"precision-{k}" for k in NEAREST]
        result = {name: list(self.clients.measured.get(name, {}).values()) for name in names}
        return {name: mean_of(values) for name, values in result.items() if values}

    def count(self, replies: Mapping[int, PublicReply]) -> dict[str, dict[str, int]]:
        """Count the payload: rows of the mean down, masked sums up, of each client."""
        ledger = self.session.exchange.ledger
        for node, request in self.requests.items():
            sent = [part.nbytes for part in request.targets if part is not None]
            ledger.count("down", "means", sum(sent))
            word = self.entries[node][RING_WORD] // 8
            came = [client for client in request.clients if client in self.contributors]
            ledger.count("up", "sums", len(came) * self.mean.rows.size * word)
        return ledger.payload

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the last common mean and the ids of its nodes.

        Returns
        -------
        dict of str to ndarray
            ``mean`` ``[u, d]`` and ``nodes`` ``[u]``; empty before the first sum.
        """
        return {"mean": self.mean.rows, "nodes": self.mean.nodes} if self.mean.made else {}


def _without_number(reason: str) -> str:
    """Take off the number of the sum, which is not the round's."""
    return re.sub(r"^round \d+( is skipped)?: ", "", reason)
