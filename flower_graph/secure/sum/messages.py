"""Messages of the secure sum: set up, and the three stages prepare, mask and unmask.

Entries of different stages have different keys, so they may travel in one Flower message. Under a
server that may lie an epoch begins with ``sum_reveal`` and ``sum_epoch``, each round has the
exchange ``sum_list``, and signatures travel with what is signed. A SuperNode is a *party*: its
number is the lowest of its clients', or its number in a registry. It has *k* partners, of whom *f*
take part.

Reading checks lengths and that numbers agree with each other. ``SumRound`` and ``SumClient`` check
that clients, rounds and words are those that were asked for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import IdentityError, MalformedReplyError, refuse_if
from flower_graph.secure.channel import COMMITMENT_BYTES as CHECK
from flower_graph.secure.channel import KEY_BYTES, TAG_BYTES, framed, is_low_order
from flower_graph.secure.parties.registry import SIGNATURE_BYTES as SIGNATURE
from flower_graph.secure.parties.registry import Identity, Registry
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.shamir import SHARE_BYTES
from flower_graph.wire.codec import (
    Block,
    Bytes,
    Clients,
    Exact,
    Integers,
    Known,
    Message,
    Part,
    Raw,
    Real,
    Reasons,
    Whole,
)
from flower_graph.wire.keys import HANDLED
from flower_graph.wire.ledger import ROOM

PACKET_BYTES = 2 * SHARE_BYTES + TAG_BYTES
SEED_BYTES = 32
# One round that is being unmasked, and the next, prepared in the same exchange
KEPT_ROUNDS = 2
# The secret that a holder is asked for, of each of its partners
NOTHING, SEED, MASK_KEY = 0, 1, 2
BINDING = b"binding"  # what a signature is for


RING = Part("Ring", make=Ring, when="word")
DOMAIN, PADS = b"flower-graph sum terms 1", b"flower-graph pads 1"
SECURE_SUM = "secure sum"  # the purpose of `SecureSum`'s


class Flags(Block):
    """Yes or no for each of a shape."""

    type = "bytes (bool)"

    def unpack(self, value: object) -> NDArray[Any]:
        flags = super().unpack(value)
        if (flags > 1).any():
            raise self.refuse("bytes 0 and 1", flags.max())
        return flags > 0


@dataclass(frozen=True)
class SumTerms:
    """The meaning of a sum's numbers; server and clients each state it by themselves."""

    purpose: str  # the kind of sum, such as ``"FedSCem union"``; no two kinds have the same
    ring: Ring | None  # how numbers are written as words; None where words are no numbers
    detail: bytes = b""  # anything else that determines a vector's layout, such as a hash of it
    padded: bool = False  # whether clients add pads that hide the sum: a ring has guard bits then

    def check_guard(self, clients: int) -> None:
        """Refuse a ring with fewer guard bits than pads of so many clients need."""
        needed = (clients - 1).bit_length()
        if self.padded and self.ring is not None:
            bits = self.ring.guard_bits
            refuse_if(bits < needed, f"guard-bits is {bits}, pads need {needed}")

    def digest(self, length: int, word: int, threshold: int, minimum: int) -> bytes:
        """Hash the terms with masking's own: words of a vector, bits of a word, and so on.

        ``threshold`` shares give a secret back; with fewer than ``minimum`` contributors nothing is
        revealed. Returns 32 bytes. The context of each key also has the run and the number of the
        sum.
        """
        numbers = struct.pack("<qqqq", length, word, threshold, minimum)
        return self._hash(DOMAIN, numbers)

    def pad_context(self, run_id: bytes) -> bytes:
        """Hash the terms with a run, 32 bytes, for pads: a reader of the sum makes them again."""
        return self._hash(PADS, run_id)

    def _hash(self, domain: bytes, more: bytes) -> bytes:
        ring = b"" if self.ring is None else self.ring.packed()
        parts = framed(domain, self.purpose.encode(), more, ring, self.detail)
        return hashlib.sha256(parts).digest()


