"""Parties: their registry, their keys and signatures, and the settings of trust.

A *party* is a SuperNode with an Ed25519 key of its own. All parties have the same registry, a JSON
file; it is distributed out of band, not by the server. The SHA-256 of the file's bytes is part of
all that is signed, so parties with different versions refuse each other instead of disagreeing
unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from nacl.bindings import crypto_core_ed25519_is_valid_point as is_valid_point
from nacl.bindings import crypto_sign_BYTES, crypto_sign_open
from nacl.exceptions import BadSignatureError

from flower_graph.errors import ConfigError, IdentityError, refuse_if
from flower_graph.records.participation import read_ranges
from flower_graph.secure.channel import KEY_BYTES, framed
from flower_graph.secure.node_config import (
    FEWEST_PARTIES,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
    differ_by,
    most_points,
    whole_number,
)
from flower_graph.secure.parties.journal import MOST_BEGUN, Journal
from flower_graph.storage.files import named, open_own, write_text
from flower_graph.storage.reading import (
    MOST_KEY,
    MOST_RECORD,
    parse_json,
    read_bytes,
    read_secret,
    reading,
)

__all__ = ["Identity", "RegisteredParty", "Registry", "TrustSettings", "new_identity"]

FORMAT = 1
MOST_NUMBER = 2**31 - 1  # of a client
DOMAIN = b"flower-graph identity 1"
refuse = partial(refuse_if, error=IdentityError)


@dataclass(frozen=True)
class RegisteredParty:
    """One SuperNode of the registry."""

    number: int  # in the registry, from 0; it never changes
    key: bytes  # its Ed25519 public key
    clients: tuple[range, ...]  # the client numbers that it may speak for
    revoked: bool = False  # whether all its signatures are invalid
    former: tuple[bytes, ...] = ()  # its earlier keys; no party may have them again

    def may_host(self, clients: Iterable[int]) -> bool:
        return all(any(client in part for part in self.clients) for client in clients)


@dataclass(frozen=True)
class Registry:
    """The parties that may take part; all parties have the same registry.

    Raises
    ------
    IdentityError
        Grants that overlap or are above ``most_clients``, keys that are there twice or are no
        points of the group, numbers that are not 0, 1, 2, ...
    """

    parties: dict[int, RegisteredParty]  # by their numbers, 0, 1, 2, ...
    most_clients: int  # the most client numbers of a party, so that no party is most of a sum
    digest: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        _check(self)
        if not self.digest:
            digest = hashlib.sha256(self.text().encode()).digest()
            object.__setattr__(self, "digest", digest)

    @classmethod
    def read(cls, path: Path | str) -> Registry:
        path = Path(path).expanduser()
        with reading(f"registry {path}", IdentityError):
            try:
                return _read(read_bytes(path, MOST_RECORD))
            except IdentityError as error:
                raise IdentityError(f"registry {path}: {error}") from error

    def write(self, path: Path) -> None:
        write_text(named(path), self.text())

    def text(self) -> str:
        rows = [
            {
                "party": party.number,
                "key": party.key.hex(),
                "clients": write_numbers(party.clients),
                "revoked": party.revoked,
                "former": [key.hex() for key in party.former],
            }
            for party in self.parties.values()
        ]
        head = {"format": FORMAT, "most-clients": self.most_clients, "parties": rows}
        return json.dumps(head, indent=1) + "\n"

    @property
    def active(self) -> list[int]:
        return [party.number for party in self.parties.values() if not party.revoked]

    @property
    def minimum(self) -> int:
        """The fewest parties in a sum, if nobody asks for more: 70 % of the active ones, or 5."""
        active = len(self.active)
        return max(FEWEST_PARTIES, active - 3 * active // 10)

    def verify(self, party: int, signature: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Tell whether a party that is not revoked signed these parts for this purpose.

        Nothing is valid of a number that the registry does not have.
        """
        registered = self.parties.get(party)
        if registered is None or registered.revoked or len(signature) != crypto_sign_BYTES:
            return False
        try:  # libsodium's takes 0.6 of the time of OpenSSL's
            crypto_sign_open(
                signature + signed_bytes(self.digest, party, purpose, parts), registered.key
            )
        except BadSignatureError:
            return False
        return True

    # New versions of the file

    def with_party(self, key: bytes, clients: Sequence[range]) -> Registry:
        number = len(self.parties)
        return self._with(RegisteredParty(number, key, tuple(clients)))

    def rotated(self, party: int, key: bytes) -> Registry:
        old = self._active(party)
        return self._with(replace(old, key=key, former=(*old.former, old.key)))

    def without(self, party: int) -> Registry:
        return self._with(replace(self._active(party), revoked=True))

    def _active(self, party: int) -> RegisteredParty:
        what = "is revoked already" if party in self.parties else "is not in the registry"
        refuse(party not in self.active, f"party {party} {what}; there are {self.active}")
        return self.parties[party]

    def _with(self, party: RegisteredParty) -> Registry:
        return Registry({**self.parties, party.number: party}, self.most_clients)


