"""The clients' half of the alignment by blinded identities, for all clients of one SuperNode.

Stages, in the order in which ``align_server`` asks for them: *blind* the identities; *evaluate* all
blinded points, if a key-holder is among the clients; take the answers and add up the table of
tokens (*union*); look up the slots in the *published* order. A repeated stage gives the same
result, except for the random points that pad a block.

Clients of one SuperNode share a process, and so their names of identities. Each identity is blinded
once, in the block of one client: all identities are dealt evenly among the clients, whichever holds
them, and all blocks have one size. So the server sees how many identities a SuperNode has a client,
not how many a client has.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    TOKEN,
    Bytes2D,
    Claim,
    Words,
    failing,
    prove,
    public_of,
)
from flower_graph.secure.channel import framed, pieces, rows_of, spread
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, TrustSettings
from flower_graph.secure.ring import CHECKS
from flower_graph.storage.checkpoint import read_state, write_state
from flower_graph.storage.reading import reading
from flower_graph.wire.arrays import Config, IntArray
from flower_graph.wire.codec import Message, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

# Slots and pads ---------------------------------------------------------------------------------

# The slots of a SuperNode's clients, and the pads that hide even the sum of a slot.
#
# A slot is the place of one identity in the vectors that clients add up. All holders of a slot
# share a secret key of it that nobody else knows, and derive from it, in every round, the same
# *pad*. Holders add the pad to what they send, so that the sum over *c* of them holds the pad *c*
# times: the server adds up without seeing even the sum, and holders take the pad out again.
#
# All clients of a run, holders or not, also have one *group key* in common. Its stream, added by
# every client everywhere, hides from the server which slots had how many holders in a round;
# without it, a sum with one client fewer would reveal which slots that client holds.
#
# With *C* contributors, *c* of them holders, a holder sends ``(x + pad) · 2^g + group`` and any
# other client ``group``; the sum is ``(Σx + c · pad) · 2^g + C · group`` modulo 2^64. ``C · group``
# has as many zeros at its end as *C* has, and hides all that stands above them: so ``2^g >= C``
# leaves the server nothing.

DOMAIN = b"flower-graph/pad/2/"


@dataclass(frozen=True)
class SlotTable:
    """The slots that the clients of one SuperNode hold."""

    num_slots: int  # How many there are over all clients
    # [n_c] slot of each of a client's nodes, -1 for a node that no other client holds
    by_client: Mapping[int, NDArray[np.int64]]
    held: NDArray[np.int64]  # [s] distinct slots of these clients, ascending
    # [s, 32] their secret keys; [0, 32] in the forms of alignment that have none
    keys: Bytes2D = field(repr=False)
    # What all clients of the run have in common; empty in the forms that have none
    group_key: bytes = field(repr=False)
    # Pads that were made last: a round's are put on, and taken off again at the next message.
    _made: dict[bytes, tuple[tuple[object, ...], Words]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def pads(self, run_id: bytes, server_round: int, width: int) -> NDArray[np.uint64]:
        """Return the pads of one round, ``[s, width]``; ``run_id`` also names the sum."""
        if len(self.keys) != self.held.size:
            raise ValueError("slots aligned in the clear have no keys, and so no pads")

        def make() -> bytes:
            base, pads = hashlib.shake_128(_context(run_id, b"slot", server_round, width)), []
            for key in pieces(self.keys):
                stream = base.copy()
                stream.update(key)
                pads.append(stream.digest(8 * width))
            return b"".join(pads)

        return self._once(b"slot", (run_id, server_round, width), make).reshape(-1, width)

    def group_pad(self, run_id: bytes, server_round: int, length: int) -> NDArray[np.uint64]:
        """Return ``[length]`` numbers of one round that all clients have in common."""
        return self._common(b"group", run_id, server_round, length)

    def check(self, run_id: bytes, server_round: int, length: int) -> Words:
        """Return the subsets of a sum's checks, which show changes without the group key."""
        return self._common(b"check", run_id, server_round, length)

    def _common(self, kind: bytes, run_id: bytes, server_round: int, length: int) -> Words:
        if not self.group_key:
            raise ValueError("clients aligned in the clear have no common key, and so no pad")

        def make() -> bytes:
            context = _context(run_id, kind, server_round, length)
            return hashlib.shake_128(context + self.group_key).digest(8 * length)

        return self._once(kind, (run_id, server_round, length), make)

    def check_pads(
        self, run_id: bytes, server_round: int, clients: Iterable[int]
    ) -> NDArray[np.uint64]:
        """Return, for some clients, the sum of the pads that each puts on its checks."""
        # Each has its own, as a multiple of one would leave lowest bits in the clear: those of
        # what is checked, which slots' pads are in, are not zeros.
        base = hashlib.shake_128(_context(run_id, b"member", server_round, CHECKS))
        base.update(self.group_key)
        total = np.zeros(CHECKS, np.uint64)
        for client in clients:
            stream = base.copy()
            stream.update(int(client).to_bytes(8, "big"))
            total += np.frombuffer(stream.digest(8 * CHECKS), "<u8")
        return total

    def _once(self, kind: bytes, what: tuple[object, ...], make: Callable[[], bytes]) -> Words:
        if self._made.get(kind, (None,))[0] != what:
            self._made[kind] = what, np.frombuffer(make(), "<u8")
        return self._made[kind][1]


