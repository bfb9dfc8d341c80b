"""Common parts of the alignment by blinded identities: messages, names, their union, proofs.

Clients want a common name for an identity that reveals the identity to nobody else. A plain hash is
not enough: an attacker that can list the identities can hash them all. So the name of an identity
is ``F(id) = SHA-512(id, k · H(id))``, where ``k`` is the sum of the secrets of a few clients, the
*key-holders*. A client sends ``r · H(id)`` for a random ``r``, which is a uniformly random point;
every key-holder multiplies it by its own secret; the client divides the sum by ``r``. This is
2HashDH, the oblivious pseudo-random function of RFC 9497 in its unverified mode, with the key split
by addition: it takes all key-holders together to try out identities.

Group operations are libsodium's, the hashes are ``hashlib``'s. Points and scalars are 32 bytes.
Rows of bytes (points, tokens) of several clients are concatenated. No other message uses these
messages' keys, so that they can travel with others in one exchange.

*Proofs.* Where clients do not trust the server, every step is signed or proved. *Parties* are
SuperNodes with a registered key (``parties/registry.py``).

- A party signs each block of points that its clients send. A key-holder evaluates only blocks that
  are signed by a party to which the client is granted, no larger than declared, and one for each
  client: so a party can try out identities only with blocks of its own, which are counted.
- Key-holders are the first ``KEY_HOLDERS`` parties in the order of the epoch's seed, to which all
  parties committed; or, for absent ones, the next among the first ``MOST_HOLDERS``. A server that
  names any party absent finds ``KEY_HOLDERS`` accomplices there, of a tenth that collude, once in
  120 runs.
- A key-holder signs the public key of its share and proves each client's answers (`prove`). Clients
  check key, place in the draw and proof of every key-holder, and add the answers up themselves.

*In the clear*, clients send a hash of each identity, which the server can try out. There are no
key-holders, no union to sum, and no slot keys: the server sees the sums of the slots.

*The union.* Every client writes its tokens into a table, an invertible Bloom lookup table; the
secure sum adds up the tables; the total gives the tokens of all clients, each with the number of
clients that have it, and no information on which client has which token. A token is added to one
cell in each of four parts of the table. A cell has three 64-bit words: a *marker* (1 in the lower
16 bits, a hash of the token above) and the token's two halves. If a cell holds one token only, *c*
times, the lower bits of the marker are *c*, dividing the halves by *c* gives the token, and the
hash confirms it. Removing that token from its other cells exposes the next tokens. All words are
sums modulo 2^64, so cells that overflow on the way are right again after they are emptied.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Annotated, TypeVar

import numpy as np
from nacl import bindings as sodium
from nacl.exceptions import RuntimeError as SodiumError
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.channel import framed, pieces, rows_of, spread
from flower_graph.secure.parties.registry import SIGNATURE_BYTES
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Block, Clients, Exact, Known, Message, Reading, Whole
from flower_graph.wire.keys import ALIGN_STAGE

Bytes2D = NDArray[np.uint8]
Words = NDArray[np.uint64]
T = TypeVar("T")  # what names key-holders

BLIND, EVALUATE, UNION, PUBLISH = "blind", "evaluate", "union", "publish"
IDENTITIES = "identities"  # the one stage of the alignment in the clear
PLAIN_EPOCH = 1
POINT, TOKEN = 32, 12  # bytes
PROOF = 3 * POINT  # bytes: two commitments and the response
# Key-holders, as one alone could try out identities; parties of the draw that may become one
KEY_HOLDERS, MOST_HOLDERS = 3, 5
OF_BLOCK, OF_KEY = b"alignment block", b"alignment key"  # what a signature is for
MIN_BLOCK = 16  # points of a client
KEY = 32  # bytes of a slot's secret
NAME = TOKEN + KEY
DOMAIN = b"flower-graph/alignment/1/"
# All clients also evaluate this word, which no identity can be: its key is common to the run
GROUP_IDENTITY = b"g:"
WORDS, PARTS = 3, 4
HALF = TOKEN // 2  # bytes: 48 bits, so that 2^14 equal halves add up to less than 2^64
MAX_CLIENTS = 1 << 14
COUNT_MASK = np.uint64(0xFFFF)
# With four parts a table can be read up to 0.77 tokens a cell (Goodrich and Mitzenmacher 2011);
# the further cells make small tables as sure: for 16 tokens it fails once in some 10,000 times.
CELLS_PER_TOKEN, FURTHER_CELLS = 1.45, 128
# Tables of that size are read in 11 passes at most (50,000 tokens). A crafted one, in which each
# token lays bare one other, is given up instead of being followed to its end.
MAX_PASSES = 24
EPOCH = Whole("align-epoch", "number of the alignment", least=1, most=(1 << 32) - 1)
CLIENTS = Clients("align-clients", "clients, all hosted there", shape="c", may_be_none=True)
POINTS = Block("align-points", "blinded identities, or the products", shape=f"n {POINT}")


class Sizes(Exact):
    """How many of the ``n`` rows of another field each client has."""

    turn = 2

    def decode(self, value: object, name: str, reading: Reading) -> IntArray:
        sizes, rows = super().decode(value, name, reading), reading.sizes["n"]
        if (sizes < 0).any() or (sizes > rows).any() or sizes.sum() != rows:
            raise self.refuse(f"sizes of {rows} rows in all", sizes[:60].tolist())
        return sizes


SIZES = Sizes("align-sizes", "points of each", shape="c")
# Entries of proofs are left out, and None, where the server is trusted
SIGNED = f"{SIGNATURE_BYTES}"


class BlindRequest(Message, down="train.align", fixed={ALIGN_STAGE: BLIND}):
    """Server to client: blind the identities of these clients."""

    epoch: Annotated[int, EPOCH]  # a higher one than before starts anew
    clients: Annotated[IntArray, CLIENTS]


class BlindReply(Message, up="train.align", prefix="align-"):
    """Client to server: blinded identities, padded with random points."""

    epoch: Annotated[int, EPOCH]
    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]  # powers of two
    points: Annotated[Bytes2D, POINTS]
    # of each client's block
    signatures: Annotated[Bytes2D | None, Block(shape=f"c {SIGNED}")] = None

    def check(self, known: Known) -> None:
        sizes = self.sizes
        wrong = (sizes < MIN_BLOCK) | ((sizes & (sizes - 1)) != 0)
        if wrong.any():
            raise MalformedReplyError(f"client {self.clients[wrong][0]}: {sizes[wrong][0]} points")


class EvaluateRequest(Message, down="train.align", fixed={ALIGN_STAGE: EVALUATE}, prefix="align-"):
    """Server to key-holders: multiply these points by your shares of the key."""

    epoch: Annotated[int, EPOCH]
    # key-holders; their shares are added up
    holders: Annotated[IntArray, replace(CLIENTS, may_be_none=False)]
    points: Annotated[Bytes2D, POINTS]  # of all clients
    # with proofs: clients of these points
    clients: Annotated[IntArray | None, Exact("align-blocks", shape="b")] = None
    parties: Annotated[IntArray | None, Exact(shape="b")] = None  # who signed each block
    sizes: Annotated[IntArray | None, replace(SIZES, shape="b", optional=True)] = None
    signatures: Annotated[Bytes2D | None, Block(shape=f"b {SIGNED}")] = None  # of each block


class EvaluateReply(Message, up="train.align", prefix="align-"):
    """Key-holders to server: the request's points, multiplied."""

    epoch: Annotated[int, EPOCH]
    points: Annotated[Bytes2D, POINTS]
    # With proofs
    proofs: Annotated[Bytes2D | None, Block(shape=f"b {PROOF}")] = None  # of each block
    # public key of its share
    key: Annotated[Bytes2D | None, Block("align-keys", shape=f"1 {POINT}")] = None
    # of this key
    signature: Annotated[Bytes2D | None, Block("align-key-signatures", shape=f"1 {SIGNED}")] = None


