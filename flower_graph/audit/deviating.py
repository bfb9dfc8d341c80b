"""The deviating server: it lies to the clients of a secure sum or an alignment.

The run's own server is patched to lie in one way, and reports what it could open by that. A single
vector counts as opened if the secrets under which it travelled were put together and are those to
which its client committed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flower_graph.audit.attacks import Deviation, Finding, guesses, ranking
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import KEY_HOLDERS, MOST_HOLDERS, public_of
from flower_graph.secure.align.server import BLINDED
from flower_graph.secure.channel import rows_of
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    SEED,
    ListRequest,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.server import StageReply, SumRound
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.codec import Message, split_rows

M = TypeVar("M", bound=Message)


class DeviatingGrid(InProcessGrid):
    """The in-process grid of a server that begins to lie at its first look for clients."""

    patch: Callable[[], None] | None = None

    def get_node_ids(self) -> list[int]:
        patch, self.patch = self.patch, None
        if patch is not None:  # the server has all its parts by then
            patch()
        return super().get_node_ids()


# Of a strategy: the run's id, with which identities are hashed, and the alignment's server
Parts = Callable[[object], tuple[bytes, Any]]
ServerOf = Callable[[Any], Any]  # of a strategy, the server of its sums
# The kinds of secrets that the server asks of a holder, one a partner, [k]; by the holder's row
Story = Callable[[SumRound, int], NDArray[np.uint8]]


def only_one_survived(local: SumRound, row: int) -> NDArray[np.uint8]:
    """Tell that all but one client vanished."""
    victim = np.flatnonzero(local.contributed)[0]
    return np.where(local.partners[row] == victim, SEED, MASK_KEY).astype(np.uint8)


def two_stories(local: SumRound, row: int) -> NDArray[np.uint8]:
    """Tell one half of each client's partners that it survived, the other that it vanished."""
    k = local.partners.shape[1]
    return np.where(np.arange(k) < (k + 1) // 2, SEED, MASK_KEY).astype(np.uint8)


class LyingRound(SumRound):
    """A round of a secure sum whose server tells a deviation's story."""

    lie: "SumDeviation"
    # Shares that holders revealed, by the holder's number; of a client's row and a kind of secret
    revealed: dict[tuple[int, int], dict[int, bytes]]

    def prepare_requests(self) -> dict[int, PrepareRequest]:
        if self.lie.threshold is None:
            return super().prepare_requests()
        self.threshold, self.minimum = self.lie.threshold, 2  # the server itself believes it
        return self.lie.tell(super().prepare_requests())

    def list_requests(self) -> dict[int, ListRequest]:
        """Have a party sign the list that its story has."""
        lies = {}
        for node, request in super().list_requests().items():
            listed, row = request.listed.copy(), self.row_of(node)
            listed[self.partners[row]] = self.lie.story(self, row) == SEED
            lies[node] = replace(request, listed=listed)
        return self.lie.tell(lies)

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """Ask each SuperNode for what its story needs, with all signatures that there are."""
        if not super().unmask_requests() and not self.signed.any():
            return {}
        self.lie.rounds.append(self)

        def lied(row: int) -> UnmaskRequest:
            about, partners = (self.run_id, self.number), self.partners[row]
            if not self.signed.any():
                count = self._count(self.contributed)
                return UnmaskRequest(*about, count, self.lie.story(self, row) == SEED)
            columns = np.flatnonzero(self.signed[partners])
            return UnmaskRequest(*about, columns=columns, signatures=self.lists[partners[columns]])

        return self.lie.tell(self._ask("unmask", self.contributed, lied))

    def take(self, node: int, reply: StageReply) -> None:
        if isinstance(reply, UnmaskReply):
            self.note(node, reply)
        super().take(node, reply)

    def note(self, node: int, reply: UnmaskReply) -> None:
        """Record the shares that a SuperNode reveals, as it was asked."""
        partners = self.partners[self.row_of(node)]
        column = np.flatnonzero(reply.kinds)
        numbers = partners.size - column  # as dealers number holders
        kinds = reply.kinds[column].tolist()
        rows = zip(partners[column].tolist(), kinds, numbers.tolist(), reply.shares, strict=True)
        for dealer, kind, number, share in rows:
            self.revealed.setdefault((dealer, kind), {})[number] = share.tobytes()

    def is_open(self, row: int) -> bool:
        """Whether all masks of one client can be computed, so that its vector is in the clear."""

        def is_known(row: int, kind: int) -> bool:
            return self.secret_of(row, kind, self.revealed.get((row, kind), {})) is not None

        partners = self.partners[row][self.live[self.partners[row]]].tolist()
        others = (is_known(partner, MASK_KEY) for partner in partners)
        return is_known(row, SEED) and (is_known(row, MASK_KEY) or all(others))


class SumDeviation(Deviation):
    """Lies about dropouts of a secure sum: in the list that parties sign, and after it."""

    def __init__(
        self, what: str, server_of: ServerOf, story: Story, threshold: int | None = None
    ) -> None:
        self.name = f"deviating server: {what}: vectors opened"
        self.server_of, self.story, self.threshold = server_of, story, threshold
        self.rounds: list[LyingRound] = []
        self.clients = 0

    def patch(self, strategy: object) -> None:
        server = self.server_of(strategy)
        opens = server.open_round

        def open_round(number: int, clients: Iterable[int]) -> SumRound:
            local: SumRound = opens(number, clients)
            self.clients = max(self.clients, len(local.parties))
            vars(local).update(lie=self, revealed={})
            local.__class__ = LyingRound
            return local

        server.open_round = open_round

    def tell(self, requests: dict[int, M]) -> dict[int, M]:
        self.told += len(requests)
        return requests

    def finding(self) -> Finding:
        right = list[bool]()
        for local in self.rounds:
            sent = np.flatnonzero(local.contributed).tolist()
            targets = sent[:1] if self.story is only_one_survived else sent  # that it is to open
            right += map(local.is_open, targets)
        return guesses(self.name, right or [False] * max(1, self.clients), 0.0)


class OwnAnswers(Deviation):
    """Answers instead of the key-holders, with a key of its own for each client."""

    name = "deviating server: who holds which node, by answers of its own in the key-holders' place"

    def __init__(self, parts_of: Parts, held: Sequence[Sequence[object]]) -> None:
        self._parts_of, self._held = parts_of, held
        self._run, self.blinded = b"", dict[int, ids.Bytes2D]()
        self._tokens = set[bytes]()

    def patch(self, strategy: object) -> None:
        self._run, self._aligner = self._parts_of(strategy)
        aligner = self._aligner
        takes, asks, unites = aligner.take_blind, aligner.union_requests, aligner.take_union

        def take_blind(node: int, reply: ids.BlindReply) -> None:
            blocks = split_rows(reply.points, reply.sizes)
            self.blinded |= dict(zip(reply.clients.tolist(), blocks, strict=True))
            takes(node, reply)

        def union_requests() -> dict[int, ids.UnionRequest]:
            return {node: self.answered(request) for node, request in asks().items()}

        def take_union(total: ids.Words, contributors: Iterable[int]) -> object:
            peeled = ids.peel(total)
            self._tokens |= set() if peeled is None else {row.tobytes() for row in peeled[0]}
            return unites(total, contributors)

        aligner.take_blind, aligner.union_requests = take_blind, union_requests
        aligner.take_union = take_union

    def answered(self, request: ids.UnionRequest) -> ids.UnionRequest:
        """Replace the key-holders' answers by the server's own, each proved answer for itself."""
        clients, holders = request.clients.tolist(), request.holders
        if not clients:
            return request
        self.told += len(clients)
        answers = [
            np.concatenate([ids.multiply(self.blinded[c], self._keys(c)[place]) for c in clients])
            for place in range(1 if holders is None else len(holders))
        ]
        request = replace(request, points=np.stack(answers))
        if holders is None:
            return request
        public = map(public_of, self._keys(clients[0])[: len(holders)])
        return replace(request, keys=rows_of(public, -1, ids.POINT))

    def _keys(self, client: int) -> list[bytes]:
        """Return the server's key for a client; of parties, the shares of one for all."""
        of = [client] if self._aligner.registry is None else range(KEY_HOLDERS)
        return [ids.scalar(b"the server's own", b"key", number) for number in of]

    def finding(self) -> Finding:
        sets = [set(ids.canonical(local, "a client")) for local in self._held]
        candidates = sorted(set().union(*sets))
        points = rows_of([ids.hash_to_group(self._run, one) for one in candidates], -1, ids.POINT)
        is_named = np.zeros((len(sets), len(candidates)))
        for client in range(len(sets)) if self._tokens else ():
            # As a client names candidates that believed the server
            named = ids.add([ids.multiply(points, key) for key in self._keys(client)])
            assert named is not None
            for place, point in enumerate(named):
                token = ids.name(self._run, candidates[place], point.tobytes())[: ids.TOKEN]
                is_named[client, place] = token in self._tokens
        truth = [[text in local for text in candidates] for local in sets]
        return ranking(self.name, is_named, truth)


class ChosenHolders(Deviation):
    """Names key-holders of its choice instead of the draw's, which parties know."""

    name = "deviating server: key-holders that it chose and that clients answered with"

    def __init__(self, parts_of: Parts) -> None:
        self.parts_of, self.chosen, self.answered = parts_of, set[int](), set[int]()
        self._share = 0.0

    def patch(self, strategy: object) -> None:
        _, aligner = self.parts_of(strategy)
        takes = aligner.take_answers

        def choose(count: int) -> list[int]:
            free = sorted(set(aligner.at(BLINDED)) - aligner.dropped - set(aligner.holders))
            lies = set(free)
            if aligner.registry is None:
                self._share = min(1.0, len(self.chosen | set(free[-count:])) / len(aligner.members))
            else:
                beyond = set(aligner.draw[MOST_HOLDERS:])
                lies = {client for client in free if aligner.party[client] in beyond}
            chosen = sorted(free, key=lambda client: client in lies)[-count:]
            self.chosen |= lies & set(chosen)
            self.told += len(chosen)
            return chosen

        def take(request: ids.EvaluateRequest, config: Mapping[str, object]) -> None:
            takes(request, config)
            self.answered |= set(request.holders.tolist())

        aligner.choose, aligner.take_answers = choose, take

    def finding(self) -> Finding:
        right = [client in self.answered for client in sorted(self.chosen)] or [False]
        return guesses(self.name, right, self._share)


def of_sums(server_of: ServerOf) -> list[Deviation]:
    """Return the lies to clients of a secure sum, or to parties that distrust the server."""
    return [
        SumDeviation("only one client survived", server_of, only_one_survived),
        SumDeviation("different stories about who dropped out", server_of, two_stories),
        SumDeviation("a threshold of 1, and different stories", server_of, two_stories, 1),
    ]


def of_alignment(parts_of: Parts, held: Sequence[Sequence[object]]) -> list[Deviation]:
    """Return the lies to clients, or parties, that align their identities."""
    return [OwnAnswers(parts_of, held), ChosenHolders(parts_of)]
