"""What a SuperNode's clients keep of one round of the secure sum, and how they check requests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError
from flower_graph.secure import channel
from flower_graph.secure.channel import KEY_BYTES, rows_of
from flower_graph.secure.shamir import SHARE_BYTES
from flower_graph.secure.sum.messages import (
    NOTHING,
    SEED,
    MaskRequest,
    PrepareRequest,
    UnmaskRequest,
)
from flower_graph.wire.fields import Bytes, Integers

# What is saved of a round: numbers, arrays, and those that are written into after they were read
NUMBERS = ("number", "threshold", "minimum")
ARRAYS = ("clients", "partners", "is_foreign", "seeds", "private", "public", "secrets")
CHANGING = ("held", "has", "live", "sent")


@dataclass
class ClientRound:
    """The secrets of a SuperNode's clients in one round, and what they hold of others."""

    number: int  # As in PrepareRequest
    threshold: int
    minimum: int
    clients: Integers  # [p] own clients that take part
    partners: Integers  # [p, k] their partners, and which of them are at other SuperNodes
    is_foreign: NDArray[np.bool_]
    seeds: Bytes = field(repr=False)  # [p, 32] seeds of the self masks, and mask keys
    private: Bytes = field(repr=False)
    public: Bytes
    # [f, 32] what the channel keys agree on, for each foreign pair
    secrets: Bytes = field(repr=False)
    # [p, k, 2, 33] shares of the partners' seeds and mask keys that our clients hold, and [p, k]
    # which are there
    held: Bytes = field(repr=False)
    has: NDArray[np.bool_]
    live: NDArray[np.bool_]  # [p, k] partners that take part, as the server said with the packets
    sent: NDArray[np.bool_]  # [p] own clients in the sum that has left

    @classmethod
    def begin(
        cls, request: PrepareRequest, is_foreign: NDArray[np.bool_], secrets: Bytes
    ) -> ClientRound:
        """Make the seeds and mask keys of a round."""
        p, k = request.partners.shape
        pairs = [channel.new_key() for _ in range(p)]
        seeds = [os.urandom(KEY_BYTES) for _ in range(p)]
        return cls(
            request.server_round,
            request.threshold,
            request.minimum,
            request.clients,
            request.partners,
            is_foreign,
            rows_of(seeds, p, KEY_BYTES),
            rows_of([private for private, _ in pairs], p, KEY_BYTES),
            rows_of([public for _, public in pairs], p, KEY_BYTES),
            secrets,
            np.zeros((p, k, 2, SHARE_BYTES), np.uint8),
            ~is_foreign,
            np.zeros((p, k), np.bool_),
            np.zeros(p, np.bool_),
        )

    @property
    def is_masked(self) -> bool:
        """Whether the sum has left, so that no key may be used again."""
        return bool(self.sent.any())

    @property
    def k(self) -> int:
        """Number of partners of a client."""
        return int(self.partners.shape[1])

    def rows(self, clients: Integers) -> Integers:
        """Return the rows of some own clients; ``RefusedError`` for one that has none."""
        places = {client: row for row, client in enumerate(self.clients.tolist())}
        result = [places.get(client, -1) for client in clients.tolist()]
        if -1 in result:
            client = clients[result.index(-1)]
            raise RefusedError(f"client {client} was not prepared here for round {self.number}")
        return np.array(result, np.int64)

    def foreign_pairs(self, request: MaskRequest, rows: Integers) -> tuple[Integers, Integers]:
        """Return rows and columns of the live partners elsewhere, in the request's order."""
        if request.live.shape != (rows.size, self.k):
            raise RefusedError(f"live has shape {request.live.shape}, not {(rows.size, self.k)}")
        index, column = np.nonzero(request.live & self.is_foreign[rows])
        if index.size != request.packets.shape[0]:
            raise RefusedError(
                f"{request.packets.shape[0]} packets for {index.size} foreign partners"
            )
        return rows[index], column

    def deliver(self, shares: Bytes) -> None:
        """Store our clients' shares ``[p, k, 2, 33]`` for holders that are our clients too."""
        row, column = np.nonzero(~self.is_foreign)
        holders, mirrored = self.rows(self.partners[row, column]), self.k - 1 - column
        others = self.partners[holders, mirrored] != self.clients[row]
        if others.any():
            client, partner = self.clients[row][others][0], self.clients[holders][others][0]
            raise RefusedError(
                f"client {client} has client {partner} as a partner, and {partner} has not {client}"
            )
        self.held[holders, mirrored] = shares[row, column]


def check_terms(request: PrepareRequest) -> None:
    """Refuse a threshold, a minimum or partners with which too few could open a vector."""
    # With more than half of the partners, no two groups of holders that were told different things
    # can give back both secrets of a client.
    k, clients = request.partners.shape[1], np.union1d(request.clients, request.partners).size
    threshold, minimum = request.threshold, request.minimum
    if not k < 2 * threshold <= 2 * k or minimum <= threshold or 2 * minimum <= clients:
        raise RefusedError(
            f"threshold is {threshold} and minimum {minimum}; for {k} partners and the {clients} "
            f"clients that we know of they must be from {k // 2 + 1} to {k}, and above "
            f"{max(threshold, clients // 2)}"
        )
    ordered = np.sort(request.partners, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any() or (
        request.partners == request.clients[:, None]
    ).any():
        raise RefusedError("a client is its own partner, or has one twice")


def check_unmask(kept: ClientRound, request: UnmaskRequest, rows: Integers) -> None:
    """Refuse a request for shares that contradicts itself, or what we know of who is in the sum."""
    kinds, partners = request.kinds, kept.partners[rows]
    numbers, index = np.unique(partners, return_inverse=True)
    kind_of, index = np.zeros(numbers.size, np.uint8), index.reshape(kinds.shape)
    kind_of[index] = kinds
    if (differs := kind_of[index] != kinds).any():
        client = partners[differs][0]
        raise RefusedError(f"client {client} is said to be in and out: nothing is revealed")
    is_in = kind_of == SEED
    own = np.isin(numbers, kept.clients)
    sent = kept.sent[kept.rows(numbers[own])]
    if (is_in[own] & ~sent).any() or (is_in[own].any() and (sent & ~is_in[own]).any()):
        raise RefusedError("our own clients are not in the sum as we sent it: nothing is revealed")
    if ((kinds != NOTHING) & ~kept.live[rows]).any():
        raise RefusedError("a partner that took no part is asked about: nothing is revealed")
    if is_in.sum() > request.contributors:
        raise RefusedError(
            f"{is_in.sum()} of our partners are said to be among {request.contributors} clients: "
            "nothing is revealed"
        )
    present = (kinds == SEED).sum(1)
    if present.min() < kept.threshold:
        raise RefusedError(
            f"client {request.clients[present.argmin()]}: {present.min()} of its partners are in "
            f"the sum, at least {kept.threshold} must be: nothing is revealed"
        )
