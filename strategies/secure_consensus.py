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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flower_graph.alignment_measure import NEAREST
from flower_graph.arrays import decode_array
from flower_graph.config_ppfl import CONSENSUS
from flower_graph.exchange import Replies
from flower_graph.ops import alignment_precision
from flower_graph.participation import NOT_READY, Participation
from flower_graph.public_node_host import PublicNodeHost
from flower_graph.public_nodes import FloatArray, Member
from flower_graph.public_session import PublicSession, mean_of, public_bytes
from flower_graph.records.keys import (
    CHECKPOINT,
    CONFIG,
    MASK_LENGTH,
    NOT_SAVED,
    RING_WORD,
    RUN_TOKEN,
    SERVER_ROUND,
)
from flower_graph.records.public_nodes import PublicReply, PublicRequest
from flower_graph.records.resume import Resume
from flower_graph.records.rotated_sum import ABSENT, SumOrder
from flower_graph.report import RoundReport
from flower_graph.rotated_sum import (
    common_nodes,
    fewest_holders,
    find_slots,
    first_points,
    rotation,
    sum_vector,
)
from flower_graph.secure.sum_server import Skipped
from flower_graph.strategies.procrustes_alignment import ProcrustesAlignment
from flower_graph.summing import MaskingClient, SecureSum

ACTIONS = ("sum_enroll", "sum_unmask")  # named actions, for make_client_app
ROTATIONS = "public-rotations"  # in Context.state: W_i of each client
LEARNT_FROM = 2  # sums that a mean needs behind it before clients learn from it

# Client ------------------------------------------------------------------------------------------