# Any: scalars and lists of them
def digest_of_told(config: Mapping[str, Any]) -> bytes:
    """Hash what clients are told to add up: a client that is told otherwise is in no sum."""

    def plain(value: Any) -> object:
        if isinstance(value, list | tuple):
            return [*map(plain, value)]
        return value.item() if isinstance(value, np.generic) else value

    told = sorted((key, plain(value)) for key, value in config.items())
    return hashlib.sha256(repr(told).encode()).digest()


def revealed(listed: NDArray[np.bool_], live: NDArray[np.bool_]) -> Bytes:
    """Return what is revealed: the seed of each party in the sum, a vanished one's mask key."""
    vanished = np.where(live, np.uint8(MASK_KEY), np.uint8(NOTHING))
    return np.where(listed, np.uint8(SEED), vanished)


# Any: what dataclasses take as a default
def none(kind: type[np.generic] = np.int64, *row: int) -> Any:
    """Return the default of an array's entry that is left out: no rows."""
    return field(default_factory=lambda: np.zeros((0, *row), kind))


class SumMessage(Message):
    """A message about the sums of one run, or of one epoch of it."""

    run_id: Annotated[bytes, Raw("*run")]  # the run


class RoundMessage(SumMessage):
    """A message about one sum."""

    server_round: Annotated[int, Whole("*round")]  # number of the sum


class KeyRequest(SumMessage, down="sum_enroll", prefix="sum-"):
    """Server to client: make a channel key for a run, or state your clients for an epoch."""


class KeyReply(SumMessage, up="sum_enroll", prefix="sum-"):
    """Client to server: its clients, and the SuperNode's public channel key.

    With a key of its own the SuperNode is a party, which signs this.
    """

    clients: Annotated[Integers, Clients(shape="p")]  # who is here
    channel_key: Annotated[Bytes, Block(shape="32")]  # its public channel key (X25519)
    # Only if the server may lie
    party: Annotated[int | None, Whole(least=0)] = None  # number in the registry
    # to its part of the graph's seed
    commitment: Annotated[Bytes, Block(shape=f"{SEED_BYTES}")] = none(np.uint8)
    # over all these (Ed25519)
    signature: Annotated[Bytes, Block(shape=f"{SIGNATURE}")] = none(np.uint8)
    # points of each client for an alignment
    points: Annotated[Integers, Exact(shape="p")] = none()
    handled: Annotated[int | None, Whole(HANDLED, least=0)] = None  # messages of the run so far

    @property
    def number(self) -> int:
        """Its number as a party: the lowest of its clients', unless it signs for another."""
        return int(self.clients.min()) if self.party is None else self.party

    def signed(self, identity: Identity) -> KeyReply:
        signature = identity.sign(BINDING, *self._parts())
        return replace(self, signature=np.frombuffer(signature, np.uint8))

    def _parts(self) -> tuple[bytes, ...]:
        clients, points = (one.astype("<i8").tobytes() for one in (self.clients, self.points))
        return self.run_id, clients, self.channel_key.tobytes(), self.commitment.tobytes(), points

    def verify(self, registry: Registry, block_cap: int | None = None) -> None:
        """Refuse it unless the party signed it and the registry grants what it claims.

        ``block_cap`` is the most points that a client may bring. ``IdentityError`` names the party
        and the fault.
        """
        who, clients, sizes = f"party {self.party}", self.clients.tolist(), self.points
        registered = None if self.party is None else registry.parties.get(self.party)
        if registered is None or registered.revoked:
            raise IdentityError(f"{who} is {'revoked' if registered else 'not in the registry'}")

        def refuse(bad: object, why: str) -> None:
            refuse_if(bad, f"{who}: {why}", IdentityError)

        is_odd = not clients or clients != sorted(set(clients))
        refuse(is_odd, "its clients are none, not ascending or there twice")
        for client in clients:
            refuse(not registered.may_host([client]), f"client {client} is not granted to it")
        is_bad = self.channel_key.size != KEY_BYTES or is_low_order(self.channel_key.tobytes())
        refuse(is_bad, f"its channel key is of low order or not {KEY_BYTES} bytes")
        refuse(self.commitment.size != SEED_BYTES, f"its commitment has not {SEED_BYTES} bytes")
        refuse(sizes.size not in (0, len(clients)), f"declares {sizes.size} blocks")
        most = 2**62 if block_cap is None else block_cap
        is_odd = ((sizes < 1) | (sizes > most)).any()
        refuse(is_odd, f"declares {sizes.max(initial=0)} points, from 1 to {most}")
        is_signed = registry.verify(self.number, self.signature.tobytes(), BINDING, *self._parts())
        version = registry.digest.hex()[:16]
        why = f"its binding is not signed for this run and version of the registry, {version}"
        refuse(not is_signed, why)