def slot_table(order: Bytes2D, names: Mapping[int, Bytes2D], group_key: bytes = b"") -> SlotTable:
    """Look up the slots of a SuperNode's clients by the names of their identities.

    Without a group key, where identities were aligned in the clear, the table has no keys.
    """
    # order [s, 12], names [n_c, 44]: tokens and keys
    slot_of = {token: slot for slot, token in enumerate(pieces(order))}
    by_client = {
        client: np.array([slot_of.get(token, -1) for token in pieces(rows[:, :TOKEN])], np.int64)
        for client, rows in names.items()
    }
    slots, rows = [np.zeros(0, np.int64)], [np.zeros((0, ids.NAME), np.uint8)]
    held, first = np.unique(np.concatenate([*slots, *by_client.values()]), return_index=True)
    first, held = first[held >= 0], held[held >= 0]
    keys = np.concatenate([*rows, *names.values()])[first if group_key else first[:0], TOKEN:]
    return SlotTable(len(order), by_client, held, keys, group_key)


def _context(run_id: bytes, purpose: bytes, server_round: int, numbers: int) -> bytes:
    """Return a stream's context; the key that follows is always 32 bytes long."""
    # How long it is goes in: of two lengths the shorter would be the beginning of the other.
    ends = server_round.to_bytes(8, "big") + numbers.to_bytes(8, "big")
    return DOMAIN + framed(run_id, purpose) + ends


# Attributes that a client's state keeps
KEPT = (
    "plain",
    "_secrets",
    "_epoch",
    "_dealt",
    "_sizes",
    "_blocks",
    "_answered",
    "_named",
    "_names",
    "order",
)


