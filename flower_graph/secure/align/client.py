"""The clients' half of the alignment by blinded identities, for all clients of one SuperNode.

Stages, in the order in which ``server.py`` asks for them: *blind* the identities; *evaluate* all
blinded points, if a key-holder is among the clients; take the answers and add up the table of
tokens (*union*); look up the slots in the *published* order. A repeated stage gives the same again.

Clients of one SuperNode share a process, and so their names of identities. Each identity is blinded
once, in the block of one client: all identities are dealt evenly among the clients, whichever holds
them, and all blocks have one size. So the server sees how many identities a SuperNode has a client,
not how many a client has.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import TOKEN, Bytes2D, Words
from flower_graph.secure.channel import framed, pieces, rows_of, spread
from flower_graph.secure.parties.registry import SIGNATURE_BYTES, TrustSettings
from flower_graph.secure.ring import CHECKS, SumPad
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

DOMAIN = b"flower-graph/pad/3/"


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

    def pads(self, run_id: bytes, server_round: int, width: int) -> Words:
        """Return the pads of one round, ``[s, width]``; ``run_id`` also names the sum."""
        return self._streams(b"slot", run_id, server_round, width, pieces(self.keys))

    def common_pad(
        self, run_id: bytes, server_round: int, length: int, *, checked: bool = False
    ) -> SumPad:
        """Return the pad of one round that all clients have in common, with checks or without."""
        of, key = (run_id, server_round), [self.group_key]
        words = self._streams(b"group", *of, length + CHECKS * checked, key).ravel()
        if not checked:
            return SumPad(words, None)
        return SumPad(words, self._streams(b"check", *of, length, key).ravel())

    def _streams(
        self, purpose: bytes, run_id: bytes, server_round: int, numbers: int, keys: list[bytes]
    ) -> Words:
        """Return a stream of each key, ``[k, numbers]``; all keys of a purpose are equally long."""
        if not self.group_key:
            raise ValueError("slots aligned in the clear have no keys, and so no pads")
        what = run_id, server_round, numbers, keys
        if self._made.get(purpose, (None,))[0] != what:
            # How long it is goes in: of two lengths the shorter would be the beginning of the other
            ends = server_round.to_bytes(8, "big") + numbers.to_bytes(8, "big")
            base, streams = hashlib.shake_128(DOMAIN + framed(run_id, purpose) + ends), []
            for key in keys:
                stream = base.copy()
                stream.update(key)
                streams.append(stream.digest(8 * numbers))
            words = np.frombuffer(b"".join(streams), "<u8").reshape(len(keys), numbers)
            self._made[purpose] = what, words
        return self._made[purpose][1]


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


# Attributes that a client's state keeps
KEPT = ["plain", "digest", "order", "epoch", "_secrets", "_dealt", "_blocks", "_answered", "_names"]


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
        own = {int(c): ids.canonical(given, f"client {c}") for c, given in identities.items()}
        kinds = {texts[0][:1]: client for client, texts in own.items() if texts}
        if len(kinds) > 1:
            a, b = kinds.values()
            raise ValueError(f"clients {a} and {b} have identities of different types")
        # From these a client's blinds and its share of the key follow.
        self._secrets = {client: os.urandom(ids.KEY) for client in own}
        self._distinct = list(dict.fromkeys(chain([ids.GROUP_IDENTITY], *own.values())))
        number = {identity: place for place, identity in enumerate(self._distinct)}
        self._numbers = {  # of each client's identities among these
            client: np.array([number[one] for one in texts], np.int64)
            for client, texts in own.items()
        }
        self.digest = hashlib.sha256(framed(run_id, repr(own).encode())).digest()
        self._start(0)

    def _start(self, epoch: int) -> None:
        self.epoch = epoch
        self._table: SlotTable | None = None
        self._dealt = dict[int, list[int]]()  # numbers of the identities in each client's block
        self._blocks = dict[int, Bytes2D]()  # as they were sent
        self._answered = dict[int, None]()  # clients whose blocks are back
        # Token and key of each identity; zeros if there is no name yet
        self._names = np.zeros((len(self._distinct), ids.NAME), np.uint8)
        self.order = np.zeros((0, TOKEN), np.uint8)

    def _enter(self, epoch: int, clients: IntArray) -> None:
        strange = [client for client in clients.tolist() if client not in self._numbers]
        if strange:
            raise RefusedError(f"asked for clients {brief(strange)} that are not hosted here")
        if epoch < self.epoch:
            raise RefusedError(f"alignment {epoch} is over, this is {self.epoch}")
        if epoch > self.epoch:
            self._start(epoch)

    def begin(self, seed: bytes, parties: Iterable[int], declared: Mapping[int, int]) -> None:
        self._draw, self._declared = ids.drawn(seed, parties), dict(declared)

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
        self._enter(ids.PLAIN_EPOCH, request.clients)
        self._names[:, :TOKEN] = rows_of(map(ids.plain_token, self._distinct), -1, TOKEN)
        self._answered = dict.fromkeys(self._numbers)
        numbers = [self._numbers[client] for client in request.clients.tolist()]
        sizes = np.array([own.size for own in numbers], np.int64)
        return ids.PlainReply(request.clients, sizes, self._names[np.concatenate(numbers), :TOKEN])

    @property
    def points(self) -> dict[int, int]:
        each = -(-len(self._distinct) // max(1, len(self._numbers)))
        return dict.fromkeys(self._numbers, ids.padded_size(each))

    def blind(self, request: ids.BlindRequest) -> ids.BlindReply:
        """Blind the clients' identities; a party also signs each block."""
        self._enter(request.epoch, request.clients)
        clients, epoch, signatures = request.clients.tolist(), request.epoch, None
        if fresh := [client for client in clients if client not in self._dealt]:
            # The identities of new clients that no block of this epoch has yet are dealt among them
            own = chain.from_iterable(self._numbers[client].tolist() for client in fresh)
            needed = sorted({0, *own}.difference(*self._dealt.values()))
            size = ids.padded_size(-(-len(needed) // len(fresh)))
            for at, client in enumerate(fresh):
                dealt = self._dealt[client] = needed[at :: len(fresh)]
                names = [self._distinct[number] for number in dealt]
                hashed = spread(partial(ids.hash_to_group, self._run_id), names)
                points = dict(zip(dealt, hashed, strict=True))
                self._blocks[client] = ids.blind(points, self._secrets[client], epoch, size)
        blocks = [self._blocks[client] for client in clients]
        if self._trust is not None:
            sign, parts = self._trust.identity.sign, partial(ids.block_parts, self._run_id, epoch)
            signed = [sign(ids.OF_BLOCK, *parts(c, self._blocks[c])) for c in clients]
            signatures = rows_of(signed, -1, SIGNATURE_BYTES)
        sizes = np.array(list(map(len, blocks)), np.int64)
        joined = np.concatenate([np.zeros((0, ids.POINT), np.uint8), *blocks])
        return ids.BlindReply(epoch, request.clients, sizes, joined, signatures)

    def evaluate(self, request: ids.EvaluateRequest) -> ids.EvaluateReply:
        """Multiply points by the share of the key; a party proves it, of signed blocks alone."""
        if self._trust is not None:
            self._enter(request.epoch, request.holders[:0])
            return self._prove(request, self._trust)
        self._enter(request.epoch, request.holders)
        secrets = [self._secrets[client] for client in request.holders.tolist()]
        share = ids.key_share(secrets, request.epoch)
        return ids.EvaluateReply(request.epoch, ids.multiply(request.points, share))

    def _prove(self, request: ids.EvaluateRequest, trust: TrustSettings) -> ids.EvaluateReply:
        own, epoch = trust.identity.party, request.epoch
        if own not in self._draw[: ids.MOST_HOLDERS]:
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
        trust.journal.serve(epoch, clients)
        key = ids.key_share(list(self._secrets.values()), epoch)
        public, answers = ids.public_of(key), [ids.multiply(block, key) for block in blocks]
        context = partial(ids.proof_context, self._run_id, epoch, own)
        proofs = [
            ids.prove(key, public, block, answer, context(client))
            for client, block, answer in zip(clients, blocks, answers, strict=True)
        ]
        by_us = trust.identity.sign(ids.OF_KEY, *ids.key_parts(self._run_id, epoch, public))
        return ids.EvaluateReply(
            epoch,
            np.concatenate(answers),
            rows_of(proofs, -1, ids.PROOF),
            rows_of([public], 1, ids.POINT),
            rows_of([by_us], 1, SIGNATURE_BYTES),
        )

    def unite(self, config: Mapping[str, object]) -> ids.UnionRequest:
        request = ids.UnionRequest.from_config(config, **self._sizes_known)
        self.finish(request)
        return request

    def finish(self, request: ids.UnionRequest) -> None:
        self._enter(request.epoch, request.clients)
        for client, size in zip(request.clients.tolist(), request.sizes.tolist(), strict=True):
            if client not in self._blocks or size != len(self._blocks[client]):
                raise RefusedError(f"client {client}: {size} answers for its block")
        answers = [
            (client, number, point)
            for client, block in self._answers(request)
            for number, point in zip(self._dealt[client], pieces(block), strict=False)
        ]

        def name(given: tuple[int, int, bytes]) -> bytes:
            client, number, answer = given
            point = ids.unblind(answer, self._secrets[client], request.epoch, number)
            return ids.name(self._run_id, self._distinct[number], point)

        numbers = np.array([number for _, number, _ in answers], np.int64)
        self._names[numbers] = rows_of(spread(name, answers), -1, ids.NAME)
        self._answered |= dict.fromkeys(request.clients.tolist())

    def _answers(self, request: ids.UnionRequest) -> Iterator[tuple[int, Bytes2D]]:
        """Yield each client's points times the whole key, after a check of every proof."""
        clients, trust, epoch = request.clients.tolist(), self._trust, request.epoch
        of_holders = [split_rows(points, request.sizes) for points in request.points]
        if trust is None or not clients:
            yield from zip(clients, *of_holders, strict=True)
            return
        signatures, proofs = request.signatures, request.proofs
        if request.holders is None or request.keys is None or signatures is None or proofs is None:
            raise RefusedError("the key-holders' answers are not proved")
        holders, keys, drawn = request.holders.tolist(), pieces(request.keys), self._draw
        if len(set(holders)) != len(holders) or len(holders) < ids.KEY_HOLDERS:
            least = f"at least {ids.KEY_HOLDERS} must differ"
            raise RefusedError(f"key-holders {holders!s:.60}: {least}")
        for holder, key, signature in zip(holders, keys, pieces(signatures), strict=True):
            if holder not in drawn[: ids.MOST_HOLDERS]:
                raise RefusedError(f"key-holder {holder} is not among the first of the draw")
            if not trust.registry.verify(
                holder, signature, ids.OF_KEY, *ids.key_parts(self._run_id, epoch, key)
            ):
                raise RefusedError(f"the key of key-holder {holder} is not signed by it")
        for place, client in enumerate(clients):
            answers = [blocks[place] for blocks in of_holders]
            each = zip(holders, keys, answers, pieces(proofs[:, place]), strict=True)
            claims = {
                holder: ids.Claim(
                    key, answer, proof, ids.proof_context(self._run_id, epoch, holder, client)
                )
                for holder, key, answer, proof in each
            }
            if wrong := ids.failing(self._blocks[client], claims):
                why = f"the answers of key-holder {wrong[0]} are not proved to be made with its key"
                raise RefusedError(f"client {client}: {why}")
            total = ids.add(answers)
            assert total is not None  # all of them are points
            yield client, total

    def sketch(self, cells: int, clients: Iterable[int]) -> Words:
        chosen = [int(client) for client in clients]
        if missing := sorted(set(chosen).difference(self.finished)):
            raise ValueError(f"clients {missing!s:.60} have no tokens yet")
        numbers = [np.zeros(0, np.int64), *(self._numbers[client] for client in chosen)]
        return ids.insert(self._names[np.concatenate(numbers), :TOKEN], cells)

    @property
    def finished(self) -> list[int]:
        """Clients that have their tokens, and so can take part in the sum of tables."""
        named: NDArray[np.bool_] = np.any(self._names, axis=1)
        answered = self._answered if named[0] else ()
        return sorted(client for client in answered if named[self._numbers[client]].all())

    def publish(self, message: ids.PublishedTokens) -> SlotTable:
        if message.epoch != self.epoch:
            raise StateLostError(f"slots of alignment {message.epoch}, here is {self.epoch}")
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
            group_key = self._names[0, TOKEN:].tobytes() if has_key else b""
            self._table = slot_table(self.order, names, group_key)
        return self._table

    def to_bytes(self) -> bytes:
        return write_state({name: getattr(self, name) for name in KEPT})

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
            if kept["digest"] != host.digest:
                raise StateLostError("the alignment's state is of another run or other identities")
            vars(host).update({name: kept[name] for name in KEPT})
        return host
