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

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, RefusedError, one_line, refuse_if
from flower_graph.secure import channel
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.parties.epoch import LIST, MASKS, ROUND_KEY, Epoch
from flower_graph.secure.parties.identity import SIGNATURE_BYTES
from flower_graph.secure.parties.journal import choose, members_of, set_of
from flower_graph.secure.parties.registry import Registry
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
# Told the reason and, of what is proven, the SuperNode: its clients are asked no more
Blame = Callable[[Reason, int | None], None]

# Parties beyond `differ-by` that may be left out, should some vanish that are ready
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
        self,
        circle: Circle | Epoch,
        number: int,
        nodes: list[int | None],
        hosted: list[list[int]],
        channel_keys: Bytes,
        blame: Blame,
        registry: Registry | None = None,
        earlier: dict[str, list[int]] | None = None,
    ) -> None:
        # nodes: None where a party is not connected; hosted: the clients that each party adds up;
        # earlier: the parties in the epochs' earlier sums, by purpose
        self.run_id, self.parties, self.partners = circle.id, circle.parties, circle.partners
        self.threshold, self.minimum = circle.threshold, circle.minimum
        m, k = self.partners.shape
        self.number, self._channel_keys, self._blame = number, channel_keys, blame
        self._epoch = circle if isinstance(circle, Epoch) else None
        self._registry, self._earlier = registry, {} if earlier is None else earlier
        self._hosted = [list(local) for local in hosted]
        self._asked = self._count(np.ones(m, np.bool_))
        self._rows = {node: row for row, node in enumerate(nodes) if node is not None}
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
        self.suspects: Integers = np.zeros(0, np.int64)  # at odds with most, unproven
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
        requests = {}
        for node, row in self._rows.items():
            partners = self.partners[row]
            terms = self.run_id, self.number, self.threshold, self.minimum
            named = self.parties[[row]], self.parties[partners][None]
            requests[node] = PrepareRequest(*terms, *named, self._channel_keys[partners])
        return requests

    def take(self, node: int, reply: StageReply) -> None:
        """Process a SuperNode's reply of the present stage, whole or not at all."""
        number, refuse = self.number, partial(refuse_if, error=MalformedReplyError)
        why = f"run {reply.run_id.hex()}, expected {self.run_id.hex()}"
        refuse(reply.run_id != self.run_id, why)
        stage, take = STAGES[type(reply)]
        why = f"round {number} is in the stage {self._stage}, not {stage}"
        refuse(stage != self._stage, why)
        why = f"node {node} was not asked in round {number}, or answered"
        refuse(node not in self._open, why)
        take(self, self._rows[node], reply)
        self._open.remove(node)

    def _take_prepare(self, row: int, reply: PrepareReply) -> None:
        party, k = int(self.parties[row]), self.partners.shape[1]
        if self._epoch is not None:
            parts = self._epoch.key_parts(self.number, reply.round_keys.tobytes())
            self.keys[row] = self._verified(row, reply.signature, ROUND_KEY, parts)
        why = f"round {self.number}: prepared for other clients than asked"
        refuse_if(reply.clients.tolist() != [party], why, MalformedReplyError)
        came = reply.packets.shape[0], reply.share_commitments.shape[0]
        why = f"{came[0]} packets and commitments to {came[1]}, expected {k}"
        refuse_if(came != (k, k), why, MalformedReplyError)
        if channel.is_low_order(reply.round_keys.tobytes()):
            self._convict(row, "its round key is of low order")
            raise MalformedReplyError(f"round key of client {party}: of low order")
        self.round_keys[row] = reply.round_keys
        self.seed_commitments[row] = reply.seed_commitments
        self.share_commitments[row] = reply.share_commitments
        self._packets[row] = reply.packets
        self.live[row] = True

    def mask_requests(
        self, length: int, word: int, terms: SumTerms, out: Collection[int] = ()
    ) -> dict[int, MaskRequest]:
        """End the first stage; write the second request to each SuperNode that prepared."""
        if self.skipped:
            return {}
        self._stage = "mask"
        self.terms = terms.digest(length, word, self.threshold, self.minimum)
        gone = set(out)
        self.live &= [gone.isdisjoint(local) for local in self._hosted]
        # Without enough partners a party's secrets could not be recovered; without it, its
        # partners may have too few in turn.
        while (few := self.live & (self.live[self.partners].sum(1) < self.threshold)).any():
            self.live &= ~few
        if not self._enough(self.live, "are ready"):
            return {}
        self.total = np.zeros(length, WORDS[word])
        requests = {}
        for node, row in self._rows.items():
            if not self.live[row]:
                continue
            partners = self.partners[row]
            live = self.live[partners]
            column = np.flatnonzero(live)
            dealers, mirrored = partners[column], partners.size - 1 - column
            hosted = np.array(self._hosted[row], np.int64)
            vectors = self.run_id, self.number, length, word, hosted, live
            shares = self.share_commitments[dealers, mirrored], self._packets[dealers, mirrored]
            requests[node] = one = MaskRequest(*vectors, self.round_keys[dealers], *shares)
            if self._epoch is not None:
                one.ready, one.signatures = self.live.copy(), self.keys[dealers]
        self._open = set(requests)
        if self._epoch is not None:
            self._sums = self._earlier.setdefault(terms.purpose, [])
            self._spare = self._choose_spare(self._epoch.differ_by)
        return requests

    def _choose_spare(self, apart: int) -> list[int]:
        """Choose parties to leave out, if the sum is not allowed with them."""
        ready = self.parties[self.live].tolist()
        start = self.number * (apart + SPARE) % max(1, len(ready))
        # First those that an earlier sum was made without: its set can be had again.
        order = sorted(
            ready[start:] + ready[:start],
            key=lambda party: -sum(not one >> party & 1 for one in self._sums),
        )
        chosen = self._choose(set_of(ready), order, apart)
        left_out = [] if chosen is None else members_of(set_of(ready) & ~chosen)
        others = [party for party in order if party not in left_out]
        return left_out + others[: apart + SPARE]

    def _choose(self, present: int, spare: list[int], apart: int) -> int | None:
        few = {"fewest": self.minimum, "number": self.number}
        return choose(present, self._sums, apart, spare=spare, **few)

    def _take_masked(self, row: int, reply: MaskedReply) -> None:
        local = self._hosted[row]
        about, refuse = f"round {self.number}:", partial(refuse_if, error=MalformedReplyError)
        if (strangers := np.setdiff1d(reply.clients, local)).size:
            raise MalformedReplyError(f"{about} client {strangers[0]} was not asked")
        refuse(not reply.clients.size, f"{about} no client is in the sum")
        came, asked = (f"{one.dtype} {one.shape}" for one in (reply.total, self.total))
        refuse(came != asked, f"{came}, not {asked}")
        # Packets that it cannot open; none twice, none that was not sent
        partners, pairs, party = self.partners[row], reply.refused, int(self.parties[row])
        column = np.flatnonzero(self.live[partners])
        checked = pairs[: column.size]  # more are wrong anyway, and not worth the memory
        refused = column[np.isin(self.parties[partners[column]], checked[:, 1])]
        is_wrong = (checked[:, 0] != party).any() or refused.size != len(pairs)
        refuse(is_wrong, f"{len(pairs)} do not open, {refused.size} of them were sent")
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
        chosen = self._choose(present, spare, epoch.differ_by)
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
        requests = {node: request for node, row in self._rows.items() if listed[row]}
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
        assert self._registry is not None
        is_valid = self._registry.verify(party, signed, purpose, *parts)
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
        contributors = self._count(self.contributed)
        for node, row in self._rows.items():
            kinds = self.kinds[self.partners[[row]]]
            if self.live[row] and (kinds != NOTHING).any():
                about = self.run_id, self.number, contributors, self.parties[[row]]
                requests[node] = one = UnmaskRequest(*about, kinds)
                if self._epoch is not None:
                    # The partners' signatures of the list; without enough of them a party refuses
                    partners = self.partners[row]
                    one.columns = np.flatnonzero(self.signed[partners])[: self.threshold]
                    one.signatures = self.lists[partners[one.columns]]
                    if not self.signed[row] or one.columns.size < self.threshold:
                        del requests[node]
        self._open = set(requests)
        return requests

    def _take_shares(self, row: int, reply: UnmaskReply) -> None:
        said, refuse = f"round {self.number}:", partial(refuse_if, error=MalformedReplyError)
        is_other = reply.clients.tolist() != [self.parties[row]]
        refuse(is_other, f"{said} shares of other clients than asked")
        asked, why = self.kinds[self.partners[[row]]], f"{said} shares that were not asked for"
        refuse(reply.kinds.shape != asked.shape, why)
        refuse(((reply.kinds != NOTHING) & (reply.kinds != asked)).any(), why)
        column = np.flatnonzero(reply.kinds[0])
        dealers, columns = self.partners[row, column], self.partners.shape[1] - 1 - column
        promised = self.share_commitments[dealers, columns, asked[0, column] - SEED]
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

    def _convict(self, row: int, why: str) -> None:
        node = next(node for node, at in self._rows.items() if at == row)
        self._blame(Reason(Cause.PROVEN, why, int(self.parties[row]), self.number), node)

    def _note(self, kind: Cause, client: int, text: str) -> None:
        self._blame(Reason(kind, text, client, self.number), None)

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
                self.suspects = self._most_disputed()
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

    def _most_disputed(self) -> Integers:
        """Return the one party that disputes packets with most others."""
        # Honest SuperNodes dispute packets with liars only: if there is one liar, with it alone.
        dealers, columns = np.nonzero(self._refused)
        pair = np.stack([dealers, self.partners[dealers, columns]])
        sides = np.unique(np.concatenate([pair, pair[::-1]], 1), axis=1)[0]
        odds = np.bincount(sides, minlength=1)
        if odds.max() < 2 or (odds == odds.max()).sum() > 1:
            return self.suspects
        return np.array(self.parties[[odds.argmax()]])

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