class UnionRequest(Message, down="train.union", fixed={ALIGN_STAGE: UNION}, prefix="align-"):
    """Server to client: the key-holders' answers, and the size of the table to add up."""

    # with proofs: parties that hold keys
    holders: Annotated[IntArray | None, Exact(shape="h")] = field(default=None, kw_only=True)
    epoch: Annotated[int, EPOCH]
    clients: Annotated[
        IntArray,
        replace(
            CLIENTS, says="clients whose points are back; none if a table is only asked for again"
        ),
    ]
    sizes: Annotated[IntArray, SIZES]
    # their points times the whole key; with proofs times each key-holder's share
    points: Annotated[Bytes2D, Block(shape=f"h n {POINT}")]
    cells: Annotated[int, Whole(least=PARTS)]  # cells of the table
    # With proofs
    keys: Annotated[Bytes2D | None, Block(shape=f"h {POINT}")] = None  # their public keys
    # theirs of these
    signatures: Annotated[Bytes2D | None, Block("align-key-signatures", shape=f"h {SIGNED}")] = None
    proofs: Annotated[Bytes2D | None, Block(shape=f"h c {PROOF}")] = None  # of each


class PlainRequest(Message, down="train.align", fixed={ALIGN_STAGE: IDENTITIES}):
    """Server to client, in the clear: the identities of these clients."""

    clients: Annotated[IntArray, replace(CLIENTS, may_be_none=False)]


