"""Sums of Flower clients' vectors; the server cannot read a single vector.

``SecureSum`` is the server's half, ``SecureSumClient`` the clients'; ``docs/secure-sum.md`` has an
example. A sum takes two exchanges: masked vectors, then shares, and the second also prepares the
next sum. ``SumServer`` and ``PartySums`` know who takes part, under a server that is trusted or
not; ``secure/sum/server.py`` has a round. All numbers here are of clients, whichever SuperNode
takes part for them.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import (
    IdentityError,
    MalformedReplyError,
    UnreadableSumError,
    refuse_if,
)
from flower_graph.secure.channel import is_low_order, rows_of
from flower_graph.secure.node_config import DIFFER_BY, MOST_BLOCK, MOST_POINTS, USUAL_DIFFERENCE
from flower_graph.secure.parties.epoch import Epoch, commit, plan_of
from flower_graph.secure.parties.journal import MOST_LISTS
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    SECURE_SUM,
    EpochReply,
    EpochRequest,
    KeyReply,
    KeyRequest,
    ListReply,
    MaskedReply,
    PrepareReply,
    RevealReply,
    RevealRequest,
    SumMessage,
    SumTerms,
    UnmaskReply,
    digest_of_told,
    sum_bytes,
)
from flower_graph.secure.sum.partners import check_shares, partners, plan
from flower_graph.secure.sum.server import Cause, Circle, Reason, Skipped, SumRound
from flower_graph.server.membership import Membership
from flower_graph.wire.arrays import Scalar, read_array
from flower_graph.wire.client_errors import Kind
from flower_graph.wire.codec import RUN_BYTES, Integers, Message, Resume, as_record
from flower_graph.wire.exchange import Exchange, Rejected, Replies
from flower_graph.wire.keys import ARRAYS, MASKED_SUM
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Message)
# As ``Session.send``. Any: what is read of a reply
Send = Callable[..., Replies[Any]]


@dataclass(frozen=True)
class Summed:
    """A sum."""

    # [L] float64, the sum of the contributors' vectors, each rounded to the resolution
    values: NDArray[np.float64]
    contributors: NDArray[np.int64]  # Numbers of the clients in it


@dataclass
class Opened:
    """The result of a sum: its words, or why there are none, and the clients left out."""

    number: int  # of the sum
    # Any: words of a ring; of a sum in the clear, numbers
    total: NDArray[Any] | None = None  # [L]
    contributors: list[int] = field(default_factory=list)  # clients in it
    skipped: str = ""
    failed: dict[int, str] = field(default_factory=dict)  # clients at fault, or left out
    silent: list[Rejected] = field(default_factory=list)  # SuperNodes without a usable answer
    others: list[str] = field(default_factory=list)  # faults of unknown clients

    @property
    def rejected(self) -> list[dict[str, object]]:
        """The entries of a report about all these."""
        result: list[dict[str, object]] = [{"reason": why} for why in self.others]
        result += [{"node": one.node_id, "reason": one.reason} for one in self.silent]
        return [*result, *({"client": c, "reason": why} for c, why in self.failed.items())]


@dataclass(kw_only=True)
class Added(Opened):
    """The outcome of `SecureSum.add`."""

    ring: Ring  # how the words are written
    run_id: bytes  # of the sum, or of its epoch
    asked: dict[int, list[int]]  # the clients of each SuperNode that was asked for vectors
    # Any: what the caller read of the replies with vectors. SuperNodes without a usable reply are
    # listed here, and not in ``silent``
    replies: Replies[Any]

    def numbers(self) -> NDArray[np.float64] | None:
        """Return the sum's numbers; None if there are none, and ``skipped`` says why."""
        if self.total is None:
            return None
        try:
            values = self.ring.decode(self.total)
            self.ring.check_sums(values, len(self.contributors))
        except UnreadableSumError as error:  # nobody can say whose words were wrong
            self.skipped = f"a client's part of the sum was not as agreed: {error}"
            return None
        return values


# Sends messages of an action in a round, and has each reply taken: ``SecureSum.tell``. Any: what is
# made of replies
Tell = Callable[
    [int, str, Mapping[int, SumMessage], type[Any], Callable[[int, Any], object]], Replies[Any]
]
MOST_BEGINNINGS = 8  # times that a client enrols with keys of its own in a run
MOST_CHEATS = 3  # SuperNodes that are proven to cheat before nobody new is taken any more
ALONE = 0, 0, 0  # the plan of a SuperNode whose clients are all in the sum
NOBODY: Integers = np.zeros(0, np.int64)


