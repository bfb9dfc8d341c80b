"""A round of the secure sum at the server.

The server is trusted to follow the protocol, not to look away. It draws the partners and carries
the packets that SuperNodes seal for each other. From a round it learns the contributors and the
sum, and nothing about a SuperNode's sum as long as fewer than ``corrupt`` of them tell it what they
hold. ``partners.py`` has the graph of shared secrets.

A round goes through four stages. *Prepare*: keys, commitments and sealed shares are collected.
*Mask*: they are handed on, and masked sums are added up; a client that prepared but is in no sum
has vanished. *List*: the members of the sum are settled; parties that do not trust the server sign
them. *Unmask*: the server collects shares of each summed client's seed and of each vanished
client's mask key; from them it recomputes the masks and subtracts them.

The parties of the protocol are the SuperNodes; the interface is in clients. A party has the lowest
number of its clients. In a round parties are rows, in ascending order of their numbers. Partner
lists are mirrored: if column j of row a holds b, column ``k - 1 - j`` of row b holds a. A party
that is alone has no partners, and no masks.

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
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, RefusedError, one_line, refuse_if
from flower_graph.secure import channel
from flower_graph.secure.channel import rows_of
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.parties.epoch import LIST, MASKS, ROUND_KEY, Epoch
from flower_graph.secure.parties.journal import choose, members_of, set_of
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, Registry
from flower_graph.secure.ring import WORDS, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, combine_shares
from flower_graph.secure.sum.messages import (
    NOTHING,
    PACKET_BYTES,
    SEED,
    KeyReply,
    ListReply,
    ListRequest,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    SumTerms,
    UnmaskReply,
    UnmaskRequest,
    revealed,
)
from flower_graph.wire.codec import Bytes, Integers, Message

M = TypeVar("M", bound=Message)


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
    text: str  # A line for a person, without the client and the round
    client: int | None = None  # None if it is about the whole sum
    round: int | None = None  # Number of the sum

    def __str__(self) -> str:
        return f"left out: {self.text}" if self.kind is Cause.LEFT_OUT else self.text


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


class Hosts(Protocol):
    """The knowledge of the SuperNodes that a round needs: a ``SumServer``."""

    bindings: dict[int, KeyReply]  # what each party enrolled with
    nodes: dict[int, int]  # SuperNode that is enrolled: party
    earlier: dict[str, list[int]]  # parties in the epochs' sums, by purpose

    @property
    def registry(self) -> Registry | None: ...
    @property
    def excluded(self) -> set[int]: ...
    def remark(self, reason: Reason) -> None: ...
    def exclude_for(self, reason: Reason, keys: KeyReply) -> None: ...


class Circle(NamedTuple):
    """The parties of a round and their partners, as a trusted server drew them."""

    id: bytes  # in the context of each key, packet and commitment
    parties: Integers  # [m] their numbers, ascending
    partners: Integers  # [m, k] rows of each party's partners
    threshold: int
    minimum: int  # so many clients must be in the sum


class SumRound:
    """A round at the server; its stages are prepare, mask, list, unmask and over.

    With an `Epoch`, minimum and threshold count parties, not clients.
    """

    def __init__(
        self, server: Hosts, circle: Circle | Epoch, number: int, local: Mapping[int, list[int]]
    ) -> None:
        # local: of the parties that are there the clients whose vectors each adds up
        self.run_id, self.parties, self.partners = circle.id, circle.parties, circle.partners
        self.threshold, self.minimum = circle.threshold, circle.minimum
        m, k = self.partners.shape
        self.number, self._server = number, server
        self._epoch = circle if isinstance(circle, Epoch) else None
        parties = self.parties.tolist()
        self._bound = [server.bindings[party] for party in parties]
        self._hosted = [local.get(party, []) for party in parties]
        self._rows = {party: row for row, party in enumerate(parties) if party in local}
        self.round_keys = np.zeros((m, channel.KEY_BYTES), np.uint8)
        self.seed_commitments = np.zeros((m, channel.COMMITMENT_BYTES), np.uint8)
        self.share_commitments = np.zeros((m, k, 2, channel.COMMITMENT_BYTES), np.uint8)
        self._packets = np.zeros((m, k, PACKET_BYTES), np.uint8)
        self.live = np.zeros(m, np.bool_)  # prepared, and with enough prepared partners
        self.contributed = np.zeros(m, np.bool_)
        self._kinds = np.zeros(m, np.uint8)  # what is to be revealed of each party
        self.shares = np.zeros((m, k, SHARE_BYTES), np.uint8)  # by dealer and the holder's column
        self.has = np.zeros((m, k), np.bool_)
        # Packets that a holder says it cannot open; by dealer and the holder's column
        self._refused = np.zeros((m, k), np.bool_)
        self._asked = m if self._epoch else sum(map(len, local.values()))
        self.total: RingArray = np.zeros(0, WORDS[64])
        self.skipped: Reason | None = None
        self._stage, self.terms = "prepare", b""  # the terms, hashed, once they are known
        self._open = set[int]()  # rows that are asked and have not answered
        # Signatures of round keys and of the list
        self.keys = np.zeros((m if self._epoch else 0, SIGNATURE_BYTES), np.uint8)
        self.lists = np.zeros_like(self.keys)
        self.signed: MASKS = np.zeros(m, np.bool_)
        self._sums: list[int] = []  # earlier sums of the purpose
        self._spare: list[int] = []  # parties, those that are left out first
        self._kept: dict[int, RingArray] = {}  # their sums

    @property
    def known(self) -> dict[str, Any]:
        """The entries that all replies of the round must have, for their `read`."""
        return {"run_id": self.run_id, "server_round": self.number}

    def row_of(self, node: int) -> int:
        """Return the row of a SuperNode that is asked in this round, -1 for any other."""
        party = self._server.nodes.get(node, -1)
        if (row := self._rows.get(party, -1)) < 0:
            return -1
        # A SuperNode that has since enrolled with these clients and other keys is another party
        keys = self._server.bindings[party].channel_key, self._bound[row].channel_key
        return row if np.array_equal(*keys) else -1

    def _ask(self, stage: str, rows: MASKS, write: Callable[[int], M]) -> dict[int, M]:
        """Begin a stage: write the requests to those parties among ``rows`` that are connected."""
        self._stage = stage
        asked = {node: self.row_of(node) for node in self._server.nodes}
        asked = {node: row for node, row in asked.items() if row >= 0 and rows[row]}
        self._open = set(asked.values())
        return {node: write(row) for node, row in asked.items()}

    def take(self, node: int, reply: StageReply) -> None:
        """Process a SuperNode's reply of the present stage, whole or not at all."""
        (stage, take), row = STAGES[type(reply)], self.row_of(node)
        why = f"round {self.number} in the stage {self._stage}: node {node} was not asked for this"
        is_due = stage == self._stage and row in self._open
        refuse_if(not is_due, why, MalformedReplyError)
        take(self, row, reply)
        self._open.remove(row)

    # Prepare

    def prepare_requests(self) -> dict[int, PrepareRequest]:
        """Ask for keys and shares; partners and terms of an epoch are known to its parties."""
        bound = [one.channel_key.tobytes() for one in self._bound]
        keys = rows_of(bound, -1, channel.KEY_BYTES)

        def write(row: int) -> PrepareRequest:
            request, partners = PrepareRequest(self.run_id, self.number), self.partners[row]
            if self._epoch is None:
                request.threshold, request.minimum = self.threshold, self.minimum
                request.partners, request.channel_keys = self.parties[partners], keys[partners]
            return request

        everyone = np.ones(len(self.parties), np.bool_)
        return {} if self.skipped else self._ask("prepare", everyone, write)

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

    # Mask

    def mask_requests(self, length: int, word: int, terms: SumTerms) -> dict[int, MaskRequest]:
        """Hand keys, commitments and packets on to each SuperNode that prepared."""
        if self.skipped:
            return {}
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
        if self._epoch is not None:
            self._sums = self._server.earlier.setdefault(terms.purpose, [])
            self._spare = self._choose_spare(self._epoch.differ_by)
        return self._ask("mask", self.live, self._mask_request)

    def _mask_request(self, row: int) -> MaskRequest:
        partners, hosted = self.partners[row], np.array(self._hosted[row], np.int64)
        column = np.flatnonzero(self.live[partners])
        dealers, mirrored = partners[column], partners.size - 1 - column
        return MaskRequest(
            self.run_id,
            self.number,
            self.total.size,
            8 * self.total.itemsize,
            hosted,
            self.live[partners] if self._epoch is None else self.live.copy(),
            self.round_keys[dealers],
            self.share_commitments[dealers, mirrored],
            self._packets[dealers, mirrored],
            None if self._epoch is None else self.keys[dealers],
        )

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
        local, party = self._hosted[row], int(self.parties[row])
        about, refuse = f"round {self.number}:", partial(refuse_if, error=MalformedReplyError)
        strangers = np.setdiff1d(reply.clients, local)
        refuse(strangers.size, f"{about} client {strangers[:1].sum()} was not asked")
        refuse(not reply.clients.size, f"{about} no client is in the sum")
        came, asked = (f"{one.dtype} {one.shape}" for one in (reply.total, self.total))
        refuse(came != asked, f"{came}, not {asked}")
        # Packets that it cannot open; none twice, none that was not sent
        partners = self.partners[row]
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

    # List

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
            many = f"{self.minimum} SuperNodes or more"
            self.skip(f"no {many} differ from each earlier sum by {DIFFER_BY} {epoch.differ_by}")
            return {}
        why = f"or this sum and an earlier one would differ by too few SuperNodes ({DIFFER_BY})"
        for party in members_of(present & ~chosen):
            row = epoch.index(party)
            self.total -= self._kept[party]
            self.contributed[row] = False
            for client in self._hosted[row]:
                self._note(Cause.LEFT_OUT, client, f"{why} (party {party})")
        self._kept.clear()
        try:
            epoch.check_present(self.contributed, "sent their vectors")
        except RefusedError as error:
            self.skip(str(error))
            return {}
        if chosen not in self._sums:
            self._sums.append(chosen)
        request = ListRequest(self.run_id, self.number, self.contributed.copy())
        return self._ask("list", self.contributed, lambda row: request)

    def _take_list(self, row: int, reply: ListReply) -> None:
        assert self._epoch is not None
        terms = self.live, self.contributed, self.terms
        parts = self._epoch.signed_parts(self.number, *terms)
        self.lists[row], self.signed[row] = self._verified(row, reply.signature, LIST, parts), True

    def _verified(
        self, row: int, signature: Bytes | None, purpose: bytes, parts: tuple[bytes, ...]
    ) -> Bytes:
        party, registry = int(self.parties[row]), self._server.registry
        assert registry is not None
        if signature is None or not registry.verify(party, signature.tobytes(), purpose, *parts):
            raise MalformedReplyError(f"party {party}: its signature is not valid")
        return signature

    # Unmask

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """Ask for shares of each summed party's seed and of each vanished party's mask key."""
        if self.skipped:
            return {}
        self._stage = "unmask"
        if not self._enough(self.contributed, "sent their vectors"):
            return {}
        self._kinds = revealed(self.contributed, self.live)
        rows = self.live & self.live[self.partners].any(1)
        if self._epoch is not None:  # without enough partners' signatures a party refuses
            rows = self.signed & (self.signed[self.partners].sum(1) >= self.threshold)
        return self._ask("unmask", rows, self._unmask_request)

    def _unmask_request(self, row: int) -> UnmaskRequest:
        about, partners = (self.run_id, self.number), self.partners[row]
        if self._epoch is None:
            count = self._count(self.contributed)
            return UnmaskRequest(*about, count, self.contributed[partners])
        columns = np.flatnonzero(self.signed[partners])[: self.threshold]
        return UnmaskRequest(*about, columns=columns, signatures=self.lists[partners[columns]])

    def _take_shares(self, row: int, reply: UnmaskReply) -> None:
        asked = self._kinds[self.partners[row]]
        is_other = ((reply.kinds != NOTHING) & (reply.kinds != asked)).any()
        why = f"round {self.number}: shares that were not asked for"
        refuse_if(is_other, why, MalformedReplyError)
        column = np.flatnonzero(reply.kinds)
        dealers, columns = self.partners[row, column], self.partners.shape[1] - 1 - column
        of = asked[column] - SEED
        promised, found = self.share_commitments[dealers, columns, of], []
        numbers = zip(self.parties[dealers].tolist(), of.tolist(), strict=True)
        for (dealer, kind), share in zip(numbers, channel.pieces(reply.shares), strict=True):
            about = self.run_id, self.number, dealer, int(self.parties[row])
            found.append(channel.commitment(channel.context(channel.SHARES[kind], *about), share))
        good = (rows_of(found, *promised.shape) == promised).all(1)
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

    def _take_masks_away(self) -> None:
        """Reconstruct and check all secrets, and subtract the masks from ``total``; or skip."""
        # Without partners only the sum's receiver is left, from whom it need not be hidden. A
        # vanished party has masks in the total where a partner contributed.
        kinds = self._kinds
        if not self.partners.size:
            return
        has_masks = self.contributed | self.contributed[self.partners].any(1)
        needed = np.flatnonzero((kinds != NOTHING) & has_masks)
        few = needed[self.has[needed].sum(1) < self.threshold]
        if few.size:
            if self._epoch is None:
                self._exclude_most_disputed()
            first = f"{self.has[few[0]].sum()} of {self.threshold} for {self.parties[few[0]]}"
            self.skip(f"too few shares came for {few.size} clients ({first})")
            return
        masks: list[tuple[bytes, int]] = []
        for row in needed.tolist():
            came = np.flatnonzero(self.has[row])[: self.threshold]
            held = {column + 1: self.shares[row, column].tobytes() for column in came.tolist()}
            secret = self.secret_of(row, int(kinds[row]), held)
            about = self.run_id, self.number, (party := int(self.parties[row]))
            if secret is None:
                self._convict(row, "its shares do not give the secret that it committed to")
                self.skip(f"client {party} shared wrongly")
            elif kinds[row] == SEED:
                masks.append((channel.self_mask_key(secret, *about, self.terms), -1))
            else:
                present = self.partners[row][self.contributed[self.partners[row]]]
                public = channel.pieces(self.round_keys[present])
                others = dict(zip(self.parties[present].tolist(), public, strict=True))
                masks += channel.pair_masks(secret, *about, others, self.terms)
        if self.skipped is None:
            add_streams(self.total, masks)

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

    # Who is at fault

    def _convict(self, row: int, why: str, cause: Cause = Cause.PROVEN) -> None:
        reason = Reason(cause, why, int(self.parties[row]), self.number)
        self._server.exclude_for(reason, self._bound[row])

    def _note(self, kind: Cause, client: int, text: str) -> None:
        self._server.remark(Reason(kind, text, client, self.number))

    def skip(self, text: str) -> None:
        """Give the sum up: nothing of it is revealed any more."""
        self.skipped = self.skipped or Reason(Cause.SKIPPED, text, round=self.number)

    def _count(self, present: NDArray[np.bool_]) -> int:
        if self._epoch is not None:
            return int(present.sum())
        return sum(len(self._hosted[row]) for row in np.flatnonzero(present).tolist())

    def _enough(self, present: NDArray[np.bool_], what: str) -> bool:
        """Skip the sum if too few clients are there, or a party has too few partners."""
        if (count := self._count(present)) < self.minimum:
            self.skip(f"{count} of {self._asked} clients {what}, at least {self.minimum} must")
        elif (present[self.partners[present]].sum(1) < self.threshold).any():
            few = f"{present.sum()} of {present.size} SuperNodes"
            self.skip(f"{few} {what}, too few to take each other's masks away")
        return self.skipped is None

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


# The stage of each reply, and what takes it
STAGES: dict[type[StageReply], tuple[str, Callable[[SumRound, int, Any], None]]] = {
    PrepareReply: ("prepare", SumRound._take_prepare),
    MaskedReply: ("mask", SumRound._take_masked),
    ListReply: ("list", SumRound._take_list),
    UnmaskReply: ("unmask", SumRound._take_shares),
}