class PlainReply(Message, up="train.align"):
    """Client to server, in the clear: the hashes of each client's identities, its tokens."""

    clients: Annotated[IntArray, replace(CLIENTS, may_be_none=False)]
    sizes: Annotated[IntArray, replace(SIZES, says="rows of each client in what follows")]
    tokens: Annotated[Bytes2D, Block("align-tokens", shape=f"n {TOKEN}")]


class PublishedTokens(Message, down="train", fixed={ALIGN_STAGE: PUBLISH}):
    """Server to client: the tokens that at least two clients hold, in the order of the slots."""

    epoch: Annotated[int, EPOCH]
    # Row *i* is slot *i*. Later messages of an epoch only append
    # tokens in the order of the slots
    tokens: Annotated[Bytes2D, Block("align-tokens", shape=f"slots {TOKEN}")]

    @property
    def num_slots(self) -> int:
        return len(self.tokens)


# Names of identities


def canonical(identities: Iterable[object], owner: str) -> list[bytes]:
    """Write identities as bytes that are equal exactly if the identities are."""
    # Places, never names: Flower sends the text of a client's error to the server.
    places = dict[bytes, int]()
    given = identities.tolist() if isinstance(identities, np.ndarray) else identities
    for number, identity in enumerate(given):
        if isinstance(identity, str):
            text = b"s:" + identity.encode()
        elif isinstance(identity, (int, np.integer)) and not isinstance(identity, bool):
            text = b"i:%d" % int(identity)
        else:
            kind = type(identity).__name__
            raise ValueError(f"{owner}: its identity number {number} is of type {kind}")
        if next(iter(places), text)[:1] != text[:1]:
            raise ValueError(f"{owner} has identities of mixed types: numbers 0 and {number}")
        if (first := places.setdefault(text, number)) != number:
            raise ValueError(f"{owner} has identities twice: numbers {first} and {number}")
    return list(places)


def plain_token(identity: bytes) -> bytes:
    """Return the token of an identity in the clear, written as ``i:5`` or ``s:abc``."""
    return hashlib.sha256(identity).digest()[:TOKEN]


def scalar(secret: bytes, purpose: bytes, number: int) -> bytes:
    """Derive a scalar from a secret; independent for every purpose and number."""
    wide = hashlib.blake2b(
        number.to_bytes(16, "little"), key=secret, person=purpose, digest_size=64
    ).digest()
    return sodium.crypto_core_ed25519_scalar_reduce(wide)


