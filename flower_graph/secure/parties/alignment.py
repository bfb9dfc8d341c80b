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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    CLIENTS,
    EPOCH,
    POINT,
    POINTS,
    SIZES,
    BlindReply,
    BlindRequest,
    Bytes2D,
    PublishedTokens,
    UnionRequest,
    add,
)
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.server import KEY_HOLDERS
from flower_graph.secure.channel import framed, pieces, rows_of
from flower_graph.secure.parties.identity import SIGNATURE_BYTES, TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.proofs import PROOF, Claim, failing, prove, public_of
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Block, Exact, Whole, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

MOST_SKIPPED = 2  # parties of the draw that may be absent
OF_BLOCK, OF_KEY = b"alignment block", b"alignment key"  # what a signature is for
EVALUATE, UNION = "evaluate-proved", "union-proved"


SIGNATURES = Block("align-signatures", "of each client's block", shape=f"c {SIGNATURE_BYTES}")


@dataclass
class SignedBlindReply(BlindReply, up="train.align"):
    """Client to server: blinded identities, and for each client its party's signature."""

    signatures: Annotated[Bytes2D, SIGNATURES]


@dataclass
class ProvedEvaluateRequest(Message, down="train.align", fixed={ALIGN_STAGE: EVALUATE}):
    """Server to key-holders: multiply these blocks by your share of the key, and prove it."""

    epoch: Annotated[int, EPOCH]
    clients: Annotated[IntArray, CLIENTS]
    parties: Annotated[IntArray, Exact("align-parties", "who signed each block", shape="c")]
    sizes: Annotated[IntArray, SIZES]
    points: Annotated[Bytes2D, POINTS]
    signatures: Annotated[Bytes2D, SIGNATURES]
    # Whom the server asks, as in ``EvaluateRequest``; it does not travel, a party has one key
    holders: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass
class ProvedEvaluateReply(Message, up="train.align"):
    """Key-holder to server: the points, multiplied, one proof for each block, its signed key."""

    epoch: Annotated[int, EPOCH]
    points: Annotated[Bytes2D, POINTS]
    proofs: Annotated[Bytes2D, Block("align-proofs", "of each block", shape=f"c {PROOF}")]
    key: Annotated[Bytes2D, Block("align-key", "public key of the share", shape=f"1 {POINT}")]
    signature: Annotated[
        Bytes2D, Block("align-key-signature", "of the key", shape=f"1 {SIGNATURE_BYTES}")
    ]


@dataclass
class ProvedUnionRequest(Message, down="train.union", fixed={ALIGN_STAGE: UNION}):
    """Server to client: each key-holder's answers and proofs, and the size of the table."""

    epoch: Annotated[int, EPOCH]
    holders: Annotated[IntArray, Exact("align-holders", "parties that hold keys", shape="h")]
    keys: Annotated[Bytes2D, Block("align-keys", "their public keys", shape=f"h {POINT}")]
    signatures: Annotated[
        Bytes2D, Block("align-key-signatures", "theirs of these", shape=f"h {SIGNATURE_BYTES}")
    ]
    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    points: Annotated[
        Bytes2D,
        Block("align-points", "their points times each key-holder's share", shape=f"h n {POINT}"),
    ]
    proofs: Annotated[Bytes2D, Block("align-proofs", "of each", shape=f"h c {PROOF}")]
    cells: Annotated[int, Whole("align-cells", "cells of the table")]


def drawn(seed: bytes, parties: Iterable[int]) -> list[int]:
    """Order parties by the epoch's seed: the first ones hold keys."""

    def rank(party: int) -> bytes:
        return hashlib.sha256(framed(b"flower-graph/key-holder", seed, b"%d" % party)).digest()

    return sorted(parties, key=rank)


