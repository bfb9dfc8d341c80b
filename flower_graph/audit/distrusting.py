"""The deviating server among clients that do not trust it: the same lies, to parties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flower_graph.audit.deviating import (
    ChosenHolders,
    Deviation,
    Opened,
    OwnAnswers,
    Parts,
    ServerOf,
    SumDeviation,
    only_one_survived,
    stories_of,
)
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.server import KEY_HOLDERS
from flower_graph.secure.channel import rows_of
from flower_graph.secure.parties.alignment import MOST_SKIPPED, ProvedUnionRequest
from flower_graph.secure.parties.messages import ListRequest, Signatures
from flower_graph.secure.parties.proofs import public_of
from flower_graph.secure.parties.server import PartyRound
from flower_graph.secure.sum.messages import PrepareRequest, UnmaskReply, UnmaskRequest
from flower_graph.secure.sum.round import StageReply
from flower_graph.wire.codec import Message


class PartyDeviation(SumDeviation):
    """Lies about dropouts of a sum of parties: in the list that they sign, and after it."""

    def patch(self, strategy: object) -> None:
        server = self.server_of(strategy)
        opens, lists = server.open_round, server.list_requests
        unmasks, takes = server.unmask_requests, server.take

        def open_round(number: int, *who: object) -> dict[int, PrepareRequest]:
            requests: dict[int, PrepareRequest] = opens(number, *who)
            self.clients = max(self.clients, len(server.parties))
            return self.with_threshold(requests)

        def list_requests(number: int) -> dict[int, ListRequest]:
            requests: dict[int, ListRequest] = lists(number)
            if self.story is not only_one_survived:
                return requests
            sent = server._rounds[number].contributed
            listed = np.zeros_like(sent)
            listed[np.flatnonzero(sent)[:1]] = True
            self.told += len(requests)
            return {node: replace(one, listed=listed) for node, one in requests.items()}

        def unmask_requests(number: int) -> dict[int, tuple[UnmaskRequest, Signatures]]:
            if server.epoch is None or number not in server._rounds:
                return {}
            one = server._rounds[number]
            unmasks(number)
            self.rounds[number] = Opened(one)
            sent = np.flatnonzero(one.contributed).tolist()
            self.told += len(sent)
            nodes = {row: server.node_of_party(int(one.parties[row])) for row in sent}
            return {node: self._lie(one, row) for row, node in nodes.items()}

        def take(node: int, reply: StageReply, *more: Message) -> None:
            if isinstance(reply, UnmaskReply) and reply.server_round in self.rounds:
                self.rounds[reply.server_round].take(reply)
            takes(node, reply, *more)

        server.open_round, server.list_requests = open_round, list_requests
        server.unmask_requests, server.take = unmask_requests, take

    def _lie(self, one: PartyRound, place: int) -> tuple[UnmaskRequest, Signatures]:
        """Ask one party for what the story needs, with all signatures that there are."""
        rows, row = np.array([place]), one.partners[place]
        columns: NDArray[np.int64] = np.flatnonzero(one.signed[row])
        request = UnmaskRequest(
            one.epoch.id,
            one.number,
            int(one.contributed.sum()),
            one.parties[rows],
            self.story(one, rows),
        )
        return request, Signatures(columns, one.lists[row[columns]])


class OwnProvedAnswers(OwnAnswers):
    """Answers instead of the key-holders, where answers are proved."""

    def answered(self, request: ProvedUnionRequest) -> ProvedUnionRequest:
        shares = [self._share(holder) for holder in request.holders.tolist()]
        if not request.clients.size:
            return request
        blocks = [self.blinded[client] for client in request.clients.tolist()]
        answers = [np.concatenate([ids.multiply(one, share) for one in blocks]) for share in shares]
        keys = rows_of([public_of(share) for share in shares], -1, ids.POINT)
        self.told += 1
        return replace(request, keys=keys, points=np.stack(answers))

    def named(self, points: ids.Bytes2D, client: int) -> ids.Bytes2D:
        total = ids.add(
            [ids.multiply(points, self._share(holder)) for holder in range(KEY_HOLDERS)]
        )
        assert total is not None
        return total

    @staticmethod
    def _share(holder: int) -> bytes:
        return ids.scalar(b"the server's own", b"key", holder % KEY_HOLDERS)


class ChosenParties(ChosenHolders):
    """Names key-holders other than the draw's, although all know the draw."""

    def patch(self, strategy: object) -> None:
        _, aligner = self.parts_of(strategy)
        asks = aligner.union_requests

        def choose(count: int) -> list[int]:
            last = set(aligner._draw[KEY_HOLDERS + MOST_SKIPPED :])
            free = [
                c for c in aligner._blinded if c not in aligner._dropped | set(aligner._holders)
            ]
            chosen = sorted(free, key=lambda c: aligner._party[c] not in last)[:count]
            self.chosen |= {c for c in chosen if aligner._party[c] in last}
            self.told += len(chosen)
            return chosen

        def union_requests() -> dict[int, object]:
            holders = {party for parties in aligner._proved.values() for party in parties}
            self.answered |= {c for c in self.chosen if aligner._party[c] in holders}
            requests: dict[int, object] = asks()
            return requests

        aligner._choose, aligner.union_requests = choose, union_requests


def of_parties(server_of: ServerOf) -> list[Deviation]:
    """Return the lies to parties of a secure sum."""
    return [
        PartyDeviation(name, server_of, story, threshold=least)
        for name, story, least in stories_of()
    ]


def of_proved_alignment(parts_of: Parts, held: Sequence[Sequence[object]]) -> list[Deviation]:
    """Return the lies to parties that align their identities."""
    return [OwnProvedAnswers(parts_of, held), ChosenParties(parts_of)]