def hash_to_group(run_id: bytes, identity: bytes) -> bytes:
    """Map an identity to a point whose logarithm nobody knows, ``H(id)``."""
    # One application of libsodium's map reaches its points unevenly; the sum of two does not, which
    # is what RFC 9380 asks for.
    wide = hashlib.sha512(DOMAIN + framed(run_id, b"hash", identity)).digest()
    return sodium.crypto_core_ed25519_add(
        sodium.crypto_core_ed25519_from_uniform(wide[:32]),
        sodium.crypto_core_ed25519_from_uniform(wide[32:]),
    )


def padded_size(count: int) -> int:
    """Return the size of the block that reveals nothing of ``count`` but its power of two."""
    return max(MIN_BLOCK, 1 << max(count - 1, 0).bit_length())


def blind(points: Mapping[int, bytes], secret: bytes, epoch: int, size: int) -> Bytes2D:
    """Blind points, each with the factor of its number, and pad them with random points."""
    given = list(points.items())

    def one(place: int) -> bytes:
        if place >= len(given):
            return public_of(sodium.crypto_core_ed25519_scalar_reduce(os.urandom(64)))
        number, point = given[place]
        return times(_blind_scalar(secret, epoch, number), point)

    return rows_of(spread(one, range(size)), -1, POINT)


def unblind(point: bytes, secret: bytes, epoch: int, number: int) -> bytes:
    """Divide the key-holders' answer by the blind of the point of that number."""
    inverse = sodium.crypto_core_ed25519_scalar_invert(_blind_scalar(secret, epoch, number))
    return times(inverse, point)


def key_share(secrets: Sequence[bytes], epoch: int) -> bytes:
    """Return the sum of the key-holders' shares: several on one machine act as one."""
    shares = [scalar(secret, b"key", epoch) for secret in secrets]
    return reduce(sodium.crypto_core_ed25519_scalar_add, shares)


def times(factor: bytes, point: bytes) -> bytes:
    """Multiply a point; ``ValueError`` if it is not in the group."""
    try:
        return sodium.crypto_scalarmult_ed25519_noclamp(factor, point)
    except SodiumError as error:
        raise ValueError(f"a point is not in the group: {point.hex()}") from error


def multiply(points: Bytes2D, factor: bytes) -> Bytes2D:
    """Multiply all points ``[n, 32]`` by a scalar; ``ValueError`` for an invalid point."""
    return rows_of(spread(partial(times, factor), pieces(points)), -1, POINT)


def add(blocks: Sequence[Bytes2D]) -> Bytes2D | None:
    """Add blocks of points ``[n, 32]`` up; None if one of them is off the curve."""
    try:
        total = [
            reduce(sodium.crypto_core_ed25519_add, points)
            for points in zip(*map(pieces, blocks), strict=True)
        ]
    except SodiumError:
        return None
    return rows_of(total, -1, POINT)


def invalid_points(points: Bytes2D) -> list[int]:
    """Return the numbers of the rows that are no points of the group."""
    valid = spread(sodium.crypto_core_ed25519_is_valid_point, pieces(points))
    return [number for number, is_valid in enumerate(valid) if not is_valid]


def drawn(seed: bytes, parties: Iterable[int]) -> list[int]:
    """Order parties by the epoch's seed: the first ones hold keys."""

    def rank(party: int) -> bytes:
        return hashlib.sha256(framed(b"flower-graph/key-holder", seed, b"%d" % party)).digest()

    return sorted(parties, key=rank)


def block_parts(run_id: bytes, epoch: int, client: int, block: Bytes2D) -> tuple[bytes, ...]:
    """Return the parts of a client's block that a party signs."""
    return run_id, b"%d" % epoch, b"%d" % client, hashlib.sha256(block.tobytes()).digest()


