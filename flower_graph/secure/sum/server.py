"""The server's side of the secure sum: the enrolled clients, and the rounds.

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

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import (
    IdentityError,
    MalformedReplyError,
    RefusedError,
    one_line,
    refuse_if,
)
from flower_graph.secure import channel
from flower_graph.secure.channel import is_low_order, rows_of
from flower_graph.secure.node_config import DIFFER_BY, MOST_BLOCK, MOST_POINTS, USUAL_DIFFERENCE
from flower_graph.secure.parties.epoch import (
    LIST,
    MASKS,
    MOST_LISTS,
    ROUND_KEY,
    Epoch,
    commit,
    plan_of,
)
from flower_graph.secure.parties.journal import choose, members_of, set_of
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, Registry
from flower_graph.secure.ring import WORDS, RingArray, add_streams
from flower_graph.secure.shamir import SHARE_BYTES, combine_shares
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MASK_KEY,
    NOTHING,
    PACKET_BYTES,
    SEED,
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
from flower_graph.secure.sum.partners import check_shares, partners, plan
from flower_graph.wire.codec import RUN_BYTES, Bytes, Integers, Message
from flower_graph.wire.exchange import Replies

LOG = logging.getLogger(__name__)


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


class Circle(NamedTuple):
    """The parties of a round and their partners, as the server drew them; as `Epoch` has them."""

    id: bytes  # in the context of each key, packet and commitment
    parties: Integers  # [m] their numbers, ascending
    partners: Integers  # [m, k] rows of each party's partners
    threshold: int
    minimum: int  # so many must be in the sum


class SumRound:
    """A round at the server. With an `Epoch`, minimum and threshold count parties, not clients."""

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
        nodes = {party: node for node, party in server.nodes.items() if party in local}
        self._rows = {nodes[party]: row for row, party in enumerate(parties) if party in nodes}
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
        listed = self.contributed.copy()
        try:
            epoch.check_present(listed, "sent their vectors")
        except RefusedError as error:
            self.skip(str(error))
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
            self.skip(f"{count} of {self._asked} clients {what}, at least {self.minimum} must")
        elif (present[self.partners[present]].sum(1) < self.threshold).any():
            few = f"{present.sum()} of {present.size} SuperNodes"
            self.skip(f"{few} {what}, too few to take each other's masks away")
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
            first = f"{self.has[few[0]].sum()} of {self.threshold} for {self.parties[few[0]]}"
            self.skip(f"too few shares came for {few.size} clients ({first})")
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


# The enrolled clients ----------------------------------------------------------------------------

# Sends messages of an action in a round, and has each reply taken: ``SecureSum.tell``. Any: what is
# made of replies
Send = Callable[
    [int, str, Mapping[int, Message], type[Any], Callable[[int, Any], object]], Replies[Any]
]
MOST_BEGINNINGS = 8  # times that a client enrols with keys of its own in a run
MOST_CHEATS = 3  # SuperNodes that are proven to cheat before nobody new is taken any more
ALONE = 0, 0, 0  # the plan of a SuperNode whose clients are all in the sum


class SumServer:
    """Carries out secure sums over clients that SuperNodes host.

    Parameters
    ----------
    dropout : float
        Share of the clients, and of the SuperNodes, that may vanish during a sum.
    corrupt : float
        Share of them that may tell the server all they hold.
    """

    # A round is a `SumRound` that `open_round` returns. Two may be open at once, so the next can be
    # prepared while this one is unmasked.

    registry: Registry | None = None  # of SuperNodes that sign what they enrol with

    def __init__(self, *, dropout: float = 0.3, corrupt: float = 0.1) -> None:
        check_shares(dropout, corrupt)
        self.dropout, self.corrupt = dropout, corrupt
        self.run_id = os.urandom(RUN_BYTES)
        # What each party enrolled with last, those that have gone too; and where the others are
        self.bindings: dict[int, KeyReply] = {}
        self.nodes: dict[int, int] = {}  # SuperNode: party
        self.homes: dict[int, int] = {}  # client: SuperNode
        self.blamed: list[Reason] = []  # clients at fault and what they did, oldest first
        self._named = 0  # of these that `take_blamed` has returned
        self._excluded: set[int] = set()
        self._barred: set[int] = set()  # those SuperNodes
        self._beginnings = Counter[int]()  # of each client, with new keys
        self._cheats = 0  # SuperNodes that were proven to cheat
        self.rounds: list[SumRound] = []  # that may be open
        self._last = -1
        self.earlier: dict[str, list[int]] = {}  # parties in the epochs' sums, by purpose
        self._warned = False  # of what sums over time tell

    @property
    def fewest_nodes(self) -> int:
        return 1

    @property
    def excluded(self) -> set[int]:
        """Clients that are in no sum any more: all of SuperNodes that stopped a sum by a fault."""
        return self._excluded

    @property
    def clients(self) -> list[int]:
        """Numbers of all connected clients that may be in the next sum, ascending."""
        return sorted(self.homes.keys() - self.out)

    @property
    def out(self) -> set[int]:
        """Numbers of clients that are not in the next sum, though they are enrolled."""
        return self.excluded

    def node_of_party(self, party: int) -> int | None:
        keys = self.bindings.get(party)
        node = None if keys is None else self.homes.get(int(keys.clients[0]))
        return None if node is None or self.nodes[node] != party else node

    # For servers that clients need not trust (``flower_graph.secure.parties``)

    def renew(self) -> None:
        """Read the permitted clients again; here every client that enrols is permitted."""

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Have clients agree on the members; return whether they began anew, here never."""
        # limit: largest size of a number, which they agree on, too
        return False

    # Who is there

    def question(self) -> KeyRequest:
        return KeyRequest(self.run_id, signed=None if self.registry is None else True)

    def check_keys(self, node: int, reply: KeyReply) -> None:
        """Refuse keys of another run, keys of low order, and clients that may not begin anew."""
        self._check_run(reply)
        clients = reply.clients.tolist()
        refuse = partial(refuse_if, error=MalformedReplyError)
        refuse(reply.party is not None, "it signs for a party, and there are none in this sum")
        low = is_low_order(reply.channel_key.tobytes())
        refuse(low, f"the channel key of client {clients[0]} is of low order")
        home = self.homes.get(clients[0])
        if home is not None and self.knows(home, reply):
            return  # it goes on
        times = [self._beginnings[client] for client in clients]
        # Whoever cheated before this run went on is let in once, and has no part in any sum.
        has_cheated = node in self._barred or (any(times) and self.excluded.issuperset(clients))
        why = f"client {clients[0]} is of a SuperNode that has cheated: it does not begin anew"
        refuse(has_cheated, why)
        is_late = not all(times) and self._cheats >= MOST_CHEATS
        refuse(is_late, f"it is new, and {self._cheats} SuperNodes have cheated")
        refuse(max(times) >= MOST_BEGINNINGS, f"client {clients[0]} has begun anew too often")

    def _check_run(self, reply: KeyReply) -> None:
        why = f"run {reply.run_id.hex()}, expected {self.run_id.hex()}"
        refuse_if(reply.run_id != self.run_id, why, MalformedReplyError)

    def enroll(self, node: int, reply: KeyReply) -> None:
        """Enrol a SuperNode's clients; if it enrols again, its new keys replace the old."""
        self.check_keys(node, reply)
        clients = reply.clients.tolist()
        for client in clients:
            owner = self.homes.get(client)
            why = f"client {client} belongs to node {owner}"
            refuse_if(owner not in (None, node), why, MalformedReplyError)
        self.forget(node)
        self._settle(node, reply)
        self._beginnings.update(clients)

    def take_blamed(self) -> list[Reason]:
        blamed, self._named = self.blamed[self._named :], len(self.blamed)
        return blamed

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude clients whose fault was proven before the run was resumed."""
        self._excluded |= set(clients)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; another SuperNode may host its clients."""
        if (party := self.nodes.pop(node, None)) is not None:
            for client in self.bindings[party].clients.tolist():
                del self.homes[client]

    def knows(self, old: int, reply: KeyReply) -> bool:
        """Tell whether a SuperNode enrolled with exactly these clients and this key."""
        return self.nodes.get(old) == reply.number and self._is_same(reply)

    def _is_same(self, reply: KeyReply) -> bool:
        before = self.bindings[reply.number]
        both = (before.clients, reply.clients), (before.channel_key, reply.channel_key)
        return all(np.array_equal(*pair) for pair in both)

    def move(self, old: int, node: int) -> None:
        """Register a SuperNode under another id: it was restarted and has kept its keys."""
        party = self._party(old)
        self._barred |= {node} if old in self._barred else set()
        del self.nodes[old]
        self.nodes[node] = party
        self.homes |= dict.fromkeys(self.bindings[party].clients.tolist(), node)
        for one in self.rounds:
            one.move(old, node)

    def _settle(self, node: int, reply: KeyReply) -> None:
        for old in (self.node_of_party(reply.number), node):
            if old is not None:
                self.forget(old)
        self.bindings[reply.number], self.nodes[node] = reply, reply.number
        self.homes |= dict.fromkeys(reply.clients.tolist(), node)

    def _party(self, node: int) -> int:
        if node not in self.nodes:
            raise MalformedReplyError(f"node {node} is no party")
        return self.nodes[node]

    def open_round(self, number: int, clients: Iterable[int]) -> SumRound:
        if number <= self._last:
            raise ValueError(f"round {number} is not after {self._last}, the last one")
        self._last, opened = number, self._begin(number, set(clients))
        self.rounds = [*self.rounds[1 - KEPT_ROUNDS :], opened]
        return opened

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        chosen = sorted(clients - self.excluded)
        local: dict[int, list[int]] = {}  # by party
        for client in chosen:
            refuse_if(client not in self.homes, f"client {client} is not enrolled", ValueError)
            local.setdefault(self.nodes[self.homes[client]], []).append(client)
        if not self._warned:
            self._warned = True
            LOG.warning(
                "the server is trusted (semi-honest): two sums tell it what those sent together "
                "who are in one alone (`flower-graph docs security#what-sums-over-time-tell`)"
            )
        m, dropped = len(local), math.floor(self.dropout * len(chosen))
        honest, hosts = (n - math.floor(self.corrupt * n) for n in (len(chosen), m))
        if honest < 2 or hosts < min(m, 2):
            few = f"{len(chosen)} clients, a sum needs at least 2 that do not collude"
            few += f", of {min(m, 2)} SuperNodes (corrupt {self.corrupt:g})"
            return self._none(number, few)
        k, threshold, vanished = ALONE if m == 1 else plan(m, self.dropout, self.corrupt)
        seed = int.from_bytes(self.run_id, "little")
        graph = partners(np.arange(m), k, seed, number) if k else np.zeros((1, 0), np.int64)
        minimum = max(2, threshold + 1, m - vanished, len(chosen) - dropped)
        parties = np.array(sorted(local), np.int64)
        return SumRound(
            self, Circle(self.run_id, parties, graph, threshold, minimum), number, local
        )

    def _none(self, number: int, why: str) -> SumRound:
        nobody = np.zeros(0, np.int64)
        one = SumRound(self, Circle(self.run_id, nobody, nobody.reshape(0, 0), 0, 0), number, {})
        one.skip(why)
        return one

    def blame(self, reason: Reason, node: int | None) -> None:
        client = reason.client
        if node is None or client is None:
            self.blamed.append(reason)
            return
        if reason.kind is Cause.PROVEN:
            self._cheats += node not in self._barred
            self._barred.add(node)
        hosted = {other for other, at in self.homes.items() if at == node} | {client}
        text = f"{reason.text} (client {client}, same SuperNode)"
        for one in sorted(hosted - self._excluded):
            self.blamed.append(reason if one == client else replace(reason, client=one, text=text))
        self._excluded |= hosted


