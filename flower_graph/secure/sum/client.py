"""The client's side of the secure sum: a SuperNode with all clients that it hosts.

The SuperNode is the party: it has a channel key for the run and, for each round, a seed and a mask
key, both shared among its partners, other SuperNodes. To the sum of its clients' vectors it adds
the stream of its seed, and for each partner a stream on which the two agree and that one adds and
the other subtracts. Its clients need no masks against each other: only their sum leaves it. If all
clients of a sum are here, the sum has only its receiver to hide from, and it leaves unmasked;
clients fewer than the minimum send nothing.

Every key is used once. A round is prepared once, masked once and unmasked once; the second time is
refused, as is a round that is not newer than the last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure import channel
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, pieces, rows_of
from flower_graph.secure.node_config import LEAST_CLIENTS
from flower_graph.secure.ring import WORDS, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, split_secrets
from flower_graph.secure.state import read_state, write_state
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MASK_KEY,
    NOTHING,
    PACKET_BYTES,
    SEED,
    KeyReply,
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

KEPT = ("run_id", "clients", "_private", "_public", "_last")  # what is saved beside the rounds


@dataclass
class ClientRound:
    """A SuperNode's secrets in one round, and its partners' shares."""

    number: int  # As in PrepareRequest
    threshold: int
    minimum: int
    is_masked: bool  # Whether the sum has left, so that no key may be used again
    partners: Integers  # [k]
    seed: Bytes = field(repr=False)  # [32] of the self mask, and the mask key
    private: Bytes = field(repr=False)
    public: Bytes
    secrets: Bytes = field(repr=False)  # [k, 32] what the channel keys agree on
    # [k, 2, 33] shares of the partners' seeds and mask keys, and [k] which are there
    held: Bytes = field(repr=False)
    has: NDArray[np.bool_]
    live: NDArray[np.bool_]  # [k] partners that take part, as the server said with the packets

    @classmethod
    def begin(cls, request: PrepareRequest, secrets: Bytes) -> ClientRound:
        """Make the seed and the mask key of a round."""
        k, (private, public) = request.partners.shape[1], channel.new_key()
        return cls(
            request.server_round,
            request.threshold,
            request.minimum,
            False,
            request.partners[0],
            np.frombuffer(os.urandom(KEY_BYTES), np.uint8),
            np.frombuffer(private, np.uint8),
            np.frombuffer(public, np.uint8),
            secrets,
            np.zeros((k, 2, SHARE_BYTES), np.uint8),
            np.zeros(k, np.bool_),
            np.zeros(k, np.bool_),
        )

    def columns(self, request: MaskRequest) -> Integers:
        """Return the columns of the live partners, in the request's order."""
        if request.live.shape != self.partners.shape:
            raise RefusedError(f"live has shape {request.live.shape}, not {self.partners.shape}")
        column = np.flatnonzero(request.live)
        if column.size != request.packets.shape[0]:
            raise RefusedError(f"{request.packets.shape[0]} packets for {column.size} partners")
        return column