def key_parts(run_id: bytes, epoch: int, public: bytes) -> tuple[bytes, ...]:
    """Return the parts of the public key of its share that a key-holder signs."""
    return run_id, b"%d" % epoch, public


def proof_context(run_id: bytes, epoch: int, holder: int, client: int) -> bytes:
    """Encode the key-holder and the client of a proof."""
    return framed(run_id, b"%d" % epoch, b"%d" % holder, b"%d" % client)


def name(run_id: bytes, identity: bytes, point: bytes) -> bytes:
    """Return token and slot key of an identity, one after the other, from ``k · H(id)``."""
    # Token and key are separate parts of one hash: the token reveals nothing of the key.
    digest = hashlib.sha512(DOMAIN + framed(run_id, b"name", identity, point)).digest()
    return digest[:TOKEN] + digest[-KEY:]


def _blind_scalar(secret: bytes, epoch: int, number: int) -> bytes:
    return scalar(secret, b"blind", epoch << 64 | number)


# The union of tokens


def cells_for(distinct: int) -> int:
    """Return how many cells a table for so many distinct tokens needs."""
    return PARTS * math.ceil((CELLS_PER_TOKEN * distinct + FURTHER_CELLS) / PARTS)


def insert(tokens: Bytes2D, cells: int) -> Words:
    """Write tokens into an empty table."""
    # tokens [n, 12]
    table = np.zeros((WORDS, cells), np.uint64)
    places, marker = _hash(tokens, cells)
    _add(table, places, np.concatenate([marker[None], _halves(tokens)]))
    return table.reshape(-1)


def peel(total: Words) -> tuple[Bytes2D, NDArray[np.int64]] | None:
    """Read the tokens from the sum of tables."""
    # total [3 · cells]
    table = total.astype(np.uint64).reshape(WORDS, -1)
    result: dict[bytes, int] = {}
    cells = np.arange(table.shape[1])  # that may hold one token alone: later only what has changed
    for _ in range(MAX_PASSES):
        tokens, counts = _single(table, cells)
        if not len(tokens):
            break
        fresh = dict(zip(pieces(tokens), counts.tolist(), strict=True))
        if fresh.keys() & result.keys() or len(fresh) + len(result) > table.shape[1]:
            # A token that comes back, or has no cell of its own, was never in such a sum.
            return None
        result |= fresh
        places, marker = _hash(tokens, table.shape[1])
        content = np.concatenate([marker[None], _halves(tokens)]) * counts
        _add(table, places, np.uint64(0) - content)
        cells = np.unique(places)
    if table.any():
        return None
    ordered = sorted(result)
    counted = np.array([result[token] for token in ordered], np.int64)
    return rows_of(ordered, -1, TOKEN), counted


def order_tokens(
    order: Bytes2D, tokens: Bytes2D, counts: NDArray[np.int64], least: int = 2
) -> Bytes2D:
    """Append to the order of slots the tokens that enough clients hold."""
    # order [s, 12], tokens [t, 12], counts [t]
    placed = set(pieces(order))
    shared = pieces(np.ascontiguousarray(tokens[counts >= least]))
    fresh = [token for token in shared if token not in placed]
    return np.concatenate([order, rows_of(fresh, -1, order.shape[1])])


def _single(table: Words, cells: NDArray[np.int64]) -> tuple[Bytes2D, Words]:
    """Return the distinct tokens ``[t, 12]`` that are alone in some cell, and their counts."""
    counts = table[0, cells] & COUNT_MASK
    plausible = (counts > 0) & (counts <= MAX_CLIENTS)
    cells, counts = cells[plausible], counts[plausible]
    halves, rest = np.divmod(table[1:, cells], counts)
    good = (rest == 0).all(axis=0) & (halves < 1 << 8 * HALF).all(axis=0)
    cells, counts, halves = cells[good], counts[good], halves[:, good]
    half_bytes = np.ascontiguousarray(halves, "<u8").view(np.uint8).reshape(2, -1, 8)[:, :, :HALF]
    tokens = np.ascontiguousarray(half_bytes.transpose(1, 0, 2)).reshape(-1, TOKEN)
    places, marker = _hash(tokens, table.shape[1])
    sure = (marker * counts == table[0, cells]) & (places == cells[:, None]).any(axis=1)
    tokens, counts = tokens[sure], counts[sure]
    _, first = np.unique(tokens, axis=0, return_index=True)
    return tokens[first], counts[first]