class SumServer(Membership):
    """Carries out secure sums over clients that SuperNodes host, and enrols the SuperNodes.

    Parameters
    ----------
    dropout : float
        Share of the clients, and of the SuperNodes, that may vanish during a sum.
    corrupt : float
        Share of them that may tell the server all they hold.
    """

    # A round is a `SumRound` that `open_round` returns. Two may be open at once, so the next can be
    # prepared while this one is unmasked.

    needs_query, message_type = True, "train.sum_enroll"
    registry: Registry | None = None  # of SuperNodes that sign what they enrol with

    def __init__(self, *, dropout: float = 0.3, corrupt: float = 0.1) -> None:
        check_shares(dropout, corrupt)
        super().__init__()
        self.dropout, self.corrupt = dropout, corrupt
        self.run_id = os.urandom(RUN_BYTES)
        # The clients of each SuperNode, if the caller has enrolled them: it may bring no others
        self.permitted: Mapping[int, Iterable[int]] | None = None
        # The last enrolment of each party, also of parties that have gone
        self.bindings: dict[int, KeyReply] = {}
        self.nodes: dict[int, int] = {}  # SuperNode that is enrolled: party
        self.blamed: list[Reason] = []  # clients at fault and what they did, oldest first
        self._told = 0  # of these that `take_blamed` has returned
        self._excluded: set[int] = set()
        self._barred: set[int] = set()  # SuperNodes that were proven to cheat
        self._cheats = 0  # how many
        self._beginnings = Counter[int]()  # of each client, with new keys
        self.rounds: list[SumRound] = []  # that may be open
        self.earlier: dict[str, list[int]] = {}  # parties in the epochs' sums, by purpose

    @property
    def fewest_nodes(self) -> int:
        """How many SuperNodes a sum needs."""
        return 1

    @property
    def excluded(self) -> set[int]:
        """Clients that are in no sum any more: all of SuperNodes that stopped a sum by a fault."""
        return self._excluded

    @property
    def out(self) -> set[int]:
        """Clients that are not in the next sum, though they are enrolled."""
        return self.excluded

    @property
    def available(self) -> list[int]:
        """Clients of enrolled SuperNodes that may be in the next sum, ascending."""
        return sorted(set(chain.from_iterable(self.clients.values())) - self.out)

    def exclude(self, clients: Iterable[int]) -> None:
        """Exclude clients whose fault was proven before the run was resumed."""
        self._excluded |= set(clients)

    # What `PartySums` does beside: who may enrol, and with whom sums are made

    def renew(self) -> None:
        """Read the permitted clients again; here every client that enrols is permitted."""

    def begin(self, server_round: int, tell: Tell, nodes: Collection[int], limit: float) -> bool:
        """Have clients agree on the members; return whether they began anew, here never."""
        # limit: largest size of a number, which they agree on, too
        return False

    # Who is there

    def question(self, resume: Resume) -> RecordDict:
        return KeyRequest(self.run_id).to_record()

    def read(self, node: int, content: RecordDict) -> KeyReply:
        reply = KeyReply.read(content, run_id=self.run_id)
        expected = reply.clients if self.permitted is None else list(self.permitted[node])
        if (strange := np.setdiff1d(reply.clients, expected)).size:
            raise MalformedReplyError(f"client {strange[0]} is not one that it enrolled with")
        self.check_keys(node, reply)
        reply.clients = np.sort(reply.clients)
        return reply

    def check_keys(self, node: int, reply: KeyReply) -> None:
        """Refuse keys of another run, keys of low order, and clients that may not begin anew."""
        clients = reply.clients.tolist()
        refuse = partial(refuse_if, error=MalformedReplyError)
        refuse(reply.party is not None, "it signs for a party, and there are none in this sum")
        low = is_low_order(reply.channel_key.tobytes())
        refuse(low, f"the channel key of client {clients[0]} is of low order")
        if self.knows(self.bound.get(clients[0], -1), reply):
            return  # it goes on
        times = [self._beginnings[client] for client in clients]
        # A SuperNode that cheated before the run was resumed may enrol once; it is in no sum.
        has_cheated = node in self._barred or (any(times) and self.excluded.issuperset(clients))
        why = f"client {clients[0]} is of a SuperNode that has cheated: it does not begin anew"
        refuse(has_cheated, why)
        is_late = not all(times) and self._cheats >= MOST_CHEATS
        refuse(is_late, f"it is new, and {self._cheats} SuperNodes have cheated")
        refuse(max(times) >= MOST_BEGINNINGS, f"client {clients[0]} has begun anew too often")

    def knows(self, old: int, reply: KeyReply) -> bool:
        """Tell whether a SuperNode enrolled with exactly these clients and this key."""
        return self.nodes.get(old) == reply.number and self._is_same(reply)

    def _is_same(self, reply: KeyReply) -> bool:
        before = self.bindings[reply.number]
        both = (before.clients, reply.clients), (before.channel_key, reply.channel_key)
        return all(np.array_equal(*pair) for pair in both)

    def node_of_party(self, party: int) -> int | None:
        node = self.bound[int(self.bindings[party].clients[0])] if party in self.bindings else -1
        return node if self.nodes.get(node) == party else None

    def is_back(self, olds: Collection[int], answer: KeyReply) -> bool:
        return len(olds) == 1 and all(self.knows(old, answer) for old in olds)

    def replaced(self, old: int, node: int, answer: KeyReply) -> None:
        """Rename a SuperNode that is back with its keys; forget one without."""
        if self.knows(old, answer):
            self.move(old, node)
        else:
            self.forget(old)

    def enrolled(self, node: int, answer: KeyReply) -> None:
        if node not in self.nodes:  # otherwise it has been renamed
            self.bindings[answer.number], self.nodes[node] = answer, answer.number
            self._beginnings.update(answer.clients.tolist())

    def move(self, old: int, node: int) -> None:
        super().move(old, node)
        self.nodes[node] = self.nodes.pop(old)
        self._barred |= {node} if old in self._barred else set()

    def forget(self, node: int) -> None:
        super().forget(node)
        del self.nodes[node]

    # Rounds

    def open_round(self, number: int, clients: Iterable[int]) -> SumRound:
        opened = self._begin(number, set(clients))
        self.rounds = [*self.rounds[1 - KEPT_ROUNDS :], opened]
        return opened

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        chosen = clients - self.excluded
        local = {self.nodes[n]: [c for c in own if c in chosen] for n, own in self.clients.items()}
        local = {party: own for party, own in local.items() if own}
        m, count = len(local), sum(map(len, local.values()))
        if not self.rounds:
            LOG.warning(
                "the server is trusted (semi-honest): two sums tell it what those sent together "
                "who are in one alone (`flower-graph docs security#what-sums-over-time-tell`)"
            )
        honest, hosts = (n - math.floor(self.corrupt * n) for n in (count, m))
        if honest < 2 or hosts < min(m, 2):
            few = f"{count} clients, a sum needs at least 2 that do not collude"
            few += f", of {min(m, 2)} SuperNodes (corrupt {self.corrupt:g})"
            return self._none(number, few)
        k, threshold, vanished = ALONE if m == 1 else plan(m, self.dropout, self.corrupt)
        seed = int.from_bytes(self.run_id, "little")
        graph = partners(np.arange(m), k, seed, number) if k else np.zeros((1, 0), np.int64)
        minimum = max(2, threshold + 1, m - vanished, count - math.floor(self.dropout * count))
        parties = np.array(sorted(local), np.int64)
        circle = Circle(self.run_id, parties, graph, threshold, minimum)
        return SumRound(self, circle, number, local)

    def _none(self, number: int, why: str) -> SumRound:
        circle = Circle(self.run_id, NOBODY, NOBODY.reshape(0, 0), 0, 0)
        one = SumRound(self, circle, number, {})
        one.skip(why)
        return one

    # Who is at fault

    def remark(self, reason: Reason) -> None:
        self.blamed.append(reason)

    def exclude_for(self, reason: Reason, keys: KeyReply) -> None:
        """Exclude a party, with all clients that its SuperNode enrolled with."""
        assert reason.client is not None
        hosted = set(keys.clients.tolist())
        if reason.kind is Cause.PROVEN:
            self._cheats += not hosted <= self._excluded
            if self._is_same(keys):  # otherwise another SuperNode has come with these numbers
                self._barred.add(self.bound[min(hosted)])
        text = f"{reason.text} (client {reason.client}, same SuperNode)"
        for one in sorted(hosted - self._excluded):
            is_it = one == reason.client
            self.remark(reason if is_it else replace(reason, client=one, text=text))
        self._excluded |= hosted

    def take_blamed(self) -> list[Reason]:
        blamed, self._told = self.blamed[self._told :], len(self.blamed)
        return blamed


