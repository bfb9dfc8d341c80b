"""The blinded alignment without a trusted server: every step is signed or proved.

It shares stages and union with ``AlignmentServer`` and ``AlignmentClient``, and differs in what
clients believe. *Parties* are SuperNodes with a registered key (``identity.py``).

- A party signs each block of points that its clients send. A key-holder evaluates only blocks that
  are signed by a party to which the client is granted, no larger than declared, and one for each
  client: so a party can try out identities only with blocks of its own, which are counted.
- Key-holders follow from the epoch's seed, to which all parties committed: its first
  ``KEY_HOLDERS`` parties, or the next in the draw for absent ones, up to ``MOST_SKIPPED``.
- A key-holder signs the public key of its share and proves each client's answers (``proofs``). The
  server forwards answers and proofs as they are. Clients check key, place in the draw and proof of
  every key-holder, and add the answers up themselves.

A server that names any party absent has ``KEY_HOLDERS + MOST_SKIPPED`` parties to find
``KEY_HOLDERS`` accomplices among: of a tenth that collude, once in 120 runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from flower_graph.errors import AlignmentError, MalformedReplyError, RefusedError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import KEY_HOLDERS, NO_PART, AlignmentServer
from flower_graph.secure.channel import framed, pieces, rows_of
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.parties.identity import SIGNATURE_BYTES, TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.proofs import PROOF, Claim, failing, prove, public_of
from flower_graph.secure.parties.registry import Registry
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Entries, Message
from flower_graph.wire.fields import Block, Exact, Whole, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

MOST_SKIPPED = 2  # parties of the draw that may be absent
OF_BLOCK, OF_KEY = b"alignment block", b"alignment key"  # what a signature is for
EVALUATE, UNION = "evaluate-proved", "union-proved"


SIGNATURES = Block("align-signatures", "of each client's block", shape=f"c {SIGNATURE_BYTES}")


@dataclass
class SignedBlindReply(ids.BlindReply, up="train.align"):
    """Client to server: blinded identities, and for each client its party's signature."""

    signatures: Annotated[ids.Bytes2D, SIGNATURES]


@dataclass
class ProvedEvaluateRequest(Message, down="train.align", fixed={ALIGN_STAGE: EVALUATE}):
    """Server to key-holders: multiply these blocks by your share of the key, and prove it."""

    epoch: Annotated[int, ids.EPOCH]
    clients: Annotated[IntArray, ids.CLIENTS]
    parties: Annotated[IntArray, Exact("align-parties", "who signed each block", shape="c")]
    sizes: Annotated[IntArray, ids.SIZES]
    points: Annotated[ids.Bytes2D, ids.POINTS]
    signatures: Annotated[ids.Bytes2D, SIGNATURES]
    # Whom the server asks, as in ``EvaluateRequest``; it does not travel, a party has one key
    holders: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass
class ProvedEvaluateReply(Message, up="train.align"):
    """Key-holder to server: the points, multiplied, one proof for each block, its signed key."""

    epoch: Annotated[int, ids.EPOCH]
    points: Annotated[ids.Bytes2D, ids.POINTS]
    proofs: Annotated[ids.Bytes2D, Block("align-proofs", "of each block", shape=f"c {PROOF}")]
    key: Annotated[
        ids.Bytes2D, Block("align-key", "public key of the share", shape=f"1 {ids.POINT}")
    ]
    signature: Annotated[
        ids.Bytes2D, Block("align-key-signature", "of the key", shape=f"1 {SIGNATURE_BYTES}")
    ]


@dataclass
class ProvedUnionRequest(Message, down="train.union", fixed={ALIGN_STAGE: UNION}):
    """Server to client: each key-holder's answers and proofs, and the size of the table."""

    epoch: Annotated[int, ids.EPOCH]
    holders: Annotated[IntArray, Exact("align-holders", "parties that hold keys", shape="h")]
    keys: Annotated[ids.Bytes2D, Block("align-keys", "their public keys", shape=f"h {ids.POINT}")]
    signatures: Annotated[
        ids.Bytes2D, Block("align-key-signatures", "theirs of these", shape=f"h {SIGNATURE_BYTES}")
    ]
    clients: Annotated[IntArray, ids.CLIENTS]
    sizes: Annotated[IntArray, ids.SIZES]
    points: Annotated[
        ids.Bytes2D,
        Block(
            "align-points", "their points times each key-holder's share", shape=f"h n {ids.POINT}"
        ),
    ]
    proofs: Annotated[ids.Bytes2D, Block("align-proofs", "of each", shape=f"h c {PROOF}")]
    cells: Annotated[int, Whole("align-cells", "cells of the table")]


