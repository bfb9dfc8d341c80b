"""Keys and sealed packets of clients whose messages the server carries.

Every key has one purpose: HKDF takes the run, the round and both clients, and ChaCha20-Poly1305
authenticates the same again. A packet of another run, round, sender or receiver does not open, nor
does a changed packet.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl.bindings import crypto_scalarmult, crypto_scalarmult_base
from nacl.exceptions import RuntimeError as SodiumError
from numpy.typing import NDArray

from flower_graph.errors import RefusedError

Bytes = NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")
WORTH_A_THREAD = 16  # curve operations: 1 ms, several times what starting a thread takes
KEY_BYTES, COMMITMENT_BYTES, TAG_BYTES = 32, 32, 16
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
    """Tell whether a public key is of low order: every secret agreed on with it is zero."""
    return public[:31] + bytes([public[31] & 127]) in LOW_ORDER


def agree(private: bytes, publics: Iterable[bytes]) -> list[bytes]:
    """Return the X25519 secrets of a private key and some public keys."""

    def one(public: bytes) -> bytes:
        try:
            return crypto_scalarmult(private, public)
        except SodiumError as error:
            raise RefusedError(f"public key {public.hex()} is of low order") from error

    return spread(one, list(publics))


def context(purpose: bytes, run_id: bytes, *numbers: int) -> bytes:
    """Encode the purpose of a key, packet or commitment; different purposes differ in bytes."""
    tail = struct.pack(f"<{len(numbers)}q", *numbers)
    return b"flower-graph secure sum/" + purpose + b"\0" + run_id + tail


def derive(secret: bytes, what_for: bytes, salt: bytes | None = None) -> bytes:
    """Derive a 32-byte key for one purpose (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt, what_for).derive(secret)


def commitment(what_for: bytes, value: bytes) -> bytes:
    """Commit to a value with 256 random bits."""
    # All of SHA-256: a dealer who is free to choose both values finds two that match by 2^(bits/2).
    return hashlib.sha256(what_for + value).digest()


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


# What each key, packet and commitment of the secure sum is for: both sides write it alike


def self_mask_key(seed: bytes, run_id: bytes, number: int, client: int, terms: bytes) -> bytes:
    """Return the stream key of a client's self mask in round ``number``."""
    return derive(seed, context(b"self mask", run_id, number, client) + terms)


def pair_masks(
    private: bytes,
    run_id: bytes,
    number: int,
    own: int,
    others: Mapping[int, bytes],
    terms: bytes,
) -> list[tuple[bytes, int]]:
    """Return the stream keys of a client's masks with others, and whether it adds or subtracts.

    ``private`` is its mask key; ``others`` have public ones. Of two clients, the lower number adds
    their mask and the higher takes it away.
    """
    masks = []
    for other, secret in zip(others, agree(private, others.values()), strict=True):
        low, high = sorted((own, other))
        key = derive(secret, context(b"pair mask", run_id, number, low, high) + terms)
        masks.append((key, 1 if own < other else -1))
    return masks


SHARES = b"share of the seed", b"share of the mask key"


def packet_context(run_id: bytes, number: int, dealer: int, holder: int) -> bytes:
    """Return the context of the packet with a dealer's shares for a holder."""
    return context(b"packet", run_id, number, dealer, holder)


def commit_to_seed(run_id: bytes, number: int, client: int, seed: bytes) -> bytes:
    """Commit to a client's seed."""
    return commitment(context(b"seed", run_id, number, client), seed)


def commit_to_shares(
    run_id: bytes, number: int, dealer: int, holder: int, shares: Sequence[bytes]
) -> list[bytes]:
    """Commit to a holder's shares of a dealer's seed and mask key."""
    pairs, about = zip(SHARES, shares, strict=True), (run_id, number, dealer, holder)
    return [commitment(context(purpose, *about), share) for purpose, share in pairs]


# Rows of bytes, and work on many of them


def spread(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Do a curve operation on every item; libsodium releases Python's lock meanwhile."""
    import torch  # takes a second, and a command that makes keys does not need it

    threads = min(torch.get_num_threads(), len(items) // WORTH_A_THREAD)
    if threads < 2:
        return list(map(work, items))
    cuts = [len(items) * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(list, map(work, items[a:b])) for a, b in pairwise(cuts)]
    return list(chain.from_iterable(part.result() for part in parts))


def rows_of(parts: Iterable[bytes], *shape: int) -> Bytes:
    """Stack equally long pieces of bytes into one array; one size of the shape may be -1."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(shape)


def pieces(rows: Bytes) -> list[bytes]:
    """Return the rows of ``[n, w]`` bytes one by one."""
    data, width = rows.tobytes(), rows.shape[1]
    return [data[start : start + width] for start in range(0, len(data), width)]


def framed(*parts: bytes) -> bytes:
    """Join parts so that no other parts give the same bytes."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])
