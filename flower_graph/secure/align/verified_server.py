"""The server's half of the alignment in which the server is not trusted; see ``verified``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.messages.codec import Entries
from flower_graph.messages.fields import split_rows
from flower_graph.secure.align.blinded import MOST_POINTS, POINT, BlindRequest, Bytes2D
from flower_graph.secure.align.proofs import PROOF, verify
from flower_graph.secure.align.server import KEY_HOLDERS, AlignmentServer
from flower_graph.secure.align.verified import (
    MOST_SKIPPED,
    OF_KEY,
    SIGNATURE,
    ProvedEvaluateReply,
    ProvedEvaluateRequest,
    ProvedUnionRequest,
    Registered,
    SignedBlindReply,
    drawn,
    proof_context,
)
from flower_graph.secure.channel import pieces, rows_of


class VerifiedAlignmentServer(AlignmentServer):
    """Leads the verifiable alignment: it forwards what key-holders answer, and adds nothing up."""

    def __init__(self, run_id: bytes, registry: Registered, most_points: int = MOST_POINTS) -> None:
        super().__init__(most_points)
        self._run_id, self._registry = run_id, registry
        self._draw: list[int] = []
        self._party: dict[int, int] = {}  # of every client
        self._signatures: dict[int, bytes] = {}
        # By client: each key-holder's signed key, answers and proof
        self._proved: dict[int, dict[int, tuple[bytes, bytes, Bytes2D, bytes]]] = {}

    def begin(self, seed: bytes, clients: Mapping[int, Sequence[int]]) -> None:
        """Take the epoch's seed, and the clients of each party."""
        self._draw = drawn(seed, clients)
        self._party = {client: party for party, local in clients.items() for client in local}

    def union_requests(self) -> dict[int, Any]:
        """Return for every node all key-holders' answers to its clients."""
        result: dict[int, Any] = {}
        for node, request in super().union_requests().items():
            clients = request.clients.tolist()
            rows = [self._proved[client] for client in clients]
            holders = sorted(rows[0]) if rows else []
            first = [rows[0][holder] for holder in holders]
            points = [np.concatenate([row[holder][2] for row in rows]) for holder in holders]
            proofs = [row[holder][3] for holder in holders for row in rows]
            result[node] = ProvedUnionRequest(
                request.epoch,
                np.array(holders, np.int64),
                rows_of([one[0] for one in first], -1, POINT),
                rows_of([one[1] for one in first], -1, SIGNATURE),
                request.clients,
                request.sizes,
                np.concatenate(points).reshape(len(holders), -1, POINT)
                if rows
                else np.zeros((0, 0, POINT), np.uint8),
                rows_of(proofs, len(holders), len(rows), PROOF),
                request.cells,
            )
        return result

    def _take(self, request: Any, config: Entries) -> None:
        if isinstance(request, BlindRequest):
            known = {"epoch": request.epoch, "clients": request.clients}
            reply = SignedBlindReply.from_config(config, **known)
            local = zip(reply.clients.tolist(), pieces(reply.signatures), strict=True)
            self._signatures |= local
            self._take_blind(reply)
            return
        n, c = len(request.points), request.clients.size
        answer = ProvedEvaluateReply.from_config(config, epoch=request.epoch, n=n, c=c)
        (holder,) = request.holders.tolist()
        self._check_answer(request, self._party[holder], answer)
        blocks = split_rows(answer.points, request.sizes)
        for client, block, proof in zip(
            request.clients.tolist(), blocks, pieces(answer.proofs), strict=True
        ):
            found = answer.key.tobytes(), answer.signature.tobytes(), block, proof
            self._proved.setdefault(client, {})[self._party[holder]] = found
        self._answers[(holder,)] = answer.points
        if set(self._holders) == {one for asked in self._answers for one in asked}:
            for client in self._at_a_time():
                self._evaluated[client] = self._blinded.pop(client)  # as many points as answers
            self._answers.clear()

    def _check_answer(self, request: Any, party: int, answer: ProvedEvaluateReply) -> None:
        """Refuse what clients would refuse: a key-holder that lies is then replaced."""
        key, signature = answer.key.tobytes(), answer.signature.tobytes()
        if not self._registry.verify(
            party, signature, OF_KEY, self._run_id, b"%d" % request.epoch, key
        ):
            raise MalformedReplyError(f"party {party}: the key of its share is not signed by it")
        blocks = zip(
            request.clients.tolist(),
            pieces(answer.proofs),
            split_rows(request.points, request.sizes),
            split_rows(answer.points, request.sizes),
            strict=True,
        )
        for client, proof, block, local in blocks:
            context = proof_context(self._run_id, request.epoch, party, client)
            if not verify(proof, key, block, local, context):
                raise MalformedReplyError(f"party {party}: a wrong proof for client {client}")

    def _evaluate_requests(self) -> dict[int, Any]:
        plain, clients = super()._evaluate_requests(), self._at_a_time()
        blocks = [self._blinded[client] for client in clients]
        return {
            node: ProvedEvaluateRequest(
                request.epoch,
                np.array(clients, np.int64),
                np.array([self._party[client] for client in clients], np.int64),
                np.array([len(block) for block in blocks], np.int64),
                request.points,
                rows_of([self._signatures[client] for client in clients], -1, SIGNATURE),
                request.holders,
            )
            for node, request in plain.items()
        }

    def _restart(self) -> None:
        super()._restart()
        self._proved.clear()
        self._signatures.clear()

    def _choose(self, count: int) -> list[int]:
        """Take the next parties of the draw, each by its first client that is there."""
        if not self._draw:
            raise AlignmentError("there is no seed yet that key-holders are drawn by")
        known = {self._party[client] for client in (*self._holders, *self._dropped)}
        chosen: list[int] = []
        for party in self._draw[: KEY_HOLDERS + MOST_SKIPPED]:
            local = [c for c in self._blinded if self._party[c] == party]
            if party not in known and local and len(chosen) < count:
                chosen.append(local[0])
        if len(self._holders) + len(chosen) < KEY_HOLDERS:
            raise AlignmentError(
                f"{len(self._holders) + len(chosen)} of the first {KEY_HOLDERS + MOST_SKIPPED} "
                f"parties of the draw can hold keys, {KEY_HOLDERS} must"
            )
        return chosen
