"""A party's own key, its signatures, and its node config's settings of trust.

The keys of all parties, and the clients that each may speak for, are in the registry
(``flower_graph.secure.parties.registry``), which no server hands out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from flower_graph.errors import ConfigError, IdentityError, refuse_if
from flower_graph.secure.node_config import (
    FEWEST_PARTIES,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
    differ_by,
    most_points,
    whole_number,
)
from flower_graph.secure.parties.registry import Registry, signed_bytes
from flower_graph.storage.reading import MOST_KEY, read_bytes, read_secret, reading
from flower_graph.storage.writing import named, open_own

__all__ = ["Identity", "Registry", "TrustSettings", "new_identity"]

SIGNATURE_BYTES = 64
PUBLIC = ".pub"  # behind the name of a key's file
NO_KEY = "is no Ed25519 key; make one with `flower-graph identity new`"
# Node config
IDENTITY_KEY, REGISTRY, BLOCK_CAP = "identity-key", "registry", "block-cap"
MINIMUM, CORRUPT, RUNS = "trust-minimum", "trust-corrupt", "trust-runs"
SETTINGS = (IDENTITY_KEY, REGISTRY, MINIMUM, CORRUPT, RUNS, BLOCK_CAP)
MOST_BEGUN = 24  # times a day that a party begins anew, unless trust-runs says otherwise


def new_identity(path: Path) -> bytes:
    """Make a private key that only its owner can read, and beside it ``.pub``, the public key."""
    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    pem = keys.Encoding.PEM
    shown = public.public_bytes(pem, keys.PublicFormat.SubjectPublicKeyInfo)
    hidden = private.private_bytes(pem, keys.PrivateFormat.PKCS8, keys.NoEncryption())
    try:
        # The public one first: nobody needs it, should the other not be made.
        for file, data, mode in ((public_file(path), shown, 0o644), (path, hidden, 0o600)):
            there = named(file.parent) / file.name
            handle = open_own(there, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        raise IdentityError(f"{file}: cannot be made: {error.strerror}") from error
    return public.public_bytes_raw()


def public_file(path: Path) -> Path:
    """Return where the public key of a key's file lies."""
    return path.with_name(path.name + PUBLIC)


def read_public(path: Path) -> bytes:
    """Read a public key's file."""
    with reading(path, IdentityError):
        data = read_bytes(path, MOST_KEY)
    with reading(path, IdentityError, f"is no public key in PEM; it is the file *{PUBLIC}"):
        key = keys.load_pem_public_key(data)
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"{path}: {NO_KEY}")
    return key.public_bytes_raw()


# Signatures ---------------------------------------------------------------------------------------


class Identity:
    """A party's own key, with its number in the registry."""

    def __init__(self, key: Ed25519PrivateKey, registry: Registry) -> None:
        public = key.public_key().public_bytes_raw()
        matching = [one for one in registry.parties.values() if public in (one.key, *one.former)]
        why = f"the registry has no party with the key {public.hex()}"
        refuse_if(not matching, why, IdentityError)
        is_old = matching[0].key != public
        why = f"the key of party {matching[0].number} {'was replaced' if is_old else 'is revoked'}"
        refuse_if(is_old or matching[0].revoked, f"{why}; take its newest", IdentityError)
        self.party, self.registry, self._key = matching[0].number, registry, key

    @classmethod
    def read(cls, path: Path | str, registry: Registry) -> Identity:
        """Read a key's file and find its party.

        Raises
        ------
        IdentityError
            A file that others may read, that is no Ed25519 key, or a key that the registry does
            not have, or has no more.
        """
        path = Path(path).expanduser()
        with reading(path, IdentityError):
            data = read_secret(path)
        with reading(path, IdentityError, "is no private key in PEM without a passphrase"):
            key = keys.load_pem_private_key(data, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(f"{path}: {NO_KEY}")
        try:
            return cls(key, registry)
        except IdentityError as error:
            raise IdentityError(f"{path}: {error}") from error

    def sign(self, purpose: bytes, *parts: bytes) -> bytes:
        """Sign parts for one purpose, under this registry; 64 bytes."""
        return self._key.sign(signed_bytes(self.registry.digest, self.party, purpose, parts))


@dataclass(frozen=True)
class TrustSettings:
    """A SuperNode's own settings of trust, from its node config; no run can ask for less."""

    identity: Identity  # from `identity-key`, the path of its key
    registry: Registry  # from `registry`, the path of the file
    minimum: int  # `trust-minimum`: the fewest SuperNodes in a sum; by default the registry's
    corrupt: float  # `trust-corrupt`: share of SuperNodes that may collude with the server
    block_cap: int  # `block-cap`: the most points that a client may bring to an alignment
    journal: Path  # beside the key (``journal.py``)
    runs: int  # `trust-runs`: how often in 24 hours its sums may begin anew
    run: bytes  # Flower's number of the run
    most_points: int = MOST_POINTS  # the most that one SuperNode's clients may bring together
    differ_by: int = USUAL_DIFFERENCE  # how many SuperNodes two sums differ by, if they differ

    # Any: what the operator wrote; ``TrustSettings`` checks it
    @classmethod
    def of(cls, node_config: Mapping[str, Any], run: int) -> TrustSettings | None:
        """Read them, for a run of Flower's; None where the node config has none.

        Raises
        ------
        ConfigError
            Settings that are unknown, without the key or the registry, or impossible.
        IdentityError
            If a file is unusable.
        """
        given = {key: node_config[key] for key in SETTINGS if key in node_config}
        if unknown := [key for key in node_config if key.startswith("trust-") and key not in given]:
            raise ConfigError(f"node-config {unknown[0]}: there are {MINIMUM}, {CORRUPT}, {RUNS}")
        if not given:
            return None
        for key in (IDENTITY_KEY, REGISTRY):
            why = f"node-config {key}: {given.get(key)!r:.60} is no path; {', '.join(given)} need "
            why += f"both {IDENTITY_KEY} and {REGISTRY}"
            refuse_if(not isinstance(given.get(key), str) or not given[key], why, ConfigError)
        registry = Registry.read(given[REGISTRY])
        key_file = Path(given[IDENTITY_KEY]).expanduser()
        key_file = named(key_file.parent) / key_file.name  # its journal lies beside it
        identity = Identity.read(key_file, registry)
        count = len(registry.active)
        why = f"registry {given[REGISTRY]}: {count} active parties, below {FEWEST_PARTIES}"
        refuse_if(count < FEWEST_PARTIES, why, IdentityError)
        minimum = whole_number(given, MINIMUM, registry.minimum, FEWEST_PARTIES, count)
        corrupt = given.get(CORRUPT, 0.1)
        is_no_share = isinstance(corrupt, bool | str) or not 0 <= corrupt < 0.5
        why = f"node-config {CORRUPT}: {corrupt!r:.60}; from 0 to below 0.5"
        refuse_if(is_no_share, why, ConfigError)
        cap = whole_number(given, BLOCK_CAP, MOST_BLOCK, 1, 2**31)
        journal = key_file.with_name(key_file.name + ".journal")
        runs = whole_number(given, RUNS, MOST_BEGUN, 1, 2**31)
        limits, of_run = (minimum, float(corrupt), cap), (journal, runs, str(run).encode())
        of_node = most_points(node_config), differ_by(node_config)
        return cls(identity, registry, *limits, *of_run, *of_node)
