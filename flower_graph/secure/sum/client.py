"""The client's side of the secure sum: a SuperNode with all clients that it hosts.

The SuperNode is the party: it has a channel key for the run and, for each round, a seed and a mask
key, both shared among its partners, other SuperNodes. To the sum of its clients' vectors it adds
the stream of its seed, and for each partner a stream on which the two agree and that one adds and
the other subtracts. Its clients need no masks against each other: only their sum leaves it. If all
clients of a sum are here, the sum has only its receiver to hide from, and it leaves unmasked;
clients fewer than the minimum send nothing.

Every key is used once. A round is prepared once, masked once and unmasked once; the second time is
refused, as is a round that is not newer than the last.

Under a server that may lie, the SuperNode has a key of its own (``TrustSettings``), and checks what
no server can make it skip: its partners and their keys are the epoch's, enough parties were ready
and are on the list, and enough partners have signed the very same list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure import channel
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, pieces, rows_of
from flower_graph.secure.node_config import LEAST_CLIENTS
from flower_graph.secure.parties.epoch import (
    LIST,
    MASKS,
    MOST_LISTS,
    ROUND_KEY,
    Epoch,
    check_partners,
    check_shown,
    commit,
)
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal, digest_of, set_of
from flower_graph.secure.ring import WORDS, Ring, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, split_secrets
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MASK_KEY,
    NOTHING,
    PACKET_BYTES,
    SEED,
    SEED_BYTES,
    EpochReply,
    EpochRequest,
    KeyReply,
    KeyRequest,
    ListReply,
    ListRequest,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    RevealReply,
    RevealRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.storage.checkpoint import read_state, write_state
from flower_graph.storage.reading import reading
from flower_graph.wire.arrays import Config
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Bytes, Integers

# What is saved beside rounds and epoch
KEPT = (
    "run_id",
    "clients",
    "points",
    "_private",
    "_public",
    "_seed",
    "_mark",
    "_epochs",
    "_keys",
    "_last",
)
# How exchanges of epochs and lists are answered
EXCHANGES: dict[str, tuple[type[Message], str]] = {
    "sum_reveal": (RevealRequest, "reveal"),
    "sum_epoch": (EpochRequest, "begin"),
    "sum_list": (ListRequest, "sign_list"),
}


@dataclass
class ClientRound:
    """A SuperNode's secrets in one round, its partners' shares, and what it sent and signed."""

    number: int  # As in PrepareRequest
    threshold: int
    minimum: int
    partners: Integers  # [k]
    seed: Bytes = field(repr=False)  # [32] of the self mask, and the mask key
    private: Bytes = field(repr=False)
    public: Bytes
    secrets: Bytes = field(repr=False)  # [k, 32] what the channel keys agree on
    # Once the masked sum has left. What it is of, hashed: then no key may be used again
    terms: bytes = b""
    # [k, 2, 33] shares of the partners' seeds and mask keys, and [k] which are there
    held: Bytes = field(repr=False, default_factory=lambda: np.zeros((0, 2, SHARE_BYTES), np.uint8))
    has: MASKS = field(default_factory=lambda: np.zeros(0, np.bool_))
    live: MASKS = field(default_factory=lambda: np.zeros(0, np.bool_))  # [k] that take part
    # Under a server that may lie
    ready: MASKS | None = None  # by index in the epoch
    purpose: str = ""
    state: bytes = b""
    listed: MASKS | None = None  # the list that we signed

    @property
    def is_masked(self) -> bool:
        return bool(self.terms)

    def check_unmasked(self) -> None:
        if self.is_masked:
            raise RefusedError(f"round {self.number} is masked already: no mask is used twice")

    def columns(self, request: MaskRequest) -> Integers:
        """Return the columns of the live partners, in the request's order."""
        if request.live.shape != self.partners.shape:
            raise RefusedError(f"live has shape {request.live.shape}, not {self.partners.shape}")
        column = np.flatnonzero(request.live)
        if column.size != request.packets.shape[0]:
            raise RefusedError(f"{request.packets.shape[0]} packets for {column.size} partners")
        return column