def drawn(seed: bytes, parties: Iterable[int]) -> list[int]:
    """Order parties by the epoch's seed: the first ones hold keys."""

    def rank(party: int) -> bytes:
        return hashlib.sha256(framed(b"flower-graph/key-holder", seed, b"%d" % party)).digest()

    return sorted(parties, key=rank)


def block_parts(run_id: bytes, epoch: int, client: int, block: ids.Bytes2D) -> tuple[bytes, ...]:
    """Return the parts of a client's block that a party signs."""
    return run_id, b"%d" % epoch, b"%d" % client, hashlib.sha256(block.tobytes()).digest()


def proof_context(run_id: bytes, epoch: int, holder: int, client: int) -> bytes:
    """Encode the key-holder and the client of a proof."""
    return framed(run_id, b"%d" % epoch, b"%d" % holder, b"%d" % client)


class VerifiedAlignmentClient(AlignmentClient):
    """Aligns the identities of one party's clients, and checks every answer of others.

    Parameters
    ----------
    run_id : bytes
    identities : mapping of int to iterable
        As in ``AlignmentClient``.
    trust : TrustSettings
        The party's key, the registry, the most points of a client that it evaluates, its journal.
    """

    stages = (
        (ids.BlindRequest, "blind"),
        (ProvedEvaluateRequest, "prove"),
        (ProvedUnionRequest, "finish_verified"),
        (ids.PublishedTokens, "publish"),
    )

    def __init__(
        self,
        run_id: bytes,
        identities: Mapping[int, Iterable[object]],
        trust: TrustSettings,
    ) -> None:
        super().__init__(run_id, identities)
        self._trust, self._identity = trust, trust.identity
        self._draw: list[int] = []
        self._declared: dict[int, int] = {}

    def begin(self, seed: bytes, parties: Iterable[int], declared: Mapping[int, int]) -> None:
        """Take the epoch's seed, its parties, and the points that each client has declared."""
        self._draw, self._declared = drawn(seed, parties), dict(declared)

    def blind(self, request: ids.BlindRequest) -> SignedBlindReply:
        """Blind the clients' identities, once an epoch, and sign each block."""
        made, clients = super().blind(request), request.clients.tolist()
        for client, block in zip(clients, split_rows(made.points, made.sizes), strict=True):
            self._blocks.setdefault(client, block)  # a repeated request gets the same block
        blocks = [self._blocks[client] for client in clients]
        signatures = [
            self._identity.sign(OF_BLOCK, *block_parts(self._run_id, request.epoch, *pair))
            for pair in zip(clients, blocks, strict=True)
        ]
        points = np.concatenate(blocks)
        signed = rows_of(signatures, -1, SIGNATURE_BYTES)
        return SignedBlindReply(request.epoch, request.clients, made.sizes, points, signed)

    def prove(self, request: ProvedEvaluateRequest) -> ProvedEvaluateReply:
        """Multiply signed blocks by this party's share of the key, and prove each."""
        self._enter(request.epoch)
        own, epoch = self._identity.party, request.epoch
        if own not in self._allowed():
            raise RefusedError(f"party {own} is not among the key-holders that the seed draws")
        blocks = split_rows(request.points, request.sizes)
        clients, parties = request.clients.tolist(), request.parties.tolist()
        for client, party, block, signature in zip(
            clients, parties, blocks, pieces(request.signatures), strict=True
        ):
            self._check_block(epoch, client, party, block, signature)
        # On the disk before answers leave: a server that rolls our state back gets no second block.
        Journal(self._trust.journal).serve(epoch, clients, self._trust.runs, self._trust.run)
        key = ids.key_share(list(self._secrets.values()), epoch)
        public, answers, proofs = public_of(key), [], []
        for client, block in zip(clients, blocks, strict=True):
            answers.append(ids.multiply(block, key))
            context = proof_context(self._run_id, epoch, own, client)
            proofs.append(prove(key, public, block, answers[-1], context))
        signed = self._identity.sign(OF_KEY, self._run_id, b"%d" % epoch, public)
        return ProvedEvaluateReply(
            epoch,
            np.concatenate(answers),
            rows_of(proofs, -1, PROOF),
            rows_of([public], 1, ids.POINT),
            rows_of([signed], 1, SIGNATURE_BYTES),
        )

    def finish_verified(self, request: ProvedUnionRequest) -> None:
        """Check every key-holder's key and proofs, and add their answers up."""
        self._known(request.clients)
        self._enter(request.epoch)
        if request.clients.size:
            self._check_holders(request)
        clients, totals = request.clients.tolist(), []
        blocks = [split_rows(points, request.sizes) for points in request.points]
        for number, client in enumerate(clients):
            answers, block = [local[number] for local in blocks], self._blocks.get(client)
            claims = self._claims(request, number, answers)
            if wrong := list(claims) if block is None else failing(block, claims):
                why = f"the answers of key-holder {wrong[0]} are not proved to be made with its key"
                raise RefusedError(f"client {client}: {why}")
            total = ids.add(answers)
            if total is None:
                raise RefusedError(f"client {client}: the answers do not add up to points")
            totals.append(total)
        points = np.concatenate([np.zeros((0, ids.POINT), np.uint8), *totals])
        sizes = request.sizes
        super().finish(
            ids.UnionRequest(request.epoch, request.clients, sizes, points, request.cells)
        )

    def _claims(
        self, request: ProvedUnionRequest, number: int, answers: list[ids.Bytes2D]
    ) -> dict[int, Claim]:
        client, epoch = int(request.clients[number]), request.epoch
        return {
            holder: Claim(key, local, proof, proof_context(self._run_id, epoch, holder, client))
            for key, local, proof, holder in zip(
                pieces(request.keys),
                answers,
                pieces(request.proofs[:, number]),
                request.holders.tolist(),
                strict=True,
            )
        }

    def _allowed(self) -> list[int]:
        if not self._draw:
            raise RefusedError("this alignment has no seed yet that key-holders are drawn by")
        return self._draw[: KEY_HOLDERS + MOST_SKIPPED]

    def _check_block(
        self, epoch: int, client: int, party: int, block: ids.Bytes2D, signature: bytes
    ) -> None:
        """Refuse a block without its party's signature, a too large block, and a second block."""
        registry, parts = self._identity.registry, block_parts(self._run_id, epoch, client, block)
        registered = registry.parties.get(party)
        if party not in self._draw or registered is None or not registered.may_host([client]):
            raise RefusedError(f"party {party} may not speak for client {client}")
        if not registry.verify(party, signature, OF_BLOCK, *parts):
            raise RefusedError(f"the block of client {client} is not signed by party {party}")
        most = min(self._trust.block_cap, self._declared.get(client, 0))
        if not 0 < len(block) <= most:
            raise RefusedError(f"client {client}: {len(block)} points, it may have {most}")

    def _check_holders(self, request: ProvedUnionRequest) -> None:
        holders, allowed = request.holders.tolist(), self._allowed()
        if len(set(holders)) != len(holders) or len(holders) < KEY_HOLDERS:
            raise RefusedError(f"key-holders {holders!s:.60}: at least {KEY_HOLDERS} must differ")
        if strange := [holder for holder in holders if holder not in allowed]:
            raise RefusedError(f"key-holder {strange[0]} is not among {allowed} of the draw")
        for holder, key, signature in zip(
            holders, pieces(request.keys), pieces(request.signatures), strict=True
        ):
            parts = self._run_id, b"%d" % request.epoch, key
            if not self._identity.registry.verify(holder, signature, OF_KEY, *parts):
                raise RefusedError(f"the key of key-holder {holder} is not signed by it")


