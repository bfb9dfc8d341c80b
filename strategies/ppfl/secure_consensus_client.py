"""PPFL-GNN's secure consensus at the clients: embeddings are rotated and masked before sending.

The steps are in ``secure_consensus.py``. If the server is not trusted, a SuperNode computes the
order of nodes in the sum by itself (``claims.py``), and everything that a server could tell one
SuperNode alone goes into the masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flower_graph.client.state import Tensors
from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.ops import alignment_precision, orthogonal_procrustes
from flower_graph.rng import derive_seed
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.sum.messages import RING
from flower_graph.strategies.ppfl.claims import (
    ABSENT,
    MEANS,
    MEASURED,
    NOT_TOLD,
    Claims,
    check_layout,
    find_slots,
    layout_of,
    sign_claim,
)
from flower_graph.strategies.ppfl.cohort_client import EmbeddingClient, PublicNodeClient
from flower_graph.strategies.ppfl.config import PRECISIONS
from flower_graph.strategies.ppfl.evaluation import GraphJudge
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
    SumOrder,
)
from flower_graph.wire.arrays import Answer, Config, Parameters, decode_array
from flower_graph.wire.counts import counts_size
from flower_graph.wire.fields import Resume

ROTATIONS = "public-rotations"  # in Context.state: W_i of each client
RUN = "public-run"  # likewise: the run of a SuperNode with a key of its own
ROUNDS = b"public-rounds"  # in its journal
Floats = NDArray[np.float64]


class SecureConsensusClient(PublicNodeClient, MaskingClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps models, keys and rotations.
    members : sequence of EmbeddingClient
        The clients; their embedding models are those of ``PublicNodeClient``.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server.
    least_holders : int
        Least number of SuperNodes that hold a summed node, if the server is not trusted.
    **folders : Path, optional
        ``save_to``, ``checkpoint_dir`` and ``output_dir``, as of ``PublicNodeClient``.
        Checkpoints have the rotations too, and never keys.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[EmbeddingClient],
        *,
        trust: TrustSettings | None = None,
        least_holders: int = LEAST_HOLDERS,
        **folders: Path | None,
    ) -> None:
        super().__init__(context, members, **folders)
        MaskingClient.__init__(self, context, list(self.members), trust)
        self._least = least_holders

    def enrolment(self) -> EmbeddingEnrolment:
        here = super().enrolment()
        if self.trust is None:
            return here
        signature = sign_claim(self.trust.identity, self.context.run_id, self.public)
        return replace(here, signature=signature)

    def save(self, server_round: int, run: str) -> str:
        if self.trust is not None and run != self._run():
            raise RefusedError("a checkpoint of another run than this SuperNode takes part in")
        return super().save(server_round, run)

    def beside(self) -> Tensors:
        return {str(client): torch.from_numpy(w) for client, w in self._rotations().items()}

    def resume(self, resume: Resume) -> Tensors | None:
        self._enter(resume)
        turns = super().resume(resume)
        if turns is not None:
            self._keep_rotations({int(client): turn.numpy() for client, turn in turns.items()})
        return turns

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Rotate the mean back, train, embed, measure, rotate and mask (steps 2 to 4)."""
        request = PublicRequest.from_numpy(parameters, config, public=self.public)
        order = SumOrder.from_config(config, sizes=[ids.size for ids in request.nodes])
        self.keys()  # before anything is trained: without keys there is no round
        layout = layout_of(*NOT_TOLD, request.dimension, request.server_round, order)
        if self.trust is not None:
            layout = self._layout(request, order, config)
        kept = self._rotations()
        targets = [
            self._own_space(client, mean, kept.get(client)) if order.is_target else None
            for client, mean in zip(request.clients, request.targets, strict=True)
        ]
        reply = self.round(replace(request, targets=targets))
        counts, reply.counts = reply.counts, None
        rows = int(config["mask-length"]) - (0 if counts is None else counts.flat().numel())
        rows -= 0 if self.trust is None else 2 * len(MEASURED)
        rotated = rotate(request, order, reply, rows)
        if any(one.precision for one in rotated.values()):
            near = [rotated[c].precision if c in rotated else {} for c in request.clients]
            for name, k in PRECISIONS.items():
                reply.judged[name] = [one.get(k, math.nan) for one in near]
        vectors = {client: one.vector for client, one in rotated.items()}
        ring = RING.from_config(config)
        if self.trust is not None:
            vectors = _with_measured(vectors, reply, ring.limit)
        if counts is not None:  # with the first client's rows; a node is one step of the ring
            row, first = counts.flat().numpy() * 2.0**-ring.fraction_bits, min(vectors, default=-1)
            vectors = {c: np.concatenate([v, row * (c == first)]) for c, v in vectors.items()}
        # The same embeddings with another rotation are the same state.
        state = [one for one in reply.embeddings if one is not None]
        masked, entries = self.masked(config, vectors, MEANS, layout, state)
        if self.trust is not None and masked.left_out:
            # A missing client may leave others alone in the sum, and means may push a client out.
            raise RefusedError("a client here cannot be in the sum: its SuperNode sends nothing")
        self._keep_rotations(kept | {client: one.rotation for client, one in rotated.items()})
        if request.saves:
            reply.not_saved = self.save(request.server_round, request.run)
        reply.request = replace(request, wants_embeddings=False)
        _, weight, metrics = reply.to_numpy()
        return [masked.total], weight, metrics | entries

    # Where the server is not trusted

    def _layout(self, request: PublicRequest, order: SumOrder, config: Config) -> bytes:
        """Return the order of nodes and the points of rotation, once all agree on them."""
        assert self.trust is not None
        claims, epoch = Claims.from_config(config), self.keys().epoch
        if epoch is None:
            raise StateLostError("no epoch has begun under this version of the registry")
        run, parties = self.context.run_id, epoch.parties.tolist()
        nodes = check_layout(claims, self.trust, run, parties, self.public, self._least)
        for ids, slots, mean in zip(request.nodes, order.slots, request.targets, strict=True):
            if not np.array_equal(slots, find_slots(ids, nodes)):
                raise RefusedError("the server orders public nodes otherwise than their holders")
            claims.check_mean(mean, slots)
        size = counts_size(self.num_classes, request.counting)
        if config["mask-length"] != nodes.size * request.dimension + 2 * len(MEASURED) + size:
            raise RefusedError("the sum has another length than the nodes that are in it")
        Journal(self.trust.journal).contribute(request.server_round, ROUNDS, self._run().encode())
        return layout_of(nodes, claims.means, request.dimension, request.server_round, order)

    @property
    def num_classes(self) -> int:
        """How many classes are counted in predictions; 0 without a judge of nodes."""
        judges = [member.judge for member in self.members.values()]
        return next((one.num_classes for one in judges if isinstance(one, GraphJudge)), 0)

    def _run(self) -> str:
        record = self.context.state.config_records.get(RUN, ConfigRecord())
        return str(record.get(RUN, ""))

    def _enter(self, resume: Resume) -> None:
        """Record the run; refuse a second run, and a checkpoint from before its last sum."""
        if self.trust is None:
            return
        if self._run() not in ("", resume.run):
            raise RefusedError("this SuperNode takes part in another run already")
        last = Journal(self.trust.journal).last(ROUNDS, resume.run.encode()) or 0
        if self._state.store.is_due(resume) and resume.server_round < last:
            raise RefusedError(
                f"this SuperNode is in the sum of round {last}: no way back to the checkpoint of "
                f"round {resume.server_round}, as two sums of a round can be compared"
            )
        self.context.state[RUN] = ConfigRecord({RUN: resume.run})

    def _own_space(
        self, client: int, mean: FloatArray | None, turn: NDArray[Any] | None
    ) -> FloatArray | None:
        """Rotate the common mean into a client's space; rows without a mean stay its own."""
        if mean is None or turn is None:
            return None
        target: FloatArray = (mean @ turn.T).astype(np.float32)
        if (missing := ~mean.any(1)).any():
            local = self._state.look(self._makers)[client].embed()[self.members[client].rows]
            target[missing] = local[missing]
        return target

    def _keep_rotations(self, kept: Mapping[int, NDArray[np.generic]]) -> None:
        arrays = {str(client): Array(w) for client, w in kept.items()}
        self.context.state[ROTATIONS] = ArrayRecord(arrays)

    def _rotations(self) -> dict[int, NDArray[np.generic]]:
        record = self.context.state.array_records.get(ROTATIONS, ArrayRecord())
        return {int(name): decode_array(name, array) for name, array in record.items()}