class AlignmentClient:
    """Aligns the identities of the clients that one SuperNode hosts.

    Parameters
    ----------
    run_id : bytes
        The run of the alignment.
    identities : mapping of int to iterable
        The identities of each client.
    trust : TrustSettings, optional
        The party's key, the registry, the most points of a client that it evaluates, its journal,
        if the server is not trusted: then every answer of others is checked.
    plain : bool
        Whether identities are aligned in the clear.
    """

    # After *union* the caller adds ``sketch`` to the secure sum; after *publish* there are
    # ``slots``.

    def __init__(
        self,
        run_id: bytes,
        identities: Mapping[int, Iterable[object]],
        trust: TrustSettings | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self._run_id, self._trust, self.plain = run_id, trust, plain
        # The server adds the answers up, unless they are proved
        self._sizes_known = {"h": 1} if trust is None else {}
        self._draw: list[int] = []  # parties in the order in which they are to hold keys
        self._declared: dict[int, int] = {}  # points of each client of the epoch
        self._identities = {
            int(client): ids.canonical(given, f"client {client}")
            for client, given in identities.items()
        }
        kinds = {texts[0][:1]: client for client, texts in self._identities.items() if texts}
        if len(kinds) > 1:
            a, b = kinds.values()
            raise ValueError(f"clients {a} and {b} have identities of different types")
        # From these a client's blinds and its share of the key follow.
        self._secrets = {client: os.urandom(ids.KEY) for client in self._identities}
        several = chain([ids.GROUP_IDENTITY], *self._identities.values())
        self._distinct = list(dict.fromkeys(several))
        numbers = {identity: number for number, identity in enumerate(self._distinct)}
        self._numbers = {  # of each client's identities among these
            client: np.array([numbers[one] for one in own], np.int64)
            for client, own in self._identities.items()
        }
        self._start(0)

    def _start(self, epoch: int) -> None:
        self._epoch, n = epoch, len(self._distinct)
        self._table: SlotTable | None = None
        # Which identities each client's block has, and its size
        self._dealt, self._sizes = dict[int, list[int]](), dict[int, int]()
        self._blocks = dict[int, ids.Bytes2D]()  # that were sent, where answers are proved
        self._answered = dict[int, None]()  # clients whose blocks are back
        # Which identities have a name, and their names: token and key
        self._named, self._names = np.zeros(n, bool), np.zeros((n, ids.NAME), np.uint8)
        self.order = np.zeros((0, ids.TOKEN), np.uint8)

    def answer(self, config: Mapping[str, object]) -> Config:
        stages: dict[object, tuple[type[Message], Callable[[Any], object]]] = {
            ids.PUBLISH: (ids.PublishedTokens, self.publish)
        }
        if self.plain:
            stages[ids.IDENTITIES] = ids.PlainRequest, self.show
        else:
            stages[ids.BLIND] = ids.BlindRequest, self.blind
            stages[ids.EVALUATE] = ids.EvaluateRequest, self.evaluate
            stages[ids.UNION] = ids.UnionRequest, self.finish
        stage = config.get(ALIGN_STAGE)
        if stage not in stages:
            raise RefusedError(f"{ALIGN_STAGE} {brief(stage)} is unknown to this alignment")
        kind, method = stages[stage]
        reply = method(kind.from_config(config, **self._sizes_known))
        return reply.to_config() if isinstance(reply, Message) else {}

    def show(self, request: ids.PlainRequest) -> ids.PlainReply:
        self._known(request.clients)
        self._enter(ids.PLAIN_EPOCH)
        tokens = rows_of(map(ids.plain_token, self._distinct), -1, ids.TOKEN)
        self._names[:, : ids.TOKEN], self._named[:] = tokens, True
        self._answered = dict.fromkeys(self._identities)
        numbers = [self._numbers[client] for client in request.clients.tolist()]
        sizes = np.array([own.size for own in numbers], np.int64)
        return ids.PlainReply(request.clients, sizes, tokens[np.concatenate(numbers)])

    @property
    def points(self) -> dict[int, int]:
        each = -(-len(self._distinct) // max(1, len(self._identities)))
        return dict.fromkeys(self._identities, ids.padded_size(each))

    def begin(self, seed: bytes, parties: Iterable[int], declared: Mapping[int, int]) -> None:
        self._draw, self._declared = ids.drawn(seed, parties), dict(declared)

    def blind(self, request: ids.BlindRequest) -> ids.BlindReply:
        """Blind the clients' identities; a party also signs each block, and keeps it."""
        self._known(request.clients)
        self._enter(request.epoch)
        clients, epoch = request.clients.tolist(), request.epoch
        if fresh := [client for client in clients if client not in self._dealt]:
            # The identities of new clients that no block of this epoch has yet are dealt among them
            own = chain.from_iterable(self._numbers[client].tolist() for client in fresh)
            needed = sorted({0, *own}.difference(*self._dealt.values()))
            size = ids.padded_size(-(-len(needed) // len(fresh)))
            for at, client in enumerate(fresh):
                self._dealt[client], self._sizes[client] = needed[at :: len(fresh)], size
        blocks, signatures = list[ids.Bytes2D](), None
        for client in clients:
            dealt = self._dealt[client]
            named = [self._distinct[number] for number in dealt]
            hashed = spread(partial(ids.hash_to_group, self._run_id), named)
            points = dict(zip(dealt, hashed, strict=True))
            blocks.append(ids.blind(points, self._secrets[client], epoch, self._sizes[client]))
        if self._trust is not None:  # a repeated request gets the same block
            pairs = zip(clients, blocks, strict=True)
            blocks = [self._blocks.setdefault(client, block) for client, block in pairs]
            sign, parts = self._trust.identity.sign, partial(ids.block_parts, self._run_id, epoch)
            signed = [sign(ids.OF_BLOCK, *parts(c, self._blocks[c])) for c in clients]
            signatures = rows_of(signed, -1, SIGNATURE_BYTES)
        sizes = np.array([self._sizes[client] for client in clients], np.int64)
        joined = np.concatenate([np.zeros((0, ids.POINT), np.uint8), *blocks])
        return ids.BlindReply(epoch, request.clients, sizes, joined, signatures)

    def evaluate(self, request: ids.EvaluateRequest) -> ids.EvaluateReply:
        """Multiply points by the share of the key; a party proves it, of signed blocks alone."""
        self._enter(request.epoch)
        if self._trust is not None:
            return self._prove(request, self._trust)
        self._known(request.holders)
        if not request.holders.size:
            raise RefusedError("asked for a share of the key of no client")
        secrets = [self._secrets[client] for client in request.holders.tolist()]
        share = ids.key_share(secrets, request.epoch)
        return ids.EvaluateReply(request.epoch, ids.multiply(request.points, share))

    def _prove(self, request: ids.EvaluateRequest, trust: TrustSettings) -> ids.EvaluateReply:
        own, epoch = trust.identity.party, request.epoch
        if own not in self._allowed():
            raise RefusedError(f"party {own} is not among the key-holders that the seed draws")
        sizes, parties, signatures = request.sizes, request.parties, request.signatures
        if request.clients is None or sizes is None or parties is None or signatures is None:
            raise RefusedError("points are to be multiplied that no party has signed")
        clients, blocks = request.clients.tolist(), split_rows(request.points, sizes)
        signed = zip(clients, parties.tolist(), blocks, pieces(signatures), strict=True)
        for client, party, block, signature in signed:
            parts = ids.block_parts(self._run_id, epoch, client, block)
            granted = trust.registry.parties.get(party)
            if party not in self._draw or granted is None or not granted.may_host([client]):
                raise RefusedError(f"party {party} may not speak for client {client}")
            if not trust.registry.verify(party, signature, ids.OF_BLOCK, *parts):
                raise RefusedError(f"the block of client {client} is not signed by party {party}")
            most = min(trust.block_cap, self._declared.get(client, 0))
            if not 0 < len(block) <= most:
                raise RefusedError(f"client {client}: {len(block)} points, it may have {most}")
        # On the disk before answers leave: a server that rolls our state back gets no second block.
        Journal(trust.journal).serve(epoch, clients, trust.runs, trust.run)
        key = ids.key_share(list(self._secrets.values()), epoch)
        public, answers = public_of(key), [ids.multiply(block, key) for block in blocks]
        proofs = [
            prove(key, public, block, answer, ids.proof_context(self._run_id, epoch, own, client))
            for client, block, answer in zip(clients, blocks, answers, strict=True)
        ]
        by_us = trust.identity.sign(ids.OF_KEY, self._run_id, b"%d" % epoch, public)
        return ids.EvaluateReply(
            epoch,
            np.concatenate(answers),
            rows_of(proofs, -1, ids.PROOF),
            rows_of([public], 1, ids.POINT),
            rows_of([by_us], 1, SIGNATURE_BYTES),
        )

    def _allowed(self) -> list[int]:
        if not self._draw:
            raise RefusedError("this alignment has no seed yet that key-holders are drawn by")
        return self._draw[: ids.KEY_HOLDERS + ids.MOST_SKIPPED]

    def unite(self, config: Mapping[str, object]) -> ids.UnionRequest:
        request = ids.UnionRequest.from_config(config, **self._sizes_known)
        self.finish(request)
        return request

    def finish(self, request: ids.UnionRequest) -> None:
        self._known(request.clients)
        self._enter(request.epoch)
        if self._trust is None:
            blocks = split_rows(request.points[0], request.sizes)
        else:
            blocks = self._proved(request, self._trust) if request.clients.size else []
        answers = list[tuple[int, int, bytes]]()
        for client, block in zip(request.clients.tolist(), blocks, strict=True):
            if len(block) != self._sizes.get(client):
                raise RefusedError(f"client {client}: {len(block)} answers for its block")
            own = pieces(block[: len(self._dealt[client])])
            answers += [(client, *one) for one in zip(self._dealt[client], own, strict=True)]

        def name(given: tuple[int, int, bytes]) -> bytes:
            client, number, answer = given
            point = ids.unblind(answer, self._secrets[client], request.epoch, number)
            return ids.name(self._run_id, self._distinct[number], point)

        numbers = np.array([number for _, number, _ in answers], np.int64)
        self._names[numbers] = rows_of(spread(name, answers), -1, ids.NAME)
        self._named[numbers] = True
        self._answered |= dict.fromkeys(request.clients.tolist())

    def _proved(self, request: ids.UnionRequest, trust: TrustSettings) -> list[ids.Bytes2D]:
        signatures, proofs, epoch = request.signatures, request.proofs, request.epoch
        if request.holders is None or request.keys is None or signatures is None or proofs is None:
            raise RefusedError("the key-holders' answers are not proved")
        holders, keys = request.holders.tolist(), pieces(request.keys)
        if len(set(holders)) != len(holders) or len(holders) < ids.KEY_HOLDERS:
            least = f"at least {ids.KEY_HOLDERS} must differ"
            raise RefusedError(f"key-holders {holders!s:.60}: {least}")
        allowed = self._allowed()
        for holder, key, signature in zip(holders, keys, pieces(signatures), strict=True):
            if holder not in allowed:
                raise RefusedError(f"key-holder {holder} is not among {allowed} of the draw")
            parts = self._run_id, b"%d" % epoch, key
            if not trust.registry.verify(holder, signature, ids.OF_KEY, *parts):
                raise RefusedError(f"the key of key-holder {holder} is not signed by it")
        result, context = [], (self._run_id, epoch)
        of_holders = [split_rows(points, request.sizes) for points in request.points]
        for number, client in enumerate(request.clients.tolist()):
            block = self._blocks.get(client)
            answers, own = [one[number] for one in of_holders], pieces(proofs[:, number])
            claims = {
                holder: Claim(key, answer, proof, ids.proof_context(*context, holder, client))
                for holder, key, answer, proof in zip(holders, keys, answers, own, strict=True)
            }
            if wrong := list(claims) if block is None else failing(block, claims):
                why = f"the answers of key-holder {wrong[0]} are not proved to be made with its key"
                raise RefusedError(f"client {client}: {why}")
            if (total := ids.add(answers)) is None:
                raise RefusedError(f"client {client}: the answers do not add up to points")
            result.append(total)
        return result

    def sketch(self, cells: int, clients: Iterable[int]) -> ids.Words:
        chosen = [int(client) for client in clients]
        if missing := sorted(set(chosen).difference(self.finished)):
            raise ValueError(f"clients {missing!s:.60} have no tokens yet")
        numbers = [np.zeros(0, np.int64), *(self._numbers[client] for client in chosen)]
        return ids.insert(self._names[np.concatenate(numbers), : ids.TOKEN], cells)

    @property
    def finished(self) -> list[int]:
        """Clients that have their tokens, and so can take part in the sum of tables."""
        answered = self._answered if self._named[0] else ()
        return sorted(client for client in answered if self._named[self._numbers[client]].all())

    def publish(self, message: ids.PublishedTokens) -> SlotTable:
        if message.epoch != self._epoch:
            raise StateLostError(f"slots of alignment {message.epoch}, here is {self._epoch}")
        is_same = np.array_equal(message.tokens[: len(self.order)], self.order)
        if not (is_same or self.plain):
            raise RefusedError("the published tokens change the order of existing slots")
        self.order, self._table = message.tokens, None
        return self.slots

    @property
    def slots(self) -> SlotTable:
        """The clients' published slots; clients without tokens have none."""
        if self._table is None:
            names = {client: self._names[self._numbers[client]] for client in self.finished}
            has_key = names and not self.plain
            group_key = self._names[0, ids.TOKEN :].tobytes() if has_key else b""
            self._table = slot_table(self.order, names, group_key)
        return self._table

    def to_bytes(self) -> bytes:
        kept = {name: getattr(self, name) for name in KEPT}
        return write_state(kept | {"digest": self._digest()})

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        run_id: bytes,
        identities: Mapping[int, Iterable[object]],
        trust: TrustSettings | None = None,
    ) -> Self:
        """Read the output of ``to_bytes``; ``StateLostError`` if it is of other identities."""
        with reading("the alignment's state", StateLostError):
            kept = read_state(data)
            host = cls(run_id, identities, trust, plain=kept["plain"])
            if list(kept["_secrets"]) != list(host._identities) or kept["digest"] != host._digest():
                raise StateLostError("the alignment's state is of another run or other identities")
            vars(host).update({name: kept[name] for name in KEPT})
        return host

    def _known(self, clients: IntArray) -> None:
        strange = [client for client in clients.tolist() if client not in self._identities]
        if strange:
            raise RefusedError(f"asked for clients {brief(strange)} that are not hosted here")

    def _enter(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise RefusedError(f"alignment {epoch} is over, this is {self._epoch}")
        if epoch > self._epoch:
            self._start(epoch)

    def _digest(self) -> bytes:
        whole = hashlib.sha256(self._run_id)
        for client, named in self._identities.items():
            whole.update(b"|%d|%d|" % (client, len(named)))
            whole.update(b"\0".join(named))
        return whole.digest()