def _hash(tokens: Bytes2D, cells: int) -> tuple[NDArray[np.int64], Words]:
    # The table's size goes into the hash: if one cannot be read, twice the size is a fresh attempt.
    salt = cells.to_bytes(16, "little")
    digests = (
        hashlib.blake2b(token, digest_size=8 * (PARTS + 1), salt=salt, person=b"sketch").digest()
        for token in pieces(tokens)
    )
    words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, PARTS + 1)
    part = cells // PARTS
    places = (words[:, :PARTS] % np.uint64(part)).astype(np.int64) + part * np.arange(PARTS)
    return places, (words[:, PARTS] & ~COUNT_MASK) | np.uint64(1)


def _halves(tokens: Bytes2D) -> Words:
    wide = np.zeros((2, len(tokens), 8), np.uint8)
    wide[:, :, :HALF] = tokens.reshape(-1, 2, HALF).transpose(1, 0, 2)
    return wide.view("<u8")[:, :, 0].astype(np.uint64)


def _add(table: Words, places: NDArray[np.int64], content: Words) -> None:
    for row, words in zip(table, content, strict=True):
        np.add.at(row, places, words[:, None])


# Proofs ------------------------------------------------------------------------------------------

# Proofs that points were multiplied by the scalar of a public key: DLEQ, after RFC 9497, 2.2.
#
# A suite of our own, as libsodium's Python bindings have no ristretto255: the group is the subgroup
# of prime order of edwards25519, with libsodium's 32-byte points and scalars; the hashes are
# SHA-512 and SHAKE-256, over parts behind their lengths and a name that begins with ``SUITE``. As
# in the RFC, prover and verifier make the same random-looking combination of all points of a block
# (*composites*), and the proof says that the combination of the answers is the key's multiple of
# that of the inputs. It differs in two ways, which make several proofs about one block cheaper to
# check:
#
# - All is hashed once: the public key, the context, which says whose block of which alignment it
#   is, and all points. Weights, of 128 bits, and the challenge come from that hash.
# - A proof consists of the two commitments and the response, not of challenge and response. Then
#   the statement to check is linear in the points, and the checks of several key-holders' answers
#   to one block can be added up, each times a random number of the verifier's own: the inputs are
#   multiplied once for all of them. A verifier is fooled with a chance of 2^-128.
#
# A point of small order, or one beside the subgroup, is refused everywhere: with it a proof would
# say less.

SUITE = b"flower-graph/DLEQ/edwards25519-SHA512/2"
ORDER = 2**252 + 27742317777372353535851937790883648493
WEIGHT = 16  # bytes

_sum = sodium.crypto_core_ed25519_add


@dataclass(frozen=True)
class Claim:
    """The claim that ``outputs`` are the inputs times the scalar of ``public``; its proof."""

    public: bytes
    outputs: Bytes2D
    proof: bytes
    context: bytes = b""


def public_of(key: bytes) -> bytes:
    """Return the public key of a scalar."""
    return sodium.crypto_scalarmult_ed25519_base_noclamp(key)