def block_parts(run_id: bytes, epoch: int, client: int, block: Bytes2D) -> tuple[bytes, ...]:
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
        (BlindRequest, "blind"),
        (ProvedEvaluateRequest, "prove"),
        (ProvedUnionRequest, "finish_verified"),
        (PublishedTokens, "publish"),
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
        self._blocks: dict[int, Bytes2D] = {}  # that were sent

    def begin(self, seed: bytes, parties: Iterable[int], declared: Mapping[int, int]) -> None:
        """Take the epoch's seed, its parties, and the points that each client has declared."""
        self._draw, self._declared = drawn(seed, parties), dict(declared)

    def blind(self, request: BlindRequest) -> SignedBlindReply:
        """Blind the clients' identities, once an epoch, and sign each block."""
        self._known(request.clients)
        self._enter(request.epoch)
        clients = request.clients.tolist()
        fresh = [client for client in clients if client not in self._blocks]
        if fresh:
            made = super().blind(BlindRequest(request.epoch, np.array(fresh, np.int64)))
            self._blocks |= zip(fresh, split_rows(made.points, made.sizes), strict=True)
        blocks = [self._blocks[client] for client in clients]
        signatures = [
            self._identity.sign(OF_BLOCK, *block_parts(self._run_id, request.epoch, *pair))
            for pair in zip(clients, blocks, strict=True)
        ]
        return SignedBlindReply(
            request.epoch,
            request.clients,
            np.array([len(block) for block in blocks], np.int64),
            np.concatenate(blocks),
            rows_of(signatures, -1, SIGNATURE_BYTES),
        )

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
            rows_of([public], 1, POINT),
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
            total = add(answers)
            if total is None:
                raise RefusedError(f"client {client}: the answers do not add up to points")
            totals.append(total)
        points = np.concatenate([np.zeros((0, POINT), np.uint8), *totals])
        sizes = request.sizes
        super().finish(UnionRequest(request.epoch, request.clients, sizes, points, request.cells))

    def _claims(
        self, request: ProvedUnionRequest, number: int, answers: list[Bytes2D]
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

    def to_bytes(self) -> bytes:
        """Write everything that the next message needs; ``begin`` is called again."""
        base = super().to_bytes()
        blocks = {str(client): block for client, block in self._blocks.items()}
        return len(base).to_bytes(8, "big") + base + (bytes(save(blocks)) if blocks else b"")

    @classmethod
    def restored(
        cls,
        data: bytes,
        run_id: bytes,
        identities: Mapping[int, Iterable[object]],
        trust: TrustSettings,
    ) -> VerifiedAlignmentClient:
        host, cut = cls(run_id, identities, trust), 8 + int.from_bytes(data[:8], "big")
        host.restore(data[8:cut])
        blocks = load(data[cut:]) if data[cut:] else {}
        host._blocks = {int(client): block for client, block in blocks.items()}
        return host

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._blocks.clear()
        super()._enter(epoch)

    def _allowed(self) -> list[int]:
        if not self._draw:
            raise RefusedError("this alignment has no seed yet that key-holders are drawn by")
        return self._draw[: KEY_HOLDERS + MOST_SKIPPED]

    def _check_block(
        self, epoch: int, client: int, party: int, block: Bytes2D, signature: bytes
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
        """Refuse key-holders that the seed does not draw, and keys that they did not sign."""
        holders, allowed = request.holders.tolist(), self._allowed()
        if len(set(holders)) != len(holders) or len(holders) < KEY_HOLDERS:
            raise RefusedError(
                f"key-holders {holders!s:.60}: at least {KEY_HOLDERS} must be different"
            )
        if strange := [holder for holder in holders if holder not in allowed]:
            raise RefusedError(f"key-holder {strange[0]} is not among {allowed} of the draw")
        for holder, key, signature in zip(
            holders, pieces(request.keys), pieces(request.signatures), strict=True
        ):
            parts = self._run_id, b"%d" % request.epoch, key
            if not self._identity.registry.verify(holder, signature, OF_KEY, *parts):
                raise RefusedError(
                    f"the key in the name of key-holder {holder} is not signed by it"
                )