class SecureConsensusClient(MaskingClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context; models, keys and rotations live behind it.
    members : sequence of Member
        The clients; their embedding models are those of ``PublicNodeClient``.
    save_to : Path, optional
        Folder for the embeddings after the last iteration, a file for each client.
    checkpoint_dir : Path, optional
        Where to save models and rotations when the server asks for a checkpoint; never keys.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[Member],
        *,
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
    ) -> None:
        super().__init__(context, [member.number for member in members])
        self.host = PublicNodeHost(context, members, save_to, checkpoint_dir)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say who is here, and which nodes each can share; load or save a checkpoint if asked."""
        if config.get(CHECKPOINT, False):
            why = self._save(int(config[SERVER_ROUND]), str(config[RUN_TOKEN]))
            return {NOT_SAVED: why} if why else {}
        turns = self.host.restore(Resume.from_config(config))
        if turns is not None:
            self._keep_rotations({int(client): turn.numpy() for client, turn in turns.items()})
        return self.host.hello().to_properties()

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Turn the mean back, train, embed, measure, turn and mask (steps 2 to 4)."""
        request = PublicRequest.from_fit(parameters, config, self.host.public)
        order = SumOrder.from_config(config, [ids.size for ids in request.nodes])
        self.keys()  # before anything is trained: without keys there is no round
        kept = self._rotations()
        targets = [
            self._own_space(client, mean, kept.get(client)) if order.is_target else None
            for client, mean in zip(request.clients, request.targets, strict=True)
        ]
        reply = self.host.round(replace(request, targets=targets))
        vectors = self._turn(request, order, reply, int(config[MASK_LENGTH]), kept)
        masked, entries = self.masked(config, vectors)
        self._keep_rotations(kept)
        if request.save:
            reply.not_saved = self._save(request.server_round, request.save)
        _, weight, metrics = reply.to_fit(replace(request, wants_embeddings=False))
        return [masked.total], weight, metrics | entries

    def _own_space(
        self, client: int, mean: FloatArray | None, turn: NDArray[Any] | None
    ) -> FloatArray | None:
        """Turn the common mean into a client's space; rows that have none are its own."""
        if mean is None or turn is None:
            return None
        target: FloatArray = (mean @ turn.T).astype(np.float32)
        if (missing := ~mean.any(1)).any():
            with self.host.opened() as models:
                own = models[client].embed()[self.host.members[client].rows]
            target[missing] = own[missing]
        return target

    def _turn(
        self,
        request: PublicRequest,
        order: SumOrder,
        reply: PublicReply,
        length: int,
        kept: dict[int, NDArray[Any]],
    ) -> dict[int, NDArray[np.float64]]:
        """Turn each client to the common mean; notes the rotations, and how near it came."""
        start = first_points(order.seed, length // request.dimension, request.dimension)
        vectors, near = {}, list[dict[int, float]]()
        for place, client in enumerate(request.clients):
            near.append({})
            x, mean, slots = reply.embeddings[place], request.targets[place], order.slots[place]
            if x is None:
                continue
            here = slots != ABSENT
            own = x.astype(np.float64)
            points = start[slots[here]] if mean is None else mean[here].astype(np.float64)
            turn = kept[client] = rotation(own[here], points, order.rotations_only)
            vectors[client] = sum_vector(own @ turn, slots, length)
            if mean is not None and here.any():
                near[-1] = alignment_precision(own[here], points, turn, NEAREST)
        if any(near):
            for k in NEAREST:
                reply.judged[f"precision-{k}"] = [one.get(k, math.nan) for one in near]
        return vectors

    def _save(self, server_round: int, run: str) -> str:
        turns = {str(client): torch.from_numpy(w) for client, w in self._rotations().items()}
        return self.host.save(server_round, run, turns)

    def _keep_rotations(self, kept: Mapping[int, NDArray[Any]]) -> None:
        arrays = {str(client): Array(w) for client, w in kept.items()}
        self.context.state[ROTATIONS] = ArrayRecord(arrays)

    def _rotations(self) -> dict[int, NDArray[Any]]:
        record = self.context.state.array_records.get(ROTATIONS, ArrayRecord())
        return {int(name): decode_array(name, array) for name, array in record.items()}


# Server ------------------------------------------------------------------------------------------


class SummingSession(PublicSession):
    """One run's exchanges over a grid, with a secure sum on the messages of each round.

    Parameters
    ----------
    limit, resolution, dropout : float
        As for ``SecureSum``.
    min_nodes, seed : int
        As for ``PublicSession``.
    """

    not_asked = NOT_READY  # all are asked that can be in the sum

    def __init__(
        self, *, limit: float, resolution: float, dropout: float, min_nodes: int, seed: int
    ) -> None:
        super().__init__(participation=1.0, min_nodes=min_nodes, seed=seed)
        self._sizes = {"limit": limit, "resolution": resolution, "dropout": dropout}
        self._sums: SecureSum | None = None
        self.entries: dict[int, dict[str, Any]] = {}  # of the round's messages, by SuperNode

    @property
    def sums(self) -> SecureSum:
        """The secure sums, once the session is open."""
        assert self._sums is not None
        return self._sums

    def open(self, grid: Grid, timeout: float, rounds: int = 0) -> None:
        """Take a grid and the seconds that an exchange may take."""
        super().open(grid, timeout, rounds)
        self._sums = SecureSum(
            self.exchange, timeout=timeout, min_nodes=self.min_nodes, **self._sizes
        )

    def send(
        self, server_round: int, requests: Mapping[int, PublicRequest]
    ) -> Replies[PublicReply]:
        """Send the round's messages; gather what clients say, and their part of the sum."""
        records = {node: request.to_record() for node, request in requests.items()}
        for node, record in records.items():
            own = record.config_records[CONFIG]
            record[CONFIG] = ConfigRecord({**own, **self.entries[node]})

        def read(node: int, content: RecordDict) -> PublicReply:
            request = replace(requests[node], wants_embeddings=False)
            reply = PublicReply.from_record(content, request)
            self.sums.take(node, content)
            return reply

        length = max((int(own[MASK_LENGTH]) for own in self.entries.values()), default=0)
        replies = self._noted(
            self.exchange.send(
                records,
                server_round=server_round,
                timeout=self.timeout,
                read=read,
                max_reply_bytes=public_bytes(requests.values(), length),
            )
        )
        for node in self._lost:
            self.sums.forget(node)  # its keys too
        return replies


class SecureConsensus(ProcrustesAlignment):
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
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        sizes = {"limit": limit, "resolution": resolution, "dropout": dropout}
        self.session: SummingSession = SummingSession(min_nodes=min_nodes, seed=seed, **sizes)
        self.dropout, self.made = dropout, 0  # sums so far
        self.nodes: NDArray[np.int64] = np.zeros(0, np.int64)  # ids of the mean's rows, ascending
        self.mean: FloatArray = np.zeros((0, 0), np.float32)
        self.contributors: list[int] = []  # to the last sum
        self._slots: dict[int, NDArray[np.int64]] = {}
        self._skipped, self._named = "", 0
        self._wants_embeddings = False  # what the base class reads from replies

    def _ask(self, server_round: int) -> None:
        """Step 1: write the round's requests, with the common mean and what masks need."""
        asked, self._rejected = self._plan(server_round)
        clients = self.session.sums.prepare(server_round, asked)
        self._choose_nodes(clients)
        entries = self.session.sums.requests(self.nodes.size * self.session.dimension)
        ids = self.session.ids
        self._slots = {c: find_slots(ids[c], self.nodes) for here in asked.values() for c in here}
        self.requests, self.session.entries = {}, {}
        # In the order of their clients: ids of SuperNodes differ from run to run.
        for node, here in asked.items():
            if node not in entries:
                continue
            slots = [self._slots[client] for client in here]
            is_target = self.made >= LEARNT_FROM
            order = SumOrder(slots, self.seed, is_target, self.rotations_only)
            self.session.entries[node] = entries[node] | order.to_config()
            self.requests[node] = PublicRequest(
                server_round,
                here,
                [ids[client] for client in here],
                [self._rows(client) for client in here],
                self.session.dimension,
                is_last=server_round == self.rounds,
                **self._going_on(here),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the server must find again: the common mean."""
        arrays = {"nodes": torch.from_numpy(self.nodes), "mean": torch.from_numpy(self.mean)}
        return super().state_dict() | arrays | {"made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        super().load_state_dict(state)
        self.nodes, self.mean = state["nodes"].numpy(), state["mean"].numpy()
        self.made = int(state["made"])

    def _choose_nodes(self, clients: Sequence[int]) -> None:
        """Choose the nodes of the next sum; those that stay keep their mean."""
        nodes = common_nodes(self.session.ids, clients, self.dropout)
        if len(clients) > 1 and not nodes.size:
            raise ValueError(
                f"no public node has {fewest_holders(len(clients), self.dropout)} holders among "
                f"{len(clients)} clients, of which the share {self.dropout:g} may be missing: its "
                "sum could be one client's own embedding; lower dropout, or align in the clear"
            )
        if not np.array_equal(nodes, self.nodes):
            mean = np.zeros((nodes.size, self.session.dimension), np.float32)
            at = find_slots(self.nodes, nodes)
            if self.made:
                mean[at[at != ABSENT]] = self.mean[at != ABSENT]
            self.nodes, self.mean = nodes, mean

    def _rows(self, client: int) -> FloatArray | None:
        """Give a client's rows of the common mean; zeros where there is none."""
        if not self.made:
            return None
        slots = self._slots[client]
        return np.where((slots != ABSENT)[:, None], self.mean[slots], np.float32(0))

    def _learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do step 5 with what came, and say what the round gave."""
        report = super()._learn(server_round, replies)
        report.skipped = self._skipped
        blamed = self.session.sums.server.blamed
        for client, why in blamed[self._named :]:
            report.rejected.append({"client": client, "reason": _without_number(why)})
        self._named = len(blamed)
        sums = self.session.sums
        report.rejected += [{"node": r.node_id, "reason": r.reason} for r in sums.rejected]
        sums.rejected.clear()
        return report

    def _participation(
        self, replies: Replies[PublicReply], answered: Collection[int], failed: Mapping[int, str]
    ) -> Participation:
        """Say what became of every client; of a sum that was made, those that are not in it fail.

        Where there is no sum, what the clients measured was used all the same.
        """
        used = answered if self._skipped else set(answered) & set(self.contributors)
        blamed = self.session.sums.server.blamed[self._named :]
        own = {client: _without_number(why) for client, why in blamed}
        return super()._participation(replies, used, own | dict(failed))

    def _align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Step 5; returns how near clients came to the mean, as they say."""
        summed = self.session.sums.close(server_round)
        self.contributors, self._skipped = [], ""
        if isinstance(summed, Skipped):
            self._skipped = f"no sum: {_without_number(summed.reason)}"
            return {}
        self.contributors = summed.contributors.tolist()
        holders = np.zeros(self.nodes.size)
        for client in self.contributors:
            slots = self._slots[client]
            holders[slots[slots != ABSENT]] += 1
        rows = summed.values.reshape(self.nodes.size, -1)
        self.mean, self.made = (rows / holders[:, None]).astype(np.float32), self.made + 1
        names = [f"precision-{k}" for k in NEAREST]
        found = {name: list(self.judged.get(name, {}).values()) for name in names}
        return {name: mean_of(values) for name, values in found.items() if values}

    def _count(self, replies: Replies[PublicReply]) -> dict[str, dict[str, int]]:
        """Count the payload: rows of the mean down, masked sums up, of each client."""
        ledger = self.session.exchange.ledger
        for node, request in self.requests.items():
            sent = [part.nbytes for part in request.targets if part is not None]
            ledger.count("down", "means", sum(sent))
            word = self.session.entries[node][RING_WORD] // 8
            came = [client for client in request.clients if client in self.contributors]
            ledger.count("up", "sums", len(came) * self.mean.size * word)
        return ledger.payload

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the last common mean and the ids of its nodes."""
        return {"mean": self.mean, "nodes": self.nodes} if self.made else {}

    # Flower's own round loop has no place for two exchanges a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        """Refuse: a round is two exchanges."""
        raise RuntimeError("a round is two exchanges: call start, not Flower's round loop")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> NoReturn:
        """Refuse: a round is two exchanges."""
        raise RuntimeError("a round is two exchanges: call start, not Flower's round loop")


def _without_number(reason: str) -> str:
    """Take off the number of the sum, which is not the round's."""
    return re.sub(r"^round \d+( is skipped)?: ", "", reason)