# Without trust: the server carries, the parties check --------------------------------------------

# An honest server makes the parties' checks too, so that no party's lie makes it look like a liar.
# A sum takes three exchanges: masked vectors, the signed list and shares, which also prepares the
# next sum. An epoch begins, with three more, when SuperNodes have joined.

TRIES = 3  # lists of commitments, while parties show no seed


class PartySums(SumServer):
    """Carries out sums over parties, SuperNodes with registered keys; callers see only clients.

    `begin` begins an epoch once all that joined have enrolled; in each round parties sign the list
    of members before they show shares.

    Parameters
    ----------
    registry : Path or str
        The registry's file, which is read again before each sum.
    dropout, corrupt : float
        Shares of the parties that may vanish during a sum, and that may collude with the server.
    differ_by : int
        SuperNodes that two sums of a purpose differ by at least, unless they have the same; the
        server leaves out more to comply. No party takes less than its own ``differ-by``.

    Raises
    ------
    IdentityError
        If the registry cannot be read.
    ValueError
        If a share is impossible, or the registry has too few parties for a sum.
    """

    registry: Registry

    def __init__(
        self,
        registry: Path | str,
        *,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        super().__init__(dropout=dropout, corrupt=corrupt)
        for name, share in (("dropout", dropout), ("corrupt", corrupt)):
            refuse_if(share >= 0.5, f"{name} is {share}, must be from 0 to below 0.5", ValueError)
        refuse_if(differ_by < 1, f"differ_by is {differ_by}, must be at least 1", ValueError)
        self._registry_file, self.registry = registry, Registry.read(registry)
        active, fewest = len(self.registry.active), self.fewest_nodes
        why = f"the registry has {active} parties, a sum needs {fewest}"
        refuse_if(active < fewest, why, ValueError)
        self._differ_by = differ_by
        self._cheating: set[int] = set()  # parties
        self._unbound: set[int] = set()  # SuperNodes that are to bind under another registry
        self._fresh: set[int] = set()  # parties that have bound themselves for the next epoch
        # The parties' agreement; None before the first epoch, or under a new registry
        self.epoch: Epoch | None = None
        self.lists = 0  # of commitments that were shown; parties answer ``MOST_LISTS``

    @property
    def fewest_nodes(self) -> int:
        return self.registry.minimum

    @property
    def parties(self) -> list[int]:
        return sorted(set(self.nodes.values()) - self._cheating)

    @property
    def members(self) -> list[int]:
        return [] if self.epoch is None else self.epoch.parties.tolist()

    @property
    def _taking_part(self) -> set[int]:
        return set(self.members) - self._cheating

    @property
    def excluded(self) -> set[int]:
        return set(self.hosted(self._cheating & self.bindings.keys()))

    @property
    def out(self) -> set[int]:
        return set(self.hosted(self.bindings.keys() - self._taking_part))

    def hosted(self, parties: Iterable[int]) -> list[int]:
        return sorted(c for party in parties for c in self.bindings[party].clients.tolist())

    def epoch_clients(self) -> dict[int, list[int]]:
        return {party: self.hosted([party]) for party in sorted(self._taking_part)}

    # Who is there

    def check_keys(self, node: int, reply: KeyReply) -> None:
        self._check_run(reply)
        try:
            reply.verify(self.registry, MOST_BLOCK)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        points = reply.declared[:, 1].sum()
        why = f"party {reply.number}: {points} points, above {MOST_POINTS}"
        refuse_if(points > MOST_POINTS, why, MalformedReplyError)

    def knows(self, old: int, reply: KeyReply) -> bool:
        return reply.number in self._taking_part and super().knows(old, reply)

    def enroll(self, node: int, reply: KeyReply) -> None:
        self.check_keys(node, reply)
        party, home = reply.number, self.node_of_party(reply.number)
        why = f"party {party} is at node {home} already"
        refuse_if(home not in (None, node), why, MalformedReplyError)
        if party in self._taking_part and self._is_same(reply):
            self._settle(node, self.bindings[party])  # it goes on, as all know it
            return
        why = f"{MOST_LISTS} lists were shown: nobody can join any more"
        refuse_if(self.lists >= MOST_LISTS, why, MalformedReplyError)
        self._settle(node, reply)
        self._fresh.add(party)

    def take_binding(self, node: int, reply: KeyReply) -> None:
        self.check_keys(node, reply)
        self._settle(node, reply)

    def forget(self, node: int) -> None:
        self._fresh.discard(self.nodes.get(node, -1))
        super().forget(node)

    def exclude(self, clients: Iterable[int]) -> None:
        parties = self.registry.parties.values()
        self._cheating |= {p.number for c in clients for p in parties if p.may_host([c])}

    def renew(self) -> None:
        try:
            registry = Registry.read(self._registry_file)
        except IdentityError as error:
            LOG.error("%s: the version before goes on", error)
            return
        if registry.digest == self.registry.digest:
            return
        old, new = self.registry.parties, registry.parties
        keyed = [number for number in old.keys() & new.keys() if old[number].key != new[number].key]
        revoked = [n for n in old if n not in new or (new[n].revoked and not old[n].revoked)]
        words = "another registry, %s; joined: %s, with another key: %s, revoked: %s"
        joined = sorted(new.keys() - old.keys())
        LOG.warning(words, registry.digest.hex()[:16], joined, keyed, revoked)
        self.registry, self._unbound, self.epoch = registry, set(self.nodes), None
        self._give_up_rounds()
        for node in self._unbound:
            self.forget(node)

    def _give_up_rounds(self) -> None:
        for one in self.rounds:
            one.skip(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self.parties)} parties, a sum needs {self.fewest_nodes}"

    # Epochs

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Begin an epoch if a party has joined; return whether one has begun."""
        self._fresh |= self._bind(server_round, send, self._unbound.intersection(nodes))
        self._unbound.clear()
        present = {party for node, party in self.nodes.items() if node in nodes} - self._cheating
        if present <= self._taking_part - self._fresh:
            return False
        for _ in range(TRIES):
            if self.lists >= MOST_LISTS:
                return False
            old = {node for node, party in self.nodes.items() if party in present - self._fresh}
            present &= self._bind(server_round, send, old) | self._fresh
            if len(present) < self.fewest_nodes:
                return False
            self._fresh -= present  # whatever comes of it, their seeds are shown
            if self.agree(server_round, send, present, limit):
                return True
            present &= set(self.nodes.values())
        return False

    def _bind(self, server_round: int, send: Send, nodes: Collection[int]) -> set[int]:
        requests = dict.fromkeys(sorted(nodes), self.question())
        replies = send(server_round, "sum_enroll", requests, KeyReply, self.take_binding)
        for entry in replies.rejected:  # with a version of the registry that is old, for one
            self.forget(entry.node_id)
        return {party for node, party in self.nodes.items() if node in replies.values}

    def agree(self, server_round: int, send: Send, present: Collection[int], limit: float) -> bool:
        """Have the parties that are present show their seeds, and begin the epoch of these.

        ``limit`` is the largest size of a number in the sums. Returns whether it has begun: not if
        a party shows no seed, which is then forgotten.
        """
        parties = sorted(set(self.parties).intersection(present))
        bindings = [self.bindings[party] for party in parties]
        declared = np.concatenate([one.declared for one in bindings])
        # Each that is in a sum has as many partners there as the threshold, which may be as high as
        # the registry's minimum, or above it, where fewer may vanish than that minimum allows.
        shares = self.dropout, self.corrupt
        minimum = max(self.fewest_nodes, plan_of(len(parties), *shares)[1] + 1)
        terms = *shares, minimum, self._differ_by, limit, np.array(parties, np.int64)
        promised = np.stack([one.commitment for one in bindings])
        points = declared[np.argsort(declared[:, 0])]
        shown = RevealRequest(self.run_id, self.lists, *terms, promised, points)
        self.lists += 1
        nodes = {node: party for node, party in self.nodes.items() if party in parties}
        take = partial(self._seed, shown)
        replies = send(server_round, "sum_reveal", dict.fromkeys(nodes, shown), RevealReply, take)
        if silent := nodes.keys() - replies.values.keys():
            for node in silent & self.nodes.keys():
                self.forget(node)
            return False
        seed_of = {nodes[node]: seed for node, seed in replies.values.items()}
        seeds = rows_of([seed_of[party] for party in parties], len(parties), -1)
        epoch = self.epoch = Epoch.agreed(shown, self.registry.digest, seeds)
        self._give_up_rounds()
        if self._differ_by > max(1, len(parties) - epoch.minimum):
            about = len(parties), epoch.minimum, DIFFER_BY, self._differ_by
            words = "%d SuperNodes, at least %d in a sum, %s %d: no sums while one is missing"
            LOG.warning(words, *about)
        requests = {}
        for node, party in nodes.items():
            row = epoch.parties[epoch.partners[epoch.index(party)]].tolist()
            signed = [self.bindings[partner] for partner in row]
            keys = np.stack([one.channel_key for one in signed])
            signatures = np.stack([one.signature for one in signed])
            clients = [one.clients for one in signed]
            sizes = np.array([one.size for one in clients], np.int64)
            rows = seeds, keys, signatures, sizes, np.concatenate(clients)
            requests[node] = EpochRequest(self.run_id, *rows)
        send(server_round, "sum_epoch", requests, EpochReply, partial(_check_epoch, epoch))
        return True

    def _seed(self, shown: RevealRequest, node: int, reply: RevealReply) -> bytes:
        party, seed = self._party(node), reply.seed.tobytes()
        is_other = (reply.run_id, reply.number) != (self.run_id, shown.number)
        why = f"list {reply.number}: not the one that is open"
        refuse_if(is_other, why, MalformedReplyError)
        if commit(self.run_id, party, seed) != self.bindings[party].commitment.tobytes():
            text = "it has committed to another seed of the graph"
            self.blame(Reason(Cause.PROVEN, text, party), node)
            raise MalformedReplyError(f"party {party}: {text}")
        return seed

    # A round, as ``SumServer`` has it

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        if (epoch := self.epoch) is None:
            return self._none(number, self._too_few)
        hosted = self.epoch_clients().items()
        local = {party: own for party, own in hosted if not clients.isdisjoint(own)}
        return SumRound(self, epoch, number, local)

    def blame(self, reason: Reason, node: int | None) -> None:
        party = reason.client
        if party is None or reason.kind is Cause.LEFT_OUT:  # of a client, not of its party
            self.blamed.append(reason)
            return
        text = f"{reason.text} (party {party})"
        self.blamed += [replace(reason, client=c, text=text) for c in self.hosted([party])]
        if node is not None:
            self._cheating.add(party)


def _check_epoch(epoch: Epoch, node: int, reply: EpochReply) -> None:
    is_other = reply.digest.tobytes() != epoch.digest
    refuse_if(is_other, "its party has another epoch", MalformedReplyError)