MOST_FAILED = 2  # unions in a row that too few took part in


class VerifiedAlignmentServer(AlignmentServer):
    """Leads the verifiable alignment: it forwards key-holders' answers, and adds nothing up."""

    def __init__(
        self, run_id: bytes, registry: Registry, least_holders: int = LEAST_HOLDERS
    ) -> None:
        super().__init__(least_holders)
        self._run_id, self._registry = run_id, registry
        self._draw: list[int] = []
        self._failed = 0  # unions in a row
        self._party: dict[int, int] = {}  # of every client
        self._signatures: dict[int, bytes] = {}
        # By client and key-holder: what it claims, and the signature of its key
        self._proved: dict[int, dict[int, tuple[Claim, bytes]]] = {}

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
            holders = sorted(self._proved[clients[0]]) if clients else []
            rows = [[self._proved[client][holder] for client in clients] for holder in holders]
            points = [np.concatenate([claim.outputs for claim, _ in row]) for row in rows]
            proofs = [claim.proof for row in rows for claim, _ in row]
            result[node] = ProvedUnionRequest(
                request.epoch,
                np.array(holders, np.int64),
                rows_of([row[0][0].public for row in rows], -1, ids.POINT),
                rows_of([row[0][1] for row in rows], -1, SIGNATURE_BYTES),
                request.clients,
                request.sizes,
                np.array(points, np.uint8).reshape(len(holders), sum(request.sizes), ids.POINT),
                rows_of(proofs, len(holders), len(clients), PROOF),
                request.cells,
            )
        return result

    # Of an alignment a client gives its table once: two sums of which one lacks it would show what
    # it holds. So after a union that gave nothing all are aligned anew.

    def take_union(self, total: ids.Words, contributors: Iterable[int]) -> bool:
        """Read the sum of the tables; if it cannot be read, align all anew for a larger one."""
        read, doublings = super().take_union(total, contributors), self._doublings
        if read:
            self._failed = 0
        elif self._evaluated:
            self._restart()
            self._doublings = doublings
        return read

    def union_failed(self, why: str, absent: Collection[int] = ()) -> None:
        self._failed += 1
        if not absent or self._failed > MOST_FAILED:
            raise AlignmentError(f"no clients could be aligned: {why}")
        for client in absent:
            self._leave_out(client, NO_PART)
            self._sizes.pop(client, None)
        self._restart()

    def _take(self, request: Any, config: Entries) -> None:
        if isinstance(request, ids.BlindRequest):
            expected = {"epoch": request.epoch, "clients": request.clients}
            reply = SignedBlindReply.from_config(config, **expected)
            local = zip(reply.clients.tolist(), pieces(reply.signatures), strict=True)
            self._signatures |= local
            self._take_blind(reply)
            return
        n, c = len(request.points), request.clients.size
        answer = ProvedEvaluateReply.from_config(config, epoch=request.epoch, n=n, c=c)
        (holder,) = request.holders.tolist()
        party, key, signature = self._party[holder], answer.key.tobytes(), answer.signature
        parts = self._run_id, b"%d" % request.epoch, key
        if not self._registry.verify(party, signature.tobytes(), OF_KEY, *parts):
            raise MalformedReplyError(f"party {party}: the key of its share is not signed by it")
        blocks = split_rows(answer.points, request.sizes)
        proofs, clients = pieces(answer.proofs), request.clients.tolist()
        for client, block, proof in zip(clients, blocks, proofs, strict=True):
            context = proof_context(self._run_id, self.epoch, party, client)
            claim = Claim(key, block, proof, context)
            self._proved.setdefault(client, {})[party] = claim, signature.tobytes()
        self._take_answer(request.holders, answer.points)

    def _add_up(self) -> None:
        """Forward the key-holders' answers, or replace key-holders whose proofs fail."""
        asked, wrong = self._at_a_time(), set[int]()
        for client in asked:
            claims = {party: claim for party, (claim, _) in self._proved[client].items()}
            wrong.update(failing(self._blinded[client], claims))
        if wrong:
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
        if not self._draw:
            raise AlignmentError("there is no seed yet that key-holders are drawn by")
        used = {self._party[client] for client in (*self._holders, *self._dropped)}
        chosen: list[int] = []
        for party in self._draw[: KEY_HOLDERS + MOST_SKIPPED]:
            local = [c for c in self._blinded if self._party[c] == party]
            if party not in used and local and len(chosen) < count:
                chosen.append(local[0])
        if len(self._holders) + len(chosen) < KEY_HOLDERS:
            raise AlignmentError(f"of the draw's first parties {KEY_HOLDERS} must be there")
        return chosen
