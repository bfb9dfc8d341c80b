"""Parties with keys of their own, a server, and a way for a test to lie on the way between."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sum_helpers import LENGTH, RING, TERMS, wire

from flower_graph.secure.parties.differences import STATE_BYTES
from flower_graph.secure.parties.identity import Identity, TrustSettings, new_identity
from flower_graph.secure.parties.registry import RegisteredParty, Registry
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.round import Skipped

RUN = bytes(16)


def settings(n: int, folder: Path, corrupt: float = 0.1) -> list[TrustSettings]:
    """Make keys, a registry of them, and what each party's node config would say."""
    keys = [Ed25519PrivateKey.generate() for _ in range(n)]
    entries = {
        i: RegisteredParty(i, key.public_key().public_bytes_raw(), (range(2 * i, 2 * i + 2),))
        for i, key in enumerate(keys)
    }
    registry = Registry(entries, 2)
    minimum = max(5, n - 3 * n // 10)
    return [
        TrustSettings(
            Identity(key, registry), registry, minimum, corrupt, 64, folder / f"{i}", 24, b"1"
        )
        for i, key in enumerate(keys)
    ]


def write_keys(n: int, folder: Path) -> tuple[Path, list[Path]]:
    """Write keys and a registry as files."""
    registry, keys = Registry({}, 2), [folder / f"key-{i}" for i in range(n)]
    for i, path in enumerate(keys):
        registry = registry.with_party(new_identity(path), [range(2 * i, 2 * i + 2)])
    registry.write(folder / "registry.json")
    return folder / "registry.json", keys


@dataclass
class PartyWorld:
    """A server and its parties; SuperNode 1000 + i is party i."""

    server: PartySums
    parties: dict[int, SumClient]
    words: np.ndarray
    tamper: Callable[[int, Any], Any] = field(default=lambda node, message: message)
    refused: list[str] = field(default_factory=list)
    # What vectors are said to be made of, by SuperNode; by default something else each time
    states: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, n: int, folder: Path, corrupt: float = 0.1, points: int = 0) -> PartyWorld:
        # points: that each client will bring to an alignment
        trusts = settings(n, folder, corrupt)
        trusts[0].registry.write(folder / "registry.json")
        server = PartySums(folder / "registry.json", corrupt=corrupt)
        parties = {
            1000 + i: SumClient(
                server.run_id, own, trust, dict.fromkeys(own, points) if points else {}
            )
            for i, trust in enumerate(trusts)
            for own in [[2 * i, 2 * i + 1]]
        }
        values = np.random.default_rng(n).uniform(-60, 60, (n, LENGTH))
        return cls(server, parties, RING.encode(values))

    def send(self, node: int, message: Any) -> Any:
        return wire(self.tamper(node, message))

    def restart(self, node: int) -> SumClient:
        old = self.parties[node]
        self.parties[node] = SumClient.from_bytes(old.to_bytes(), old.trust)
        return self.parties[node]

    def put_back(self, states: dict[int, bytes]) -> None:
        for node, state in states.items():
            self.parties[node] = SumClient.from_bytes(state, self.parties[node].trust)

    def begin_run(self, run: bytes) -> None:
        """Bring the same SuperNodes to another run of Flower's, with nothing that they kept."""
        self.server = PartySums(self.server._registry_file)
        for node, party in self.parties.items():
            trust = replace(party.trust, run=run)
            self.parties[node] = SumClient(self.server.run_id, party.clients, trust)
        self.begin()

    def begin(self, lost: Collection[int] = ()) -> None:
        server = self.server
        for node, party in self.parties.items():
            server.take_binding(node, wire(party.bind()))
        for node, request in server.reveal_requests(RING.limit).items():
            reply = self.restart(node).reveal(self.send(node, request))
            if node not in lost:
                server.take_seed(node, wire(reply))
        for node, request in server.epoch_requests().items():
            server.take_epoch(node, wire(self.restart(node).begin(self.send(node, request))))

    def prepare(self, number: int, lost: Collection[int] = ()) -> None:
        for node, request in self.server.open_round(number, self.server.clients).items():
            if node not in lost:
                reply = self.restart(node).prepare(self.send(node, request))
                self.server.take(node, wire(reply))

    def mask(self, number: int, lost: Collection[int] = ()) -> None:
        for node, request in self.server.mask_requests(number, LENGTH, 64, TERMS).items():
            total = self.words[node - 1000]
            state = self.states.get(node) or os.urandom(STATE_BYTES)
            party = self.restart(node)
            came = party.receive(self.send(node, request), TERMS.ring)
            reply = party.mask(came, party.clients, total, TERMS, [state])
            if node not in lost:
                self.server.take(node, wire(reply))

    def sign(self, number: int, lost: Collection[int] = ()) -> None:
        for node, request in self.server.list_requests(number).items():
            if node not in lost:
                reply = self.restart(node).sign_list(self.send(node, request))
                self.server.take_list(node, wire(reply))

    def unmask(self, number: int, lost: Collection[int] = ()) -> None:
        for node, request in self.server.unmask_requests(number).items():
            if node not in lost:
                reply = self.restart(node).unmask(self.send(node, request))
                self.server.take(node, wire(reply))

    def round(self, number: int, **lost: Collection[int]):
        for stage in ("prepare", "mask", "sign", "unmask"):
            getattr(self, stage)(number, lost.get(stage, ()))
        result = self.server.result(number)
        if isinstance(result, Skipped):
            return result
        return replace(result, contributors=np.unique(result.contributors // 2))  # parties

    def check(self, result, contributors) -> None:
        assert result.contributors.tolist() == sorted(contributors)
        expected = self.words[result.contributors].sum(0, dtype=self.words.dtype)
        assert (result.total == expected).all()
