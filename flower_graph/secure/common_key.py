"""A key that all SuperNodes of a run have in common, and the server that carries it does not have.

One SuperNode draws it, and seals it for each other one under what their X25519 keys agree on. The
server is taken to follow the protocol: one that hands out public keys of its own learns the key, as
does one that is told it by a SuperNode.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
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
from flower_graph.secure.ring import RingArray
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import Block, Bytes, Flag

NAME = "common-key"  # in Context.state
CHECK_BYTES = 16
PACKET_BYTES = KEY_BYTES + KEY_BYTES + TAG_BYTES  # a salt, and the sealed key
NO_KEY = bytes(CHECK_BYTES)
PURPOSE = context(b"common key", b"")


@dataclass
class ShareKeyRequest(Message, down="train.share_key"):
    """Server to client: seal the common key for others."""

    public: Annotated[
        Bytes, Block("key-public", "public keys of who is to get it", shape=f"k {KEY_BYTES}")
    ]
    makes: Annotated[bool, Flag("key-makes", "whether to draw the key, as nobody has it")]


@dataclass
class ShareKeyReply(Message, up="train.share_key"):
    """Client to server: the sealed keys."""

    packets: Annotated[Bytes, Block("key-packets", "a packet for each", shape=f"k {PACKET_BYTES}")]
    key_check: Annotated[Bytes, Block("key-check", "hash of the key", shape=f"{CHECK_BYTES}")]


@dataclass
class KeyPacket(Message):
    """Server to client: the common key, sealed by another SuperNode."""

    packet: Annotated[Bytes, Block("key-packet", "the sealed key", shape=f"{PACKET_BYTES}")]
    sender: Annotated[
        Bytes, Block("key-sender", "public key of who has sealed it", shape=f"{KEY_BYTES}")
    ]


class CommonKey:
    """A SuperNode's own key pair and the common key, in its context's state; never elsewhere."""

    def __init__(self, of: Context) -> None:
        self._state = of.state

    @property
    def public(self) -> Bytes:
        """The own public key, made when it is first asked for."""
        if NAME not in self._state:
            private, public = new_key()
            self._state[NAME] = ConfigRecord({"private": private, "public": public})
        return np.frombuffer(self._entry("public"), np.uint8)

    @property
    def check(self) -> Bytes:
        """A hash of the common key; zeros without one."""
        key = self._key
        check = hashlib.sha256(PURPOSE + key).digest()[:CHECK_BYTES] if key else NO_KEY
        return np.frombuffer(check, np.uint8)

    def share(self, request: ShareKeyRequest) -> ShareKeyReply:
        """Seal the common key for others."""
        if not self._key:
            if not request.makes:
                raise StateLostError("the common key is not here")
            self._keep(os.urandom(KEY_BYTES))
        packets = []
        for secret in agree(self._entry("private"), pieces(request.public)):
            salt = os.urandom(KEY_BYTES)
            packets.append(salt + seal(secret, PURPOSE, salt, self._key))
        return ShareKeyReply(rows_of(packets, -1, PACKET_BYTES), self.check)

    def take(self, one: KeyPacket) -> None:
        """Open a packet and keep the key."""
        packet, sender = one.packet.tobytes(), one.sender.tobytes()
        (secret,) = agree(self._entry("private"), [sender])
        key = unseal(secret, PURPOSE, packet[:KEY_BYTES], packet[KEY_BYTES:])
        if key is None:
            raise RefusedError("the packet with the common key is not for this SuperNode")
        self._keep(key)

    def drop(self) -> None:
        """Forget the run."""
        self._state.pop(NAME, None)

    def seed(self) -> int:
        """Give a seed of generators that those without the key cannot guess."""
        return int.from_bytes(self._derived(b"seed")[:8], "big") >> 1

    def pad(self, run_id: bytes, number: int, length: int) -> RingArray:
        """Give the words, ``[length]``, that hide the sum of this number from the server."""
        stream = hashlib.shake_128(self._derived(b"pad") + run_id + number.to_bytes(8, "big"))
        return np.frombuffer(stream.digest(8 * length), "<u8")

    def seal(self, data: bytes) -> bytes:
        """Encrypt for all who have the key."""
        salt = os.urandom(KEY_BYTES)
        return salt + seal(self._derived(b"seal"), PURPOSE, salt, data)

    def open(self, data: bytes) -> bytes:
        """Open what ``seal`` gave."""
        plain = unseal(self._derived(b"seal"), PURPOSE, data[:KEY_BYTES], data[KEY_BYTES:])
        if plain is None:
            raise RefusedError("it was not sealed under the common key, or was changed")
        return plain

    @property
    def _key(self) -> bytes:
        record = self._state.config_records.get(NAME, ConfigRecord())
        return bytes(record.get("key", b""))  # type: ignore[arg-type]

    def _derived(self, purpose: bytes) -> bytes:
        if not self._key:
            raise StateLostError("the common key is not here")
        return derive(self._key, context(b"common key " + purpose, b""))

    def _entry(self, name: str) -> bytes:
        record: Mapping[str, object] = self._state.config_records.get(NAME, ConfigRecord())
        value = record.get(name)
        if not isinstance(value, bytes):
            raise StateLostError("this SuperNode's own key is not here")
        return value

    def _keep(self, key: bytes) -> None:
        pair = {name: self._entry(name) for name in ("private", "public")}
        self._state[NAME] = ConfigRecord({**pair, "key": key})