def prove(
    key: bytes, public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes = b""
) -> bytes:
    """Prove that ``outputs`` are ``inputs`` times ``key``, whose public key is ``public``.

    ``inputs`` and ``outputs`` are points of the group, [n, 32]; ``context`` is what the proof is
    for. The proof has 96 bytes: commitments to the nonce, over the base point and over the inputs,
    and the response. ``ValueError`` for a point that is not in the group, or blocks of different or
    no length.
    """
    if inputs.shape != outputs.shape or not len(inputs):
        raise ValueError(f"{len(outputs)} answers to {len(inputs)} points; both must be the same")
    statement = _statement(public, inputs, outputs, context)
    # Random, and bound to key and statement in case the source of randomness is a poor one
    nonce = _to_scalar(b"Nonce", key, os.urandom(64), statement)
    weights = map(_scalar, _weights(statement, len(inputs)))
    combined = reduce(_sum, map(times, weights, pieces(inputs)))
    seen = public_of(nonce) + times(nonce, combined)
    # Key and nonce stay libsodium's, whose time does not depend on them; Python's integers' does.
    secret = sodium.crypto_core_ed25519_scalar_mul(_to_scalar(b"Challenge", statement, seen), key)
    return seen + sodium.crypto_core_ed25519_scalar_sub(nonce, secret)


def verify(inputs: Bytes2D, claims: Sequence[Claim]) -> bool:
    """Tell whether all proofs of ``prove`` about the same inputs hold; every point is checked."""
    # Each claim over the base point, and all together over the inputs
    n, of_inputs, terms, seen = len(inputs), [0] * len(inputs), [], []
    if not claims:
        return False
    try:
        for claim in claims:
            proof, public, shape = claim.proof, claim.public, claim.outputs.shape
            response = int.from_bytes(proof[2 * POINT :], "little")
            # Another way to write the same scalar would be another proof.
            if len(proof) != PROOF or inputs.shape != shape or not n or response >= ORDER:
                return False
            statement = _statement(public, inputs, claim.outputs, claim.context)
            wide = _to_scalar(b"Challenge", statement, proof[: 2 * POINT])
            challenge = int.from_bytes(wide, "little")
            # Response times base plus challenge times key is the commitment; so over the inputs.
            base = _sum(public_of(_scalar(response)), times(_scalar(challenge), public))
            if base != proof[:POINT]:
                return False
            factor = int.from_bytes(os.urandom(WEIGHT), "little")
            weights = [factor * weight for weight in _weights(statement, n)]
            of_inputs = [s + response * w for s, w in zip(of_inputs, weights, strict=True)]
            points = zip(weights, pieces(claim.outputs), strict=True)
            terms += [(challenge * weight, point) for weight, point in points]
            seen.append(times(_scalar(factor), proof[POINT : 2 * POINT]))
        terms += zip(of_inputs, pieces(inputs), strict=True)
        total = reduce(_sum, (times(_scalar(factor), point) for factor, point in terms))
        return total == reduce(_sum, seen)
    except (SodiumError, ValueError):  # a point that is not in the group, or a scalar of zero
        return False


def failing(inputs: Bytes2D, claims: Mapping[T, Claim]) -> list[T]:
    """Return the key-holders whose proofs about the same inputs do not hold."""
    if verify(inputs, list(claims.values())):
        return []
    return [holder for holder, claim in claims.items() if not verify(inputs, [claim])]


def _statement(public: bytes, inputs: Bytes2D, outputs: Bytes2D, context: bytes) -> bytes:
    points = inputs.tobytes(), outputs.tobytes()
    return hashlib.sha512(framed(SUITE + b"/Statement", public, context, *points)).digest()


def _weights(statement: bytes, count: int) -> list[int]:
    """Derive the weights of a block's points from the statement, so that nobody can choose them."""
    stream = hashlib.shake_256(framed(SUITE + b"/Composite", statement)).digest(WEIGHT * count)
    places = range(0, len(stream), WEIGHT)
    return [int.from_bytes(stream[start : start + WEIGHT], "little") for start in places]


def _to_scalar(purpose: bytes, *parts: bytes) -> bytes:
    wide = hashlib.sha512(framed(SUITE + b"/" + purpose, *parts)).digest()
    return sodium.crypto_core_ed25519_scalar_reduce(wide)


def _scalar(number: int) -> bytes:
    return (number % ORDER).to_bytes(POINT, "little")