class PrepareRequest(RoundMessage, down="sum_unmask", prefix="prepare-"):
    """Server to client: make the keys and shares of a round."""

    # Only of a trusted server: otherwise all this follows from the epoch
    threshold: Annotated[int, Whole()] = 0  # shares that give a secret back
    minimum: Annotated[int, Whole()] = 0  # contributors without whom nothing is to be revealed
    # the party's partners, in the server's mirrored order
    partners: Annotated[Integers, Exact(shape="k")] = none()
    channel_keys: Annotated[Bytes, Block(shape=f"k {KEY_BYTES}")] = none(np.uint8, KEY_BYTES)


class PrepareReply(RoundMessage, up="sum_unmask", prefix="prepare-"):
    """Client to server: public keys, commitments and sealed shares of a round."""

    round_key: Annotated[Bytes, Block(shape=f"{KEY_BYTES}")]  # public mask key
    seed_commitment: Annotated[Bytes, Block(shape=f"{CHECK}")]  # to the seed of the self mask
    # to partners' shares of seed and mask key
    share_commitments: Annotated[Bytes, Block(shape=f"k 2 {CHECK}")]
    packets: Annotated[Bytes, Block(shape=f"k {PACKET_BYTES}")]  # sealed shares for them
    # over the round key; this entry and all others of signatures: only if the server may lie
    signature: Annotated[Bytes | None, Block(shape=f"{SIGNATURE}")] = None


class MaskRequest(RoundMessage, down="sum_mask", prefix="mask-"):
    """Server to client: mask the vectors of a round; with the other SuperNodes' packets."""

    length: Annotated[int, Whole()]  # numbers of a vector
    word: Annotated[int, Whole()]  # bits of a number
    clients: Annotated[Integers, Clients(shape="c")]  # who may contribute
    # which partners take part; if the server may lie: which parties of the epoch
    live: Annotated[NDArray[np.bool_], Flags(shape="n")]
    round_keys: Annotated[Bytes, Block(shape=f"f {KEY_BYTES}")]  # their public mask keys
    # to their shares for the party
    share_commitments: Annotated[Bytes, Block(shape=f"f 2 {CHECK}")]
    packets: Annotated[Bytes, Block(shape=f"f {PACKET_BYTES}")]  # these shares, sealed
    # of the partners' round keys
    signatures: Annotated[Bytes | None, Block(shape=f"f {SIGNATURE}")] = None


class MaskedReply(RoundMessage, up="sum_mask", prefix="mask-"):
    """Client to server: the masked sum of a SuperNode's clients."""

    clients: Annotated[Integers, Clients(shape="q")]  # who is in the sum
    total: RingArray  # [L] ring words. Travels beside the entries, as an array
    # partners whose packets do not open
    refused: Annotated[Integers, Exact(shape="n")] = none()
    # `number:reason` for each client that is not in the sum
    left_out: Annotated[dict[int, str], Reasons()] = field(default_factory=dict)


