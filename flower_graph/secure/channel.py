"""Keys and sealed packets between two clients whose messages the server carries.

Every key is made for one purpose: HKDF takes the run, the round and both clients, and ChaCha20-
Poly1305 authenticates the same again. A packet of another run, round, sender or receiver does not
open, nor does one that was changed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl.bindings import crypto_scalarmult_base

from flower_graph.errors import RefusedError

KEY_BYTES, COMMITMENT_BYTES, TAG_BYTES = 32, 16, 16
MAX_AGREEMENTS = 1 << 14  # a few MB; beyond it, those of the last round are kept
# Public keys with which every agreement is zero (libsodium's list); the top bit is ignored.
_P = 2**255 - 19
_ORDER_8 = (
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
)
LOW_ORDER = frozenset(
    [value.to_bytes(32, "little") for value in (0, 1, _P - 1, _P, _P + 1)]
    + [bytes.fromhex(value) for value in _ORDER_8]
)


def new_key() -> tuple[bytes, bytes]:
    """Make an X25519 key pair, private and public, 32 bytes each."""
    private = os.urandom(KEY_BYTES)
    return private, public_key(private)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return crypto_scalarmult_base(private)


def is_low_order(public: bytes) -> bool:
    """Tell whether a public key gives nobody a secret."""
    return public[:31] + bytes([public[31] & 127]) in LOW_ORDER


def agree(private: bytes, publics: Iterable[bytes]) -> list[bytes]:
    """Return the X25519 secrets of a private key and some public keys."""
    local, secrets = X25519PrivateKey.from_private_bytes(private), []
    for public in publics:
        try:
            secrets.append(local.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError as error:
            raise RefusedError(f"public key {public.hex()} is of low order") from error
    return secrets


class Agreements:
    """What clients' channel keys agree on with others', kept: the same partners come again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], bytes] = {}

    def look_up(
        self, privates: Mapping[int, bytes], pairs: Sequence[tuple[int, bytes]]
    ) -> list[bytes]:
        """Return the secrets of pairs of a client and a public key."""
        fresh: dict[int, list[bytes]] = {}
        for client, public in pairs:
            if (client, public) not in self._known:
                fresh.setdefault(client, []).append(public)
        for client, publics in fresh.items():
            for public, secret in zip(publics, agree(privates[client], publics), strict=True):
                self._known[client, public] = secret
        result = [self._known[pair] for pair in pairs]
        if len(self._known) > MAX_AGREEMENTS:
            self._known = dict(zip(pairs, result, strict=True))
        return result


def context(purpose: bytes, run_id: bytes, *numbers: int) -> bytes:
    """Write what a key, a packet or a commitment is for; no two purposes give the same bytes."""
    tail = struct.pack(f"<{len(numbers)}q", *numbers)
    return b"flower-graph secure sum/" + purpose + b"\0" + run_id + tail


def derive(secret: bytes, what_for: bytes, salt: bytes | None = None) -> bytes:
    """Derive a 32-byte key for one purpose (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, what_for).derive(secret)


def commitment(what_for: bytes, value: bytes) -> bytes:
    """Commit to a value that has 256 random bits."""
    # Half of SHA-256 is enough: to pass off another value takes a second preimage, 2^128 tries.
    return hashlib.sha256(what_for + value).digest()[:COMMITMENT_BYTES]


def seal(secret: bytes, what_for: bytes, round_key: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate a packet."""
    key = derive(secret, what_for, round_key)
    return ChaCha20Poly1305(key).encrypt(bytes(12), plain, what_for)


def unseal(secret: bytes, what_for: bytes, round_key: bytes, packet: bytes) -> bytes | None:
    """Open a packet; arguments as in ``seal``. None if it was altered or is for something else."""
    key = derive(secret, what_for, round_key)
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), packet, what_for)
    except InvalidTag:
        return None
