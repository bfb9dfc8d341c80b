"""The registry of parties: their keys, and the clients that each may speak for.

A *party* is a SuperNode with an Ed25519 key of its own. All parties have the same registry, a JSON
file; it is distributed out of band, not by the server. The SHA-256 of the file's bytes is part of
all that is signed, so parties with different versions refuse each other instead of disagreeing
unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

from nacl.bindings import crypto_core_ed25519_is_valid_point as is_valid_point
from nacl.bindings import crypto_sign_BYTES, crypto_sign_open
from nacl.exceptions import BadSignatureError

from flower_graph.errors import IdentityError, refuse_if
from flower_graph.secure.channel import KEY_BYTES, framed
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.storage.files import write_text
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading
from flower_graph.storage.writing import named

__all__ = ["RegisteredParty", "Registry"]

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
        """Read a registry's file; ``IdentityError`` names it and the fault."""
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
        """Return the registry with a party revoked; its clients may be granted to another."""
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
    result, end = [], 0
    for part in text.split(","):
        first, dash, last = part.partition("-")
        words = (first, last) if dash else (first, first)
        is_number = all(word.isascii() and word.isdigit() and len(word) <= 10 for word in words)
        why = f"clients {text!r:.60}: write numbers and ranges, such as 0-99,200"
        refuse(not is_number, why)
        low, high = map(int, words)
        why = f"clients {text!r:.60}: {part} does not ascend to {MOST_NUMBER}"
        refuse(not end <= low <= high <= MOST_NUMBER, why)
        result.append(range(low, high + 1))
        end = high + 1
    return tuple(result)


def write_numbers(clients: Iterable[range]) -> str:
    """Write client numbers as ``read_numbers`` reads them."""
    return ",".join(
        f"{part.start}-{part.stop - 1}" if len(part) > 1 else f"{part.start}" for part in clients
    )


def signed_bytes(digest: bytes, party: int, purpose: bytes, parts: Sequence[bytes]) -> bytes:
    """Encode signed parts: no other registry, party, purpose or parts give the same bytes."""
    return framed(DOMAIN, digest, party.to_bytes(8, "big"), purpose, *parts)
