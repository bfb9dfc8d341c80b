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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flower_graph.errors import RefusedError, StateLostError, brief, refuse_if
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

OF_NODE = "trust", "_least"  # are not in the state that is kept


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

    def check_unmasked(self) -> None:
        why = f"round {self.number} is masked already: no mask is used twice"
        refuse_if(self.terms, why)


class Received(NamedTuple):
    """What a server states about a sum, checked, and a round with its packets opened."""

    kept: ClientRound
    request: MaskRequest
    ring: Ring | None
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
        why = f"clients are {numbers!r:.60}, must be some, each there once"
        refuse_if(not numbers or len(set(numbers)) != len(numbers), why, ValueError)
        self.run_id, self.clients, self.trust, self._least = run_id, numbers, trust, least
        self.points = dict(points or {})
        why = "points are declared for some of the clients: for all, or for none"
        refuse_if(self.points and sorted(self.points) != numbers, why, ValueError)
        self._private, self._public = channel.new_key()
        self._rounds: dict[int, ClientRound] = {}
        self._last = -1  # the newest round that was prepared
        # Under a server that may lie
        self._seed = os.urandom(SEED_BYTES)
        self.mark = ""  # of the last sum, as the journal has it; empty before it
        self._epochs = -1  # the newest epoch's number
        self._shown: RevealRequest | None = None  # the list that the seed was shown for
        self.epoch: Epoch | None = None
        self._keys: Bytes = np.zeros((0, KEY_BYTES), np.uint8)  # [k, 32] of the epoch's partners

    @property
    def party(self) -> int:
        return min(self.clients) if self.trust is None else self.trust.identity.party

    @property
    def sum_run(self) -> bytes:
        """The run's name in its sums: of the epoch, if there are epochs."""
        return self.run_id if self.trust is None else self._begun().id

    def answer(self, action: str, config: Config) -> Config:
        """Answer an exchange in which no vector travels, as the request's entries ask."""
        replies: Config = {}
        for kind, reply in ANSWERS[action]:
            if action != "sum_unmask" or f"{kind.prefix}run" in config:
                replies |= reply(self, kind.from_config(config)).to_config()
        return replies

    # An epoch begins

    def enrol(self, request: KeyRequest) -> KeyReply:
        self._check_run(request.run_id, self.run_id)
        why = "no trusted server's sum" if self.trust else "its registry has no key for it"
        why = f"with{'' if self.trust else 'out'} a key of its own: {why}"
        refuse_if(bool(request.signed) != (self.trust is not None), why)
        return self.keys()

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
        is_shown = self._shown is not None or request.number <= self._epochs
        refuse_if(is_shown, "the seed of the graph was shown for another list: bind anew")
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
        secrets = rows_of(channel.agree(self._private, publics), len(publics), KEY_BYTES)
        terms = request.server_round, request.threshold, request.minimum, request.partners[0]
        own = rows_of([os.urandom(KEY_BYTES), private, public], 3, KEY_BYTES)
        kept = ClientRound(*terms, own[0], own[1], own[2], secrets)
        commitments, packets = self._deal(kept)
        self._last = kept.number
        older = sorted(self._rounds)[1 - KEPT_ROUNDS :]
        self._rounds = {number: self._rounds[number] for number in older} | {kept.number: kept}
        seed = channel.commit_to_seed(self.sum_run, kept.number, self.party, kept.seed.tobytes())
        about = self.sum_run, kept.number, request.clients, kept.public[None]
        promised = rows_of([seed], 1, COMMITMENT_BYTES), commitments
        reply = PrepareReply(*about, *promised, packets)
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
        few = f"fewer than {kept.threshold} of its partners take part"
        refuse_if(has.sum() < kept.threshold, few)
        kept.held, kept.has, kept.live = held, has, request.live
        return Received(kept, request, ring, refused)

    def mask(
        self,
        came: Received,
        present: Sequence[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike] = (),
    ) -> MaskedReply:
        """Mask ``total``, the sum of the vectors of the clients ``present``.

        ``came`` is of `receive`; ``state`` is what the vectors were made of: under a server that
        may lie, no sum of others has it.
        """
        kept, request, chosen = came.kept, came.request, list(present)
        asked = set(request.clients.tolist()) & set(self.clients)
        kept.check_unmasked()
        is_other = not chosen or len(set(chosen)) != len(chosen) or not asked.issuperset(chosen)
        refuse_if(is_other, f"present is {brief(present)}, must be some of the request's")
        is_alone = not kept.partners.size and len(chosen) < kept.minimum
        refuse_if(is_alone, f"{len(chosen)} clients alone: nothing is sent")
        dtype, length = WORDS.get(request.word), request.length
        why = f"{total.dtype} {total.shape}, expected {dtype} ({length},)"
        refuse_if(total.shape != (length,) or total.dtype != dtype, why, ValueError)
        held_by = kept.minimum
        if (epoch := self.epoch) is not None:
            assert terms.ring == came.ring and request.ready is not None
            trust, digest = self._trusted(), digest_of(state)
            who = set_of(epoch.parties[request.ready].tolist())
            Journal(trust.journal).check_state(terms.purpose, digest, who)
            held_by = max(held_by, len(epoch.points))
        terms.check_guard(held_by)
        kept.terms = terms.digest(request.length, request.word, kept.threshold, kept.minimum)
        masked = np.array(total)
        if kept.partners.size:
            about = self.sum_run, kept.number, self.party
            others = kept.partners[request.live].tolist()
            keys = dict(zip(others, pieces(request.round_keys), strict=True))
            own = channel.self_mask_key(kept.seed.tobytes(), *about, kept.terms)
            pairs = channel.pair_masks(kept.private.tobytes(), *about, keys, kept.terms)
            add_streams(masked, [(own, 1), *pairs])
        if epoch is not None:
            # Who repeats a round with one fewer learns that one: on the disk before it leaves.
            steps = kept.number, self.mark, trust.runs, trust.run
            self.mark = Journal(trust.journal).continue_run(*steps)
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
        refuse_if(kept.listed is not None, f"a list of round {number} is signed already")
        epoch.check_present(listed, "sent their vectors")
        refuse_if((listed & ~kept.ready).any(), "somebody is on the list that was not ready")
        refuse_if(not listed[epoch.index(self.party)], f"round {number}: we are not on the list")
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
        is_odd = request.kinds.shape != (1, kept.partners.size) or (request.kinds > MASK_KEY).any()
        refuse_if(is_odd, f"kinds have shape {request.kinds.shape}, or unknown entries")
        if self.epoch is not None:
            self._check_signed(self.epoch, kept, request)
        count = request.contributors
        refuse_if(count < kept.minimum, f"{count} clients, {kept.minimum} must be")
        kinds = np.zeros_like(request.kinds)
        if kept.terms:
            asked = request.kinds[0]
            is_gone = ((asked != NOTHING) & ~kept.live).any()
            refuse_if(is_gone, "a partner that took no part is asked about")
            present = int((asked == SEED).sum())
            refuse_if(present > count, f"{present} of our partners among {count}")
            few = f"{present} of our partners are in the sum, {kept.threshold} must"
            refuse_if(present < kept.threshold, few)
            kinds = np.where(kept.has, request.kinds, np.uint8(NOTHING))
        column = np.flatnonzero(kinds[0])
        shares = kept.held[column, kinds[0, column] - SEED]
        del self._rounds[kept.number]
        return UnmaskReply(self.sum_run, kept.number, request.clients, kinds, shares)

    # Its state

    def to_bytes(self) -> bytes:
        kept = {name: value for name, value in vars(self).items() if name not in OF_NODE}
        epoch, shown = self.epoch, self._shown
        return write_state(
            kept
            | {
                "registry": None if self.trust is None else self.trust.registry.digest,
                "_shown": None if shown is None else vars(shown),
                "epoch": epoch and {each.name: vars(epoch)[each.name] for each in fields(epoch)},
                "_rounds": {number: vars(one) for number, one in self._rounds.items()},
            }
        )

    @classmethod
    def from_bytes(
        cls, state: bytes, trust: TrustSettings | None = None, *, least: int = 1
    ) -> SumClient:
        with reading("the state of the secure sum", StateLostError):
            kept = read_state(state)
            host = cls(kept["run_id"], kept["clients"], trust, least=least)
            names = "registry", "_shown", "epoch", "_rounds"
            registry, shown, epoch, rounds = (kept.pop(name) for name in names)
            why = "the keys that were kept are for another setting of trust"
            refuse_if((registry is None) != (trust is None), why, StateLostError)
            if trust is not None and registry != trust.registry.digest:
                # An epoch is of one version of the registry. A seed that was shown is known: it
                # serves no other list.
                kept |= {"_last": -1} | ({} if shown is None else {"_seed": host._seed})
            else:
                kept["_shown"] = shown and RevealRequest(**shown)
                kept["epoch"] = epoch and Epoch(**epoch)
                kept["_rounds"] = {number: ClientRound(**one) for number, one in rounds.items()}
            vars(host).update(kept)
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

    def _round(self, run_id: bytes, number: int) -> ClientRound:
        self._check_run(run_id, self.sum_run)
        kept = self._rounds.get(number)
        if kept is None:
            raise RefusedError(f"round {number} is not open; open: {sorted(self._rounds)}")
        return kept

    def _check_run(self, run_id: bytes, expected: bytes) -> None:
        refuse_if(run_id != expected, f"run {run_id.hex()}, expected {expected.hex()}")

    def _check_party(self, clients: Integers) -> None:
        why = f"client {clients[:1]} is not the first of those hosted here"
        refuse_if(clients.tolist() != [self.party], why)

    def _check_prepare(self, request: PrepareRequest) -> None:
        if self.trust is not None:
            epoch = self._begun()
            wanted = epoch.parties[epoch.partners_of(epoch.index(self.party))][None]
            is_other = not np.array_equal(request.partners, wanted)
            refuse_if(is_other, "the partners are not those of the epoch's graph")
            terms = request.threshold, request.minimum
            why = f"threshold {request.threshold}, minimum {request.minimum}"
            refuse_if(terms != (epoch.threshold, epoch.minimum), why)
            is_other = not np.array_equal(request.channel_keys, self._keys)
            refuse_if(is_other, "a partner's channel key is not the one that it signed")
        self._check_run(request.run_id, self.sum_run)
        number = request.server_round
        refuse_if(number <= self._last, f"round {number} is not newer than {self._last}")
        # With more than half of the partners, no two groups of holders that were told different
        # things can give back both secrets of a party. Without partners there are no secrets. The
        # minimum, which is larger, is more than half of the parties that are known here.
        k, threshold, minimum = request.partners.shape[1], request.threshold, request.minimum
        fewest, above = min(k, k // 2 + 1), max(threshold, 1)
        is_few = not fewest <= threshold <= k or minimum <= above
        refuse_if(is_few, f"threshold is {threshold} and minimum {minimum}, too few for {k}")
        is_twice = np.unique(request.partners).size < k or request.clients[0] in request.partners
        refuse_if(is_twice, "a client is its own partner, or has one twice")
        refuse_if(minimum < self._least, f"minimum {minimum}, {LEAST_CLIENTS} is {self._least}")
        self._check_party(request.clients)
        keys = request.channel_keys.shape[0]
        refuse_if(keys != k, f"{keys} channel keys")

    def _check_ready(self, epoch: Epoch, request: MaskRequest, ring: Ring | None) -> None:
        index, ready = epoch.index(self.party), request.ready
        if ready is None or request.signatures is None:
            raise RefusedError("mask-ready or mask-signatures is missing")
        is_other = sorted(request.clients.tolist()) != self.clients
        refuse_if(is_other, "a sum of other clients is asked for than those hosted here")
        epoch.check_present(ready, "are ready")
        is_other = not np.array_equal(request.live, ready[epoch.partners_of(index)])
        why = "the partners who are ready are not those of the list"
        refuse_if(not ready[index] or is_other, why)
        is_short = request.signatures.shape[0] != request.round_keys.shape[0]
        refuse_if(is_short, "a partner's round key is not signed")
        if ring is not None:
            why = f"limit is {ring.limit}, the epoch's is {epoch.limit}"
            refuse_if(ring.limit != epoch.limit, why)

    def _check_signed(self, epoch: Epoch, kept: ClientRound, request: UnmaskRequest) -> None:
        """Refuse unless as many listed partners as the threshold signed our own list."""
        if kept.ready is None or (listed := kept.listed) is None:
            raise RefusedError(f"no list of round {kept.number} was signed here")
        row = epoch.partners_of(epoch.index(self.party))
        kinds = np.where(listed[row], SEED, np.where(kept.ready[row], MASK_KEY, NOTHING))
        is_other = not ((request.kinds == kinds) | (request.kinds == NOTHING)).all()
        refuse_if(is_other, "shares are asked for that do not follow from the signed list")
        why = f"{request.contributors} contributors, the list has {listed.sum()}"
        refuse_if(request.contributors != listed.sum(), why)
        parts = epoch.signed_parts(kept.number, kept.ready, listed, kept.terms)
        if request.columns is None or request.signatures is None:
            raise RefusedError("the partners' signatures of the list are missing")
        columns, good = request.columns.tolist(), 0
        is_odd = len(set(columns)) != len(columns) or not set(columns) <= set(range(row.size))
        refuse_if(is_odd, "a signature is there twice, or is not a partner's")
        verify = self._trusted().registry.verify
        for index, signature in zip(row[columns], pieces(request.signatures), strict=True):
            if listed[index]:
                good += verify(int(epoch.parties[index]), signature, LIST, *parts)
            if good >= epoch.threshold:
                return
        raise RefusedError(f"{good} partners signed it: others saw something else")

    # Shares

    def _deal(self, kept: ClientRound) -> tuple[Bytes, Bytes]:
        """Share both secrets among the partners: commitments ``[k, 2, 32]`` and packets."""
        k, about, own = kept.partners.size, (self.sum_run, kept.number, self.party), kept.public
        secrets = np.stack([kept.seed, kept.private])
        shares = split_secrets(secrets, kept.threshold, k) if k else secrets[:, :0]
        commitments, packets = [], []
        for at, (holder, secret) in enumerate(
            zip(kept.partners.tolist(), kept.secrets, strict=True)
        ):
            both = [share.tobytes() for share in shares[:, at]]
            commitments += channel.commit_to_shares(*about, holder, both)
            what_for, plain = channel.packet_context(*about, holder), b"".join(both)
            packets.append(channel.seal(secret.tobytes(), what_for, own.tobytes(), plain))
        return rows_of(commitments, k, 2, COMMITMENT_BYTES), rows_of(packets, k, PACKET_BYTES)

    def _open(self, kept: ClientRound, request: MaskRequest) -> tuple[Bytes, MASKS, Integers]:
        """Open the packets; return all shares, which of them came, and the pairs that failed."""
        k, live = kept.partners.size, request.live
        why = f"live has shape {live.shape}, not {kept.partners.shape}"
        refuse_if(live.shape != kept.partners.shape, why)
        column, came = np.flatnonzero(live), request.packets.shape[0]
        refuse_if(column.size != came, f"{came} packets for {column.size} partners")
        held, has = np.zeros((k, 2, SHARE_BYTES), np.uint8), np.zeros(k, np.bool_)
        parts = zip(
            column.tolist(),
            kept.partners[column].tolist(),
            pieces(kept.secrets[column]),
            pieces(request.round_keys),
            pieces(request.packets),
            pieces(request.share_commitments.reshape(-1, 2 * COMMITMENT_BYTES)),
            strict=True,
        )
        for place, (at, dealer, secret, round_key, packet, promised) in enumerate(parts):
            about = self.sum_run, kept.number, dealer, self.party
            plain = channel.unseal(secret, channel.packet_context(*about), round_key, packet)
            both = (plain[:SHARE_BYTES], plain[SHARE_BYTES:]) if plain else (b"", b"")
            if b"".join(channel.commit_to_shares(*about, both)) == promised:
                held[at], has[at] = rows_of(both, 2, SHARE_BYTES), True
            elif (epoch := self.epoch) is not None and request.signatures is not None:
                # A packet that opens shows that the key beside it is the partner's. One that does
                # not may be the partner's fault or the server's: the partner's signature tells.
                signed = ROUND_KEY, *epoch.key_parts(kept.number, round_key)
                signature = request.signatures[place].tobytes()
                is_signed = self._trusted().registry.verify(dealer, signature, *signed)
                why = f"the round key of party {dealer} is not the one it signed"
                refuse_if(not is_signed, why)
        failed = kept.partners[live & ~has]
        return held, has, np.stack([np.full_like(failed, self.party), failed], 1)


# What answers each exchange; of the last, either may be missing
ANSWERS: dict[str, list[tuple[type[Message], Callable[[SumClient, Any], Message]]]] = {
    "sum_enroll": [(KeyRequest, SumClient.enrol)],
    "sum_reveal": [(RevealRequest, SumClient.reveal)],
    "sum_epoch": [(EpochRequest, SumClient.begin)],
    "sum_list": [(ListRequest, SumClient.sign_list)],
    "sum_unmask": [(UnmaskRequest, SumClient.unmask), (PrepareRequest, SumClient.prepare)],
}
