"""A key common to all SuperNodes of a run, carried by a server that does not have it.

One SuperNode draws the key, and seals it for every other under the secret of their X25519 keys. A
server that hands out public keys of its own would learn the key; where the server is not trusted,
each public key is signed with its SuperNode's own key, which is in the registry. Any process to
which a SuperNode passes the key has it.

The pads and checks of relayed sums (``ring.py``) come from the same key.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated

import numpy as np
from flwr.app import ConfigRecord, Context

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.channel import (
    KEY_BYTES,
    TAG_BYTES,
    agree,
    context,
    derive,
    new_key,
    pieces,
    rows_of,
    seal,
    unseal,
)
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, Registry, TrustSettings
from flower_graph.secure.ring import CHECKS, Ring, RingArray, SumPad
from flower_graph.secure.sum.messages import RING
from flower_graph.wire.codec import Block, Bytes, Flag, Message, Raw, Tensor, Whole

COMMON_KEY = "common-key"  # in Context.state
CHECK_BYTES = 16
PACKET_BYTES = KEY_BYTES + KEY_BYTES + TAG_BYTES  # a salt, and the sealed key
NO_KEY = bytes(CHECK_BYTES)
PURPOSE = context(b"common key", b"")
SIGNED_BY = 8 + SIGNATURE_BYTES  # a party's number, and its signature


SIGNED = "who has signed each public key, and the signature, where the server is not trusted"
SIGNED_KEY = Block("key-signed-by", SIGNED, shape=f"{SIGNED_BY}", optional=True)


class ShareKeyRequest(Message, down="train.share_key", prefix="key-"):
    """Server to client: seal the common key for others."""

    public: Annotated[Bytes, Block(shape=f"k {KEY_BYTES}")]  # keys of who is to get it
    makes: Annotated[bool, Flag()]  # whether to draw the key, as nobody has it
    signed_by: Annotated[
        Bytes | None, Block(says=SIGNED, shape=f"k {SIGNED_BY}", optional=True)
    ] = None


class ShareKeyReply(Message, up="train.share_key"):
    """Client to server: the sealed keys."""

    packets: Annotated[Bytes, Block("key-packets", shape=f"k {PACKET_BYTES}")]  # a packet for each
    key_check: Annotated[Bytes, Block(shape=f"{CHECK_BYTES}")]  # hash of the key


class MemberKey(Message, prefix="key-"):
    """Client to server: a SuperNode's key for masked sums, and whether it has the common key."""

    public: Annotated[Bytes, Block(shape=f"{KEY_BYTES}")]  # its public key (X25519)
    # hash of the common key, or zeros
    key_check: Annotated[Bytes, Block("key-check", shape=f"{CHECK_BYTES}")]
    signed_by: Annotated[Bytes | None, SIGNED_KEY] = None


class HiddenSum(Message, prefix="pad-"):
    """Server to client: a sum that the server cannot read; clients take the pads off."""

    contributors: Annotated[int, Whole(least=1)]  # pads in the words
    sum_run: Annotated[bytes, Raw("pad-run")]  # run of the secure sum, which the pad is made for
    sum_round: Annotated[int, Whole("pad-round")]  # its number, too
    ring: Annotated[Ring, RING]
    # the sum under pads, and checks
    words: Annotated[
        RingArray, Tensor("total/words", shape="L", dtype="uint32 or uint64", limit=None)
    ]


class KeyPacket(Message, prefix="key-"):
    """Server to client: the common key, sealed by another SuperNode."""

    packet: Annotated[Bytes, Block(shape=f"{PACKET_BYTES}")]  # the sealed key
    sender: Annotated[Bytes, Block(shape=f"{KEY_BYTES}")]  # key of who has sealed it
    signed_by: Annotated[Bytes | None, SIGNED_KEY] = None