def first_points(seed: int, nodes: int, dimension: int) -> Floats:
    """Draw the points ``[u, d]`` to which clients rotate before there is a mean."""
    # Any fixed points do: clients with similar embeddings get similar rotated embeddings.
    rng = np.random.default_rng(derive_seed(seed, "secure-consensus"))
    return rng.standard_normal((nodes, dimension))


class Rotated(NamedTuple):
    """A client's embeddings in the common space."""

    rotation: Floats  # ``W_i``
    vector: Floats  # its part of the sum
    precision: Mapping[int, float]  # distance to the common mean; empty without one


def rotate(
    request: PublicRequest, order: SumOrder, reply: PublicReply, length: int
) -> dict[int, Rotated]:
    """Rotate each client's rows nearest to the common mean, or to the first points."""
    start = first_points(order.seed, length // request.dimension, request.dimension)
    result = {}
    for index, client in enumerate(request.clients):
        x, mean, slots = reply.embeddings[index], request.targets[index], order.slots[index]
        if x is None:
            continue
        here, local = slots != ABSENT, x.astype(np.float64)
        points = start[slots[here]] if mean is None else mean[here].astype(np.float64)
        turn, near = np.eye(request.dimension), dict[int, float]()
        if here.any():
            turn = orthogonal_procrustes(local[here], points, rotations_only=order.rotations_only)
            if mean is not None:
                near = alignment_precision(local[here], points, turn)
        result[client] = Rotated(turn, sum_vector(local @ turn, slots, length), near)
    return result


def _with_measured(
    vectors: Mapping[int, Floats], reply: PublicReply, limit: float
) -> dict[int, Floats]:
    """Move the measurements from a reply into the vectors: the server learns no single client's."""
    # Some of them depend on the server's means.
    nothing = [math.nan] * len(reply.loss)
    said = {**reply.judged, "loss": reply.loss, "disagreement": reply.disagreement}
    result = dict[int, Floats]()
    for index, client in enumerate(reply.request.clients):
        values = np.array([said.get(name, nothing)[index] for name in MEASURED])
        fits = np.abs(values) <= limit  # not if it is NaN
        if client in vectors:
            result[client] = np.concatenate([vectors[client], np.where(fits, values, 0), fits])
    reply.loss, reply.disagreement, reply.judged = nothing, nothing, {}
    return result


def sum_vector(turned: Floats, slots: IntArray, length: int) -> Floats:
    """Place a client's rotated rows ``[p, d]`` at their slots, zeros elsewhere, ``[length]``."""
    dimension = turned.shape[1]
    here, count = slots != ABSENT, length // dimension
    chosen = slots[here]
    is_inside = ((chosen >= 0) & (chosen < count)).all()
    if length % dimension or np.unique(chosen).size != chosen.size or not is_inside:
        given = f"{brief(chosen.tolist())} of {length} numbers in rows of {dimension}"
        raise ValueError(f"slots: {given}; allowed are different ones from 0 to {count - 1}")
    rows = np.zeros((count, dimension))
    rows[chosen] = turned[here]
    return rows.ravel()
