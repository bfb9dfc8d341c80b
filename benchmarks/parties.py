"""Parties with keys of their own, as node configs would make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from flower_graph.secure.parties.identity import MOST_BEGUN, Identity, TrustSettings
from flower_graph.secure.parties.registry import RegisteredParty, Registry

RUN = b"1"  # Flower's number of the run


def registered(grants: Sequence[range]) -> tuple[list[Ed25519PrivateKey], Registry]:
    """Make a key for each grant of clients, and the registry of all keys."""
    keys = [Ed25519PrivateKey.generate() for _ in grants]
    entries = {
        i: RegisteredParty(i, key.public_key().public_bytes_raw(), (grant,))
        for i, (key, grant) in enumerate(zip(keys, grants, strict=True))
    }
    return keys, Registry(entries, max(map(len, grants)))


def make(grants: Sequence[range], folder: Path, corrupt: float, cap: int) -> list[TrustSettings]:
    """Make a party for each grant of clients, with its journal in a folder."""
    keys, registry = registered(grants)
    return [
        TrustSettings(
            Identity(key, registry),
            registry,
            registry.minimum,
            corrupt,
            cap,
            folder / f"{i}",
            MOST_BEGUN,
            RUN,
        )
        for i, key in enumerate(keys)
    ]
