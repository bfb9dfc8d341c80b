"""Secure sums with all their clients in one process; parties with keys of their own.

Benchmarks and tests play the same: messages are handed over as they are.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.parties.journal import STATE_BYTES, Journal
from flower_graph.secure.parties.registry import (
    Identity,
    RegisteredParty,
    Registry,
    TrustSettings,
)
from flower_graph.secure.ring import RingArray
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    EpochReply,
    EpochRequest,
    KeyReply,
    RevealReply,
    RevealRequest,
    SumTerms,
)
from flower_graph.secure.sum.server import SumRound
from flower_graph.server.sums import PartySums, SumServer
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Replies

RUN = b"1"  # Flower's number of the run
STAGES = "prepare", "mask", "sign", "unmask"  # of a sum; nobody signs for a trusted server


def make(grants: Sequence[range], folder: Path, corrupt: float, cap: int) -> list[TrustSettings]:
    """Make a party for each grant of clients, with its journal in a folder."""
    keys = [Ed25519PrivateKey.generate() for _ in grants]
    entries = {
        i: RegisteredParty(i, key.public_key().public_bytes_raw(), (grant,))
        for i, (key, grant) in enumerate(zip(keys, grants, strict=True))
    }
    registry = Registry(entries, max(map(len, grants)))
    limits = registry.minimum, corrupt, cap
    return [
        TrustSettings(Identity(key, registry), registry, *limits, Journal(folder / f"{i}", RUN))
        for i, key in enumerate(keys)
    ]


class World:
    """A server, its SuperNodes' halves, and every client's vector."""

    first = 0  # number of the first SuperNode

    # Any: a server of either form
    def __init__(
        self, server: Any, hosts: Mapping[int, SumClient], words: RingArray, terms: SumTerms
    ) -> None:
        self.server, self.hosts, self.words, self.terms = server, dict(hosts), words, terms
        self.rounds: dict[int, SumRound] = {}

    @classmethod
    def trusting(
        cls, hosted: Iterable[Sequence[int]], words: RingArray, terms: SumTerms, **shares: float
    ) -> Self:
        """Make SuperNodes with these clients, which trust the server, and enrol them."""
        server = SumServer(**shares)
        hosts = {cls.first + own[0]: SumClient(server.run_id, own) for own in hosted}
        world = cls(server, hosts, words, terms)
        for node, host in world.hosts.items():
            world.enroll(node, world.send(node, host.keys()))
        return world

    def enroll(self, node: int, reply: KeyReply) -> None:
        """Enrol a SuperNode by its answer, as the server does which asks it."""
        self.server.check_keys(node, reply)
        if why := self.server._enrol(node, reply, reply.clients.tolist()):
            raise MalformedReplyError(why)

    @classmethod
    def distrusting(
        cls,
        grants: Sequence[range],
        folder: Path,
        words: RingArray,
        terms: SumTerms,
        *,
        corrupt: float = 0.1,
        points: int = 0,
    ) -> Self:
        """Make a party for each grant; each of its clients will bring ``points``, if any."""
        trusts = make(grants, folder, corrupt, max(64, points))
        trusts[0].registry.write(folder / "registry.json")
        server, hosts = PartySums(folder / "registry.json", corrupt=corrupt), {}
        for number, (own, trust) in enumerate(zip(grants, trusts, strict=True)):
            brought = dict.fromkeys(own, points) if points else {}
            hosts[cls.first + number] = SumClient(server.run_id, own, trust, brought)
        return cls(server, hosts, words, terms)

    def send(self, node: int, message: Any) -> Any:
        """Hand a message over, to a SuperNode or from it."""
        return message

    def host(self, node: int) -> SumClient:
        """Save a SuperNode's half and load it for the next message."""
        old = self.hosts[node]
        self.hosts[node] = SumClient.from_bytes(old.to_bytes(), old.trust)
        return self.hosts[node]

    def begin(self, lost: Collection[int] = (), most: int | None = None) -> None:
        """Begin an epoch; SuperNodes beyond ``most`` take what the others have checked."""
        server, limit = self.server, self.terms.ring.limit if self.terms.ring else 1.0
        checking = set([*self.hosts][:most])
        for node, host in self.hosts.items():
            server.take_binding(node, self.send(node, host.keys()))

        # Any: messages of two kinds, and what is made of replies
        def ask(_: int, action: str, requests: Any, kind: type, take: Any) -> Replies[Any]:
            replies = Replies[Any]()
            for node, request in requests.items():
                if node in checking:
                    host, told = self.host(node), self.send(node, request)
                    reply = host.reveal(told) if kind is RevealReply else host.begin(told)
                else:
                    reply = self._believed(node, request)
                if node not in lost:
                    replies.values[node] = take(node, self.send(node, reply))
            return replies

        server.agree(0, ask, server.parties, limit)

    def _believed(self, node: int, request: RevealRequest | EpochRequest) -> Message:
        host = self.hosts[node]
        if isinstance(request, RevealRequest):
            seed = np.frombuffer(host._seed, np.uint8)
            return RevealReply(request.run_id, seed)
        host.epoch, host._keys = self.server.epoch, request.channel_keys
        return EpochReply(request.run_id, np.frombuffer(host.epoch.digest, np.uint8))

    def requests(
        self, stage: str, number: int, clients: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Return the server's requests of a stage."""
        if stage == "prepare":
            server = self.server
            asked = server.available if clients is None else clients
            self.rounds[number] = server.open_round(number, asked)
            return dict(self.rounds[number].prepare_requests())
        one, word = self.rounds[number], self.words.dtype.itemsize * 8
        if stage == "mask":
            return dict(one.mask_requests(self.words.shape[1], word, self.terms))
        return dict(one.list_requests() if stage == "sign" else one.unmask_requests())

    def answer(self, stage: str, node: int, request: Any) -> Any:
        """Return a SuperNode's reply to a request, None if it has none."""
        host, request = self.host(node), self.send(node, request)
        if stage == "mask":
            return self.masked(host, request, request.clients.tolist())
        answers = {"prepare": host.prepare, "sign": host.sign_list, "unmask": host.unmask}
        return answers[stage](request)

    def masked(self, host: SumClient, request: Any, present: Sequence[int]) -> Any:
        """Mask the sum of the vectors of some clients."""
        host.receive(request, self.terms.ring)
        state = [os.urandom(STATE_BYTES)]
        return host.mask(request, present, self.total(present), self.terms, state)

    def total(self, present: Sequence[int]) -> RingArray:
        """Return the sum of the vectors of some clients."""
        return self.words[np.asarray(present)].sum(0, dtype=self.words.dtype)
