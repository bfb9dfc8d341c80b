"""One round of the secure sum at the server: the replies, the members, and the sum at the end.

The round goes through four stages. *Prepare*: keys, commitments and sealed shares are collected.
*Mask*: they are handed on, and masked sums are added up; a client that prepared but is in no sum
has vanished. *List*: the members of the sum are settled; parties that do not trust the server sign
them. *Unmask*: the server collects shares of each summed client's seed and of each vanished
client's mask key; from them it recomputes the masks and subtracts them.

Parties, the SuperNodes, are rows here, in ascending order of their numbers; each adds up some
clients. Partner lists are mirrored: if column j of row a holds b, column ``k - 1 - j`` of row b
holds a. A party that is alone has no partners, and no masks.

Parties that do not trust the server sign no list that differs from an earlier one by too few
(``journal.py``). The server knows which parties to leave out only when all vectors are there,
but it adds vectors up as they come. So the sums of a few parties, by turns, are kept beside the
total, to be taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, RefusedError, one_line, refuse_if
from flower_graph.secure import channel
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.parties.epoch import LIST, MASKS, ROUND_KEY, Epoch
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.journal import choose, members_of, set_of
from flower_graph.secure.ring import WORDS, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, combine_shares
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    NOTHING,
    PACKET_BYTES,
    SEED,
    ListReply,
    ListRequest,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.wire.fields import Bytes, Integers

if TYPE_CHECKING:
    from flower_graph.secure.sum.server import SumServer


class Cause(Enum):
    """The kind of a reason."""

    LEFT_OUT = "its own SuperNode left the client out of the sum"
    DISPUTED = "a holder says that the client's packet does not open, which proves nothing"
    AT_ODDS = "most others are at odds with the client: it is excluded"
    PROVEN = "the client has cheated, and the server can prove it"
    SKIPPED = "there is no sum"


@dataclass(frozen=True)
class Reason:
    """Why a client is blamed or left out, or why there is no sum."""

    kind: Cause
    text: str  # One line for a person, without the client and the round
    client: int | None = None  # None if it is about the whole sum
    round: int | None = None  # Number of the sum, or the caller's own; None to leave it out

    def __str__(self) -> str:
        text = f"left out: {self.text}" if self.kind is Cause.LEFT_OUT else self.text
        if self.round is None:
            return text
        skipped = " is skipped" if self.kind is Cause.SKIPPED else ""
        return f"round {self.round}{skipped}: {text}"


@dataclass(frozen=True)
class SumResult:
    """The sum of a round."""

    total: RingArray  # [L] ring words: the sum of the contributors' encoded vectors, without masks
    contributors: Integers  # Numbers of the clients in it, ascending


@dataclass(frozen=True)
class Skipped:
    """A round without a sum; nothing of it was or will be revealed."""

    reason: Reason


StageReply = PrepareReply | MaskedReply | ListReply | UnmaskReply

# Parties beyond `differ-by` by which the turn to be left out goes on; twice as many can be spared
SPARE = 2


class Circle(NamedTuple):
    """The parties of a round and their partners, as the server drew them; as `Epoch` has them."""

    id: bytes  # in the context of each key, packet and commitment
    parties: Integers  # [m] their numbers, ascending
    partners: Integers  # [m, k] rows of each party's partners
    threshold: int
    minimum: int  # so many must be in the sum


class SumRound:
    """One round at the server; of an `Epoch` it counts parties, not clients."""

    def __init__(
        self, server: SumServer, circle: Circle | Epoch, number: int, local: Mapping[int, list[int]]
    ) -> None:
        # local: of the parties that are there the clients whose vectors each adds up
        self.run_id, self.parties, self.partners = circle.id, circle.parties, circle.partners
        self.threshold, self.minimum = circle.threshold, circle.minimum
        m, k = self.partners.shape
        self.number, self._server = number, server
        self._epoch = circle if isinstance(circle, Epoch) else None
        parties = self.parties.tolist()
        bound = [server.bindings[party] for party in parties]
        keys = (one.channel_key.tobytes() for one in bound)
        self._channel_keys = channel.rows_of(keys, m, channel.KEY_BYTES)
        both = zip(parties, bound, strict=True)
        self._hosted = [local.get(party, one.clients.tolist()) for party, one in both]
        self._asked = self._count(np.ones(m, np.bool_))
        nodes = {party: node for node, party in server.nodes.items()}
        self._rows = {nodes[party]: row for row, party in enumerate(parties) if party in local}
        self.round_keys = np.zeros((m, channel.KEY_BYTES), np.uint8)
        self.seed_commitments = np.zeros((m, channel.COMMITMENT_BYTES), np.uint8)
        self.share_commitments = np.zeros((m, k, 2, channel.COMMITMENT_BYTES), np.uint8)
        self._packets = np.zeros((m, k, PACKET_BYTES), np.uint8)
        self.live = np.zeros(m, np.bool_)  # prepared, and with enough prepared partners
        self.contributed = np.zeros(m, np.bool_)
        self.kinds = np.zeros(m, np.uint8)  # what is to be revealed of each party
        self.shares = np.zeros((m, k, SHARE_BYTES), np.uint8)  # by dealer and the holder's column
        self.has = np.zeros((m, k), np.bool_)
        # Whose packet a holder cannot open, as it says; by dealer and the holder's column
        self._refused = np.zeros((m, k), np.bool_)
        self.total: RingArray = np.zeros(0, WORDS[64])
        self.skipped: Reason | None = None
        self._stage, self.terms = "prepare", b""  # the terms, hashed, once they are known
        self._open = set(self._rows)  # nodes that are asked and have not answered
        # Signatures of round keys and of the list
        self.keys = np.zeros((m if self._epoch else 0, SIGNATURE_BYTES), np.uint8)
        self.lists = np.zeros_like(self.keys)
        self.signed: MASKS = np.zeros(m, np.bool_)
        self._sums: list[int] = []  # earlier sums of the purpose
        self._spare: list[int] = []  # parties, those that are left out first
        self._kept: dict[int, RingArray] = {}  # their sums

    def move(self, old: int, node: int) -> None:
        self._rows = {node if at == old else at: rows for at, rows in self._rows.items()}
        self._open = {node if at == old else at for at in self._open}

    def prepare_requests(self) -> dict[int, PrepareRequest]:
        """Ask for keys and shares; partners and terms of an epoch are known to its parties."""
        requests = {node: PrepareRequest(self.run_id, self.number) for node in self._rows}
        if self._epoch is None:
            for node, row in self._rows.items():
                one, partners = requests[node], self.partners[row]
                one.threshold, one.minimum = self.threshold, self.minimum
                one.partners, one.channel_keys = (
                    self.parties[partners],
                    self._channel_keys[partners],
                )
        return {} if self.skipped else requests

    def _present(self) -> list[tuple[int, int]]:
        """Return the SuperNodes that have not gone, and their rows."""
        return [(node, row) for node, row in self._rows.items() if node in self._server.nodes]

    def take(self, node: int, reply: StageReply) -> None:
        """Process a SuperNode's reply of the present stage, whole or not at all."""
        number, refuse = self.number, partial(refuse_if, error=MalformedReplyError)
        is_other = (reply.run_id, reply.server_round) != (self.run_id, number)
        refuse(is_other, f"run {reply.run_id.hex()}, round {reply.server_round}: not {number}")
        stage, take = STAGES[type(reply)]
        why = f"round {number} is in the stage {self._stage}, not {stage}"
        refuse(stage != self._stage, why)
        why = f"node {node} was not asked in round {number}, or answered"
        refuse(node not in self._open, why)
        take(self, self._rows[node], reply)
        self._open.remove(node)

    def _take_prepare(self, row: int, reply: PrepareReply) -> None:
        key = reply.round_key.tobytes()
        if self._epoch is not None:
            parts = self._epoch.key_parts(self.number, key)
            self.keys[row] = self._verified(row, reply.signature, ROUND_KEY, parts)
        if channel.is_low_order(key):
            self._convict(row, "its round key is of low order")
            raise MalformedReplyError(f"round key of client {self.parties[row]}: of low order")
        self.round_keys[row] = reply.round_key
        self.seed_commitments[row] = reply.seed_commitment
        self.share_commitments[row] = reply.share_commitments
        self._packets[row] = reply.packets
        self.live[row] = True

    def mask_requests(self, length: int, word: int, terms: SumTerms) -> dict[int, MaskRequest]:
        """End the first stage; write the second request to each SuperNode that prepared."""
        if self.skipped:
            return {}
        self._stage = "mask"
        self.terms = terms.digest(length, word, self.threshold, self.minimum)
        excluded = self._server.excluded
        self.live &= [excluded.isdisjoint(local) for local in self._hosted]
        # Without enough partners a party's secrets could not be recovered; without it, its
        # partners may have too few in turn.
        while (few := self.live & (self.live[self.partners].sum(1) < self.threshold)).any():
            self.live &= ~few
        if not self._enough(self.live, "are ready"):
            return {}
        self.total = np.zeros(length, WORDS[word])
        requests = {}
        for node, row in self._present():
            if not self.live[row]:
                continue
            partners = self.partners[row]
            live = self.live[partners]
            column = np.flatnonzero(live)
            dealers, mirrored = partners[column], partners.size - 1 - column
            hosted = np.array(self._hosted[row], np.int64)
            told, signatures = (
                (live, None) if self._epoch is None else (self.live, self.keys[dealers])
            )
            requests[node] = MaskRequest(
                self.run_id,
                self.number,
                length,
                word,
                hosted,
                told.copy(),
                self.round_keys[dealers],
                self.share_commitments[dealers, mirrored],
                self._packets[dealers, mirrored],
                signatures,
            )
        self._open = set(requests)
        if self._epoch is not None:
            self._sums = self._server.earlier.setdefault(terms.purpose, [])
            self._spare = self._choose_spare(self._epoch.differ_by)
        return requests

    def _choose_spare(self, apart: int) -> list[int]:
        """Choose parties that can be left out, if the sum is not allowed with them."""
        ready = self.parties[self.live].tolist()
        start = self.number * (apart + SPARE) % len(ready)
        # First those that an earlier sum was made without: its set can be had again.
        order = sorted(
            ready[start:] + ready[:start],
            key=lambda party: -sum(not one >> party & 1 for one in self._sums),
        )
        return order[: apart + 2 * SPARE]

    def _take_masked(self, row: int, reply: MaskedReply) -> None:
        local = self._hosted[row]
        about, refuse = f"round {self.number}:", partial(refuse_if, error=MalformedReplyError)
        if (strangers := np.setdiff1d(reply.clients, local)).size:
            raise MalformedReplyError(f"{about} client {strangers[0]} was not asked")
        refuse(not reply.clients.size, f"{about} no client is in the sum")
        came, asked = (f"{one.dtype} {one.shape}" for one in (reply.total, self.total))
        refuse(came != asked, f"{came}, not {asked}")
        # Packets that it cannot open; none twice, none that was not sent
        partners, party = self.partners[row], int(self.parties[row])
        column = np.flatnonzero(self.live[partners])
        checked = reply.refused[: column.size]  # more are wrong anyway, and not worth the memory
        refused = column[np.isin(self.parties[partners[column]], checked)]
        why = f"{reply.refused.size} do not open, {refused.size} of them were sent"
        refuse(refused.size != reply.refused.size, why)
        self.total += reply.total
        self.contributed[row] = True
        self._refused[partners[refused], partners.size - 1 - refused] = True
        self._hosted[row] = reply.clients.tolist()
        if party in self._spare:
            self._kept[party] = reply.total
        for client in sorted(reply.left_out.keys() & set(local)):
            self._note(Cause.LEFT_OUT, client, one_line(reply.left_out[client]))

    def list_requests(self) -> dict[int, ListRequest]:
        """Settle the sum's members; ask parties that do not trust the server to sign them.

        Parties are left out that the list may not have.
        """
        if self.skipped is not None or (epoch := self._epoch) is None:
            return {}
        present = set_of(self.parties[self.contributed].tolist())
        spare = [one for one in self._spare if one in self._kept]
        few = {"fewest": self.minimum, "number": self.number}
        chosen = choose(present, self._sums, epoch.differ_by, spare=spare, **few)
        if chosen is None:
            self.skip(
                f"whoever is left out, this sum differs by fewer than {epoch.differ_by} SuperNodes "
                f"from an earlier one ({DIFFER_BY}), or {self.minimum} are not left; nothing is "
                "revealed"
            )
            return {}
        why = f"or this sum and an earlier one would differ by too few SuperNodes ({DIFFER_BY})"
        for party in members_of(present & ~chosen):
            row = epoch.index(party)
            self.total -= self._kept[party]
            self.contributed[row] = False
            for client in self._hosted[row]:
                self._note(Cause.LEFT_OUT, client, f"{why} (party {party})")
        self._kept.clear()
        listed = self.contributed.copy()
        try:
            epoch.check_present(listed, "sent their vectors")
        except RefusedError as error:
            self.skip(f"{error}; nothing is revealed")
            return {}
        if chosen not in self._sums:
            self._sums.append(chosen)
        request = ListRequest(self.run_id, self.number, listed)
        requests = {node: request for node, row in self._present() if listed[row]}
        self._stage, self._open = "list", set(requests)
        return requests

    def _take_list(self, row: int, reply: ListReply) -> None:
        assert self._epoch is not None
        terms = self.live, self.contributed, self.terms
        parts = self._epoch.signed_parts(self.number, *terms)
        self.lists[row], self.signed[row] = self._verified(row, reply.signature, LIST, parts), True

    def _verified(
        self, row: int, signature: Bytes | None, purpose: bytes, parts: tuple[bytes, ...]
    ) -> Bytes:
        party, signed = int(self.parties[row]), b"" if signature is None else signature.tobytes()
        assert self._server.registry is not None
        is_valid = self._server.registry.verify(party, signed, purpose, *parts)
        if signature is None or not is_valid:
            raise MalformedReplyError(f"party {party}: its signature is not valid")
        return signature

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """End the stage before; write the last request to each SuperNode that masked a sum."""
        if self.skipped:
            return {}
        self._stage = "unmask"
        if not self._enough(self.contributed, "sent their vectors"):
            return {}
        has_masks = self.contributed[self.partners].any(1)
        vanished = self.live & ~self.contributed & has_masks
        self.kinds[self.contributed], self.kinds[vanished] = SEED, MASK_KEY
        requests = {}
        about = self.run_id, self.number
        for node, row in self._present():
            partners = self.partners[row]
            kinds = self.kinds[partners]
            if not self.live[row] or not kinds.any():
                continue
            if self._epoch is None:
                requests[node] = UnmaskRequest(*about, self._count(self.contributed), kinds)
                continue
            # The partners' signatures of the list; without enough of them a party refuses
            columns = np.flatnonzero(self.signed[partners])[: self.threshold]
            if self.signed[row] and columns.size == self.threshold:
                signatures = self.lists[partners[columns]]
                requests[node] = UnmaskRequest(*about, columns=columns, signatures=signatures)
        self._open = set(requests)
        return requests

    def _take_shares(self, row: int, reply: UnmaskReply) -> None:
        asked = self.kinds[self.partners[row]]
        is_other = ((reply.kinds != NOTHING) & (reply.kinds != asked)).any()
        why = f"round {self.number}: shares that were not asked for"
        refuse_if(is_other, why, MalformedReplyError)
        column = np.flatnonzero(reply.kinds)
        dealers, columns = self.partners[row, column], self.partners.shape[1] - 1 - column
        promised = self.share_commitments[dealers, columns, asked[column] - SEED]
        about, found = (self.run_id, self.number), []
        for dealer, share in zip(dealers.tolist(), channel.pieces(reply.shares), strict=True):
            both = int(self.parties[dealer]), int(self.parties[row])
            what_for = channel.context(channel.SHARES[self.kinds[dealer] - SEED], *about, *both)
            found.append(channel.commitment(what_for, share))
        good = (channel.rows_of(found, *promised.shape) == promised).all(1)
        if not good.all():
            self._convict(row, "it sent a wrong share")
        self.shares[dealers[good], columns[good]] = reply.shares[good]
        self.has[dealers[good], columns[good]] = True

    def result(self) -> SumResult | Skipped:
        if self._stage != "unmask" and not self.skipped:
            raise ValueError(f"round {self.number}: no shares were asked for yet")
        self._stage, self._open = "over", set()
        for row in np.flatnonzero(self._refused.any(1)):
            # The holders' word against the dealer's: noted, not proven.
            holders = self.parties[self.partners[row, self._refused[row]]]
            why = f"its packet does not open, says client {holders.min()}"
            more = f" and {holders.size - 1} more" if holders.size > 1 else ""
            self._note(Cause.DISPUTED, int(self.parties[row]), why + more)
        if self.skipped is None:
            self._take_masks_away()
        if self.skipped is not None:
            return Skipped(self.skipped)
        there = [self._hosted[row] for row in np.flatnonzero(self.contributed).tolist()]
        return SumResult(self.total, np.sort(np.concatenate(there)))

    def _convict(self, row: int, why: str, cause: Cause = Cause.PROVEN) -> None:
        node = next(node for node, at in self._rows.items() if at == row)
        self._server.blame(Reason(cause, why, int(self.parties[row]), self.number), node)

    def _note(self, kind: Cause, client: int, text: str) -> None:
        self._server.blame(Reason(kind, text, client, self.number), None)

    def skip(self, text: str) -> None:
        """Give the sum up: nothing of it is revealed any more."""
        self.skipped = Reason(Cause.SKIPPED, text, round=self.number)

    def _count(self, present: NDArray[np.bool_]) -> int:
        if self._epoch is not None:
            return int(present.sum())
        return sum(len(self._hosted[row]) for row in np.flatnonzero(present).tolist())

    def _enough(self, present: NDArray[np.bool_], what: str) -> bool:
        """Skip the sum if too few clients are there, or a party has too few partners."""
        if (count := self._count(present)) < self.minimum:
            self.skip(
                f"{count} of {self._asked} clients {what}, at least {self.minimum} must; nothing "
                "is revealed"
            )
        elif (present[self.partners[present]].sum(1) < self.threshold).any():
            self.skip(
                f"{present.sum()} of {present.size} SuperNodes {what}, which are too few to take "
                "each other's masks away; nothing is revealed"
            )
        return self.skipped is None

    def _take_masks_away(self) -> None:
        """Reconstruct and check all secrets, and subtract the masks from ``total``; or skip."""
        if not self.partners.size:
            return  # only the sum's receiver is left, from whom it need not be hidden
        needed = np.flatnonzero(self.kinds != NOTHING)
        few = needed[self.has[needed].sum(1) < self.threshold]
        if few.size:
            if self._epoch is None:
                self._exclude_most_disputed()
            self.skip(
                f"too few shares came for {few.size} clients (the first is "
                f"{self.parties[few[0]]}: {self.has[few[0]].sum()} of {self.threshold})"
            )
            return
        wrong: list[int] = []
        masks: list[tuple[bytes, int]] = []
        for row in needed.tolist():
            came = np.flatnonzero(self.has[row])[: self.threshold]
            held = {column + 1: self.shares[row, column].tobytes() for column in came.tolist()}
            secret = self.secret_of(row, int(self.kinds[row]), held)
            about = self.run_id, self.number, (party := int(self.parties[row]))
            if secret is None:
                self._convict(row, "its shares do not give the secret that it committed to")
                wrong.append(party)
            elif self.kinds[row] == SEED:
                masks.append((channel.self_mask_key(secret, *about, self.terms), -1))
            else:
                partners = self.partners[row]
                present = partners[self.contributed[partners]]
                public = channel.pieces(self.round_keys[present])
                others = dict(zip(self.parties[present].tolist(), public, strict=True))
                masks += channel.pair_masks(secret, *about, others, self.terms)
        if wrong:
            self.skip(f"client {wrong[0]} shared wrongly")
            return
        add_streams(self.total, masks)

    def _exclude_most_disputed(self) -> None:
        """Exclude the one party that disputes packets with most others, if there is one."""
        # Honest SuperNodes dispute packets with liars only: if there is one liar, with it alone.
        dealers, columns = np.nonzero(self._refused)
        pair = np.stack([dealers, self.partners[dealers, columns]])
        sides = np.unique(np.concatenate([pair, pair[::-1]], 1), axis=1)[0]
        odds = np.bincount(sides, minlength=1)
        if odds.max() >= 2 and (odds == odds.max()).sum() == 1:
            why = "most others and its SuperNode cannot open what they seal for each other"
            self._convict(int(odds.argmax()), why, Cause.AT_ODDS)

    def secret_of(self, row: int, kind: int, shares: Mapping[int, bytes]) -> bytes | None:
        """Reconstruct a secret from its holders' shares; None if it was not committed to."""
        chosen, party = sorted(shares)[: self.threshold], int(self.parties[row])
        try:
            secret = combine_shares(chosen, [shares[holder] for holder in chosen])
        except ValueError:
            return None
        if kind == SEED:
            commitment = channel.commit_to_seed(self.run_id, self.number, party, secret)
            return secret if commitment == self.seed_commitments[row].tobytes() else None
        return secret if channel.public_key(secret) == self.round_keys[row].tobytes() else None


# The stage of each reply, and what takes it
STAGES: dict[type[StageReply], tuple[str, Callable[[SumRound, int, Any], None]]] = {
    PrepareReply: ("prepare", SumRound._take_prepare),
    MaskedReply: ("mask", SumRound._take_masked),
    ListReply: ("list", SumRound._take_list),
    UnmaskReply: ("unmask", SumRound._take_shares),
}