class Received(NamedTuple):
    """The partners' sealed packets of a round, opened: all that is needed to mask a sum."""

    kept: ClientRound
    request: MaskRequest
    ring: Ring | None
    held: Bytes  # as ``ClientRound`` has them
    has: MASKS
    refused: Integers  # [n, 2] own number and that of a partner whose packet does not open


class SumClient:
    """The clients of one SuperNode in a secure sum.

    Parameters
    ----------
    run_id : bytes
        The run, as the server names it.
    clients : sequence of int
        The clients that the SuperNode hosts.
    trust : TrustSettings, optional
        The SuperNode's own key and the parties that it trusts, if the server may lie.
    points : mapping of int to int, optional
        Points that each client will bring to an alignment, if there is to be one.
    least : int
        Contributors without whom nothing is revealed, whatever the server asks.
    """

    def __init__(
        self,
        run_id: bytes,
        clients: Sequence[int],
        trust: TrustSettings | None = None,
        points: Mapping[int, int] | None = None,
        *,
        least: int = 1,
    ) -> None:
        numbers = sorted(int(client) for client in clients)
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"clients are {numbers!r:.60}, must be some, each there once")
        self.run_id, self.clients, self.trust, self._least = run_id, numbers, trust, least
        self.points = dict(points or {})
        if self.points and sorted(self.points) != numbers:
            raise ValueError("points are declared for some of the clients: for all, or for none")
        self._private, self._public = channel.new_key()
        self._rounds: dict[int, ClientRound] = {}
        self._last = -1  # the newest round that was prepared
        # Under a server that may lie
        self._seed = os.urandom(SEED_BYTES)
        self._mark = ""  # of the last sum, as the journal has it
        self._epochs = -1  # the newest epoch's number
        self._shown: RevealRequest | None = None  # the list that the seed was shown for
        self.epoch: Epoch | None = None
        self._keys: Bytes = np.zeros((0, KEY_BYTES), np.uint8)  # [k, 32] of the epoch's partners

    @property
    def party(self) -> int:
        return min(self.clients) if self.trust is None else self.trust.identity.party

    @property
    def has_sent(self) -> bool:
        return bool(self._mark)

    @property
    def sum_run(self) -> bytes:
        """The run's name in its sums: of the epoch, if there are epochs."""
        return self.run_id if self.trust is None else self._begun().id

    def answer(self, action: str, config: Config) -> Config:
        """Answer an exchange in which no vector travels, as the request's entries ask."""
        if action == "sum_enroll":
            asked = KeyRequest.from_config(config)
            self._check_run(asked.run_id, self.run_id)
            if bool(asked.signed) != (self.trust is not None):
                why = "no trusted server's sum" if self.trust else "its registry has no key for it"
                raise RefusedError(f"with{'' if self.trust else 'out'} a key of its own: {why}")
            return self.keys().to_config()
        if action in EXCHANGES:
            request, method = EXCHANGES[action]
            reply: Message = getattr(self, method)(request.from_config(config))
            return reply.to_config()
        answer: Config = {}
        if "unmask-run" in config:
            answer |= self.unmask(UnmaskRequest.from_config(config)).to_config()
        if "prepare-run" in config:
            answer |= self.prepare(PrepareRequest.from_config(config)).to_config()
        return answer

    # An epoch begins

    def keys(self) -> KeyReply:
        """State the clients hosted here; a party also commits to its part of the graph's seed."""
        clients, public = np.array(self.clients, np.int64), np.frombuffer(self._public, np.uint8)
        reply = KeyReply(self.run_id, clients, public)
        if (trust := self.trust) is None:
            return reply
        if self._shown is not None:  # that seed is known: it may not serve a second list
            self._seed, self._shown = os.urandom(SEED_BYTES), None
        reply.party = self.party
        reply.commitment = np.frombuffer(commit(self.run_id, self.party, self._seed), np.uint8)
        reply.declared = np.array(sorted(self.points.items()), np.int64).reshape(-1, 2)
        return reply.signed(trust.identity, trust.block_cap)

    def reveal(self, request: RevealRequest) -> RevealReply:
        """Show the own part of the graph's seed, when all commitments are there."""
        trust = self._trusted()
        self._check_run(request.run_id, self.run_id)
        if self._shown is not None or request.number <= self._epochs:
            raise RefusedError("the seed of the graph was shown for another list: bind anew")
        commitment = commit(self.run_id, self.party, self._seed)
        points = {client: self.points.get(client) for client in self.clients}
        check_shown(request, trust, commitment, points)
        # On the disk before the seed leaves: neither another epoch's run nor a state that is put
        # back gives more draws.
        Journal(trust.journal).answer_list(MOST_LISTS, trust.runs, trust.run)
        self._shown = request
        return RevealReply(self.run_id, request.number, np.frombuffer(self._seed, np.uint8))

    def begin(self, request: EpochRequest) -> EpochReply:
        """Begin an epoch: check all seeds, and the partners that follow from them."""
        self._check_run(request.run_id, self.run_id)
        shown, registry = self._shown, self._trusted().registry
        if shown is None or shown.number <= self._epochs:
            raise RefusedError("no list of commitments is open")
        epoch = Epoch.agreed(shown, registry.digest, request.seeds)
        check_partners(epoch, self.party, shown, request, registry)
        self.epoch, self._keys, self._epochs = epoch, request.channel_keys, epoch.number
        self._rounds, self._last = {}, -1
        self._seed, self._shown = os.urandom(SEED_BYTES), None  # all know the old one
        return EpochReply(self.run_id, np.frombuffer(epoch.digest, np.uint8))

    # A round

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        self._check_prepare(request)
        publics, (private, public) = pieces(request.channel_keys), channel.new_key()
        kept = ClientRound(
            request.server_round,
            request.threshold,
            request.minimum,
            request.partners[0],
            np.frombuffer(os.urandom(KEY_BYTES), np.uint8),
            np.frombuffer(private, np.uint8),
            np.frombuffer(public, np.uint8),
            rows_of(channel.agree(self._private, publics), len(publics), KEY_BYTES),
        )
        shares, share_commitments = self._share(kept)
        self._last = kept.number
        older = sorted(self._rounds)[1 - KEPT_ROUNDS :]
        self._rounds = {number: self._rounds[number] for number in older} | {kept.number: kept}
        seed = self.sum_run, kept.number, self.party, kept.seed.tobytes()
        reply = PrepareReply(
            self.sum_run,
            kept.number,
            request.clients,
            kept.public[None],
            rows_of([channel.commit_to_seed(*seed)], 1, COMMITMENT_BYTES),
            share_commitments,
            self._seal(kept, shares),
        )
        if self.epoch is not None:
            reply.signature = self._sign(ROUND_KEY, self.epoch.key_parts(kept.number, public))
        return reply

    def receive(self, request: MaskRequest, ring: Ring | None) -> Received:
        """Check a server's statements about a sum, all of them before there is a vector.

        If a server tells one party other terms than the rest, the party's refusal must not depend
        on its vector. So the vector is made only after this call. ``ring`` is the vector's; None
        where words are no numbers.
        """
        kept = self._round(request.run_id, request.server_round)
        if self.epoch is not None:
            self._check_ready(self.epoch, request, ring)
        kept.check_unmasked()
        held, has, refused = self._open(kept, request)
        if has.sum() < kept.threshold:
            raise RefusedError(f"fewer than {kept.threshold} of its partners take part")
        if self.epoch is not None:
            self._check_refused(self.epoch, kept, request, refused)
        return Received(kept, request, ring, held, has, refused)

    def mask(
        self,
        came: Received,
        present: Sequence[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike] = (),
    ) -> MaskedReply:
        """Mask the sum of some clients' vectors.

        Parameters
        ----------
        came : Received
            The partners' packets, from `receive`.
        present : sequence of int
            The clients in the sum.
        total : array, shape (L,)
            Its words.
        terms : SumTerms
            What the sum is of.
        state : iterable of arrays
            What the vectors were made of: under a server that may lie, no sum of others has it.
        """
        kept, request, chosen = came.kept, came.request, list(present)
        asked = set(request.clients.tolist()) & set(self.clients)
        kept.check_unmasked()
        if not chosen or len(set(chosen)) != len(chosen) or not asked.issuperset(chosen):
            raise RefusedError(f"present is {brief(present)}, must be some of the request's")
        if not kept.partners.size and len(chosen) < kept.minimum:
            raise RefusedError(f"{len(chosen)} clients alone: nothing is sent")
        dtype, length = WORDS.get(request.word), request.length
        if total.shape != (length,) or total.dtype != dtype:
            raise ValueError(f"{total.dtype} {total.shape}, expected {dtype} ({length},)")
        held_by = kept.minimum
        if (epoch := self.epoch) is not None:
            assert terms.ring == came.ring and request.ready is not None
            trust, digest = self._trusted(), digest_of(state)
            who = set_of(epoch.parties[request.ready].tolist())
            Journal(trust.journal).check_state(terms.purpose, digest, who)
            held_by = max(held_by, len(epoch.points))
        terms.check_guard(held_by)
        kept.held, kept.has, kept.live = came.held, came.has, request.live
        kept.terms = terms.digest(request.length, request.word, kept.threshold, kept.minimum)
        masked = np.array(total)
        add_streams(masked, self._masks(kept, request, kept.terms))
        if epoch is not None:
            # Who repeats a round with one fewer learns that one: on the disk before it leaves.
            steps = kept.number, self._mark, trust.runs, trust.run
            self._mark = Journal(trust.journal).continue_run(*steps)
            kept.ready, kept.purpose, kept.state = request.ready, terms.purpose, digest
        clients = np.array(chosen, np.int64)
        return MaskedReply(self.sum_run, kept.number, clients, masked, came.refused)

    def sign_list(self, request: ListRequest) -> ListReply:
        """Sign the parties of a sum, if the list is sound; one list a round."""
        trust, epoch = self._trusted(), self._begun()
        number, listed = request.server_round, request.listed
        kept = self._rounds.get(number)
        if request.run_id != epoch.id or kept is None or kept.ready is None:
            raise RefusedError(f"nothing was sent for round {number} of this epoch")
        if kept.listed is not None:
            raise RefusedError(f"a list of round {number} is signed already")
        epoch.check_present(listed, "sent their vectors")
        if (listed & ~kept.ready).any():
            raise RefusedError("somebody is on the list that was not ready")
        if not listed[epoch.index(self.party)]:
            raise RefusedError(f"round {number}: we are not on the list")
        # If the server rolls our state back and gets us to sign two different lists, it learns
        # both secrets of any party that is on only one of them. From two sums it learns their
        # difference. The journal prevents both.
        who = set_of(epoch.parties[listed].tolist())
        journal, run = Journal(trust.journal), (LIST, trust.run)
        journal.enter(number, kept.purpose, kept.state, who, epoch.differ_by, *run)
        kept.listed = listed
        parts = epoch.signed_parts(number, kept.ready, listed, kept.terms)
        return ListReply(epoch.id, number, self._sign(LIST, parts))

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Reveal one share about each partner that the server asks about; never two."""
        # Of a round in which nothing left this SuperNode, it has nothing to give.
        kept = self._round(request.run_id, request.server_round)
        self._check_party(request.clients)
        if request.kinds.shape != (1, kept.partners.size) or (request.kinds > MASK_KEY).any():
            raise RefusedError(f"kinds have shape {request.kinds.shape}, or unknown entries")
        if self.epoch is not None:
            self._check_signed(self.epoch, kept, request)
        if request.contributors < kept.minimum:
            raise RefusedError(f"{request.contributors} clients, {kept.minimum} must be")
        if kept.is_masked:
            asked = request.kinds[0]
            if ((asked != NOTHING) & ~kept.live).any():
                raise RefusedError("a partner that took no part is asked about")
            if (present := int((asked == SEED).sum())) > request.contributors:
                raise RefusedError(f"{present} of our partners among {request.contributors}")
            if present < kept.threshold:
                few = f"{present} of our partners are in the sum, {kept.threshold} must"
                raise RefusedError(few)
            kinds = np.where(kept.has, request.kinds, np.uint8(NOTHING))
        else:
            kinds = np.zeros_like(request.kinds)
        column = np.flatnonzero(kinds[0])
        shares = kept.held[column, kinds[0, column] - SEED]
        del self._rounds[kept.number]
        return UnmaskReply(self.sum_run, kept.number, request.clients, kinds, shares)

    # Its state

    def to_bytes(self) -> bytes:
        epoch, shown = self.epoch, self._shown
        return write_state(
            {name: getattr(self, name) for name in KEPT}
            | {
                "registry": None if self.trust is None else self.trust.registry.digest,
                "shown": None if shown is None else vars(shown),
                "epoch": None
                if epoch is None
                else {each.name: vars(epoch)[each.name] for each in fields(epoch)},
                "rounds": [vars(kept) for kept in self._rounds.values()],
            }
        )

    @classmethod
    def from_bytes(
        cls, state: bytes, trust: TrustSettings | None = None, *, least: int = 1
    ) -> SumClient:
        with reading("the state of the secure sum", StateLostError):
            kept = read_state(state)
            host = cls(kept["run_id"], kept["clients"], trust, least=least)
            fresh, registry = host._seed, kept["registry"]
            if (registry is None) != (trust is None):
                raise StateLostError("the keys that were kept are for another setting of trust")
            vars(host).update({name: kept[name] for name in KEPT})
            shown, epoch = kept["shown"], kept["epoch"]
            if trust is not None and registry != trust.registry.digest:
                # An epoch is of one version of the registry. A seed that was shown is known: it
                # serves no other list.
                host._seed, host._last = host._seed if shown is None else fresh, -1
                return host
            host._shown = None if shown is None else RevealRequest(**shown)
            host.epoch = None if epoch is None else Epoch(**epoch)
            host._rounds = {one["number"]: ClientRound(**one) for one in kept["rounds"]}
        return host

    # Checks

    def _trusted(self) -> TrustSettings:
        if self.trust is None:
            raise RefusedError("this SuperNode has no key of its own (identity-key, registry)")
        return self.trust

    def _begun(self) -> Epoch:
        if self.epoch is None:
            raise StateLostError("no epoch has begun under this version of the registry: bind anew")
        return self.epoch

    def _sign(self, purpose: bytes, parts: tuple[bytes, ...]) -> Bytes:
        return np.frombuffer(self._trusted().identity.sign(purpose, *parts), np.uint8)

    def _verify(
        self, party: int, signature: Bytes, purpose: bytes, parts: tuple[bytes, ...]
    ) -> bool:
        return self._trusted().registry.verify(party, signature.tobytes(), purpose, *parts)

    def _round(self, run_id: bytes, number: int) -> ClientRound:
        self._check_run(run_id, self.sum_run)
        kept = self._rounds.get(number)
        if kept is None:
            raise RefusedError(f"round {number} is not open; open: {sorted(self._rounds)}")
        return kept

    def _check_run(self, run_id: bytes, expected: bytes) -> None:
        if run_id != expected:
            raise RefusedError(f"run {run_id.hex()}, expected {expected.hex()}")

    def _check_party(self, clients: Integers) -> None:
        if clients.tolist() != [self.party]:
            first = clients[0] if clients.size else None
            raise RefusedError(f"client {first} is not the first of those hosted here")

    def _check_prepare(self, request: PrepareRequest) -> None:
        if self.trust is not None:
            epoch = self._begun()
            wanted = epoch.parties[epoch.partners_of(epoch.index(self.party))]
            if not np.array_equal(request.partners, wanted[None]):
                raise RefusedError("the partners are not those of the epoch's graph")
            if request.threshold != epoch.threshold or request.minimum != epoch.minimum:
                raise RefusedError(f"threshold {request.threshold}, minimum {request.minimum}")
            if not np.array_equal(request.channel_keys, self._keys):
                raise RefusedError("a partner's channel key is not the one that it signed")
        self._check_run(request.run_id, self.sum_run)
        if request.server_round <= self._last:
            raise RefusedError(f"round {request.server_round} is not newer than {self._last}")
        # With more than half of the partners, no two groups of holders that were told different
        # things can give back both secrets of a party. Without partners there are no secrets. The
        # minimum, which is larger, is more than half of the parties that are known here.
        k, threshold, minimum = request.partners.shape[1], request.threshold, request.minimum
        fewest, above = min(k, k // 2 + 1), max(threshold, 1)
        if not fewest <= threshold <= k or minimum <= above:
            raise RefusedError(f"threshold is {threshold} and minimum {minimum}, too few for {k}")
        if np.unique(request.partners).size < k or request.clients[0] in request.partners:
            raise RefusedError("a client is its own partner, or has one twice")
        if request.minimum < self._least:
            raise RefusedError(f"minimum {request.minimum}, {LEAST_CLIENTS} is {self._least}")
        self._check_party(request.clients)
        if request.channel_keys.shape[0] != request.partners.shape[1]:
            raise RefusedError(f"{len(request.channel_keys)} channel keys")

    def _check_ready(self, epoch: Epoch, request: MaskRequest, ring: Ring | None) -> None:
        index, ready = epoch.index(self.party), request.ready
        if ready is None or request.signatures is None:
            raise RefusedError("mask-ready or mask-signatures is missing")
        if sorted(request.clients.tolist()) != self.clients:
            raise RefusedError("a sum of other clients is asked for than those hosted here")
        epoch.check_present(ready, "are ready")
        if not ready[index] or not np.array_equal(request.live, ready[epoch.partners_of(index)]):
            raise RefusedError("the partners who are ready are not those of the list")
        if request.signatures.shape[0] != request.round_keys.shape[0]:
            raise RefusedError("a partner's round key is not signed")
        if ring is not None and ring.limit != epoch.limit:
            raise RefusedError(f"limit is {ring.limit}, the epoch's is {epoch.limit}")

    def _check_refused(
        self, epoch: Epoch, kept: ClientRound, request: MaskRequest, refused: Integers
    ) -> None:
        # A packet that opens shows that the key beside it is the partner's. One that does not may
        # be the partner's fault or the server's: the partner's signature tells.
        assert request.signatures is not None  # as ``_check_ready`` says
        live = kept.partners[request.live].tolist()
        for partner in {dealer for _, dealer in refused.tolist()}:
            at = live.index(partner)
            signed = epoch.key_parts(request.server_round, request.round_keys[at].tobytes())
            if not self._verify(partner, request.signatures[at], ROUND_KEY, signed):
                raise RefusedError(f"the round key of party {partner} is not the one it signed")

    def _check_signed(self, epoch: Epoch, kept: ClientRound, request: UnmaskRequest) -> None:
        """Refuse unless as many listed partners as the threshold signed our own list."""
        if kept.ready is None or (listed := kept.listed) is None:
            raise RefusedError(f"no list of round {kept.number} was signed here")
        row = epoch.partners_of(epoch.index(self.party))
        kinds = np.where(listed[row], SEED, np.where(kept.ready[row], MASK_KEY, NOTHING))
        if not ((request.kinds == kinds) | (request.kinds == NOTHING)).all():
            raise RefusedError("shares are asked for that do not follow from the signed list")
        if request.contributors != listed.sum():
            raise RefusedError(f"{request.contributors} contributors, the list has {listed.sum()}")
        parts = epoch.signed_parts(kept.number, kept.ready, listed, kept.terms)
        if request.columns is None or request.signatures is None:
            raise RefusedError("the partners' signatures of the list are missing")
        columns, good = request.columns.tolist(), 0
        if len(set(columns)) != len(columns) or not all(0 <= each < row.size for each in columns):
            raise RefusedError("a signature is there twice, or is not a partner's")
        for column, signature in zip(columns, request.signatures, strict=True):
            index = row[column]
            if listed[index]:
                good += self._verify(int(epoch.parties[index]), signature, LIST, parts)
            if good >= epoch.threshold:
                return
        raise RefusedError(f"{good} partners signed it: others saw something else")

    # Shares and masks

    def _share(self, kept: ClientRound) -> tuple[Bytes, Bytes]:
        k = kept.partners.size
        if not k:
            return np.zeros((0, 2, SHARE_BYTES), np.uint8), rows_of([], 0, 2, COMMITMENT_BYTES)
        split = split_secrets(np.stack([kept.seed, kept.private]), kept.threshold, k)  # [2, k, 33]
        shares = np.ascontiguousarray(np.moveaxis(split, 0, 1))
        contexts = channel.share_contexts(self.sum_run, kept.number, self.party)
        given, commitments = pieces(shares.reshape(-1, SHARE_BYTES)), []
        for at, holder in enumerate(kept.partners.tolist()):
            name, both = channel.name_bytes(holder), given[2 * at : 2 * at + 2]
            commitments += channel.commit_to_shares(contexts, name, both)
        return shares, rows_of(commitments, k, 2, COMMITMENT_BYTES)

    def _seal(self, kept: ClientRound, shares: Bytes) -> Bytes:
        plain = pieces(shares.reshape(-1, 2 * SHARE_BYTES))
        parts = zip(kept.partners.tolist(), pieces(kept.secrets), plain, strict=True)
        own = kept.public.tobytes()
        packets = [
            channel.seal(secret, self._packet(kept, self.party, holder), own, both)
            for holder, secret, both in parts
        ]
        return rows_of(packets, len(packets), PACKET_BYTES)

    def _open(self, kept: ClientRound, request: MaskRequest) -> tuple[Bytes, MASKS, Integers]:
        """Open the packets; return all shares, which of them came, and the pairs that failed."""
        column, k, own = kept.columns(request), kept.partners.size, channel.name_bytes(self.party)
        held, has = np.zeros((k, 2, SHARE_BYTES), np.uint8), np.zeros(k, np.bool_)
        dealers = kept.partners[column].tolist()
        parts = zip(
            dealers,
            pieces(kept.secrets[column]),
            pieces(request.round_keys),
            pieces(request.packets),
            pieces(request.share_commitments.reshape(-1, 2 * COMMITMENT_BYTES)),
            strict=True,
        )
        opened = []
        for dealer, secret, round_key, packet, promised in parts:
            what_for = self._packet(kept, dealer, self.party)
            plain = channel.unseal(secret, what_for, round_key, packet)
            both = (plain[:SHARE_BYTES], plain[SHARE_BYTES:]) if plain else (b"", b"")
            contexts = channel.share_contexts(self.sum_run, kept.number, dealer)
            commitments = channel.commit_to_shares(contexts, own, both)
            opened.append(b"".join(both if b"".join(commitments) == promised else ()))
        good = np.array([plain != b"" for plain in opened], np.bool_)
        held[column[good]] = rows_of(opened, int(good.sum()), 2, SHARE_BYTES)
        has[column[good]] = True
        refused = [[self.party, dealers[at]] for at in np.flatnonzero(~good).tolist()]
        return held, has, np.array(refused, np.int64).reshape(-1, 2)

    def _packet(self, kept: ClientRound, dealer: int, holder: int) -> bytes:
        return channel.packet_context(self.sum_run, kept.number, dealer, holder)

    def _masks(
        self, kept: ClientRound, request: MaskRequest, terms: bytes
    ) -> list[tuple[bytes, int]]:
        """Return the self mask, and the pair masks with live partners; none without partners."""
        number, run_id, party = kept.number, self.sum_run, self.party
        if not kept.partners.size:
            return []
        others = kept.partners[kept.columns(request)].tolist()
        keys = dict(zip(others, pieces(request.round_keys), strict=True))
        own = channel.self_mask_key(kept.seed.tobytes(), run_id, number, party, terms)
        private = kept.private.tobytes()
        return [(own, 1), *channel.pair_masks(private, run_id, number, party, keys, terms)]
