"""The server's half of the alignment without a trusted server; see ``alignment.py``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.secure.align.blinded import POINT, BlindRequest, Bytes2D, Words
from flower_graph.secure.align.server import KEY_HOLDERS, NO_PART, AlignmentServer
from flower_graph.secure.channel import pieces, rows_of
from flower_graph.secure.node_config import Limits
from flower_graph.secure.parties.alignment import (
    MOST_SKIPPED,
    OF_KEY,
    ProvedEvaluateReply,
    ProvedEvaluateRequest,
    ProvedUnionRequest,
    SignedBlindReply,
    drawn,
    proof_context,
)
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.proofs import PROOF, Claim, failing
from flower_graph.secure.parties.registry import Registry
from flower_graph.wire.codec import Entries
from flower_graph.wire.fields import split_rows

MOST_FAILED = 2  # unions in a row that too few took part in


class VerifiedAlignmentServer(AlignmentServer):
    """Leads the verifiable alignment: it forwards key-holders' answers, and adds nothing up."""

    def __init__(self, run_id: bytes, registry: Registry, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._run_id, self._registry = run_id, registry
        self._draw: list[int] = []
        self._failed = 0  # unions in a row
        self._party: dict[int, int] = {}  # of every client
        self._signatures: dict[int, bytes] = {}
        # By client: each key-holder's signed key, answers and proof
        self._proved: dict[int, dict[int, tuple[bytes, bytes, Bytes2D, bytes]]] = {}

    def begin(self, seed: bytes, clients: Mapping[int, Sequence[int]], registry: Registry) -> None:
        """Store an epoch's seed, clients and registry; aligned clients align anew."""
        if self._sizes or self._evaluated or self._blinded:
            self._restart()  # other parties are to hold keys
        self._registry = registry
        self._failed, self._dropped, self._draw = 0, set(), drawn(seed, clients)
        self._party = {client: party for party, local in clients.items() for client in local}

    @property
    def enrolled(self) -> set[int]:
        return set(self._node)

    # Any: other requests than its parent's, with signatures and proofs
    def union_requests(self) -> dict[int, Any]:
        result: dict[int, object] = {}
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
                rows_of([one[1] for one in first], -1, SIGNATURE_BYTES),
                request.clients,
                request.sizes,
                np.concatenate(points).reshape(len(holders), -1, POINT)
                if rows
                else np.zeros((0, 0, POINT), np.uint8),
                rows_of(proofs, len(holders), len(rows), PROOF),
                request.cells,
            )
        return result

    # Of an alignment a client gives its table once: two sums of which one lacks it would show what
    # it holds. So after a union that gave nothing all are aligned anew.

    def take_union(self, total: Words, contributors: Iterable[int]) -> bool:
        """Read the sum of the tables; if it cannot be read, align all anew for a larger one."""
        read, doublings = super().take_union(total, contributors), self._doublings
        if read:
            self._failed = 0
        elif self._evaluated:
            self._restart()
            self._doublings = doublings
        return read

    def union_failed(self, why: str, absent: Collection[int] = ()) -> None:
        """Align all anew, without the absent clients."""
        self._failed += 1
        if not absent or self._failed > MOST_FAILED:
            raise AlignmentError(f"no clients could be aligned: {why}")
        for client in absent:
            self._leave_out(client, NO_PART)
            self._sizes.pop(client, None)
        self._restart()

    def _take(self, request: Any, config: Entries) -> None:
        if isinstance(request, BlindRequest):
            expected = {"epoch": request.epoch, "clients": request.clients}
            reply = SignedBlindReply.from_config(config, **expected)
            local = zip(reply.clients.tolist(), pieces(reply.signatures), strict=True)
            self._signatures |= local
            self._take_blind(reply)
            return
        n, c = len(request.points), request.clients.size
        answer = ProvedEvaluateReply.from_config(config, epoch=request.epoch, n=n, c=c)
        (holder,) = request.holders.tolist()
        party, key, signature = (
            self._party[holder],
            answer.key.tobytes(),
            answer.signature.tobytes(),
        )
        parts = self._run_id, b"%d" % request.epoch, key
        if not self._registry.verify(party, signature, OF_KEY, *parts):
            raise MalformedReplyError(f"party {party}: the key of its share is not signed by it")
        blocks = split_rows(answer.points, request.sizes)
        proofs, clients = pieces(answer.proofs), request.clients.tolist()
        for client, block, proof in zip(clients, blocks, proofs, strict=True):
            self._proved.setdefault(client, {})[party] = key, signature, block, proof
        self._answers[(holder,)] = answer.points
        if set(self._holders) == {one for asked in self._answers for one in asked}:
            self._end_stage()

    def _end_stage(self) -> None:
        """Forward the key-holders' answers, or replace key-holders whose proofs fail."""
        asked = self._at_a_time()
        if wrong := {one for client in asked for one in self._wrong_proofs(client)}:
            holders = [holder for holder in self._holders if self._party[holder] in wrong]
            for holder in holders:
                del self._answers[(holder,)]
            self._proved = {
                client: {party: one for party, one in answers.items() if party not in wrong}
                for client, answers in self._proved.items()
            }
            self._lose_holders(holders, "a wrong proof of its answers as key-holder")
            return
        for client in asked:
            self._evaluated[client] = self._blinded.pop(client)  # as many points as answers
        self._answers.clear()

    def _wrong_proofs(self, client: int) -> list[int]:
        block, claims = self._blinded[client], {}
        for party, (key, _, local, proof) in self._proved[client].items():
            context = proof_context(self._run_id, self.epoch, party, client)
            claims[party] = Claim(key, local, proof, context)
        return failing(block, claims)

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
                rows_of([self._signatures[client] for client in clients], -1, SIGNATURE_BYTES),
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
        used = {self._party[client] for client in (*self._holders, *self._dropped)}
        chosen: list[int] = []
        for party in self._draw[: KEY_HOLDERS + MOST_SKIPPED]:
            local = [c for c in self._blinded if self._party[c] == party]
            if party not in used and local and len(chosen) < count:
                chosen.append(local[0])
        if len(self._holders) + len(chosen) < KEY_HOLDERS:
            raise AlignmentError(
                f"too few of the draw's first parties are there: {KEY_HOLDERS} must hold keys"
            )
        return chosen