class UnmaskRequest(RoundMessage, down="sum_unmask", prefix="unmask-"):
    """Server to client: reveal shares of a round."""

    # Of a trusted server: how many are in the sum, and which partners
    contributors: Annotated[int, Whole()] = 0
    listed: Annotated[NDArray[np.bool_], Flags("unmask-there", shape="k")] = none(np.bool_)
    # Of one that may lie: places of partners that signed the list
    columns: Annotated[Integers, Exact(shape="s")] = none()
    # these partners' signatures of the list
    signatures: Annotated[Bytes, Block(shape=f"s {SIGNATURE}")] = none(np.uint8, SIGNATURE)


class UnmaskReply(RoundMessage, up="sum_unmask", prefix="unmask-"):
    """Client to server: the shares that it reveals."""

    # of each partner 0: nothing; 1: the share of its seed; 2: of its mask key
    kinds: Annotated[Bytes, Block(shape="k")]
    shares: Annotated[Bytes, Block(shape=f"n {SHARE_BYTES}")]  # one for each entry that is not 0

    def check(self, known: Known) -> None:
        wanted = int((self.kinds != NOTHING).sum())
        why = f"unmask-shares: {len(self.shares)}, expected {wanted}"
        refuse_if(len(self.shares) != wanted, why, MalformedReplyError)


# Under a server that may lie


class RevealRequest(SumMessage, down="sum_reveal", prefix="reveal-"):
    """Server to client: all commitments; show the seed that you committed to."""

    number: Annotated[int, Whole("reveal-epoch", least=0)]  # which epoch
    dropout: Annotated[float, Real()]  # share of parties that may vanish
    corrupt: Annotated[float, Real()]  # share of parties that may collude
    minimum: Annotated[int, Whole()]  # parties without whom nothing is revealed
    differ_by: Annotated[int, Whole(least=1)]  # parties that two sums differ by at least
    limit: Annotated[float, Real()]  # largest size of a number in their sums
    parties: Annotated[Integers, Clients(shape="n")]  # whose they are, ascending
    commitments: Annotated[Bytes, Block(shape=f"n {SEED_BYTES}")]  # of all
    # all clients that are to be aligned, ascending, and the points of each; as above
    declared: Annotated[Integers, Exact(shape="b 2")] = none(np.int64, 2)


class RevealReply(SumMessage, up="sum_reveal", prefix="reveal-"):
    """Client to server: its part of the graph's seed."""

    seed: Annotated[Bytes, Block(shape=f"{SEED_BYTES}")]  # as committed to


class EpochRequest(SumMessage, down="sum_epoch", prefix="epoch-"):
    """Server to client: all seeds, and the statements that the client's partners signed."""

    seeds: Annotated[Bytes, Block(shape=f"n {SEED_BYTES}")]  # of all parties
    channel_keys: Annotated[Bytes, Block(shape=f"k {KEY_BYTES}")]  # the partners'
    signatures: Annotated[Bytes, Block(shape=f"k {SIGNATURE}")]  # their bindings'
    counts: Annotated[Integers, Exact(shape="k")]  # clients that each hosts
    clients: Annotated[Integers, Exact(shape="c")]  # these, one after another


class EpochReply(SumMessage, up="sum_epoch", prefix="epoch-"):
    """Client to server: its view of the epoch."""

    digest: Annotated[Bytes, Block(shape=f"{SEED_BYTES}")]  # the epoch's hash


class ListRequest(RoundMessage, down="sum_list", prefix="list-"):
    """Server to client: the parties in the sum."""

    listed: Annotated[NDArray[np.bool_], Flags("list-parties", shape="n")]  # who of the epoch


class ListReply(RoundMessage, up="sum_list", prefix="list-"):
    """Client to server: the list, signed."""

    signature: Annotated[Bytes, Block(shape=f"{SIGNATURE}")]  # over epoch, round and list


def sum_bytes(partners: int) -> int:
    """Return the most bytes of a reply about the partners of one sum and of the next."""
    of_each = 1 + SHARE_BYTES + 2 * CHECK + PACKET_BYTES
    return ROOM + KEY_BYTES + CHECK + SIGNATURE + partners * of_each
