"""The client's side of the secure sum under a server that may lie.

A ``PartyClient`` is a SuperNode: it takes part with the sum over all clients that it hosts. The
protocol inside is that of ``SumClient``, with one client, the party. Around it are checks that no
server can make a party skip: of its partners and their keys, of the parties that were ready and
that are on the list, and that enough partners have signed the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure import channel
from flower_graph.secure.channel import KEY_BYTES
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.parties.differences import set_of
from flower_graph.secure.parties.epoch import (
    MASKS,
    MOST_LISTS,
    Epoch,
    check_declared,
    check_list,
    check_partners,
    check_work,
    commit,
)
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.messages import (
    SEED_BYTES,
    BindReply,
    EpochReply,
    EpochRequest,
    ListReply,
    ListRequest,
    Ready,
    RevealReply,
    RevealRequest,
    Signatures,
    SignedKey,
)
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.state import read_state, write_state
from flower_graph.secure.sum.client import Received, SumClient
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MASK_KEY,
    NOTHING,
    SEED,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.storage.reading import reading
from flower_graph.wire.arrays import Config
from flower_graph.wire.fields import Bytes, Integers

ROUND_KEY, LIST = b"round key", b"list"  # what signatures are for
# What is saved: always, and what counts under one version of the registry only
KEPT = ("run_id", "clients", "points", "_private", "_public", "_seed", "_epochs", "_mark")
OF_REGISTRY = ("_keys", "_sent")


class SentRound(NamedTuple):
    """What a party sent for a round, and the list that it signed of it."""

    ready: MASKS  # by index in the epoch, when we sent
    purpose: str
    state: bytes
    terms: bytes  # what the sum is of, hashed
    listed: MASKS | None = None


class PartyClient:
    """One SuperNode with a key of its own in sums whose server it does not trust."""

    def __init__(
        self,
        run_id: bytes,
        clients: Sequence[int],
        trust: TrustSettings,
        points: Mapping[int, int] | None = None,
    ) -> None:
        # points: that each client will bring to an alignment, if there is to be one
        self.run_id, self.trust = run_id, trust
        self.clients, self.points = sorted(int(client) for client in clients), dict(points or {})
        if self.points and sorted(self.points) != self.clients:
            raise ValueError("points are declared for some of the clients: for all, or for none")
        self._private, self._public = channel.new_key()
        self._seed = os.urandom(SEED_BYTES)
        self._mark = ""  # of the last sum, as the journal has it
        self._epochs = -1  # the newest epoch's number
        self._shown: RevealRequest | None = None  # the list that the seed was shown for
        self.epoch: Epoch | None = None
        self._keys: Bytes = np.zeros((0, KEY_BYTES), np.uint8)  # [k, 32] of the partners
        self.sums: SumClient | None = None
        self._sent: dict[int, SentRound] = {}
        self._received: tuple[Received, Ready, Ring | None] | None = None  # of the sum to be masked

    @property
    def party(self) -> int:
        return self.trust.identity.party

    @property
    def has_sent(self) -> bool:
        return bool(self._mark)

    def answer(self, action: str, config: Config) -> Config:
        """Answer an exchange in which no vector travels."""
        if action == "sum_bind":
            return self.bind().to_config()
        if action == "sum_reveal":
            return self.reveal(RevealRequest.from_config(config)).to_config()
        if action == "sum_epoch":
            return self.begin(EpochRequest.from_config(config)).to_config()
        if action == "sum_list":
            return self.sign_list(ListRequest.from_config(config)).to_config()
        entries: Config = {}
        if "unmask-run" in config:
            signed = Signatures.from_config(config)
            entries |= self.unmask(UnmaskRequest.from_config(config), signed).to_config()
        if "prepare-run" in config:
            reply, key = self.prepare(PrepareRequest.from_config(config))
            entries |= reply.to_config() | key.to_config()
        return entries

    def bind(self) -> BindReply:
        """State the clients hosted here, and commit to a fresh part of the graph's seed."""
        if self._shown is not None:  # that seed is known: it may not serve a second list
            self._seed, self._shown = os.urandom(SEED_BYTES), None
        commitment = commit(self.run_id, self.party, self._seed)
        statement = BindReply(
            self.run_id,
            self.party,
            np.array(self.clients, np.int64),
            np.frombuffer(self._public, np.uint8),
            np.frombuffer(commitment, np.uint8),
            np.zeros(0, np.uint8),
            np.array(sorted(self.points.items()), np.int64).reshape(-1, 2),
        )
        return statement.signed(self.trust.identity, self.trust.block_cap)

    def reveal(self, request: RevealRequest) -> RevealReply:
        """Show the own part of the graph's seed, when all commitments are there."""
        self._check_run(request.run_id)
        if self._shown is not None or request.number <= self._epochs:
            raise RefusedError("the seed of the graph was shown for another list: bind anew")
        own = self.party, commit(self.run_id, self.party, self._seed)
        check_list(request.parties, request.commitments, own, request.minimum, self.trust.minimum)
        if request.corrupt < self.trust.corrupt or not 0 <= request.dropout < 0.5:
            shares = f"corrupt is {request.corrupt} and dropout {request.dropout}"
            raise RefusedError(f"{shares}; here at least {self.trust.corrupt}, and below 0.5")
        if request.differ_by < self.trust.differ_by:
            raise RefusedError(
                f"sums differ by {request.differ_by}, {DIFFER_BY} is {self.trust.differ_by}"
            )
        check_declared(request.declared, self.clients, self.points, self.trust.block_cap)
        active = self.trust.registry.active
        if strangers := sorted(set(request.parties.tolist()) - set(active)):
            raise RefusedError(f"party {strangers[0]} is revoked or not in the registry")
        registered = self.trust.registry.parties
        granted = {one: registered[one].clients for one in request.parties.tolist()}
        check_work(request.declared, granted, self.trust.most_points)
        # On the disk before the seed leaves: neither another epoch's run nor a state that is put
        # back gives more draws.
        Journal(self.trust.journal).answer_list(MOST_LISTS, self.trust.runs, self.trust.run)
        self._shown = request
        return RevealReply(self.run_id, request.number, np.frombuffer(self._seed, np.uint8))

    def begin(self, request: EpochRequest) -> EpochReply:
        """Begin an epoch: check all seeds, and the partners that follow from them."""
        self._check_run(request.run_id)
        shown = self._shown
        if shown is None or shown.number <= self._epochs:
            raise RefusedError("no list of commitments is open")
        epoch = Epoch.agreed(shown, self.trust.registry.digest, request.seeds)
        check_partners(epoch, self.party, shown, request, self.trust.registry)
        self.epoch, self._keys, self._epochs = epoch, request.channel_keys, epoch.number
        self.sums = SumClient(epoch.id, [self.party], (self._private, self._public))
        self._sent = {}
        self._seed, self._shown = os.urandom(SEED_BYTES), None  # all know the old one
        return EpochReply(self.run_id, np.frombuffer(epoch.digest, np.uint8))

    def prepare(self, request: PrepareRequest) -> tuple[PrepareReply, SignedKey]:
        """Make the keys of a round, for the epoch's partners and threshold."""
        epoch, sums = self._begun()
        wanted = epoch.parties[epoch.partners_of(epoch.index(self.party))]
        if request.clients.tolist() != [self.party] or not np.array_equal(
            request.partners, wanted[None]
        ):
            raise RefusedError("the partners are not those of the epoch's graph")
        if request.threshold != epoch.threshold or request.minimum != epoch.minimum:
            raise RefusedError(
                f"threshold {request.threshold} and minimum {request.minimum}, the epoch has others"
            )
        if not np.array_equal(request.channel_keys, self._keys):
            raise RefusedError("a partner's channel key is not the one that it signed")
        reply = sums.prepare(request)
        for older in sorted(self._sent)[: 1 - KEPT_ROUNDS]:
            del self._sent[older]
        key = epoch.key_parts(reply.server_round, reply.round_keys.tobytes())
        signature = self.trust.identity.sign(ROUND_KEY, *key)
        return reply, SignedKey(np.frombuffer(signature, np.uint8))

    def receive(self, request: MaskRequest, ready: Ready, ring: Ring | None) -> None:
        """Check a server's statements about a sum, all of them before there is a vector.

        If a server tells one party other terms than the rest, the party's refusal must not depend
        on its vector. So the vector is made only after this call.
        """
        # ring: of the vector; None where words are no numbers
        epoch, sums = self._begun()
        index = epoch.index(self.party)
        epoch.check_present(ready.ready, "are ready")
        row = epoch.partners_of(index)
        if not ready.ready[index] or not np.array_equal(request.live, ready.ready[row]):
            raise RefusedError("the partners who are ready are not those of the list")
        if ready.signatures.shape[0] != request.round_keys.shape[0]:
            raise RefusedError("a partner's round key is not signed")
        if ring is not None and ring.limit != epoch.limit:
            raise RefusedError(
                f"limit is {ring.limit}, and all have agreed on {epoch.limit} for this epoch"
            )
        came = sums.receive(request, [self.party])
        # A packet that opens shows that the key beside it is the partner's. One that does not may
        # be the partner's fault or the server's: the partner's signature tells.
        live = epoch.parties[row[ready.ready[row]]].tolist()
        for partner in {dealer for _, dealer in came.refused.tolist()}:
            at = live.index(partner)
            signed = epoch.key_parts(request.server_round, request.round_keys[at].tobytes())
            if not self._verify(partner, ready.signatures[at], ROUND_KEY, signed):
                raise RefusedError(f"the round key of party {partner} is not the one it signed")
        self._received = came, ready, ring

    def mask(self, total: RingArray, terms: SumTerms, state: bytes) -> MaskedReply:
        # state: what the sum was made of, as digest_of names it: no sum of others has it
        epoch, sums = self._begun()
        assert self._received is not None  # ``receive`` comes before a vector is made
        (came, ready, ring), self._received = self._received, None
        assert terms.ring == ring
        request = came.request
        who = set_of(epoch.parties[ready.ready].tolist())
        Journal(self.trust.journal).check_state(terms.purpose, state, who)
        terms.check_guard(max(len(epoch.points), epoch.minimum))
        reply = sums.mask_received(came, total, terms)
        # Who repeats a round with one fewer learns that one: on the disk before it leaves.
        self._mark = Journal(self.trust.journal).continue_run(
            request.server_round, self._mark, self.trust.runs, self.trust.run
        )
        meant = terms.digest(request.length, request.word, epoch.threshold, epoch.minimum)
        self._sent[request.server_round] = SentRound(ready.ready, terms.purpose, state, meant)
        return reply

    def sign_list(self, request: ListRequest) -> ListReply:
        """Sign the parties of a sum, if the list is sound; one list a round."""
        epoch, _ = self._begun()
        number, listed = request.server_round, request.listed
        sent = self._sent.get(number)
        if request.run_id != epoch.id or sent is None:
            raise RefusedError(f"nothing was sent for round {number} of this epoch")
        if sent.listed is not None:
            raise RefusedError(f"a list of round {number} is signed already")
        epoch.check_present(listed, "sent their vectors")
        if (listed & ~sent.ready).any():
            raise RefusedError("somebody is on the list that was not ready")
        if not listed[epoch.index(self.party)]:
            raise RefusedError(
                f"our vector was sent for round {number}, but we are not on the list"
            )
        # If the server rolls our state back and gets us to sign two different lists, it learns
        # both secrets of any party that is on only one of them. From two sums it learns their
        # difference. The journal prevents both.
        who = set_of(epoch.parties[listed].tolist())
        journal, run = Journal(self.trust.journal), (LIST, self.trust.run)
        journal.enter(number, sent.purpose, sent.state, who, epoch.differ_by, *run)
        self._sent[number] = sent._replace(listed=listed)
        parts = epoch.signed_parts(number, sent.ready, listed, sent.terms)
        signature = self.trust.identity.sign(LIST, *parts)
        return ListReply(epoch.id, number, np.frombuffer(signature, np.uint8))

    def unmask(self, request: UnmaskRequest, signed: Signatures) -> UnmaskReply:
        """Reveal shares by the signed list, if enough partners signed the very same."""
        epoch, sums = self._begun()
        number, sent = request.server_round, self._sent.get(request.server_round)
        if request.run_id != epoch.id or sent is None or (listed := sent.listed) is None:
            raise RefusedError(f"no list of round {number} was signed here: nothing is revealed")
        row = epoch.partners_of(epoch.index(self.party))
        kinds = np.where(listed[row], SEED, np.where(sent.ready[row], MASK_KEY, NOTHING))
        same = (request.kinds == kinds) | (request.kinds == NOTHING)
        if request.kinds.shape != (1, row.size) or not same.all():
            raise RefusedError("shares are asked for that do not follow from the signed list")
        if request.contributors != listed.sum():
            raise RefusedError(f"{request.contributors} contributors, the list has {listed.sum()}")
        parts = epoch.signed_parts(number, sent.ready, listed, sent.terms)
        self._check_signed(epoch, row, listed, parts, signed)
        reply = sums.unmask(request)
        del self._sent[number]
        return reply

    def to_bytes(self) -> bytes:
        epoch, shown, sums = self.epoch, self._shown, self.sums
        return write_state(
            {name: getattr(self, name) for name in (*KEPT, *OF_REGISTRY)}
            | {
                "registry": self.trust.registry.digest,
                "shown": None if shown is None else vars(shown),
                "epoch": None
                if epoch is None
                else {f.name: vars(epoch)[f.name] for f in fields(epoch)},
                "sums": None if sums is None else np.frombuffer(sums.to_bytes(), np.uint8),
            }
        )

    @classmethod
    def from_bytes(cls, state: bytes, trust: TrustSettings) -> PartyClient:
        with reading("the state of the secure sum", StateLostError):
            kept = read_state(state)
            party = cls(kept["run_id"], kept["clients"], trust)
            fresh = party._seed
            vars(party).update({name: kept[name] for name in KEPT})
            shown, epoch = kept["shown"], kept["epoch"]
            if kept["registry"] != trust.registry.digest:  # an epoch is of one version of it
                if shown is not None:  # that seed is known: it serves no other list
                    party._seed = fresh
                return party
            party._shown = None if shown is None else RevealRequest(**shown)
            if epoch is not None:
                party.epoch, party._keys = Epoch(**epoch), kept["_keys"]
                party.sums = SumClient.from_bytes(kept["sums"].tobytes())
            party._sent = {number: SentRound(*sent) for number, sent in kept["_sent"].items()}
        return party

    def _check_signed(
        self,
        epoch: Epoch,
        row: Integers,
        listed: MASKS,
        parts: tuple[bytes, ...],
        signed: Signatures,
    ) -> None:
        """Refuse unless as many listed partners as the threshold signed our own list."""
        columns, good = signed.columns.tolist(), 0
        if len(set(columns)) != len(columns) or not all(0 <= each < row.size for each in columns):
            raise RefusedError("a signature is there twice, or is not a partner's")
        for column, signature in zip(columns, signed.signatures, strict=True):
            index = row[column]
            party = int(epoch.parties[index])
            if listed[index] and self._verify(party, signature, LIST, parts):
                good += 1
            if good >= epoch.threshold:
                return
        raise RefusedError(
            f"{good} partners signed it, {epoch.threshold} must: others saw something else"
        )

    def _verify(
        self, party: int, signature: Bytes, purpose: bytes, parts: tuple[bytes, ...]
    ) -> bool:
        return self.trust.registry.verify(party, signature.tobytes(), purpose, *parts)

    def _begun(self) -> tuple[Epoch, SumClient]:
        if self.epoch is None or self.sums is None:
            raise StateLostError("no epoch has begun under this version of the registry: bind anew")
        return self.epoch, self.sums

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise RefusedError(f"run {run_id.hex()}, expected {self.run_id.hex()}")
