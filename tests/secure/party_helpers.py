"""Parties with keys of their own, a server, and a way for a test to lie on the way between."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from sum_helpers import LENGTH, RING, TERMS, World

from benchmarks import parties
from flower_graph.secure.parties.identity import TrustSettings, new_identity
from flower_graph.secure.parties.journal import STATE_BYTES
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import PartySums

RUN = bytes(16)


def settings(n: int, folder: Path, corrupt: float = 0.1) -> list[TrustSettings]:
    """Make keys, a registry of them, and what each party's node config would say."""
    return parties.make([range(2 * i, 2 * i + 2) for i in range(n)], folder, corrupt, 64)


def write_keys(n: int, folder: Path) -> tuple[Path, list[Path]]:
    """Write keys and a registry as files."""
    registry, keys = Registry({}, 2), [folder / f"key-{i}" for i in range(n)]
    for i, path in enumerate(keys):
        registry = registry.with_party(new_identity(path), [range(2 * i, 2 * i + 2)])
    registry.write(folder / "registry.json")
    return folder / "registry.json", keys


class PartyWorld(World):
    """A server and its parties; SuperNode 1000 + i is party i, whose clients have one vector."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # What vectors are said to be made of, by SuperNode; by default something else each time
        self.states: dict[int, bytes] = {}

    @classmethod
    def make(cls, n: int, folder: Path, corrupt: float = 0.1, points: int = 0) -> Self:
        # points: that each client will bring to an alignment
        words = RING.encode(np.random.default_rng(n).uniform(-60, 60, (n, LENGTH)))
        grants = [range(2 * i, 2 * i + 2) for i in range(n)]
        return cls.distrusting(grants, folder, words, TERMS, corrupt=corrupt, points=points)

    def put_back(self, states: dict[int, bytes]) -> None:
        for node, state in states.items():
            self.hosts[node] = SumClient.from_bytes(state, self.hosts[node].trust)

    def begin_run(self, run: bytes) -> None:
        """Bring the same SuperNodes to another run of Flower's, with nothing that they kept."""
        self.server = PartySums(self.server._registry_file)
        for node, party in self.hosts.items():
            trust = replace(party.trust, run=run)
            self.hosts[node] = SumClient(self.server.run_id, party.clients, trust)
        self.begin()

    def mask_reply(self, node: int, request: Any, without: Any = ()) -> Any:
        party, state = self.host(node), self.states.get(node) or os.urandom(STATE_BYTES)
        came = party.receive(self.send(node, request), RING)
        return party.mask(came, party.clients, self.words[node - 1000], TERMS, [state])

    def round(self, number: int, *given: Any, **lost: Collection[int]) -> Any:
        result = super().round(number, *given, **lost)
        if isinstance(result, Skipped):
            return result
        return replace(result, contributors=np.unique(result.contributors // 2))  # parties
