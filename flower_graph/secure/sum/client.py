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

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partialmethod
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import ArrayLike, NDArray

from flower_graph.errors import OutOfRangeError, RefusedError, StateLostError, refuse_if
from flower_graph.flower_compat import NumPyClient
from flower_graph.secure import channel
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, pieces, rows_of, spread
from flower_graph.secure.node_config import LEAST_CLIENTS, least_clients
from flower_graph.secure.parties.epoch import (
    LIST,
    MASKS,
    ROUND_KEY,
    Epoch,
    check_partners,
    check_shown,
    commit,
)
from flower_graph.secure.parties.journal import digest_of, set_of
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import WORDS, Ring, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, split_secrets
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    PACKET_BYTES,
    SECURE_SUM,
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
    digest_of_told,
    revealed,
)
from flower_graph.storage.checkpoint import read_state, write_state
from flower_graph.storage.reading import reading
from flower_graph.wire.arrays import Answer, Config, Parameters, each_once
from flower_graph.wire.codec import Bytes, Integers, Message, fields_of
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, MASKED_SUM, SUM_STATE

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
        self.run_id, self.clients, self.trust = run_id, sorted(map(int, clients)), trust
        self._least, self.points = least, dict(points or {})
        self._private, self._public = channel.new_key()
        self._rounds: dict[int, ClientRound] = {}
        self._last = -1  # the newest round that was prepared
        # Under a server that may lie
        self._seed = os.urandom(SEED_BYTES)
        self.mark = ""  # of the last sum, as the journal has it; empty before it
        self._shown: RevealRequest | None = None  # the list that the seed was shown for
        self.epoch: Epoch | None = None
        self._keys: Bytes = np.zeros((0, KEY_BYTES), np.uint8)  # [k, 32] of the epoch's partners

    @property
    def party(self) -> int:
        return min(self.clients) if self.trust is None else self.trust.identity.party

    @property
    def _commitment(self) -> bytes:
        return commit(self.run_id, self.party, self._seed)

    @property
    def sum_run(self) -> bytes:
        """The run's name in its sums: of the epoch, if there are epochs."""
        return self.run_id if self.trust is None else self._begun().id

    # An epoch begins

    def enrol(self, request: KeyRequest) -> KeyReply:
        self._check_run(request.run_id, self.run_id)
        return self.keys()

    def keys(self) -> KeyReply:
        """State the clients hosted here; a party also commits to its part of the graph's seed."""
        clients, public = np.array(self.clients, np.int64), np.frombuffer(self._public, np.uint8)
        reply = KeyReply(self.run_id, clients, public)
        if (trust := self.trust) is None:
            return reply
        # A seed that is known may not serve a second list. If this state was put back, the journal
        # alone knows that it is.
        if self._shown is not None or trust.journal.has_shown(self._commitment):
            self._seed, self._shown = os.urandom(SEED_BYTES), None
        reply.party = self.party
        reply.commitment = np.frombuffer(self._commitment, np.uint8)
        reply.points = np.array([self.points[c] for c in self.clients if self.points], np.int64)
        return reply.signed(trust.identity)

    def reveal(self, request: RevealRequest) -> RevealReply:
        """Show the own part of the graph's seed, when all commitments are there."""
        trust = self._trusted()
        self._check_run(request.run_id, self.run_id)
        points = {client: self.points.get(client) for client in self.clients}
        check_shown(request, trust, self._commitment, points)
        # On the disk before the seed leaves: neither another epoch's run nor a state that is put
        # back gives more draws, or shows a seed twice.
        trust.journal.answer_list(self._commitment, request.limit)
        self._shown = request
        return RevealReply(self.run_id, np.frombuffer(self._seed, np.uint8))

    def begin(self, request: EpochRequest) -> EpochReply:
        """Begin an epoch: check all seeds, and the partners that follow from them."""
        self._check_run(request.run_id, self.run_id)
        shown, registry = self._shown, self._trusted().registry
        if shown is None:
            raise RefusedError("no list of commitments is open")
        epoch = Epoch.agreed(shown, registry.digest, request.seeds)
        check_partners(epoch, self.party, shown, request, registry)
        is_few = epoch.minimum <= epoch.threshold  # words have room for pads of that many parties
        refuse_if(is_few, f"minimum {epoch.minimum}, threshold {epoch.threshold}")
        self.epoch, self._keys = epoch, request.channel_keys
        self._rounds, self._last = {}, -1
        self._seed, self._shown = os.urandom(SEED_BYTES), None  # all know the old one
        return EpochReply(self.run_id, np.frombuffer(epoch.digest, np.uint8))

    # A round

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        self._check_run(request.run_id, self.sum_run)
        number, epoch = request.server_round, self.epoch
        refuse_if(number <= self._last, f"round {number} is not newer than {self._last}")
        if epoch is None:
            self._check_terms(request)
            terms = request.threshold, request.minimum, request.partners
            publics = pieces(request.channel_keys)
        else:
            partners = epoch.parties[epoch.partners_of(epoch.index(self.party))]
            terms, publics = (epoch.threshold, epoch.minimum, partners), pieces(self._keys)
        private, public = channel.new_key()
        secrets = rows_of(channel.agree(self._private, publics), len(publics), KEY_BYTES)
        own = rows_of([os.urandom(KEY_BYTES), private, public], 3, KEY_BYTES)
        kept = ClientRound(number, *terms, own[0], own[1], own[2], secrets)
        commitments, packets = self._deal(kept)
        self._last = number
        older = sorted(self._rounds)[1 - KEPT_ROUNDS :]
        self._rounds = {number: self._rounds[number] for number in older} | {number: kept}
        seed = channel.commit_to_seed(self.sum_run, number, self.party, kept.seed.tobytes())
        promised = np.frombuffer(seed, np.uint8), commitments
        reply = PrepareReply(self.sum_run, number, kept.public, *promised, packets)
        if epoch is not None:
            reply.signature = self._sign(ROUND_KEY, epoch.key_parts(number, public))
        return reply

    def receive(self, request: MaskRequest, ring: Ring | None) -> None:
        """Check a server's statements about a sum, all of them before there is a vector.

        If a server tells one party other terms than the rest, the party's refusal must not depend
        on its vector. So the vector is made only after this call. ``ring`` is the vector's; None
        where words are no numbers.
        """
        kept, live = self._unmasked(request), request.live
        if self.epoch is not None:
            live = self._checked_ready(self.epoch, request, ring)
        held, has = self._open(kept, request, live)
        few = f"fewer than {kept.threshold} of its partners take part"
        refuse_if(has.sum() < kept.threshold, few)
        kept.held, kept.has, kept.live = held, has, live

    def mask(
        self,
        request: MaskRequest,
        present: Sequence[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike] = (),
    ) -> MaskedReply:
        """Mask ``total``, the sum of the vectors of the clients ``present``.

        `receive` has checked the request. ``state`` is what the vectors were made of: under a
        server that may lie, no sum of others has it.
        """
        kept, count = self._unmasked(request), len(present)
        is_alone = not kept.partners.size and count < kept.minimum
        refuse_if(is_alone, f"{count} clients alone: nothing is sent")
        dtype, length = WORDS.get(request.word), request.length
        why = f"{total.dtype} {total.shape}, expected {dtype} ({length},)"
        refuse_if(total.shape != (length,) or total.dtype != dtype, why, ValueError)
        held_by = kept.minimum
        if (epoch := self.epoch) is not None:
            trust, limit = self._trusted(), terms.ring.limit if terms.ring else 0.0
            digest = digest_of(state) + digest_of([np.array(present, np.int64), limit])
            who = set_of(epoch.parties[request.live].tolist())
            trust.journal.check_state(terms.purpose, digest, who)
            held_by = max(int(request.live.sum()), len(epoch.points))
        terms.check_guard(held_by)
        kept.terms = terms.digest(request.length, request.word, kept.threshold, kept.minimum)
        masked = np.array(total)
        if kept.partners.size:
            about = self.sum_run, kept.number, self.party
            others = kept.partners[kept.live].tolist()
            keys = dict(zip(others, pieces(request.round_keys), strict=True))
            own = channel.self_mask_key(kept.seed.tobytes(), *about, kept.terms)
            pairs = channel.pair_masks(kept.private.tobytes(), *about, keys, kept.terms)
            add_streams(masked, [(own, 1), *pairs])
        if epoch is not None:
            # On the disk before the vector leaves: a round repeated without one SuperNode would
            # show that SuperNode's vector.
            self.mark = trust.journal.continue_run(kept.number, self.mark)
            kept.ready, kept.purpose, kept.state = request.live, terms.purpose, digest
        clients = np.array(present, np.int64)
        refused = kept.partners[kept.live & ~kept.has]
        return MaskedReply(self.sum_run, kept.number, clients, masked, refused)

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
        trust.journal.enter(number, kept.purpose, kept.state, who, epoch.differ_by)
        kept.listed = listed
        parts = epoch.signed_parts(number, kept.ready, listed, kept.terms)
        return ListReply(epoch.id, number, self._sign(LIST, parts))

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Reveal one share about each partner that took part; never two."""
        kept = self._round(request.run_id, request.server_round)
        check = self._told if self.epoch is None else self._signed
        kinds = np.zeros(kept.partners.size, np.uint8)
        if (listed := check(kept, request)) is not None:
            kinds = revealed(listed, kept.live) * kept.has
        column = np.flatnonzero(kinds)
        shares = kept.held[column, kinds[column] - SEED]
        del self._rounds[kept.number]
        return UnmaskReply(self.sum_run, kept.number, kinds, shares)

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

    def _unmasked(self, request: MaskRequest) -> ClientRound:
        kept = self._round(request.run_id, request.server_round)
        refuse_if(kept.terms, f"round {kept.number} is masked already: no mask is used twice")
        return kept

    def _check_run(self, run_id: bytes, expected: bytes) -> None:
        refuse_if(run_id != expected, f"run {run_id.hex()}, expected {expected.hex()}")

    def _check_terms(self, request: PrepareRequest) -> None:
        """Refuse partners and numbers of a trusted server with which few could open a vector."""
        # With more than half of the partners, no two groups of holders that were told different
        # things can give back both secrets of a party. Without partners there are no secrets. The
        # minimum, which is larger, is more than half of the parties that are known here.
        k, threshold, minimum = request.partners.size, request.threshold, request.minimum
        fewest, above = min(k, k // 2 + 1), max(threshold, 1)
        is_few = not fewest <= threshold <= k or minimum <= above
        refuse_if(is_few, f"threshold is {threshold} and minimum {minimum}, too few for {k}")
        is_twice = np.unique(request.partners).size < k or self.party in request.partners
        refuse_if(is_twice, "a client is its own partner, or has one twice")
        refuse_if(minimum < self._least, f"minimum {minimum}, {LEAST_CLIENTS} is {self._least}")
        keys = request.channel_keys.shape[0]
        refuse_if(keys != k, f"{keys} channel keys")

    def _checked_ready(self, epoch: Epoch, request: MaskRequest, ring: Ring | None) -> MASKS:
        """Check the list of parties that are ready; return which partners are on it."""
        index, ready = epoch.index(self.party), request.live
        is_other = sorted(request.clients.tolist()) != self.clients
        refuse_if(is_other, "a sum of other clients is asked for than those hosted here")
        epoch.check_present(ready, "are ready")
        refuse_if(not ready[index], "we are not among those who are ready")
        signatures = 0 if request.signatures is None else request.signatures.shape[0]
        is_short = signatures != request.round_keys.shape[0]
        refuse_if(is_short, "a partner's round key is not signed")
        why = f"limit is {ring and ring.limit}, the epoch's is {epoch.limit}"
        refuse_if(ring is not None and ring.limit != epoch.limit, why)
        live: MASKS = ready[epoch.partners_of(index)]
        return live

    def _told(self, kept: ClientRound, request: UnmaskRequest) -> MASKS | None:
        """Return which partners are in the sum; None if nothing left this SuperNode for it."""
        count, listed = request.contributors, request.listed
        refuse_if(count < kept.minimum, f"{count} clients, {kept.minimum} must be")
        if not kept.terms:
            return None
        is_odd = listed.shape != kept.live.shape or (listed & ~kept.live).any()
        refuse_if(is_odd, "a partner that took no part is asked about")
        present = int(listed.sum())
        refuse_if(present > count, f"{present} of our partners among {count}")
        few = f"{present} of our partners are in the sum, {kept.threshold} must"
        refuse_if(present < kept.threshold, few)
        return listed

    def _signed(self, kept: ClientRound, request: UnmaskRequest) -> MASKS:
        """Return what follows from our own list, if enough listed partners signed the same."""
        epoch = self._begun()
        if kept.ready is None or (listed := kept.listed) is None:
            raise RefusedError(f"no list of round {kept.number} was signed here")
        row = epoch.partners_of(epoch.index(self.party))
        parts = epoch.signed_parts(kept.number, kept.ready, listed, kept.terms)
        columns = request.columns
        is_odd = not each_once(columns) or not np.isin(columns, np.arange(row.size)).all()
        is_odd = is_odd or len(columns) != len(request.signatures)
        refuse_if(is_odd, "a signature is there twice, or is not a partner's")
        registry, there = self._trusted().registry, listed[row[columns]]
        signers = epoch.parties[row[columns][there]].tolist()
        signed = [*zip(signers, pieces(request.signatures[there]), strict=True)]
        good = sum(spread(lambda one: registry.verify(*one, LIST, *parts), signed))
        why = f"{good} partners signed it: others saw something else"
        refuse_if(good < epoch.threshold, why)
        return listed[row]

    # Shares

    def _deal(self, kept: ClientRound) -> tuple[Bytes, Bytes]:
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

    def _open(self, kept: ClientRound, request: MaskRequest, live: MASKS) -> tuple[Bytes, MASKS]:
        """Open the packets of the partners that take part; return the shares, and which came."""
        k = kept.partners.size
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
        return held, has


# The method that answers the messages of each exchange
ANSWERS: dict[str, list[tuple[type[Message], Callable[[SumClient, Any], Message]]]] = {
    "sum_enroll": [(KeyRequest, SumClient.enrol)],
    "sum_reveal": [(RevealRequest, SumClient.reveal)],
    "sum_epoch": [(EpochRequest, SumClient.begin)],
    "sum_list": [(ListRequest, SumClient.sign_list)],
    "sum_unmask": [(UnmaskRequest, SumClient.unmask), (PrepareRequest, SumClient.prepare)],
}


LOG = logging.getLogger(__name__)
FloatArray = NDArray[np.floating]
# Entries of a sum itself, beside those that tell clients what to add up
OF_SUM = {one.key for kind in (MaskRequest, Ring) for one in fields_of(kind).values()}
# A request for vectors that was checked, its ring, and the secrets that it was checked with
Received = tuple[MaskRequest, Ring, SumClient]


class MaskingClient(NumPyClient):
    """Common parts of all clients' halves: keys, masks and shares. Subclasses send the vectors.

    With ``trust``, the SuperNode's own settings, it enters no sum of a trusted server.
    """

    # The keys are kept in the context's state: a party's with ``trust``, clients' without.
    party_actions = ("sum_enroll", "sum_reveal", "sum_epoch", "sum_list")
    actions: tuple[str, ...] = ("sum_unmask", *party_actions)

    def __init__(
        self, context: Context, clients: Sequence[int], trust: TrustSettings | None = None
    ) -> None:
        self.context, self.clients, self.trust = context, clients, trust

    def _answer(self, parameters: Parameters, config: Config, action: str) -> Answer:
        host = self._enrolled(config) if action == "sum_enroll" else self.keys()
        asked = [(kind, reply) for kind, reply in ANSWERS[action] if f"{kind.prefix}run" in config]
        entries: Config = {}
        for kind, reply in asked:
            entries |= reply(host, kind.from_config(config)).to_config()
        self._keep(host)
        return [], 1, entries

    sum_unmask = partialmethod(_answer, action="sum_unmask")
    sum_enroll = partialmethod(_answer, action="sum_enroll")
    sum_reveal = partialmethod(_answer, action="sum_reveal")
    sum_epoch = partialmethod(_answer, action="sum_epoch")
    sum_list = partialmethod(_answer, action="sum_list")

    def received(self, config: Config) -> Received:
        """Read a request for vectors and check it, before there is a vector."""
        request, ring, host = MaskRequest.from_config(config), Ring.from_config(config), self.keys()
        host.receive(request, ring)
        return request, ring, host

    def masked(
        self,
        received: Received,
        vectors: Mapping[int, FloatArray],
        purpose: str = SECURE_SUM,
        detail: bytes = b"",
        state: Iterable[ArrayLike] | None = None,
        pad: RingArray | None = None,
    ) -> tuple[MaskedReply, Config]:
        """Add up clients' vectors and mask the sum, as a request says."""
        # state: what the vectors were made of, if not the vectors: it enters one sum
        # pad: words that each client adds, so that the server cannot read the sum either
        request, ring, host = received
        clients = request.clients.tolist()
        total, left_out = np.zeros(request.length, ring.dtype), dict[int, str]()
        for client in clients:
            vector = vectors.get(client)
            if vector is None or np.shape(vector) != total.shape:
                got = "no vector" if vector is None else f"a vector of shape {np.shape(vector)}"
                left_out[client] = f"{got}, expected {total.shape}"
                continue
            try:
                total += ring.encode(vector)
            except OutOfRangeError as error:
                most = f"-{ring.limit:g} to {ring.limit:g}"
                left_out[client] = f"a number is outside the ring's range of {most}"
                # For the client's own log: the server is not told how large.
                LOG.warning("client %d: %s", client, error)
        present = [client for client in clients if client not in left_out]
        if not present:
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        if pad is not None:
            total += pad.astype(ring.dtype) * ring.dtype.type(len(present))
        terms = SumTerms(purpose, ring, detail, padded=pad is not None)
        made_of = [vectors[client] for client in sorted(vectors)] if state is None else state
        return self.mask(host, request, present, total, terms, made_of, left_out)

    def mask(
        self,
        host: SumClient,
        request: MaskRequest,
        present: Sequence[int],
        total: RingArray,
        terms: SumTerms,
        state: Iterable[ArrayLike],
        left_out: Mapping[int, str] = MappingProxyType({}),
    ) -> tuple[MaskedReply, Config]:
        """Mask the sum of the vectors of the clients ``present``; arguments as of ``SumClient``."""
        reply = host.mask(request, present, total, terms, state)
        reply.left_out |= left_out
        self._keep(host)
        return reply, reply.to_config() | {ARRAY_NAMES: [f"{ARRAYS}/{MASKED_SUM}"]}

    def _enrolled(self, config: Config) -> SumClient:
        run_id = KeyRequest.from_config(config).run_id
        with suppress(StateLostError):  # the secrets of another run are of no more use
            if (host := self.keys()).run_id == run_id:
                return host
        return SumClient(run_id, self.clients, self.trust, least=self._fewest())

    def keys(self) -> SumClient:
        """Return the secrets that are kept; ``StateLostError`` without any."""
        record = self.context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: enrol first")
        host = SumClient.from_bytes(state, self.trust, least=self._fewest())
        if host.clients != sorted(self.clients):
            raise StateLostError("the keys that were kept belong to other clients")
        return host

    def _fewest(self) -> int:
        return 1 if self.trust else least_clients(self.context.node_config)

    def _keep(self, host: SumClient) -> None:
        self.context.state[SUM_STATE] = ConfigRecord({SUM_STATE: host.to_bytes()})


class SecureSumClient(MaskingClient):
    """The clients' half: a subclass returns in ``vectors`` the vectors to add up."""

    actions = (*MaskingClient.actions, "sum_mask")

    def __init__(self, context: Context, clients: Sequence[int]) -> None:
        trust = TrustSettings.of(context.node_config, context.run_id)
        super().__init__(context, clients, trust)

    @abstractmethod
    def vectors(self, config: Config) -> Mapping[int, FloatArray]:
        """Return the vector of each client; a missing client is left out of the sum."""

    def sum_mask(self, parameters: Parameters, config: Config) -> Answer:
        told = {key: config[key] for key in config.keys() - OF_SUM}
        received = self.received(config)
        vectors, detail = self.vectors(config), digest_of_told(told)
        reply, entries = self.masked(received, vectors, SECURE_SUM, detail)
        return [reply.total], reply.clients.size, entries
