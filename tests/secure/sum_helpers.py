"""Sums between hosts and a server, trusted or not; a test loses messages, or lies on the way."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks import parties
from flower_graph.secure.parties.journal import STATE_BYTES
from flower_graph.secure.parties.registry import Registry, TrustSettings, new_identity
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import MaskedReply, MaskRequest, SumTerms
from flower_graph.secure.sum.server import Skipped
from flower_graph.server.sums import PartySums

LENGTH = 6
RING = Ring.fit(10_000, 64, 2.0**-16)
TERMS = SumTerms("test", RING)


def wire(message: Any) -> Any:
    """Send a message through its config entries."""
    total = {"total": message.total} if isinstance(message, MaskedReply) else {}
    return type(message).from_config(message.to_config(), **total)


def mask(host: SumClient, request: MaskRequest, *given: Any) -> MaskedReply:
    """Have a host receive a request and mask a sum: clients, words, terms."""
    host.receive(request, RING)
    return host.mask(request, *given)


class World(parties.World):
    """Messages that travel, and vectors of numbers up to 60.

    ``tamper`` changes a message on its way; for hostile parties.
    """

    first = 1000
    tamper: Callable[[int, Any], Any] = staticmethod(lambda node, message: message)

    @classmethod
    def make(cls, m: int, per_host: int = 1, *, ring: Ring = RING, **shares: float) -> Self:
        """Make hosts of ``per_host`` clients; the last may have fewer."""
        hosted = [range(start, min(m, start + per_host)) for start in range(0, m, per_host)]
        values = np.random.default_rng(m).uniform(-60, 60, (m, LENGTH))
        return cls.trusting(hosted, ring.encode(values), TERMS, **shares)

    def send(self, node: int, message: Any) -> Any:
        return wire(self.tamper(node, message))

    def forget(self, node: int) -> None:
        if node in self.server.clients:
            self.server.forget(node)

    def mask_reply(
        self, node: int, request: MaskRequest, without=(), terms: SumTerms | None = None
    ) -> MaskedReply | None:
        present = [client for client in request.clients.tolist() if client not in without]
        if not present:
            return None
        sent = self.send(node, request)
        return mask(self.host(node), sent, present, self.total(present), terms or TERMS)

    def play(
        self, stage: str, number: int, lost: Collection[int] = (), clients=None, without=()
    ) -> None:
        """Play a stage; the replies of those in ``lost`` are lost."""
        is_mask = stage == "mask"
        for node, request in self.requests(stage, number, clients).items():
            reply = (
                self.mask_reply(node, request, without)
                if is_mask
                else self.answer(stage, node, request)
            )
            if reply is not None and node not in lost:
                self.rounds[number].take(node, self.send(node, reply))

    prepare, mask = partialmethod(play, "prepare"), partialmethod(play, "mask")
    sign, unmask = partialmethod(play, "sign"), partialmethod(play, "unmask")

    def round(self, number: int, clients=None, without=(), **lost: Collection[int]) -> Any:
        """Run a whole round and return its result; ``lost``: whose reply to a stage is lost."""
        for stage in parties.STAGES:
            self.play(stage, number, lost.get(stage, ()), clients, without)
        return self.rounds[number].result()

    def check(self, result, contributors) -> None:
        assert result.contributors.tolist() == sorted(contributors)
        assert (result.total == self.total(result.contributors)).all()


def settings(n: int, folder: Path, corrupt: float = 0.1) -> list[TrustSettings]:
    """Make keys, a registry of them, and what each party's node config would say."""
    return parties.make([range(2 * i, 2 * i + 2) for i in range(n)], folder, corrupt, 64)


def in_journal(trust: TrustSettings, **changes: Any) -> TrustSettings:
    """Change a party's journal: the run, how often it begins anew, or its file."""
    return replace(trust, journal=replace(trust.journal, **changes))


def keys_in(folder: Path, count: int) -> list[dict[str, str]]:
    """Say in each SuperNode's config which key and registry of a folder are its own."""
    registry = str(folder / "registry.json")
    keys = [str(folder / f"party-{i}") for i in range(count)]
    return [{"identity-key": key, "registry": registry} for key in keys]


def write_keys(
    count: int, folder: Path, each: int = 2, clients: Sequence[Sequence[int]] = ()
) -> list[dict[str, str]]:
    """Write parties' keys and a registry as files; give the node configs that name them.

    Parties have some clients each, in turn, or those that are named.
    """
    registry, configs = Registry({}, each), keys_in(folder, count)
    for i, config in enumerate(configs):
        own = [range(one, one + 1) for one in clients[i]] if clients else []
        key = new_identity(Path(config["identity-key"]))
        registry = registry.with_party(key, own or [range(each * i, each * (i + 1))])
    registry.write(folder / "registry.json")
    return configs


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
            trust = in_journal(party.trust, run=run)
            self.hosts[node] = SumClient(self.server.run_id, party.clients, trust)
        self.begin()

    def mask_reply(self, node: int, request: Any, without: Any = ()) -> Any:
        party, state = self.host(node), self.states.get(node) or os.urandom(STATE_BYTES)
        return mask(
            party, self.send(node, request), party.clients, self.words[node - 1000], TERMS, [state]
        )

    def round(self, number: int, *given: Any, **lost: Collection[int]) -> Any:
        result = super().round(number, *given, **lost)
        if isinstance(result, Skipped):
            return result
        return replace(result, contributors=np.unique(result.contributors // 2))  # parties
