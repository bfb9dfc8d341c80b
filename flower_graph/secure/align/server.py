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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import KEY_HOLDERS, MOST_SKIPPED, Claim, failing
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


@dataclass
class Block:
    """A client's identities on their way into the union."""

    stage: int = PENDING
    points: ids.Bytes2D = field(default_factory=lambda: NOTHING)  # blinded, or the answers' sum
    size: int = 0
    signature: bytes = b""
    # By key-holder: what it claims, and the signature of its key
    claims: dict[int, tuple[Claim, bytes]] = field(default_factory=dict)


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
        self._node: dict[int, int] = {}  # of every client
        self._asked: dict[int, Request] = {}
        self._least_holders, self._registry, self._run_id = least_holders, registry, run_id
        self._draw: list[int] = []  # parties in the order in which they are to hold keys
        self._party: dict[int, int] = {}  # of every client
        self.epoch, self._failed = 1, 0  # unions in a row that failed
        self._blocks: dict[int, Block] = {}  # of every client
        self._holders: list[int] = []
        self._dropped: set[int] = set()  # clients that failed as key-holders
        # By key-holders that answered together: products of all that is blinded, in its order.
        self._answers: dict[tuple[int, ...], ids.Bytes2D] = {}
        self._doublings = 0
        self._absent: set[int] = set()  # clients that took no part in a union that failed
        self._excluded: set[int] = set()  # clients that are in no secure sum any more
        self.order = np.zeros((0, ids.TOKEN), np.uint8)

    def begin(self, seed: bytes, clients: Mapping[int, Sequence[int]], registry: Registry) -> None:
        if self._at(BLINDED, EVALUATED, UNITED):
            self._restart()  # other parties are to hold keys
        self._registry = registry
        self._failed, self._dropped, self._draw = 0, set(), ids.drawn(seed, clients)
        self._party = {client: party for party, local in clients.items() for client in local}

    def move(self, old: int, node: int) -> None:
        self._node = {client: node if at == old else at for client, at in self._node.items()}

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
        self._take(request, config)
        del self._asked[node]

    def _by_node(self, clients: Iterable[int]) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for client in clients:
            nodes.setdefault(self._node[client], []).append(client)
        return nodes

    def _at(self, *stages: int) -> list[int]:
        return [client for client, block in self._blocks.items() if block.stage in stages]

    @property
    def enrolled(self) -> set[int]:
        return set(self._node)

    def enroll(self, node: int, clients: Iterable[int]) -> None:
        for client in clients:
            if client not in self._node:
                if len(self._node) == ids.MAX_CLIENTS and not self.plain:
                    why = f"there are {ids.MAX_CLIENTS} clients already, no more can be aligned"
                    self.blamed.append((client, why))
                    continue
                self._blocks[client] = Block()
            self._node[client] = node

    def forget(self, clients: Iterable[int]) -> None:
        # If one held a share of the key, nobody's tokens can be compared with new ones.
        gone = set(clients)
        for client in gone & self._node.keys():
            del self._node[client], self._blocks[client]
        if gone & set(self._holders):
            self._restart()

    @property
    def is_behind(self) -> bool:
        """Whether clients are to be aligned, new ones, or all since a key-holder is gone."""
        return bool(self._at(PENDING))

    def waits(self, excluded: Collection[int] = ()) -> bool:
        """Record which clients are in no sum any more; return whether others wait for the union."""
        self._excluded = set(excluded)
        return not self._excluded.issuperset(self._at(EVALUATED))

    @property
    def uniting(self) -> list[int]:
        # All aligned clients take part in the sum, not only new ones: what new ones hold must not
        # show apart from the rest more than it has to.
        return sorted(set(self._at(EVALUATED, UNITED)) - self._absent - self._excluded)

    def union_requests(self) -> dict[int, ids.UnionRequest]:
        requests, cells = {}, self._cells()
        for node, clients in self._by_node(self.uniting).items():
            waiting = [client for client in clients if self._blocks[client].stage == EVALUATED]
            blocks = [self._blocks[client] for client in waiting]
            sizes = np.array([block.size for block in blocks], np.int64)
            message = self.epoch, np.array(waiting, np.int64), sizes
            if self._registry is None:
                points = np.concatenate([NOTHING, *(block.points for block in blocks)])[None]
                requests[node] = ids.UnionRequest(*message, points, cells)
                continue
            holders = sorted(blocks[0].claims) if blocks else []
            rows = [[block.claims[holder] for block in blocks] for holder in holders]
            answers = [np.concatenate([claim.outputs for claim, _ in row]) for row in rows]
            proofs = [claim.proof for row in rows for claim, _ in row]
            requests[node] = ids.UnionRequest(
                *message,
                np.array(answers, np.uint8).reshape(len(holders), sum(sizes), ids.POINT),
                cells,
                rows_of([row[0][0].public for row in rows], -1, ids.POINT),
                rows_of([row[0][1] for row in rows], -1, SIGNATURE_BYTES),
                rows_of(proofs, len(holders), len(waiting), ids.PROOF),
                holders=np.array(holders, np.int64),
            )
        return requests

    def take_union(self, total: ids.Words, contributors: Iterable[int]) -> bool:
        """Read the sum of the tables and append newly shared tokens to the order."""
        # total [3 · cells]
        if total.shape != (3 * self._cells(),):
            raise ValueError(f"a sum of shape {total.shape}, expected {3 * self._cells()} words")
        if (union := ids.peel(total)) is None:
            if self._doublings == MAX_DOUBLINGS:
                self.union_failed("the sum of tables cannot be read: a client sent a wrong one")
                return False
            doublings = self._doublings + 1
            if self._registry is not None:
                self._restart()  # a client gives its table once
            self._doublings = doublings
            return False
        present = set(contributors)
        for client in self.uniting:
            if (block := self._blocks[client]).stage == EVALUATED:
                block.stage, block.points = UNITED, NOTHING
                if client not in present:
                    self._leave_out(client, NO_PART)
        self.order = ids.order_tokens(self.order, *union, self._least_holders)
        self._doublings = self._failed = 0
        self._absent.clear()
        return True

    def union_failed(self, why: str, absent: Collection[int] = ()) -> None:
        """Try again without absent clients; without any, leave out all that wait."""
        error = AlignmentError(f"no clients could be aligned: {why}")
        if self._registry is not None:
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
        waiting = set(self._at(EVALUATED)) - self._excluded
        for client in sorted(waiting & self._absent if absent else waiting):
            self._leave_out(client, NO_PART if absent else UNREADABLE)
        if not self.waits(self._excluded):
            self._doublings = 0
            self._absent.clear()
            if not self._at(UNITED):
                raise error

    def publications(self) -> dict[int, ids.PublishedTokens]:
        by_node = self._by_node(self._at(UNITED))
        if not self.plain:
            return dict.fromkeys(by_node, ids.PublishedTokens(self.epoch, self.order))
        # A client counts once for a token, however often it sends it
        each = [np.unique(block.points, axis=0) for block in self._blocks.values()]
        every = np.concatenate([np.zeros((0, ids.TOKEN), np.uint8), *each])
        tokens, counts = np.unique(every, axis=0, return_counts=True)
        shared, result = tokens[counts >= LEAST_HOLDERS], dict[int, ids.PublishedTokens]()
        for node, clients in by_node.items():
            own = {token for client in clients for token in pieces(self._blocks[client].points)}
            is_own = np.array([token in own for token in pieces(shared)], bool)
            # Zeros in the place of others' tokens, whose identities a client could try out
            result[node] = ids.PublishedTokens(ids.PLAIN_EPOCH, shared * is_own[:, None])
        return result

    @property
    def aligned(self) -> list[int]:
        return sorted(self._at(UNITED))

    def _cells(self) -> int:
        local = self.uniting
        points = sum(self._blocks[client].size for client in local)
        share = FIRST_SHARE if len(self._by_node(local)) > 1 else 1
        return ids.cells_for(points * 2**self._doublings // share)

    def _leave_out(self, client: int, reason: str) -> None:
        self._node.pop(client, None)
        self._blocks.pop(client, None)
        self.blamed.append((client, reason))

    def _drop(self, unanswered: Mapping[int, Request]) -> None:
        lost: list[int] = []
        for node, request in unanswered.items():
            if not isinstance(request, ids.EvaluateRequest):
                for client in request.clients.tolist():
                    if client in self._blocks and self._blocks[client].stage == PENDING:
                        self._leave_out(client, "did not answer the alignment")
            else:
                # Nor is there hope for another key-holder on the same machine.
                self._dropped |= {client for client, at in self._node.items() if at == node}
                lost += request.holders.tolist()
        if self._at(BLINDED):  # the key is needed again, and clients left out since have shares
            lost += [holder for holder in self._holders if holder not in self._node]
        if lost:
            self._lose_holders(lost, "did not answer as key-holder")

    def _next_stage(self) -> Mapping[int, Request]:
        if pending := self._at(PENDING):
            each = {n: np.array(local, np.int64) for n, local in self._by_node(pending).items()}
            if self.plain:
                return {node: ids.PlainRequest(clients) for node, clients in each.items()}
            return {node: ids.BlindRequest(self.epoch, clients) for node, clients in each.items()}
        if not (clients := self._at_a_time()):
            return {}
        if not self._holders:
            self._holders = self._choose(KEY_HOLDERS)
        answered = set(chain.from_iterable(self._answers))
        waiting = [holder for holder in self._holders if holder not in answered]
        blocks, signed = [self._blocks[client] for client in clients], dict[str, NDArray[Any]]()
        if self._registry is not None:
            signed = {
                "clients": np.array(clients, np.int64),
                "parties": np.array([self._party[client] for client in clients], np.int64),
                "sizes": np.array([block.size for block in blocks], np.int64),
                "signatures": rows_of([one.signature for one in blocks], -1, SIGNATURE_BYTES),
            }
        points = np.concatenate([block.points for block in blocks])
        return {
            node: ids.EvaluateRequest(self.epoch, np.array(holders, np.int64), points, **signed)
            for node, holders in self._by_node(waiting).items()
        }

    def _take(self, request: Request, config: Mapping[str, object]) -> None:
        if isinstance(request, ids.PlainRequest):
            plain = ids.PlainReply.from_config(config, clients=request.clients)
            each = split_rows(plain.tokens, plain.sizes)
            for client, tokens in zip(plain.clients.tolist(), each, strict=True):
                self._blocks[client] = Block(UNITED, tokens)
            return
        if isinstance(request, ids.BlindRequest):
            expected = {"epoch": request.epoch, "clients": request.clients}
            blind = ids.BlindReply.from_config(config, **expected)
            if self._registry is not None and blind.signatures is None:
                raise MalformedReplyError("its blocks are not signed")
            self._take_blind(blind)
            return
        clients, sizes = request.clients, request.sizes
        known = {"n": len(request.points), "b": 0 if clients is None else clients.size}
        answer = ids.EvaluateReply.from_config(config, epoch=request.epoch, **known)
        holders = tuple(request.holders.tolist())
        if self._registry is not None:
            party, proofs = self._party[holders[0]], answer.proofs
            if answer.key is None or answer.signature is None or proofs is None:
                raise MalformedReplyError(f"party {party}: its answers are not proved")
            assert clients is not None and sizes is not None  # as it was asked
            key, signature = answer.key.tobytes(), answer.signature.tobytes()
            parts = self._run_id, b"%d" % request.epoch, key
            if not self._registry.verify(party, signature, ids.OF_KEY, *parts):
                raise MalformedReplyError(f"party {party}: the key of its share is not signed")
            answers = split_rows(answer.points, sizes)
            for client, part, proof in zip(clients.tolist(), answers, pieces(proofs), strict=True):
                context = ids.proof_context(self._run_id, self.epoch, party, client)
                claim = Claim(key, part, proof, context)
                self._blocks[client].claims[party] = claim, signature
        self._answers[holders] = answer.points
        if set(self._holders) == set(chain.from_iterable(self._answers)):
            self._add_up()

    def _take_blind(self, reply: ids.BlindReply) -> None:
        brought = Counter[int]()  # points of every SuperNode
        for client, block in self._blocks.items():
            brought[self._node[client]] += block.size
        clients, parts = reply.clients.tolist(), split_rows(reply.points, reply.sizes)
        signed = [b""] * len(clients) if reply.signatures is None else pieces(reply.signatures)
        for client, part, signature in zip(clients, parts, signed, strict=True):
            node = self._node[client]
            points = brought[node] + len(part)
            if len(part) > MOST_BLOCK:
                why = f"its block has {len(part)} points, at most {MOST_BLOCK} are taken"
                self._leave_out(client, why)
            elif points > MOST_POINTS:
                why = f"its SuperNode's clients bring {points} points, at most {MOST_POINTS}"
                self._leave_out(client, why)
            elif wrong := ids.invalid_points(part):
                self._leave_out(client, f"its point {wrong[0]} is not in the group")
            else:
                self._blocks[client] = Block(BLINDED, part, len(part), signature)
                brought[node] = points

    def _at_a_time(self) -> list[int]:
        waiting = self._at(BLINDED)
        totals = accumulate(self._blocks[client].size for client in waiting)
        fit = [c for c, total in zip(waiting, totals, strict=True) if total <= AT_A_TIME]
        return fit or waiting[:1]

    def _add_up(self) -> None:
        """Add the key-holders' answers up, or keep them with their proofs; replace wrong ones."""
        asked = [self._blocks[client] for client in self._at_a_time()]
        wrong, is_sound = list[tuple[int, ...]](), True
        if self._registry is None:
            why = "its answer is not in the group"
            # Checking the sum costs a fraction of checking every answer. What it misses, parts
            # outside the group that cancel, does no harm.
            total = ids.add(list(self._answers.values()))
            if total is None or ids.invalid_points(total):
                is_sound = False
                wrong = [who for who, points in self._answers.items() if ids.invalid_points(points)]
            else:
                parts = split_rows(total, [block.size for block in asked])
                for block, part in zip(asked, parts, strict=True):
                    block.points = part
        else:
            why, failed = "a wrong proof of its answers as key-holder", set[int]()
            for block in asked:
                claims = {party: claim for party, (claim, _) in block.claims.items()}
                failed.update(failing(block.points, claims))
            is_sound = not failed
            wrong = [who for who in self._answers if self._party[who[0]] in failed]
            for block in self._blocks.values():
                for party in failed & block.claims.keys():
                    del block.claims[party]
        if not is_sound:
            for holders in wrong:
                del self._answers[holders]
            self._lose_holders(list(chain(*wrong)), why)
            return
        for block in asked:
            block.stage = EVALUATED
        self._answers.clear()

    def _lose_holders(self, holders: list[int], reason: str) -> None:
        self._dropped |= set(holders)
        self.blamed += [(holder, reason) for holder in holders]
        self._holders = [holder for holder in self._holders if holder not in self._dropped]
        if self._at(EVALUATED, UNITED):
            self._restart()
        else:
            self._holders += self._choose(len(holders))

    def _restart(self) -> None:
        self.epoch += 1
        self._blocks = {client: Block() for client in self._node}
        self._answers.clear()
        self._absent.clear()
        self._holders, self._doublings, self.order = [], 0, self.order[:0]

    def _choose(self, count: int) -> list[int]:
        """Choose further key-holders; where answers are proved, the next parties of the draw."""
        if self._registry is None:
            used = self._dropped.union(self._holders)
            free = [client for client in self._at(BLINDED) if client not in used]
            chosen = self._draw_holders(free, count)
            enough, few = min(FEWEST_HOLDERS, len(self._node)), "clients are left to hold keys"
        elif not self._draw:
            raise AlignmentError("there is no seed yet that key-holders are drawn by")
        else:
            used = {self._party[client] for client in (*self._holders, *self._dropped)}
            first = {self._party[client]: client for client in reversed(self._at(BLINDED))}
            parties = self._draw[: KEY_HOLDERS + MOST_SKIPPED]
            free = [first[one] for one in parties if one in first and one not in used]
            chosen, enough, few = free[:count], KEY_HOLDERS, "of the draw's first parties are there"
        if (left := len(self._holders) + len(chosen)) < enough:
            raise AlignmentError(f"{left} {few}, at least {enough} must")
        return chosen

    def _draw_holders(self, free: list[int], count: int) -> list[int]:
        draw, taken = secrets.SystemRandom(), {self._node[holder] for holder in self._holders}
        by_node = [*self._by_node(free).items()]
        draw.shuffle(by_node)  # by SuperNode: hosting more clients is not likelier
        by_node.sort(key=lambda one: one[0] in taken)
        turns = zip_longest(*(draw.sample(local, len(local)) for _, local in by_node))
        return [client for turn in turns for client in turn if client is not None][:count]