@lru_cache(maxsize=4)
def _read(data: bytes) -> Registry:
    raw = parse_json(data)
    parties = {
        row["party"]: RegisteredParty(
            int(row["party"]),
            bytes.fromhex(row["key"]),
            read_numbers(row["clients"]),
            bool(row["revoked"]),
            tuple(map(bytes.fromhex, row["former"])),
        )
        for row in raw["parties"]
    }
    registry = Registry(parties, int(raw["most-clients"]), hashlib.sha256(data).digest())
    # So a registry has one way to be written: no entry is there twice, is unknown, or of another
    # type or format.
    is_other = registry.text() != data.decode()
    refuse(is_other, "is not as `flower-graph registry` of this version writes it")
    return registry


def _check(registry: Registry) -> None:
    parties, most = list(registry.parties.values()), registry.most_clients
    refuse(most < 1, f"most-clients is {most}, must be at least 1")
    seen: dict[bytes, int] = {}
    for index, party in enumerate(parties):
        why = f"party {party.number} is at place {index}: numbers are 0, 1, 2 …"
        refuse(party.number != index, why)
        for key in (party.key, *party.former):
            is_key = len(key) == KEY_BYTES and is_valid_point(key)
            refuse(not is_key, f"party {index}: {key.hex()} is no Ed25519 key")
            why = f"party {index}: has a key that party {seen.get(key)} has or had"
            refuse(key in seen, why)
            seen[key] = index
        count = sum(map(len, party.clients))
        why = f"party {index}: {count} clients, most-clients is {most}"
        refuse(not 1 <= count <= most, why)
    active = [party for party in parties if not party.revoked]
    grants = sorted((part.start, part.stop, one.number) for one in active for part in one.clients)
    for (_, end, one), (start, _, other) in pairwise(grants):
        refuse(start < end, f"client {start} is granted to party {one} and to party {other}")


def read_numbers(text: str) -> tuple[range, ...]:
    """Read client numbers such as ``0-99,200``: ascending, none twice."""
    why = f"clients {text!r:.60}: write ascending numbers and ranges, such as 0-99,200"
    try:
        ends = read_ranges(text)
    except ValueError as error:
        raise IdentityError(why) from error
    refuse(not ends or ends[-1][1] > MOST_NUMBER, f"{why}, up to {MOST_NUMBER}")
    return tuple(range(low, high + 1) for low, high in ends)


def write_numbers(clients: Iterable[range]) -> str:
    """Write client numbers as ``read_numbers`` reads them."""
    return ",".join(
        f"{part.start}-{part.stop - 1}" if len(part) > 1 else f"{part.start}" for part in clients
    )


def signed_bytes(digest: bytes, party: int, purpose: bytes, parts: Sequence[bytes]) -> bytes:
    """Encode signed parts: no other registry, party, purpose or parts give the same bytes."""
    return framed(DOMAIN, digest, party.to_bytes(8, "big"), purpose, *parts)


SIGNATURE_BYTES = 64
PUBLIC = ".pub"  # behind the name of a key's file
NO_KEY = "is no Ed25519 key; make one with `flower-graph identity new`"
# Node config
IDENTITY_KEY, REGISTRY, BLOCK_CAP = "identity-key", "registry", "block-cap"
MINIMUM, CORRUPT, RUNS = "trust-minimum", "trust-corrupt", "trust-runs"
SETTINGS = (IDENTITY_KEY, REGISTRY, MINIMUM, CORRUPT, RUNS, BLOCK_CAP)


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
        return self._key.sign(signed_bytes(self.registry.digest, self.party, purpose, parts))


@dataclass(frozen=True)
class TrustSettings:
    """A SuperNode's own settings of trust, from its node config; no run can ask for less."""

    identity: Identity  # from `identity-key`, the path of its key
    registry: Registry  # from `registry`, the path of the file
    minimum: int  # `trust-minimum`: the fewest SuperNodes in a sum; by default the registry's
    corrupt: float  # `trust-corrupt`: share of SuperNodes that may collude with the server
    block_cap: int  # `block-cap`: the most points that a client may bring to an alignment
    # beside the key, with `trust-runs`, how often in 24 hours its sums may begin anew
    journal: Journal
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
        file, runs = f"{key_file.name}.journal", whole_number(given, RUNS, MOST_BEGUN, 1, 2**31)
        journal = Journal(key_file.with_name(file), str(run).encode(), runs)
        limits = float(corrupt), cap, journal, most_points(node_config), differ_by(node_config)
        return cls(identity, registry, minimum, *limits)
