"""Both halves' transport over Flower of sums under a server that may lie.

A sum takes three exchanges, masked vectors, the signed list and shares; the last also prepares the
next sum. An epoch begins, with three more, when SuperNodes have joined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flower_graph.errors import IdentityError, MalformedReplyError, one_line
from flower_graph.secure.align.limits import MOST_BLOCK, MOST_POINTS
from flower_graph.secure.parties.epoch import MOST_LISTS, Epoch
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import (
    BindReply,
    BindRequest,
    EpochReply,
    EpochRequest,
    ListReply,
    ListRequest,
    Ready,
    RevealReply,
    RevealRequest,
    Signatures,
    SignedKey,
)
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.parties.server import PartyServer
from flower_graph.secure.parties.trust import USUAL_DIFFERENCE
from flower_graph.secure.sum.messages import (
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.results import Cause, Reason, Skipped, SumResult
from flower_graph.secure.sum.round import StageReply
from flower_graph.secure.sum.server import M, Send, SumServer
from flower_graph.secure.sum.terms import SumTerms
from flower_graph.wire.codec import Message
from flower_graph.wire.ledger import setup_bytes
from flower_graph.wire.numpy_client import Config

LOG = logging.getLogger(__name__)
TRIES = 3  # lists of commitments, while parties show no seed


class PartySums(SumServer):
    """Carries out sums over parties, SuperNodes with registered keys; callers see only clients.

    `begin` begins an epoch once all that joined have enrolled; `sign` comes between masked vectors
    and shares.

    Parameters
    ----------
    registry : Path or str
        The registry's file, which is read again before each sum.
    dropout, corrupt : float
        Shares of the parties that may vanish during a sum, and that may collude with the server.
    block_cap : int
        Most points that a client may declare for an alignment, where the caller has one.
    most_points : int
        Most points that the clients of one SuperNode may declare together.
    differ_by : int
        SuperNodes that two sums of a purpose differ by at least, unless they have the same; the
        server leaves out more to comply. No party takes less than its own ``differ-by``.

    Raises
    ------
    IdentityError
        If the registry cannot be read.
    ValueError
        If a share is impossible, or the registry has too few parties for a sum.
    """

    # What a SuperNode is asked, and answers, when it enrols; and with what keys of a round come
    enrolment = ("sum_bind", BindRequest, BindReply)
    prepared = (PrepareReply, SignedKey)

    def __init__(
        self,
        registry: Path | str,
        *,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        block_cap: int = MOST_BLOCK,
        most_points: int = MOST_POINTS,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        super().__init__(dropout=dropout, corrupt=corrupt)
        self._registry_file = registry
        self._protocol = PartyServer(
            Registry.read(registry),
            dropout=dropout,
            corrupt=corrupt,
            block_cap=block_cap,
            most_points=most_points,
            differ_by=differ_by,
        )
        self.run_id = self._protocol.run_id  # bindings name it
        self._unbound: set[int] = set()  # SuperNodes that are to bind under another registry
        self._fresh: set[int] = set()  # parties that have bound themselves for the next epoch
        self._told = 0  # how many of the parties' are among them
        # Rounds, each with its clients, and the parties left out of it
        self._open: dict[int, tuple[set[int], dict[int, str]]] = {}

    @property
    def fewest_nodes(self) -> int:
        return self._protocol.minimum

    @property
    def registry(self) -> Registry:
        """The registry in the version that counts now."""
        return self._protocol.registry

    @property
    def epoch(self) -> Epoch | None:
        """The parties' agreement; None before the first epoch, or under a new registry."""
        return self._protocol.epoch

    @property
    def members(self) -> list[int]:
        """Parties of the epoch, absent ones too, ascending; none before there is one."""
        return [] if self.epoch is None else self.epoch.parties.tolist()

    @property
    def blamed(self) -> list[Reason]:
        """Clients at fault, their own or with their party, and why."""
        told, self._told = self._told, len(self._protocol.blamed)
        for reason in self._protocol.blamed[told:]:
            assert reason.client is not None  # a party here
            text = f"{reason.text} (party {reason.client})"
            clients = self._protocol.clients_of([reason.client])
            self._blamed += [replace(reason, client=client, text=text) for client in clients]
        return self._blamed

    @property
    def excluded(self) -> set[int]:
        return set(
            self._protocol.clients_of(self._protocol.excluded & self._protocol.bindings.keys())
        )

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude the parties of clients whose fault was proven before the run was resumed."""
        parties = self._protocol.registry.parties.values()
        self._protocol.exclude(p.number for c in clients for p in parties if p.may_host([c]))

    @property
    def out(self) -> set[int]:
        return set(self._protocol.clients_of(self._protocol.bindings.keys() - self._taking_part))

    @property
    def clients(self) -> list[int]:
        """Numbers of all clients that may be in the next sum, ascending."""
        return self._protocol.clients_of(self._taking_part & self._protocol.homes.keys())

    @property
    def homes(self) -> dict[int, int]:
        homes = self._protocol.homes.items()
        return {client: node for party, node in homes for client in self.hosted([party])}

    def node_of(self, client: int) -> int | None:
        return self.homes.get(client)

    @property
    def _taking_part(self) -> set[int]:
        return set(self.members) - self._protocol.excluded

    # Who is there

    def check_keys(self, node: int, reply: BindReply) -> None:
        """Refuse a statement that its party has not signed, or may not sign."""
        self._protocol.check_binding(reply)

    def knows(self, old: int, reply: BindReply) -> bool:
        """Tell whether a SuperNode's party is in the epoch with exactly these clients and key."""
        return self._protocol.homes.get(reply.party) == old and self._is_in(reply)

    def move(self, old: int, node: int) -> None:
        """Register a SuperNode under another id: it was restarted and has kept its keys."""
        self._protocol.move(old, node)

    def enroll(self, node: int, reply: BindReply, gone: Collection[int] = ()) -> None:
        self.check_keys(node, reply)
        if (home := self._protocol.homes.get(reply.party, node)) != node and home not in gone:
            raise MalformedReplyError(f"party {reply.party} is at node {home} already")
        if self._is_in(reply):
            self._protocol.settle(node, reply.party)
        elif self._protocol.lists >= MOST_LISTS:
            raise MalformedReplyError(
                f"parties answer {MOST_LISTS} lists of commitments a run: nobody can join any more"
            )
        else:
            self._protocol.take_binding(node, reply)
            self._fresh.add(reply.party)

    def forget(self, node: int) -> None:
        """Remove a SuperNode; its party counts as absent until it is back."""
        self._fresh -= {party for party, at in self._protocol.homes.items() if at == node}
        self._protocol.forget(node)

    def _is_in(self, reply: BindReply) -> bool:
        if reply.party not in self._taking_part:
            return False
        binding = self._protocol.bindings[reply.party][0]
        shown = tuple(reply.clients.tolist()), reply.channel_key.tobytes()
        return (binding.clients, binding.channel_key) == shown

    def renew(self) -> None:
        """Read the registry again; under another version all must bind anew, and begin an epoch."""
        try:
            registry = Registry.read(self._registry_file)
        except IdentityError as error:
            LOG.error("%s: the version before goes on", error)
            return
        if registry.digest != self._protocol.registry.digest:
            self._unbound = set(self._protocol.homes.values())
            self._protocol.renew(registry)
            self._fresh.clear()
            self._open.clear()

    def begin(self, server_round: int, send: Send, nodes: Collection[int], limit: float) -> bool:
        """Begin an epoch if a party has joined; return whether one has begun."""
        server = self._protocol
        self._fresh |= self._bind(server_round, send, self._unbound.intersection(nodes))
        self._unbound.clear()
        present = {party for party in server.parties if server.homes[party] in nodes}
        if present <= self._taking_part - self._fresh:
            return False
        for _ in range(TRIES):
            if server.lists >= MOST_LISTS:
                return False
            old = {server.homes[party] for party in present - self._fresh}
            present &= self._bind(server_round, send, old) | self._fresh
            if not (lists := server.reveal_requests(limit, present)):
                return False
            self._fresh -= present  # whatever comes of it, these seeds are shown
            self._exchange(send, server_round, "sum_reveal", lists, RevealReply, server.take_seed)
            if epochs := server.epoch_requests():
                take = server.take_epoch
                self._exchange(send, server_round, "sum_epoch", epochs, EpochReply, take)
                self._open.clear()
                return True
            present &= server.homes.keys()
        return False

    def _bind(self, server_round: int, send: Send, nodes: Collection[int]) -> set[int]:
        """Have the parties of some SuperNodes commit to another seed; return those that did."""
        if not nodes:
            return set()
        replies = send(
            dict.fromkeys(sorted(nodes), BindRequest(self.run_id).to_record()),
            server_round,
            lambda node, content: self._protocol.take_binding(node, BindReply.read(content)),
            message_type="train.sum_bind",
            max_reply_bytes=setup_bytes(),
        )
        for entry in replies.rejected:  # with a version of the registry that is old, for one
            self.forget(entry.node_id)
        return {party for party, node in self._protocol.homes.items() if node in replies.values}

    def epoch_clients(self) -> dict[int, list[int]]:
        return {party: self.hosted([party]) for party in sorted(self._taking_part)}

    def node_of_party(self, party: int) -> int | None:
        return self._protocol.homes.get(party)

    # A round, as ``SumServer`` has it

    def open_round(self, number: int, clients: Iterable[int]) -> dict[int, PrepareRequest]:
        if self.epoch is None:
            return {}
        asked = set(clients)
        parties = {
            party for party in self._taking_part if not asked.isdisjoint(self.hosted([party]))
        }
        self._open = {old: one for old, one in self._open.items() if old == number - 1}
        self._open[number] = asked, {}
        return self._protocol.open_round(number, parties)

    def mask_requests(
        self, number: int, length: int, word: int, terms: SumTerms
    ) -> dict[int, tuple[MaskRequest, Ready]]:
        if number not in self._open:
            return {}
        return self._protocol.mask_requests(number, length, word, terms)

    def hosted(self, parties: Iterable[int]) -> list[int]:
        return self._protocol.clients_of(list(parties))

    def take(self, node: int, reply: StageReply, *more: Message) -> None:
        if isinstance(reply, PrepareReply):
            (key,) = more
            assert isinstance(key, SignedKey)  # as ``prepared`` says
            self._protocol.take_prepared(node, reply, key)
        elif isinstance(reply, UnmaskReply):
            self._protocol.take_shares(node, reply)
        else:
            self._protocol.take_masked(node, replace(reply, left_out={}))
            number = reply.server_round
            asked, left_out = self._open[number]
            local = asked.intersection(self.hosted(reply.clients.tolist()))
            out = {c: why for c, why in reply.left_out.items() if c in local}
            left_out |= out
            self._blamed += [
                Reason(Cause.LEFT_OUT, one_line(why), client, number) for client, why in out.items()
            ]

    def sign(self, number: int, server_round: int, send: Send) -> None:
        lists = self._protocol.list_requests(number) if number in self._open else {}
        self._exchange(send, server_round, "sum_list", lists, ListReply, self._protocol.take_list)

    def unmask_requests(self, number: int) -> dict[int, tuple[UnmaskRequest, Signatures]]:
        return self._protocol.unmask_requests(number) if number in self._open else {}

    def result(self, number: int) -> SumResult | Skipped:
        """End a round; contributors are numbers of clients."""
        if number not in self._open:
            few = f"{len(self._protocol.parties)} parties, a sum needs {self._protocol.minimum}"
            return Skipped(Reason(Cause.SKIPPED, few, round=number))
        result, (asked, out) = self._protocol.result(number), self._open.pop(number)
        if isinstance(result, Skipped):
            return result
        local = asked.intersection(self.hosted(result.contributors.tolist())) - out.keys()
        return SumResult(result.total, np.array(sorted(local), np.int64))

    def _exchange(
        self,
        send: Send,
        server_round: int,
        action: str,
        requests: Mapping[int, Message],
        kind: type[M],
        take: Callable[[int, M], object],
    ) -> None:
        if requests:
            send(
                {node: request.to_record() for node, request in requests.items()},
                server_round,
                lambda node, content: take(node, kind.read(content)),
                message_type=f"train.{action}",
                max_reply_bytes=setup_bytes(),
            )


# The client's half, by entries


def bound(kept: object, run_id: bytes, clients: Sequence[int], trust: TrustSettings) -> PartyClient:
    """Return the kept party if it is of this run and these clients, else a new one."""
    wanted = run_id, sorted(clients), dict[int, int]()
    if isinstance(kept, PartyClient) and (kept.run_id, kept.clients, kept.points) == wanted:
        return kept
    return PartyClient(run_id, clients, trust)


def answer(party: PartyClient, action: str, config: Config) -> Config:
    """Answer an exchange in which no vector travels."""
    if action == "sum_bind":
        return party.bind().to_config()
    if action == "sum_reveal":
        return party.reveal(RevealRequest.from_config(config)).to_config()
    if action == "sum_epoch":
        return party.begin(EpochRequest.from_config(config)).to_config()
    if action == "sum_list":
        return party.sign_list(ListRequest.from_config(config)).to_config()
    entries: Config = {}
    if "unmask-run" in config:
        signed = Signatures.from_config(config)
        entries |= party.unmask(UnmaskRequest.from_config(config), signed).to_config()
    if "prepare-run" in config:
        reply, key = party.prepare(PrepareRequest.from_config(config))
        entries |= reply.to_config() | key.to_config()
    return entries