class CommonKey:
    """A SuperNode's own key pair and the common key, in its context's state; never elsewhere."""

    def __init__(self, of: Context, trust: TrustSettings | None = None) -> None:
        # trust: the SuperNode's own key, where the server is not trusted
        self._state, self._trust = of.state, trust

    @property
    def public(self) -> Bytes:
        if COMMON_KEY not in self._state:
            private, public = new_key()
            self._state[COMMON_KEY] = ConfigRecord({"private": private, "public": public})
        return np.frombuffer(self._entry("public"), np.uint8)

    @property
    def shown(self) -> MemberKey:
        """What the server is told of it."""
        return MemberKey(self.public, self.check, self.signed_by)

    @property
    def signed_by(self) -> Bytes | None:
        """The signer of the own public key, and the signature; None if the server is trusted."""
        if (trust := self._trust) is None:
            return None
        signature = trust.identity.sign(PURPOSE, trust.journal.run, self.public.tobytes())
        return np.frombuffer(struct.pack("<q", trust.identity.party) + signature, np.uint8)

    @property
    def check(self) -> Bytes:
        check = NO_KEY
        with suppress(StateLostError):
            check = hashlib.sha256(PURPOSE + self._entry("key")).digest()[:CHECK_BYTES]
        return np.frombuffer(check, np.uint8)

    def share(self, request: ShareKeyRequest) -> ShareKeyReply:
        every = [None] * len(request.public) if request.signed_by is None else request.signed_by
        for public, signed_by in zip(request.public, every, strict=True):
            self._check(public, signed_by)
        if request.makes and not self.check.any():
            self._keep(os.urandom(KEY_BYTES))
        secrets, key = agree(self._entry("private"), pieces(request.public)), self._entry("key")
        packets = [_sealed(secret, key) for secret in secrets]
        return ShareKeyReply(rows_of(packets, -1, PACKET_BYTES), self.check)

    def take(self, one: KeyPacket) -> None:
        self._check(one.sender, one.signed_by)
        (secret,) = agree(self._entry("private"), [one.sender.tobytes()])
        self._keep(_opened(secret, one.packet.tobytes()))

    def seed(self) -> int:
        """Return a seed of generators that cannot be guessed without the key."""
        return int.from_bytes(self._derived(b"seed")[:8], "big") >> 1

    def pad(self, run_id: bytes, number: int, detail: bytes, ring: Ring, length: int) -> SumPad:
        """Return the pad that hides the sum of this number and detail from the server."""
        of = run_id + number.to_bytes(8, "big") + ring.packed() + detail
        if self._trust is None:
            return SumPad(self._words(b"pad", of, length), None)
        subsets = self._words(b"check", of, length)
        return SumPad(self._words(b"pad", of, length + CHECKS), subsets)

    def seal(self, data: bytes) -> bytes:
        return _sealed(self._derived(b"seal"), data)

    def open(self, data: bytes) -> bytes:
        return _opened(self._derived(b"seal"), data)

    def _words(self, purpose: bytes, of: bytes, count: int) -> RingArray:
        stream = hashlib.shake_128(self._derived(purpose) + of)
        return np.frombuffer(stream.digest(8 * count), "<u8")

    def _check(self, public: Bytes, signed_by: Bytes | None) -> None:
        if (trust := self._trust) is not None:
            check_signed(trust.registry, trust.journal.run, public, signed_by)

    def _derived(self, purpose: bytes) -> bytes:
        return derive(self._entry("key"), context(b"common key " + purpose, b""))

    def _entry(self, name: str) -> bytes:
        value = self._state.config_records.get(COMMON_KEY, ConfigRecord()).get(name)
        if not isinstance(value, bytes):
            raise StateLostError(f"{COMMON_KEY}: there is no {name}")
        return value

    def _keep(self, key: bytes) -> None:
        self._state.config_records[COMMON_KEY]["key"] = key


def _sealed(secret: bytes, data: bytes) -> bytes:
    salt = os.urandom(KEY_BYTES)
    return salt + seal(secret, PURPOSE, salt, data)


def _opened(secret: bytes, data: bytes) -> bytes:
    plain = unseal(secret, PURPOSE, data[:KEY_BYTES], data[KEY_BYTES:])
    if plain is None:
        raise RefusedError("what was sealed is not for this SuperNode, or was changed")
    return plain


# Has one SuperNode share the key, and returns its reply, if it is good
AskOne = Callable[..., ShareKeyReply | None]


def packets_for(
    nodes: Iterable[int], keys: Mapping[int, MemberKey], ask: AskOne
) -> dict[int, KeyPacket]:
    """Have the common key sealed for SuperNodes that lack it; one draws it if nobody has it.

    ``keys`` are of the SuperNodes that are there; those that get a packet will have the key.
    """
    checks = {node: keys[node].key_check.tobytes() for node in keys}
    known = [check for check in checks.values() if any(check)][:1]
    having = [node for node, check in checks.items() if check in known]
    lacking = [node for node in nodes if node not in having]
    for donor in (having or list(keys)) if lacking else ():
        others = [node for node in lacking if node != donor]
        public = np.array([keys[node].public for node in others], np.uint8)
        rows = [keys[node].signed_by for node in others]
        signed = None
        if keys[donor].signed_by is not None:
            signed = np.array(rows, np.uint8).reshape(-1, SIGNED_BY)
        request = ShareKeyRequest(public.reshape(-1, KEY_BYTES), not having, signed)
        reply = ask(donor, request=request, read=partial(ShareKeyReply.read, k=len(others)))
        if reply is not None:
            for node in (donor, *others):
                keys[node].key_check = reply.key_check
            sender = keys[donor].public, keys[donor].signed_by
            packets = [KeyPacket(packet, *sender) for packet in reply.packets]
            return dict(zip(others, packets, strict=True))
    return {}


def check_signed(registry: Registry, run: bytes, public: Bytes, signed_by: Bytes | None) -> None:
    """Refuse a public key that no party has signed for this run."""
    if signed_by is not None:
        (party,), signature = struct.unpack("<q", signed_by[:8].tobytes()), signed_by[8:].tobytes()
        if registry.verify(party, signature, PURPOSE, run, public.tobytes()):
            return
    raise RefusedError("a public key for the common key is not signed with a registered key")