def check_terms(request: PrepareRequest) -> None:
    """Refuse a threshold, a minimum or partners with which too few could open a sum."""
    # With more than half of the partners, no two groups of holders that were told different things
    # can give back both secrets of a party. Without partners there are no secrets. The
    # minimum, which is larger, is more than half of the parties that are known here.
    k, threshold, minimum = request.partners.shape[1], request.threshold, request.minimum
    fewest, above = min(k, k // 2 + 1), max(threshold, 1)
    if not fewest <= threshold <= k or minimum <= above:
        raise RefusedError(
            f"threshold is {threshold} and minimum {minimum}, too few for {k} partners"
        )
    if np.unique(request.partners).size < k or request.clients[0] in request.partners:
        raise RefusedError("a client is its own partner, or has one twice")


def check_unmask(kept: ClientRound, request: UnmaskRequest) -> None:
    """Refuse a request for shares that contradicts the known members of the sum."""
    kinds = request.kinds[0]
    if ((kinds != NOTHING) & ~kept.live).any():
        raise RefusedError("a partner that took no part is asked about: nothing is revealed")
    if (present := int((kinds == SEED).sum())) > request.contributors:
        raise RefusedError(
            f"{present} of our partners among {request.contributors} clients: nothing is revealed"
        )
    if present < kept.threshold:
        raise RefusedError(
            f"{present} of our partners are in the sum, {kept.threshold} must: nothing is revealed"
        )


class Received(NamedTuple):
    """The partners' sealed packets of a round, opened."""

    kept: ClientRound
    request: MaskRequest
    present: list[int]  # own clients that are to be in the sum
    held: Bytes  # as ``ClientRound`` has them
    has: NDArray[np.bool_]
    refused: Integers  # [n, 2] own number and that of a partner whose packet does not open


class SumClient:
    """The clients of one SuperNode in a secure sum."""

    def __init__(
        self,
        run_id: bytes,
        clients: Sequence[int],
        own: tuple[bytes, bytes] | None = None,
        least: int = 1,
    ) -> None:
        # own: the private and public channel key, where the SuperNode has one already
        # least: contributors without whom nothing is revealed, whatever the server asks
        numbers = [int(client) for client in clients]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"clients are {numbers!r:.60}, must be some, each there once")
        self.run_id, self.clients, self._least = run_id, numbers, least
        self._private, self._public = channel.new_key() if own is None else own
        self._rounds: dict[int, ClientRound] = {}
        self._last = -1  # the newest round that was prepared
        self._agreed = channel.Agreements()

    @property
    def party(self) -> int:
        return min(self.clients)

    def keys(self) -> KeyReply:
        public = np.frombuffer(self._public, np.uint8)
        return KeyReply(self.run_id, np.array(self.clients, np.int64), public)

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        self._check_prepare(request)
        publics = pieces(request.channel_keys)
        agreed = self._agreed.look_up(self._private, publics)
        kept = ClientRound.begin(request, rows_of(agreed, len(publics), KEY_BYTES))
        shares, share_commitments = self._share(kept)
        self._last = kept.number
        older = sorted(self._rounds)[1 - KEPT_ROUNDS :]
        self._rounds = {number: self._rounds[number] for number in older} | {kept.number: kept}
        seed = self.run_id, kept.number, self.party, kept.seed.tobytes()
        return PrepareReply(
            self.run_id,
            kept.number,
            request.clients,
            kept.public[None],
            rows_of([channel.commit_to_seed(*seed)], 1, COMMITMENT_BYTES),
            share_commitments,
            self._seal(kept, shares),
        )

    def mask(
        self, request: MaskRequest, present: Sequence[int], total: RingArray, terms: SumTerms
    ) -> MaskedReply:
        """Mask the sum of some clients' vectors; ``terms`` describe the sum."""
        return self.mask_received(self.receive(request, present), total, terms)

    def receive(self, request: MaskRequest, present: Sequence[int]) -> Received:
        """Open the partners' packets for the clients that are to be in a sum."""
        kept = self._round(request.run_id, request.server_round)
        if kept.is_masked:
            raise RefusedError(f"round {kept.number} is masked already: no mask is used twice")
        asked, chosen = set(request.clients.tolist()) & set(self.clients), list(present)
        if not chosen or len(set(chosen)) != len(chosen) or not asked.issuperset(chosen):
            raise RefusedError(f"present is {brief(present)}, must be some of the request's")
        if not kept.partners.size and len(chosen) < kept.minimum:
            raise RefusedError(
                f"{len(chosen)} clients alone, {kept.minimum} must be in the sum: nothing is sent"
            )
        held, has, refused = self._receive(kept, request)
        if has.sum() < kept.threshold:
            raise RefusedError(
                f"client {self.party}: fewer than {kept.threshold} of its partners take part"
            )
        return Received(kept, request, chosen, held, has, refused)

    def mask_received(self, came: Received, total: RingArray, terms: SumTerms) -> MaskedReply:
        """Mask a sum, as ``mask`` does, after ``receive``."""
        # total [L]
        kept, request = came.kept, came.request
        terms.check_guard(kept.minimum)
        _check_total(request, total)
        kept.held, kept.has = came.held, came.has
        kept.live, kept.is_masked = request.live, True
        masked = np.array(total)
        bound = terms.digest(request.length, request.word, kept.threshold, kept.minimum)
        add_streams(masked, self._masks(kept, request, bound))
        clients = np.array(came.present, np.int64)
        return MaskedReply(self.run_id, kept.number, clients, masked, came.refused)

    def answer(self, action: str, config: Config) -> Config:
        """Reveal shares of one sum, prepare the next, or both, as the request's entries ask."""
        answer: Config = {}
        if "unmask-run" in config:
            answer |= self.unmask(UnmaskRequest.from_config(config)).to_config()
        if "prepare-run" in config:
            answer |= self.prepare(PrepareRequest.from_config(config)).to_config()
        return answer

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Reveal one share about each partner that the server asks about; never two."""
        # Of a round in which nothing left this SuperNode, it has nothing to give.
        kept = self._round(request.run_id, request.server_round)
        self._check_party(request.clients)
        if request.contributors < kept.minimum:
            raise RefusedError(
                f"{request.contributors} clients, {kept.minimum} must be: nothing is revealed"
            )
        if request.kinds.shape != (1, kept.partners.size) or (request.kinds > MASK_KEY).any():
            raise RefusedError(f"kinds have shape {request.kinds.shape}, or unknown entries")
        if kept.is_masked:
            check_unmask(kept, request)
        kinds = np.where(kept.has & kept.is_masked, request.kinds, np.uint8(NOTHING))
        column = np.flatnonzero(kinds[0])
        shares = kept.held[column, kinds[0, column] - SEED]
        del self._rounds[kept.number]
        return UnmaskReply(self.run_id, kept.number, request.clients, kinds, shares)

    def to_bytes(self) -> bytes:
        rounds = [vars(kept) for kept in self._rounds.values()]
        return write_state({name: getattr(self, name) for name in KEPT} | {"rounds": rounds})

    @classmethod
    def from_bytes(cls, state: bytes, least: int = 1) -> SumClient:
        host = cls.__new__(cls)
        host._agreed, host._least = channel.Agreements(), least
        with reading("the state of the secure sum", StateLostError):
            kept = read_state(state)
            vars(host).update({name: kept[name] for name in KEPT})
            host._rounds = {one["number"]: ClientRound(**one) for one in kept["rounds"]}
        return host

    def _round(self, run_id: bytes, number: int) -> ClientRound:
        self._check_run(run_id)
        kept = self._rounds.get(number)
        if kept is None:
            raise RefusedError(f"round {number} is not open; open: {sorted(self._rounds)}")
        return kept

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise RefusedError(f"run {run_id.hex()}, expected {self.run_id.hex()}")

    def _check_party(self, clients: Integers) -> None:
        if clients.tolist() != [self.party]:
            first = clients[0] if clients.size else None
            raise RefusedError(f"client {first} is not the first of those hosted here")

    def _check_prepare(self, request: PrepareRequest) -> None:
        self._check_run(request.run_id)
        if request.server_round <= self._last:
            raise RefusedError(
                f"round {request.server_round} is not newer than {self._last}, the last prepared"
            )
        check_terms(request)
        if request.minimum < self._least:
            raise RefusedError(
                f"a sum of {request.minimum} clients, here {LEAST_CLIENTS} is {self._least}"
            )
        self._check_party(request.clients)
        if request.channel_keys.shape[0] != request.partners.shape[1]:
            raise RefusedError(
                f"{len(request.channel_keys)} channel keys for {request.partners.shape[1]} partners"
            )

    def _share(self, kept: ClientRound) -> tuple[Bytes, Bytes]:
        """Split both secrets into shares ``[k, 2, 33]``, and commit to each, ``[k, 2, 32]``."""
        k = kept.partners.size
        if not k:
            return np.zeros((0, 2, SHARE_BYTES), np.uint8), rows_of([], 0, 2, COMMITMENT_BYTES)
        split = split_secrets(np.stack([kept.seed, kept.private]), kept.threshold, k)  # [2, k, 33]
        shares = np.ascontiguousarray(np.moveaxis(split, 0, 1))
        contexts = channel.share_contexts(self.run_id, kept.number, self.party)
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

    def _receive(
        self, kept: ClientRound, request: MaskRequest
    ) -> tuple[Bytes, NDArray[np.bool_], Integers]:
        """Open the packets; return all shares, which of them came, and the pairs that failed."""
        column = kept.columns(request)
        held, has, own = kept.held.copy(), np.zeros_like(kept.has), channel.name_bytes(self.party)
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
            contexts = channel.share_contexts(self.run_id, kept.number, dealer)
            commitments = channel.commit_to_shares(contexts, own, both)
            opened.append(b"".join(both if b"".join(commitments) == promised else ()))
        good = np.array([plain != b"" for plain in opened], np.bool_)
        held[column[good]] = rows_of(opened, int(good.sum()), 2, SHARE_BYTES)
        has[column[good]] = True
        refused = [[self.party, dealers[at]] for at in np.flatnonzero(~good).tolist()]
        return held, has, np.array(refused, np.int64).reshape(-1, 2)

    def _packet(self, kept: ClientRound, dealer: int, holder: int) -> bytes:
        return channel.packet_context(self.run_id, kept.number, dealer, holder)

    def _masks(
        self, kept: ClientRound, request: MaskRequest, terms: bytes
    ) -> list[tuple[bytes, int]]:
        """Return the self mask, and the pair masks with live partners; none without partners."""
        number, run_id, party = kept.number, self.run_id, self.party
        if not kept.partners.size:
            return []
        masks = [(channel.self_mask_key(kept.seed.tobytes(), run_id, number, party, terms), 1)]
        others = kept.partners[kept.columns(request)].tolist()
        secrets = channel.agree(kept.private.tobytes(), pieces(request.round_keys))
        for other, secret in zip(others, secrets, strict=True):
            key = channel.pair_mask_key(secret, run_id, number, party, other, terms)
            masks.append((key, channel.pair_sign(party, other)))
        return masks


def _check_total(request: MaskRequest, total: RingArray) -> None:
    dtype = WORDS.get(request.word)
    if total.shape != (request.length,) or total.dtype != dtype:
        raise ValueError(
            f"the sum is {total.dtype} {total.shape}, asked for were {dtype} ({request.length},)"
        )