# Without trust: the server carries, the parties check --------------------------------------------

# An honest server makes the parties' checks too, so that no party's lie makes it look like a liar.
# A sum takes three exchanges: masked vectors, the signed list and shares, which also prepares the
# next sum. An epoch begins, with three more, when SuperNodes have joined.

TRIES = 3  # lists of commitments, while parties show no seed


class PartySums(SumServer):
    """Carries out sums over parties, SuperNodes with registered keys; callers see only clients.

    `begin` begins an epoch once all that joined have enrolled; in each round parties sign the list
    of members before they show shares.

    Parameters
    ----------
    registry : Path or str
        The registry's file, which is read again before each sum.
    dropout, corrupt : float
        Shares of the parties that may vanish during a sum, and that may collude with the server.
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

    registry: Registry

    def __init__(
        self,
        registry: Path | str,
        *,
        dropout: float = 0.3,
        corrupt: float = 0.1,
        differ_by: int = USUAL_DIFFERENCE,
    ) -> None:
        super().__init__(dropout=dropout, corrupt=corrupt)
        shares = f"dropout is {dropout}, corrupt {corrupt}; both must be below 0.5"
        refuse_if(max(dropout, corrupt) >= 0.5, shares, ValueError)
        refuse_if(differ_by < 1, f"differ_by is {differ_by}, must be at least 1", ValueError)
        self._registry_file, self.registry = registry, Registry.read(registry)
        active, fewest = len(self.registry.active), self.fewest_nodes
        why = f"the registry has {active} parties, a sum needs {fewest}"
        refuse_if(active < fewest, why, ValueError)
        self._differ_by = differ_by
        self._cheating: set[int] = set()  # parties
        self._fresh: set[int] = set()  # parties that have bound themselves for the next epoch
        # The parties' agreement; None before the first epoch, or under a new registry
        self.epoch: Epoch | None = None
        self.lists = 0  # of commitments that were shown; parties answer ``MOST_LISTS``

    @property
    def fewest_nodes(self) -> int:
        return self.registry.minimum

    @property
    def parties(self) -> list[int]:
        return sorted(set(self.nodes.values()) - self._cheating)

    @property
    def members(self) -> list[int]:
        return [] if self.epoch is None else self.epoch.parties.tolist()

    @property
    def _taking_part(self) -> set[int]:
        return set(self.members) - self._cheating

    @property
    def excluded(self) -> set[int]:
        return set(self.hosted(self._cheating & self.bindings.keys()))

    @property
    def out(self) -> set[int]:
        return set(self.hosted(self.bindings.keys() - self._taking_part))

    def hosted(self, parties: Iterable[int]) -> list[int]:
        return sorted(c for party in parties for c in self.bindings[party].clients.tolist())

    def epoch_clients(self) -> dict[int, list[int]]:
        return {party: self.hosted([party]) for party in sorted(self._taking_part)}

    def exclude(self, clients: Iterable[int]) -> None:
        parties = self.registry.parties.values()
        self._cheating |= {p.number for c in clients for p in parties if p.may_host([c])}

    # Who is there

    def check_keys(self, node: int, reply: KeyReply) -> None:
        try:
            reply.verify(self.registry, MOST_BLOCK)
        except IdentityError as error:
            raise MalformedReplyError(str(error)) from error
        points = reply.points.sum()
        why = f"party {reply.number}: {points} points, above {MOST_POINTS}"
        refuse_if(points > MOST_POINTS, why, MalformedReplyError)

    def knows(self, old: int, reply: KeyReply) -> bool:
        return reply.number in self._taking_part and super().knows(old, reply)

    def enrolled(self, node: int, answer: KeyReply) -> None:
        if node in self.nodes:  # it has been renamed
            return
        party, home = answer.number, self.node_of_party(answer.number)
        refuse = partial(refuse_if, error=MalformedReplyError)
        refuse(home is not None, f"party {party} is at node {home} already")
        if party not in self._taking_part or not self._is_same(answer):
            is_over = self.lists >= MOST_LISTS
            refuse(is_over, f"{MOST_LISTS} lists were shown: nobody can join any more")
            self.bindings[party] = answer  # one that goes on has the binding that all know
            self._fresh.add(party)
        self.nodes[node] = party

    def take_binding(self, node: int, reply: KeyReply) -> None:
        """Take a binding with another seed, for the next epoch."""
        self.check_keys(node, reply)
        home = self.node_of_party(reply.number)
        why = f"party {reply.number} is at node {home} already"
        refuse_if(home not in (None, node), why, MalformedReplyError)
        clients = reply.clients.tolist()
        self.bindings[reply.number], self.nodes[node] = reply, reply.number
        self.clients[node] = clients
        self._arrays.pop(node, None)
        self.bound |= dict.fromkeys(clients, node)

    def forget(self, node: int) -> None:
        self._fresh.discard(self.nodes[node])
        super().forget(node)

    def renew(self) -> None:
        try:
            registry = Registry.read(self._registry_file)
        except IdentityError as error:
            LOG.error("%s: the version before goes on", error)
            return
        if registry.digest == self.registry.digest:
            return
        changed = dict(registry.parties.items() - self.registry.parties.items())
        words = "another registry, %s; new, with another key or revoked: %s"
        LOG.warning(words, registry.digest.hex()[:16], sorted(changed))
        self.registry, self.epoch = registry, None
        self._give_up_rounds()
        for node in [*self.nodes]:  # to be asked for bindings under this registry
            self.forget(node)

    def _give_up_rounds(self) -> None:
        for one in self.rounds:
            one.skip(self._too_few)

    @property
    def _too_few(self) -> str:
        return f"{len(self.parties)} parties, a sum needs {self.fewest_nodes}"

    # Epochs

    def begin(self, server_round: int, tell: Tell, nodes: Collection[int], limit: float) -> bool:
        """Begin an epoch if a party has joined; return whether one has begun."""
        present = {party for node, party in self.nodes.items() if node in nodes} - self._cheating
        if present <= self._taking_part - self._fresh:
            return False
        for _ in range(TRIES):
            if self.lists >= MOST_LISTS:
                return False
            old = {node for node, party in self.nodes.items() if party in present - self._fresh}
            present &= self._bind(server_round, tell, old) | self._fresh
            if len(present) < self.fewest_nodes:
                return False
            self._fresh -= present  # whatever comes of it, their seeds are shown
            if self.agree(server_round, tell, present, limit):
                return True
            present &= set(self.nodes.values())
        return False

    def _bind(self, server_round: int, tell: Tell, nodes: Collection[int]) -> set[int]:
        requests = dict.fromkeys(sorted(nodes), KeyRequest(self.run_id))
        replies = tell(server_round, "sum_enroll", requests, KeyReply, self.take_binding)
        for entry in replies.rejected:  # with a version of the registry that is old, for one
            if entry.node_id in self.nodes:
                self.forget(entry.node_id)
        return {party for node, party in self.nodes.items() if node in replies.values}

    def agree(self, server_round: int, tell: Tell, present: Collection[int], limit: float) -> bool:
        """Have the parties that are present show their seeds, and begin the epoch of these.

        ``limit`` is the largest size of a number in the sums. Returns whether it has begun: not if
        a party shows no seed, which is then forgotten.
        """
        parties = sorted(set(self.parties).intersection(present))
        bindings = [self.bindings[party] for party in parties]
        points = [np.stack([one.clients, one.points], 1) for one in bindings if one.points.size]
        declared = np.concatenate([np.zeros((0, 2), np.int64), *points])
        # Each that is in a sum has as many partners there as the threshold, which may be as high as
        # the registry's minimum, or above it, where fewer may vanish than that minimum allows.
        shares = self.dropout, self.corrupt
        minimum = max(self.fewest_nodes, plan_of(len(parties), *shares)[1] + 1)
        terms = *shares, minimum, self._differ_by, limit, np.array(parties, np.int64)
        promised = np.stack([one.commitment for one in bindings])
        declared = declared[np.argsort(declared[:, 0])]
        shown = RevealRequest(self.run_id, self.lists, *terms, promised, declared)
        self.lists += 1
        nodes = {node: party for node, party in self.nodes.items() if party in parties}
        shows = dict.fromkeys(nodes, shown)
        replies = tell(server_round, "sum_reveal", shows, RevealReply, self._seed)
        if silent := nodes.keys() - replies.values.keys():
            for node in silent & self.nodes.keys():
                self.forget(node)
            return False
        seed_of = {nodes[node]: seed for node, seed in replies.values.items()}
        seeds = rows_of([seed_of[party] for party in parties], len(parties), -1)
        epoch = self.epoch = Epoch.agreed(shown, self.registry.digest, seeds)
        self._give_up_rounds()
        if self._differ_by > max(1, len(parties) - epoch.minimum):
            about = len(parties), epoch.minimum, DIFFER_BY, self._differ_by
            words = "%d SuperNodes, at least %d in a sum, %s %d: no sums while one is missing"
            LOG.warning(words, *about)
        requests = {}
        for node, party in nodes.items():
            row = epoch.parties[epoch.partners[epoch.index(party)]].tolist()
            signed = [self.bindings[partner] for partner in row]
            keys = np.stack([one.channel_key for one in signed])
            signatures = np.stack([one.signature for one in signed])
            clients = [one.clients for one in signed]
            sizes = np.array([one.size for one in clients], np.int64)
            rows = seeds, keys, signatures, sizes, np.concatenate(clients)
            requests[node] = EpochRequest(self.run_id, *rows)

        def check(node: int, reply: EpochReply) -> None:
            is_other = reply.digest.tobytes() != epoch.digest
            refuse_if(is_other, "its party has another epoch", MalformedReplyError)

        tell(server_round, "sum_epoch", requests, EpochReply, check)
        return True

    def _seed(self, node: int, reply: RevealReply) -> bytes:
        party, seed = self.nodes[node], reply.seed.tobytes()
        if commit(self.run_id, party, seed) != self.bindings[party].commitment.tobytes():
            text = "it has committed to another seed of the graph"
            self.exclude_for(Reason(Cause.PROVEN, text, party), self.bindings[party])
            raise MalformedReplyError(f"party {party}: {text}")
        return seed

    # Rounds, and who is at fault

    def _begin(self, number: int, clients: set[int]) -> SumRound:
        if (epoch := self.epoch) is None:
            return self._none(number, self._too_few)
        hosted = self.epoch_clients().items()
        local = {party: own for party, own in hosted if not clients.isdisjoint(own)}
        return SumRound(self, epoch, number, local)

    def remark(self, reason: Reason) -> None:
        party = reason.client
        if party is None or reason.kind is Cause.LEFT_OUT:  # of a client, not of its party
            super().remark(reason)
            return
        text = f"{reason.text} (party {party})"
        self.blamed += [replace(reason, client=c, text=text) for c in self.hosted([party])]

    def exclude_for(self, reason: Reason, keys: KeyReply) -> None:
        assert reason.client is not None
        self.remark(reason)
        self._cheating.add(reason.client)


# Sums over messages ------------------------------------------------------------------------------


class SecureSum:
    """The server's half: asks the clients for masked vectors and adds them up.

    Parameters
    ----------
    exchange : Exchange or callable
        How messages are sent. With a callable, such as ``Session.send``, the caller enrols
        SuperNodes in ``server`` and drives the stages: `begin`, `ready`, `add`.
    limit : float
        Largest absolute value of a single number; a client with a larger one is left out.
    resolution : float
        Step to which numbers are rounded.
    server : SumServer, optional
        The protocol; by default a ``SumServer``, which clients trust to follow the protocol.
        ``PartySums`` is for SuperNodes with keys of their own, which do not.
    timeout : float
        Seconds to wait for replies to one exchange, and for nodes.
    min_nodes : int
        SuperNodes to wait for.
    guard : bool
        Whether words have bits to spare for pads that clients add (`flower_graph.secure.ring`).
    """

    def __init__(
        self,
        exchange: Exchange | Send,
        *,
        limit: float,
        resolution: float = 2.0**-16,
        server: SumServer | None = None,
        timeout: float = 600.0,
        min_nodes: int = 1,
        guard: bool = False,
    ) -> None:
        self.server = server = server or SumServer()
        self._exchange, self._timeout = exchange, timeout
        send = exchange if callable(exchange) else partial(exchange.send, timeout=timeout)
        self._send: Send = send
        self.number = -1  # of the newest sum
        self.round: SumRound  # of it, from when it is made ready
        self.clients: list[int] = []  # that it was made ready for; none if none is ready
        self._limit = limit
        self.ring_for = partial(Ring.fit, limit=limit, resolution=resolution, guard=guard)
        self.ring = self.ring_for(2)  # of the newest sum; this refuses impossible numbers
        self.rejected: list[Rejected] = []  # SuperNodes left out of an exchange of the newest sum
        refuse_if(min_nodes < 1, f"min_nodes: {min_nodes} is not at least 1", ValueError)
        self._min_nodes = max(server.fewest_nodes, min_nodes)

    def sum(
        self, server_round: int, length: int, config: Mapping[str, Scalar] | None = None
    ) -> Summed | Skipped:
        """Add up one vector of each client.

        Parameters
        ----------
        server_round : int
            The caller's round, for messages and logs.
        length : int
            Numbers of a vector.
        config : Mapping or None
            Entries for the clients' ``vectors``.

        Returns
        -------
        Summed or Skipped
            The sum, or why there is none. SuperNodes that joined since the last sum was made
            ready take part from the next one on.
        """
        self.prepare(server_round)
        contents = dict.fromkeys(self.server.clients, config or {})
        what = SECURE_SUM, digest_of_told(config or {})
        found = self.add(server_round, contents, "train.sum_mask", length, *what)
        if (values := found.numbers()) is None:
            return Skipped(Reason(Cause.SKIPPED, found.skipped, round=found.number))
        return Summed(values, np.array(found.contributors, np.int64))

    # The same in two steps, for messages of the caller's own that carry the masked vectors

    def prepare(
        self, server_round: int, nodes: Iterable[int] | Mapping[int, Iterable[int]] | None = None
    ) -> list[int]:
        """Make a sum ready, where the last one has not.

        Parameters
        ----------
        server_round : int
            The caller's round.
        nodes : iterable of int, or mapping of int to iterable of int, optional
            SuperNodes that may take part; by default all that are connected. A mapping has the
            clients of each: one that brings others is refused.

        Returns
        -------
        list of int
            Clients that the sum is for, ascending. At most the server's share ``dropout`` of them
            may be missing from it, else it is skipped.
        """
        server, exchange, timeout = self.server, self._exchange, self._timeout
        assert isinstance(exchange, Exchange)
        present = exchange.nodes(self._min_nodes, timeout) if nodes is None else sorted(nodes)
        self.rejected = []
        server.renew()
        server.permitted = nodes if isinstance(nodes, Mapping) else None
        self.rejected += server.ask(exchange, present, server_round, timeout)
        for gone in server.clients.keys() - set(present):
            server.forget(gone)
        self.begin(server_round, present)
        if not self.clients:
            self.ready(server_round, server.available)
        return self.clients

    def add(
        self,
        server_round: int,
        contents: Mapping[int, Message | RecordDict | Mapping[str, Any]],
        message_type: str,
        length: int,
        purpose: str,
        detail: bytes = b"",
        *,
        padded: bool = False,
        are_numbers: bool = True,
        following: Callable[[], Iterable[int] | None] | None = None,
        read: Callable[[int, RecordDict], object] | None = None,
        most_bytes: int | None = None,
    ) -> Added:
        """Send each SuperNode its message, take the masked vectors, and open their sum.

        Parameters
        ----------
        server_round : int
            The caller's round.
        contents : mapping of int to Message, RecordDict or Mapping
            The message for each SuperNode; entries of the sum are added. A SuperNode that is not in
            the sum is sent none.
        message_type : str
            As of ``Exchange.send``.
        length : int
            Numbers of a vector.
        purpose, detail, padded
            The vectors' meaning, as of ``SumTerms``: clients state it too.
        are_numbers : bool
            Whether the words are numbers of the sum's ring; otherwise words of 64 bits.
        following : callable, optional
            Returns the clients of the next sum once the vectors are here, None if no sum follows
            yet; by default all that are available.
        read : Callable[[int, RecordDict], object], optional
            Reads and checks the rest of a reply. Any exception leaves the SuperNode out. By default
            ``replies`` have the clients in each vector.
        most_bytes : int, optional
            The largest reply; by default as large as one without further content.

        Returns
        -------
        Added
            The sum, under pads if ``padded``, or why there is none. The exchange that removes the
            masks also makes the next sum ready.
        """
        one, ring = self.round, self.ring
        most = most_bytes or reply_bytes(length, len(self.clients))
        entries, word = (ring.to_config(), ring.word) if are_numbers else ({}, 64)
        terms = SumTerms(purpose, ring if are_numbers else None, detail, padded)
        masks = one.mask_requests(length, word, terms)
        masks = {node: mask for node, mask in masks.items() if node in contents}
        requests = {n: as_record(contents[n], m.to_config() | entries) for n, m in masks.items()}

        def taken(node: int, content: RecordDict) -> object:
            result, shape = None if read is None else read(node, content), one.total.shape
            total = read_array(content, ARRAYS, MASKED_SUM, shape, limit=None, must_be_finite=False)
            reply = MaskedReply.read(content, total=total, **one.known)
            one.take(node, reply)
            return reply.clients.tolist() if read is None else result

        replies = self._ask(requests, server_round, taken, message_type, most)
        rest = following() if following else self.server.available
        counted = len(self.rejected)
        # Parties that do not trust the server settle and sign the list of members
        self.tell(server_round, "sum_list", one.list_requests(), ListReply, one.take)
        self.ready(server_round, rest, one)
        result, blamed = one.result(), self.server.take_blamed()
        silent = self.rejected[: counted - len(replies.rejected)] + self.rejected[counted:]
        found = Added(
            one.number,
            failed={by.client: str(by) for by in blamed if by.client is not None},
            silent=silent,
            ring=ring,
            run_id=one.run_id,
            asked={node: mask.clients.tolist() for node, mask in masks.items()},
            replies=replies,
        )
        if isinstance(result, Skipped):
            found.skipped = str(result.reason)
            LOG.warning("round %d: no sum: %s", server_round, found.skipped)
        else:
            found.total, found.contributors = result.total, result.contributors.tolist()
        for client, why in found.failed.items():
            LOG.warning("round %d: client %d: %s", server_round, client, why)
        return found

    # The stages before it

    def begin(self, server_round: int, nodes: Collection[int]) -> bool:
        """Have clients agree on the members, if need be; return whether they began anew."""
        begun = self.server.begin(server_round, self.tell, nodes, self._limit)
        self.clients = [] if begun else self.clients
        return begun

    def ready(
        self, server_round: int, clients: Iterable[int] | None, done: SumRound | None = None
    ) -> None:
        """Prepare a sum for some clients, in one exchange with the shares of one that is done."""
        # Any: requests and replies of two kinds
        stages: list[tuple[SumRound, dict[int, Any], Any]] = []
        if done is not None:
            stages.append((done, done.unmask_requests(), UnmaskReply))
        self.clients = list(clients or ())
        if clients is not None:
            self.number += 1
            self.ring = self.ring_for(max(1, len(self.clients)))
            self.round = self.server.open_round(self.number, self.clients)
            stages.append((self.round, self.round.prepare_requests(), PrepareReply))

        def read(node: int, content: RecordDict) -> None:
            for one, asked, kind in stages:
                if node in asked:
                    one.take(node, kind.read(content, k=one.partners.shape[1], **one.known))

        nodes = dict.fromkeys(node for _, asked, _ in stages for node in asked)
        requests = {n: as_record(*(a[n] for _, a, _ in stages if n in a)) for n in nodes}
        if requests:
            most = sum_bytes(max(one.partners.shape[1] for one, *_ in stages))
            self._ask(requests, server_round, read, "train.sum_unmask", most)

    def tell(
        self,
        server_round: int,
        action: str,
        requests: Mapping[int, SumMessage],
        kind: type[M],
        take: Callable[[int, M], object],
    ) -> Replies[object]:
        """Ask SuperNodes for replies of one kind, without vectors; each is taken as it comes."""
        if not requests:
            return Replies()
        contents = {node: request.to_record() for node, request in requests.items()}

        def read(node: int, content: RecordDict) -> object:
            return take(node, kind.read(content, run_id=requests[node].run_id))

        return self._ask(contents, server_round, read, f"train.{action}", setup_bytes())

    def _ask(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Callable[[int, RecordDict], T],
        message_type: str,
        most: int,
    ) -> Replies[T]:
        how = {"message_type": message_type, "max_reply_bytes": most}
        replies = self._send(requests, server_round=server_round, read=read, **how)
        self.rejected += replies.rejected
        for entry in replies.rejected if isinstance(self._exchange, Exchange) else ():
            if entry.kind is Kind.STATE_LOST and entry.node_id in self.server.clients:
                self.server.forget(entry.node_id)  # it is asked for new keys
        return replies
