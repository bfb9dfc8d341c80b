"""Encrypted state files: a SuperNode's node config names a key, ``state-key``.

ChaCha20-Poly1305 with a key for each salt, by HKDF from a key file or by scrypt from a passphrase.
A file is bound to its path below the SuperNode's folder, so it does not open at another path. An
older version of the same file does open: anybody who can write there can put it back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from flower_graph.errors import CheckpointError, ConfigError
from flower_graph.storage.reading import SEALED, read_secret, reason

STATE_KEY = "state-key"  # node config
SALT, NONCE, CHECK = 16, 12, 8
_HEAD = struct.Struct(f">{len(SEALED)}s{SALT}s{CHECK}s{NONCE}s")
HEAD = _HEAD.size
KEY_DIGITS, FEWEST = 64, 12  # hexadecimal digits of a key; characters of a passphrase
SCRYPT = {"n": 1 << 15, "r": 8, "p": 1}  # 32 MiB, a tenth of a second
# The salt of the file that was opened last, by secret: a process derives one key, not one a file
_SALTS: dict[bytes, bytes] = {}


class StateKey:
    """Encrypts and opens the files below one SuperNode's folder."""

    def __init__(self, secret: bytes, place: Path) -> None:
        self._secret, self._place = secret, place

    @classmethod
    def of(cls, node_config: Mapping[str, object], place: Path | None) -> StateKey:
        """Read the key's file that the node config names; it is the user's alone.

        ``ConfigError`` if it has neither 64 hexadecimal digits nor a passphrase of 12 characters or
        more, or the SuperNode has no place.
        """
        given = node_config[STATE_KEY]
        where = f"node-config {STATE_KEY}: {given!s:.200}"
        if place is None:
            raise ConfigError(f"{where}: neither state-dir nor data-folder: state is in memory")
        try:
            secret = read_secret(Path(str(given)).expanduser()).rstrip(b"\r\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: cannot be read: {reason(error)}") from error
        if len(secret) < FEWEST:
            allowed = f"{KEY_DIGITS} hexadecimal digits, or a passphrase of {FEWEST} or more"
            raise ConfigError(f"{where}: has {len(secret)} characters; must be {allowed}")
        return cls(secret, place)

    def seal(self, data: bytes, path: Path) -> bytes:
        salt = _SALTS.setdefault(self._secret, os.urandom(SALT))
        key, check = _derived(self._secret, salt)
        nonce = os.urandom(NONCE)
        head = _HEAD.pack(SEALED, salt, check, nonce)
        return head + ChaCha20Poly1305(key).encrypt(nonce, data, head + self._name(path))

    def open(self, data: bytes, path: Path) -> bytes:
        """Decrypt the file at a path; ``CheckpointError`` says why that fails."""
        if not data.startswith(SEALED):
            raise CheckpointError(f"{path}: is not encrypted, though state-key is set")
        head, body = data[:HEAD], data[HEAD:]
        _, salt, check, nonce = _HEAD.unpack(head.ljust(HEAD, b"\0"))
        key, expected = _derived(self._secret, salt)
        if check != expected:
            raise CheckpointError(f"{path}: is encrypted with another key than state-key")
        try:
            plain = ChaCha20Poly1305(key).decrypt(nonce, body, head + self._name(path))
        except InvalidTag as error:
            raise CheckpointError(
                f"{path}: was changed, is not whole, or is another file"
            ) from error
        _SALTS[self._secret] = salt
        return plain

    def _name(self, path: Path) -> bytes:
        return path.relative_to(self._place).as_posix().encode()


@lru_cache(maxsize=64)
def _derived(secret: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Return the key for a salt, and a check value of the secret."""
    if len(secret) == KEY_DIGITS and not set(secret) - set(b"0123456789abcdefABCDEF"):
        root = bytes.fromhex(secret.decode())
    else:
        root = Scrypt(salt, 32, **SCRYPT).derive(secret)
    both = HKDF(hashes.SHA256(), 32 + CHECK, salt, b"flower-graph state").derive(root)
    return both[:32], both[32:]
