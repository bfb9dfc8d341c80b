"""The server's half of the alignment by blinded identities: requests, and checks of replies.

Free of any transport. The caller drives it::

    while requests := server.requests():           # node -> message of one stage
        ... send all; server.take(node, config of its reply) for those that answered
    while server.waits():
        ... send server.union_requests(), let server.uniting take part in one secure sum of their
        ... tables; server.take_union(total, contributors), or, if there is no sum, union_failed
        ... ask the stages again: after a failed union all may be aligned anew
    ... send server.publications() with the next messages

A client that does not answer a stage is left out; ``blamed`` has it with the reason. A lost
key-holder is replaced and only the replacement is asked again, since every choice of key-holders
has a key of its own. Nobody can foresee the replacement: once it has all points, the server draws
key-holders, SuperNode by SuperNode, from system randomness. Each request
holds as many points as all can answer. If the union cannot be read even from larger tables, the
clients that wait for it are left out. Clients that enrol later go through the stages for
themselves; existing slots keep their places. If a key-holder is lost by then, its share of the key
is lost too, and all start again under the next *epoch*.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import KEY_HOLDERS, Bytes2D, Claim
from flower_graph.secure.channel import pieces, rows_of
from flower_graph.secure.node_config import LEAST_HOLDERS, MOST_BLOCK, MOST_POINTS
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, Registry
from flower_graph.wire.codec import split_rows

# One alone could try out identities, so with two or more clients there is never only one.
FEWEST_HOLDERS = 2
MOST_FAILED = 2  # unions in a row that too few took part in, where answers are proved
# A table for half of all points is about right, as blocks are filled up and SuperNodes overlap; if
# there is one SuperNode, nothing does.
# Twice that is enough for any tables, four times for bad luck, too.
FIRST_SHARE, MAX_DOUBLINGS = 2, 2
# Points that key-holders are asked for at a time: 7 s of work.
AT_A_TIME = 1 << 15
NOTHING = np.zeros((0, ids.POINT), np.uint8)
# What a client waits for: its blinded identities, the key-holders' answers, the union, or nothing
PENDING, BLINDED, EVALUATED, UNITED = range(4)
NO_PART = "took no part in the union of tokens"
UNREADABLE = "was in no union of tokens that could be read"

Request = ids.PlainRequest | ids.BlindRequest | ids.EvaluateRequest
Holders = tuple[int, ...]  # key-holders that answer together, as they are on one SuperNode


@dataclass
class Member:
    """A client, and its identities on their way into the union."""

    node: int
    stage: int = PENDING
    points: Bytes2D = field(default_factory=lambda: NOTHING)  # blinded, or the answers' sum
    size: int = 0
    signature: bytes = b""
    # By key-holders: what they claim, and the signature of their key; proofs may be empty
    claims: dict[Holders, tuple[Claim, bytes]] = field(default_factory=dict)


class AlignmentServer:
    """Leads all clients to one order of the identities that at least two of them hold.

    Parameters
    ----------
    least_holders : int
        The fewest clients that hold an identity with a slot.
    registry : Registry, optional
        The parties' keys, if clients do not trust the server: then `begin` begins an epoch, the
        server forwards key-holders' answers with their proofs, and adds nothing up.
    run_id : bytes
        The run that is signed and proved.
    plain : bool
        Whether identities are aligned in the clear; then two clients hold one with a slot.
    """

    def __init__(
        self,
        least_holders: int = LEAST_HOLDERS,
        registry: Registry | None = None,
        run_id: bytes = b"",
        *,
        plain: bool = False,
    ) -> None:
        self.plain = plain
        self.blamed: list[tuple[int, str]] = []  # client and reason
        self.members: dict[int, Member] = {}  # by client
        self.registry, self._least_holders, self._run_id = registry, least_holders, run_id
        self.draw: list[int] = []  # parties in the order in which they are to hold keys
        self.party: dict[int, int] = {}  # of every client
        self.epoch, self._failed = 1, 0  # unions in a row that failed
        self.holders: list[int] = []  # clients with shares of the key
        self.dropped: set[int] = set()  # clients that failed as key-holders
        self._asked: dict[int, Request] = {}
        self._doublings = 0
        self._absent: set[int] = set()  # clients that took no part in a union that failed
        self._excluded: set[int] = set()  # clients that are in no secure sum any more
        self.order = np.zeros((0, ids.TOKEN), np.uint8)

    # Clients

    def begin(self, seed: bytes, clients: Mapping[int, Sequence[int]], registry: Registry) -> None:
        """Begin an epoch of parties, each with its clients."""
        if self.at(BLINDED, EVALUATED, UNITED):
            self._restart()  # other parties are to hold keys
        self.registry = registry
        self._failed, self.dropped, self.draw = 0, set(), ids.drawn(seed, clients)
        self.party = {client: party for party, local in clients.items() for client in local}

    def enroll(self, node: int, clients: Iterable[int]) -> None:
        for client in clients:
            if client in self.members:
                self.members[client].node = node
            elif len(self.members) < ids.MAX_CLIENTS or self.plain:
                self.members[client] = Member(node)
            else:
                why = f"there are {ids.MAX_CLIENTS} clients already, no more can be aligned"
                self.blamed.append((client, why))

    def move(self, old: int, node: int) -> None:
        for member in self.members.values():
            member.node = node if member.node == old else member.node

    def forget(self, clients: Iterable[int]) -> None:
        # If one held a share of the key, nobody's tokens can be compared with new ones.
        gone = set(clients)
        self.members = {client: one for client, one in self.members.items() if client not in gone}
        if gone & set(self.holders):
            self._restart()

    def at(self, *stages: int) -> list[int]:
        return [client for client, member in self.members.items() if member.stage in stages]

    @property
    def is_behind(self) -> bool:
        """Whether clients are to be aligned, new ones, or all since a key-holder is gone."""
        return bool(self.at(PENDING))

    @property
    def aligned(self) -> list[int]:
        return sorted(self.at(UNITED))

    def _by_node(self, clients: Iterable[int]) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for client in clients:
            nodes.setdefault(self.members[client].node, []).append(client)
        return nodes

    def _leave_out(self, client: int, reason: str) -> None:
        self.members.pop(client, None)
        self.blamed.append((client, reason))

    def _restart(self) -> None:
        self.epoch += 1
        self.members = {client: Member(one.node) for client, one in self.members.items()}
        self._absent.clear()
        self.holders, self._doublings, self.order = [], 0, self.order[:0]

    # Stages

    def requests(self) -> dict[int, Request]:
        # What was asked before and is not answered by now counts as lost.
        unanswered, self._asked = self._asked, {}
        self._drop(unanswered)
        self._asked = dict(self._next_stage())
        return dict(self._asked)

    def take(self, node: int, config: Mapping[str, object]) -> None:
        """Take the reply to a request; ``MalformedReplyError`` if it cannot be used."""
        request = self._asked.get(node)
        if request is None:
            raise MalformedReplyError("it was not asked, or has answered already")
        if isinstance(request, ids.PlainRequest):
            plain = ids.PlainReply.from_config(config, clients=request.clients)
            each = split_rows(plain.tokens, plain.sizes)
            for client, tokens in zip(plain.clients.tolist(), each, strict=True):
                self.members[client] = Member(node, UNITED, tokens)
        elif isinstance(request, ids.BlindRequest):
            asked = {"epoch": request.epoch, "clients": request.clients}
            self.take_blind(node, ids.BlindReply.from_config(config, **asked))
        else:
            self.take_answers(request, config)
        del self._asked[node]

    def _next_stage(self) -> Mapping[int, Request]:
        if pending := self.at(PENDING):
            each = {n: np.array(local, np.int64) for n, local in self._by_node(pending).items()}
            if self.plain:
                return {node: ids.PlainRequest(clients) for node, clients in each.items()}
            return {node: ids.BlindRequest(self.epoch, clients) for node, clients in each.items()}
        if not (clients := self._at_a_time()):
            return {}
        if not self.holders:
            self.holders = self.choose(KEY_HOLDERS)
        blocks, signed = [self.members[client] for client in clients], dict[str, NDArray[Any]]()
        if self.registry is not None:
            signed = {
                "clients": np.array(clients, np.int64),
                "parties": np.array([self.party[client] for client in clients], np.int64),
                "sizes": np.array([block.size for block in blocks], np.int64),
                "signatures": rows_of([one.signature for one in blocks], -1, SIGNATURE_BYTES),
            }
        points, answered = np.concatenate([block.points for block in blocks]), blocks[0].claims
        waiting = [one for one in self.holders if one not in chain.from_iterable(answered)]
        return {
            node: ids.EvaluateRequest(self.epoch, np.array(holders, np.int64), points, **signed)
            for node, holders in self._by_node(waiting).items()
        }

    def _at_a_time(self) -> list[int]:
        waiting = self.at(BLINDED)
        totals = accumulate(self.members[client].size for client in waiting)
        fit = [c for c, total in zip(waiting, totals, strict=True) if total <= AT_A_TIME]
        return fit or waiting[:1]

    def _drop(self, unanswered: Mapping[int, Request]) -> None:
        lost: list[int] = []
        pending = set(self.at(PENDING))
        for node, request in unanswered.items():
            if not isinstance(request, ids.EvaluateRequest):
                for client in filter(pending.__contains__, request.clients.tolist()):
                    self._leave_out(client, "did not answer the alignment")
            else:
                # Nor is there hope for another key-holder on the same machine.
                self.dropped |= {c for c, member in self.members.items() if member.node == node}
                lost += request.holders.tolist()
        if self.at(BLINDED):  # the key is needed again, and clients left out since have shares
            lost += [holder for holder in self.holders if holder not in self.members]
        if lost:
            self._lose_holders(lost, "did not answer as key-holder")

    def take_blind(self, node: int, reply: ids.BlindReply) -> None:
        if self.registry is not None and reply.signatures is None:
            raise MalformedReplyError("its blocks are not signed")
        brought = sum(member.size for member in self.members.values() if member.node == node)
        clients, parts = reply.clients.tolist(), split_rows(reply.points, reply.sizes)
        signed = [b""] * len(clients) if reply.signatures is None else pieces(reply.signatures)
        for client, part, signature in zip(clients, parts, signed, strict=True):
            points = brought + len(part)
            if len(part) > MOST_BLOCK:
                why = f"its block has {len(part)} points, at most {MOST_BLOCK} are taken"
            elif points > MOST_POINTS:
                why = f"its SuperNode's clients bring {points} points, at most {MOST_POINTS}"
            elif wrong := ids.invalid_points(part):
                why = f"its point {wrong[0]} is not in the group"
            else:
                self.members[client] = Member(node, BLINDED, part, len(part), signature)
                brought = points
                continue
            self._leave_out(client, why)

    def take_answers(self, request: ids.EvaluateRequest, config: Mapping[str, object]) -> None:
        clients, holders = self._at_a_time(), tuple(request.holders.tolist())
        known = {"n": len(request.points), "b": len(clients) if self.registry else 0}
        answer = ids.EvaluateReply.from_config(config, epoch=request.epoch, **known)
        key, signature, proofs, party = b"", b"", [b""] * len(clients), 0
        if self.registry is not None:
            party = self.party[holders[0]]
            if answer.key is None or answer.signature is None or answer.proofs is None:
                raise MalformedReplyError(f"party {party}: its answers are not proved")
            key, signature = answer.key.tobytes(), answer.signature.tobytes()
            parts = ids.key_parts(self._run_id, request.epoch, key)
            if not self.registry.verify(party, signature, ids.OF_KEY, *parts):
                raise MalformedReplyError(f"party {party}: the key of its share is not signed")
            proofs = pieces(answer.proofs)
        answers = split_rows(answer.points, [self.members[client].size for client in clients])
        for client, part, proof in zip(clients, answers, proofs, strict=True):
            context = ids.proof_context(self._run_id, self.epoch, party, client)
            claim = Claim(key, part, proof, context)
            self.members[client].claims[holders] = claim, signature
        if set(self.holders) == set(chain.from_iterable(self.members[clients[0]].claims)):
            self._add_up([self.members[client] for client in clients])

    def _add_up(self, blocks: list[Member]) -> None:
        """Add the key-holders' answers up, or keep them with their proofs; replace wrong ones."""
        wrong, sums = set[Holders](), list[Bytes2D]()
        for block in blocks:
            claims = {who: claim for who, (claim, _) in block.claims.items()}
            if self.registry is not None:
                wrong.update(ids.failing(block.points, claims))
                continue
            # Checking the sum costs a fraction of checking every answer. What it misses, parts
            # outside the group that cancel, does no harm.
            total = ids.add([claim.outputs for claim in claims.values()])
            if total is None or ids.invalid_points(total):
                spoilt = {who for who, one in claims.items() if ids.invalid_points(one.outputs)}
                wrong |= spoilt or set(claims)
            else:
                sums.append(total)
        if wrong:
            for member in self.members.values():
                member.claims = {who: c for who, c in member.claims.items() if who not in wrong}
            proved = "a wrong proof of its answers as key-holder"
            why = "its answer is not in the group" if self.registry is None else proved
            self._lose_holders(list(chain(*wrong)), why)
            return
        for place, block in enumerate(blocks):
            block.stage = EVALUATED
            if sums:
                block.points, block.claims = sums[place], {}

    # Key-holders

    def _lose_holders(self, holders: list[int], reason: str) -> None:
        self.dropped |= set(holders)
        self.blamed += [(holder, reason) for holder in holders]
        self.holders = [holder for holder in self.holders if holder not in self.dropped]
        if self.at(EVALUATED, UNITED):
            self._restart()
        else:
            self.holders += self.choose(len(holders))

    def choose(self, count: int) -> list[int]:
        """Choose further key-holders; where answers are proved, the next parties of the draw."""
        used, blinded = self.dropped.union(self.holders), self.at(BLINDED)
        if self.registry is None:
            chosen = self._draw_holders([one for one in blinded if one not in used], count)
            enough = min(FEWEST_HOLDERS, len(self.members))
        else:
            parties = {self.party[client] for client in used}
            first = {self.party[client]: client for client in reversed(blinded)}
            left = [one for one in self.draw[: ids.MOST_HOLDERS] if one not in parties]
            chosen, enough = [first[one] for one in left if one in first][:count], KEY_HOLDERS
        if (found := len(self.holders) + len(chosen)) < enough:
            raise AlignmentError(f"{found} clients are left to hold keys, at least {enough} must")
        return chosen

    def _draw_holders(self, free: list[int], count: int) -> list[int]:
        draw, taken = secrets.SystemRandom(), set(self._by_node(self.holders))
        by_node = [*self._by_node(free).items()]
        draw.shuffle(by_node)  # by SuperNode: hosting more clients is not likelier
        by_node.sort(key=lambda one: one[0] in taken)
        turns = zip_longest(*(draw.sample(local, len(local)) for _, local in by_node))
        return [client for turn in turns for client in turn if client is not None][:count]

    # The union

    def waits(self, excluded: Collection[int] = ()) -> bool:
        """Record which clients are in no sum any more; return whether others wait for the union."""
        self._excluded = set(excluded)
        return not self._excluded.issuperset(self.at(EVALUATED))

    @property
    def uniting(self) -> list[int]:
        # All aligned clients take part in the sum, not only new ones: what new ones hold must not
        # show apart from the rest more than it has to.
        return sorted(set(self.at(EVALUATED, UNITED)) - self._absent - self._excluded)

    def _cells(self) -> int:
        local = self.uniting
        points = sum(self.members[client].size for client in local)
        share = FIRST_SHARE if len(self._by_node(local)) > 1 else 1
        return ids.cells_for(points * 2**self._doublings // share)

    def union_requests(self) -> dict[int, ids.UnionRequest]:
        requests, cells = {}, self._cells()
        for node, clients in self._by_node(self.uniting).items():
            waiting = [client for client in clients if self.members[client].stage == EVALUATED]
            blocks = [self.members[client] for client in waiting]
            sizes = np.array([block.size for block in blocks], np.int64)
            answers, proved = [[block.points for block in blocks]], dict[str, NDArray[Any]]()
            if self.registry is not None:
                holders = sorted(blocks[0].claims) if blocks else []
                rows = [[block.claims[holder] for block in blocks] for holder in holders]
                answers = [[claim.outputs for claim, _ in row] for row in rows]
                proofs = [claim.proof for row in rows for claim, _ in row]
                proved = {
                    "holders": np.array([self.party[who] for (who,) in holders], np.int64),
                    "keys": rows_of([row[0][0].public for row in rows], -1, ids.POINT),
                    "signatures": rows_of([row[0][1] for row in rows], -1, SIGNATURE_BYTES),
                    "proofs": rows_of(proofs, len(holders), len(waiting), ids.PROOF),
                }
            points = [np.concatenate([NOTHING, *own]) for own in answers]
            requests[node] = ids.UnionRequest(
                self.epoch,
                np.array(waiting, np.int64),
                sizes,
                np.array(points, np.uint8).reshape(len(points), sum(sizes), ids.POINT),
                cells,
                **proved,
            )
        return requests

    def take_union(self, total: ids.Words, contributors: Iterable[int]) -> bool:
        """Read the sum of the tables and append newly shared tokens to the order."""
        # total [3 · cells]
        if (union := ids.peel(total)) is None:
            if self._doublings == MAX_DOUBLINGS:
                self.union_failed("the sum of tables cannot be read: a client sent a wrong one")
                return False
            doublings = self._doublings + 1
            if self.registry is not None:
                self._restart()  # a client gives its table once
            self._doublings = doublings
            return False
        present = set(contributors)
        for client in sorted(set(self.uniting).intersection(self.at(EVALUATED))):
            member = self.members[client]
            member.stage, member.points, member.claims = UNITED, NOTHING, {}
            if client not in present:
                self._leave_out(client, NO_PART)
        self.order = ids.order_tokens(self.order, *union, self._least_holders)
        self._doublings = self._failed = 0
        self._absent.clear()
        return True

    def union_failed(self, why: str, absent: Collection[int] = ()) -> None:
        """Try again without absent clients; without any, leave out all that wait."""
        error = AlignmentError(f"no clients could be aligned: {why}")
        if self.registry is not None:
            # Where clients do not trust the server, a client gives its table once in an alignment:
            # two sums of which one lacks it would show what it holds.
            self._failed += 1
            if not absent or self._failed > MOST_FAILED:
                raise error
            for client in absent:
                self._leave_out(client, NO_PART)
            self._restart()
            return
        self._absent |= set(absent)
        waiting = set(self.at(EVALUATED)) - self._excluded
        for client in sorted(waiting & self._absent if absent else waiting):
            self._leave_out(client, NO_PART if absent else UNREADABLE)
        if not self.waits(self._excluded):
            self._doublings = 0
            self._absent.clear()
            if not self.at(UNITED):
                raise error

    def publications(self) -> dict[int, ids.PublishedTokens]:
        by_node = self._by_node(self.at(UNITED))
        if not self.plain:
            return dict.fromkeys(by_node, ids.PublishedTokens(self.epoch, self.order))
        # A client counts once for a token, however often it sends it
        each = [np.unique(block.points, axis=0) for block in self.members.values()]
        every = np.concatenate([np.zeros((0, ids.TOKEN), np.uint8), *each])
        tokens, counts = np.unique(every, axis=0, return_counts=True)
        shared, result = tokens[counts >= LEAST_HOLDERS], dict[int, ids.PublishedTokens]()
        for node, clients in by_node.items():
            own = {token for client in clients for token in pieces(self.members[client].points)}
            is_own = np.array([token in own for token in pieces(shared)], bool)
            # Zeros in the place of others' tokens, whose identities a client could try out
            result[node] = ids.PublishedTokens(ids.PLAIN_EPOCH, shared * is_own[:, None])
        return result
