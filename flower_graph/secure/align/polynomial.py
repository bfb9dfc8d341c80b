"""The paper's polynomials over identities (FedSCem, section 4.3.1). For reproduction only.

**This does not hide identities.** A client's set becomes the coefficients of
``ρ*(γ) = (γ − γ_1) ⋯ (γ − γ_n) · (γ − ξ)  mod β`` (equation 12). From the coefficients, anybody
finds the roots in a moment: by evaluating at every candidate, or by factoring, which is easy over a
prime field. The random root ξ adds one more identity and hides none. ``tests/secure`` does the
former.

Two clients' sum ``ρ*_a + ρ*_b`` vanishes at an identity of *a* exactly if ``ρ*_b`` does. All
identities are below 2^30 and every ξ is a prime above that and below β: so no ξ is ever taken for
an identity, and the probability of a false root is zero. (With ξ from all primes below a 31-bit β,
as the paper's text allows, each of *m* clients adds a false member to one of *n* identities with
probability *n* / 10^8.)
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import AlignmentError, MalformedReplyError
from flower_graph.secure.align.blinded import Bytes2D, canonical
from flower_graph.secure.align.plaintext import CLIENTS, NUM_SLOTS, SIZES, OpenClient, OpenServer
from flower_graph.secure.channel import rows_of
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.codec import Known, Message, Reading
from flower_graph.wire.fields import Block, Exact, Whole, split_rows
from flower_graph.wire.keys import ALIGN_STAGE

Residues = NDArray[np.uint64]  # below 2^31, so that products fit

IDENTITY_LIMIT = 1 << 30
PRIME_RANGE = (3 << 29, 1 << 31)
POLYNOMIALS, PAIRS, SECTIONS = "polynomials", "pairs", "sections"
PRIME = Whole("align-prime", "the modulus", least=1)
COEFFICIENTS = "align-coefficients"


def random_prime(low: int, high: int) -> int:
    """Draw a prime from ``low`` to ``high - 1``, at most 2^31."""
    while True:
        number = low + secrets.randbelow(high - low)
        if is_prime(number):
            return number


def is_prime(number: int) -> bool:
    """Tell whether a number below 3.2 · 10^9 is prime (Miller and Rabin's test, exact there)."""
    bases = (2, 3, 5, 7)
    if number < 2 or any(number % base == 0 for base in bases):
        return number in bases
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        powers = [pow(base, odd << i, number) for i in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def check_identities(client: int, identities: Sequence[object]) -> Residues:
    """Return identities as residues; ``ValueError`` unless they are integers in range."""
    for number, identity in enumerate(identities):
        if not isinstance(identity, (int, np.integer)) or not 0 <= identity < IDENTITY_LIMIT:
            raise ValueError(
                f"client {client}: its identity number {number} is none that polynomials take: "
                f"integers from 0 to {IDENTITY_LIMIT - 1}"
            )
    return np.array(identities, np.uint64)


def polynomial(identities: Residues, prime: int) -> Residues:
    """Return the coefficients of equation 12."""
    # identities [n]
    if not (PRIME_RANGE[0] <= prime < PRIME_RANGE[1] and is_prime(prime)):
        raise ValueError(
            f"the modulus is {prime}; must be a prime from {PRIME_RANGE[0]} to {PRIME_RANGE[1] - 1}"
        )
    modulus = np.uint64(prime)
    coefficients: Residues = np.ones(1, np.uint64)
    for root in (*identities.tolist(), random_prime(IDENTITY_LIMIT, prime)):
        # (γ − root) · Σ c_i γ^i
        lower = np.append(coefficients * np.uint64(prime - root) % modulus, np.uint64(0))
        coefficients = (lower + np.insert(coefficients, 0, np.uint64(0))) % modulus
    return coefficients


def evaluate(polynomials: Residues, points: Residues, prime: int) -> Residues:
    """Evaluate polynomials ``[b, d]`` at points ``[n]``, modulo ``prime``: ``[n, b]``."""
    values = np.zeros((points.size, len(polynomials)), np.uint64)
    for coefficient in polynomials.T[::-1]:
        values = (values * points[:, None] + coefficient) % np.uint64(prime)
    return values


def pair_sums(polynomials: Residues, client: int, prime: int) -> Residues:
    """Add one client's polynomial to those of all others: ``[m, d]`` to ``[m - 1, d]``."""
    others = np.delete(polynomials, client, axis=0)
    sums: Residues = (others + polynomials[client]) % np.uint64(prime)
    return sums


def patterns(identities: Residues, sums: Residues, client: int, prime: int) -> NDArray[np.uint8]:
    """Find which other clients hold each of a client's identities."""
    # identities [n], sums [m - 1, d]
    shared = evaluate(sums, identities, prime) == 0
    return np.packbits(np.insert(shared, client, True, axis=1), axis=1)


def sections(counts: dict[bytes, int]) -> dict[bytes, int]:
    """Return the first slot of every pattern with at least two clients."""
    start, first = {}, 0
    for pattern in sorted(counts, reverse=True):
        if sum(byte.bit_count() for byte in pattern) >= 2:
            start[pattern] = first
            first += counts[pattern]
    return start


def slots(
    identities: Residues, own: NDArray[np.uint8], start: dict[bytes, int]
) -> NDArray[np.int64]:
    """Place a client's identities: ascending within the section of their pattern."""
    # identities [n], own [n, ceil(m / 8)]
    result = np.full(identities.size, -1, np.int64)
    following = dict(start)
    for row in np.argsort(identities).tolist():
        pattern = own[row].tobytes()
        if pattern in following:
            result[row] = following[pattern]
            following[pattern] += 1
    return result


@dataclass(frozen=True)
class Modular(Exact):
    """Numbers below a prime of 31 bits; the message or its reader has the prime."""

    type = "bytes (uint32)"

    def encode(self, value: IntArray) -> bytes:
        return value.astype("<u4").tobytes()

    def unpack(self, value: object) -> Residues:
        if not isinstance(value, bytes) or len(value) % 4:
            raise self.refuse("rows of 4 bytes", value)
        return np.frombuffer(value, "<u4").astype(np.uint64)

    def decode(self, value: object, name: str, reading: Reading) -> IntArray:
        numbers = super().decode(value, name, reading)
        prime = reading.values.get("prime", reading.known.get("prime"))
        if numbers.size and numbers.max() >= prime:
            raise MalformedReplyError(f"the coefficient {numbers.max()} is not below {prime}")
        return numbers


@dataclass
class PolynomialRequest(Message, down="train.align", fixed={ALIGN_STAGE: POLYNOMIALS}):
    """Server to client: the polynomials of these clients modulo ``prime``."""

    prime: Annotated[int, PRIME]
    clients: Annotated[IntArray, CLIENTS]


@dataclass
class PolynomialReply(Message, up="train.align"):
    """Client to server: coefficients of the clients, ``sizes`` each, below ``prime``."""

    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    coefficients: Annotated[Residues, Modular(COEFFICIENTS, "`polynomials`")]


@dataclass
class PairRequest(Message, down="train.align", fixed={ALIGN_STAGE: PAIRS}):
    """Server to client: each client's polynomial added to those of all others."""

    prime: Annotated[int, PRIME]
    clients: Annotated[IntArray, CLIENTS]
    places: Annotated[
        IntArray, Exact("align-slots", "`pairs`: the clients' places among all `m`", shape="c")
    ]
    # The client itself is not among the *m - 1*
    sums: Annotated[
        Residues,
        Modular(
            COEFFICIENTS,
            "`pairs`: sums with the others' polynomials",
            shape="c o d",
            sent=(
                ("o", Whole("align-peers", "`pairs`: `o = m − 1`", least=0)),
                ("d", Whole("align-counts", "`pairs`: coefficients of a polynomial", least=0)),
            ),
        ),
    ]


@dataclass
class PatternReply(Message, up="train.align"):
    """Client to server: how many of its identities each set of clients has in common."""

    clients: Annotated[IntArray, CLIENTS]
    sizes: Annotated[IntArray, SIZES]
    # Bits: which of all *m* clients hold them; the reader knows ``w``, ``ceil(m / 8)``
    patterns: Annotated[
        Bytes2D,
        Block("align-patterns", "`pairs`: which clients hold something together", shape="n w"),
    ]
    counts: Annotated[
        IntArray, Exact("align-counts", "`pairs`: how many identities each pattern has", shape="m")
    ]

    def check(self, known: Known) -> None:
        if self.counts.size != len(self.patterns) or (self.counts < 1).any():
            raise MalformedReplyError(
                f"{self.counts.size} counts for {len(self.patterns)} patterns"
            )


@dataclass
class SectionOrder(Message, down="train", fixed={ALIGN_STAGE: SECTIONS}):
    """Server to client: the first slot of every pattern; how many slots in all."""

    num_slots: Annotated[int, NUM_SLOTS]
    patterns: Annotated[
        Bytes2D,
        Block(
            "align-patterns",
            "`sections`: the patterns",
            shape="n w",
            sent=(("w", Whole("align-peers", "`sections`: bytes of a pattern", least=1)),),
        ),
    ]
    first: Annotated[IntArray, Exact("align-slots", "`sections`: first slot of each pattern")]


class PolynomialAlignmentClient(OpenClient):
    """The paper's alignment, for the clients of one SuperNode; identities are small integers."""

    stages = (
        (PolynomialRequest, "polynomials"),
        (PairRequest, "patterns"),
        (SectionOrder, "order"),
    )

    def __init__(self, identities: Mapping[int, Sequence[object]]) -> None:
        super().__init__(identities)
        for client, local in identities.items():
            canonical(local, f"client {client}")
        self._identities = {
            int(client): check_identities(client, local) for client, local in identities.items()
        }

    def polynomials(self, request: PolynomialRequest) -> PolynomialReply:
        self._known(request.clients)
        clients = request.clients.tolist()
        rows = [polynomial(self._identities[client], request.prime) for client in clients]
        sizes = np.array([row.size for row in rows], np.int64)
        return PolynomialReply(request.clients, sizes, np.concatenate(rows))

    def patterns(self, request: PairRequest) -> PatternReply:
        """Find the holders of each identity, and count the identities of each pattern."""
        self._known(request.clients)
        distinct, counts = [], []
        for client, row, sums in zip(
            request.clients.tolist(), request.places.tolist(), request.sums, strict=True
        ):
            local = patterns(self._identities[client], sums, row, request.prime)
            self._patterns[client] = local
            pattern, count = np.unique(local, axis=0, return_counts=True)
            distinct.append(pattern)
            counts.append(count)
        sizes = np.array([len(pattern) for pattern in distinct], np.int64)
        return PatternReply(
            request.clients, sizes, np.concatenate(distinct), np.concatenate(counts)
        )

    def order(self, message: SectionOrder) -> None:
        first = message.first.tolist()
        start = {p.tobytes(): slot for p, slot in zip(message.patterns, first, strict=True)}
        self._num_slots = message.num_slots
        self._slots = {
            client: slots(self._identities[client], local, start)
            for client, local in self._patterns.items()
        }


class PolynomialAlignmentServer(OpenServer[PolynomialRequest | PairRequest]):
    """Leads the paper's alignment: polynomials, their pairwise sums, sizes of intersections."""

    def _begin(self) -> None:
        self._prime = random_prime(*PRIME_RANGE)
        self.polynomials: dict[int, Residues] = {}  # what the server sees of each client
        self._everyone: list[int] = []  # clients with polynomials, in the order of the patterns
        self._counts: dict[int, dict[bytes, int]] = {}

    def _next_stage(self) -> dict[int, PolynomialRequest | PairRequest]:
        missing = [client for client in self._node if client not in self.polynomials]
        if missing:
            return {
                node: PolynomialRequest(self._prime, np.array(clients, np.int64))
                for node, clients in self._by_node(missing).items()
            }
        if not self._everyone:
            self._everyone = sorted(self.polynomials)
        waiting = [client for client in self._node if client not in self._counts]
        return {node: self._pairs(clients) for node, clients in self._by_node(waiting).items()}

    def _pairs(self, clients: list[int]) -> PairRequest:
        degree = max(row.size for row in self.polynomials.values())
        table = np.zeros((len(self._everyone), degree), np.uint64)
        for row, client in enumerate(self._everyone):
            table[row, : self.polynomials[client].size] = self.polynomials[client]
        rows = [self._everyone.index(client) for client in clients]
        sums = np.stack([pair_sums(table, row, self._prime) for row in rows])
        return PairRequest(self._prime, np.array(clients), np.array(rows), sums)

    def _take(self, request: PolynomialRequest | PairRequest, config: Mapping[str, object]) -> None:
        if isinstance(request, PolynomialRequest):
            reply = PolynomialReply.from_config(config, clients=request.clients, prime=self._prime)
            rows = split_rows(reply.coefficients, reply.sizes)
            self.polynomials |= zip(reply.clients.tolist(), rows, strict=True)
            return
        width = -(-len(self._everyone) // 8)
        answer = PatternReply.from_config(config, clients=request.clients, w=width)
        for client, distinct, counts in zip(
            answer.clients.tolist(),
            split_rows(answer.patterns, answer.sizes),
            split_rows(answer.counts, answer.sizes),
            strict=True,
        ):
            names = [pattern.tobytes() for pattern in distinct]
            self._counts[client] = dict(zip(names, counts.tolist(), strict=True))

    def publications(self) -> dict[int, SectionOrder]:
        """Return the order of sections; ``AlignmentError`` if clients disagree about one."""
        counts: dict[bytes, int] = {}
        for client, local in self._counts.items():
            for pattern, count in local.items():
                if counts.setdefault(pattern, count) != count:
                    raise AlignmentError(
                        f"client {client} counts {count} identities in an intersection in which "
                        f"others count {counts[pattern]}"
                    )
        start = sections(counts)
        width = max(map(len, counts), default=1)
        message = SectionOrder(
            sum(counts[pattern] for pattern in start),
            rows_of(start, -1, width),
            np.array(list(start.values()), np.int64),
        )
        return dict.fromkeys(self._by_node(self._counts), message)
