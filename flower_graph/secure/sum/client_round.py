"""What a SuperNode keeps of a round of the secure sum, and how its state is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.channel import KEY_BYTES, SHARE_BYTES, new_key, rows_of
from flower_graph.secure.sum.messages import Bytes, Integers, MaskRequest, PrepareRequest

ARRAYS = ("clients", "partners", "is_foreign", "seeds", "private", "public", "secrets")
CHANGING = ("held", "has")  # written into after they were read
NUMBERS = "numbers"  # number, threshold, minimum, is_masked


@dataclass
class ClientRound:
    """The secrets of a SuperNode's clients in one round, and what they hold of others."""

    number: int  # As in PrepareRequest
    threshold: int
    minimum: int
    is_masked: bool  # Whether the sum has left, so that no key may be used again
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

    @classmethod
    def begin(
        cls, request: PrepareRequest, is_foreign: NDArray[np.bool_], secrets: Bytes
    ) -> ClientRound:
        """Make the seeds and mask keys of a round."""
        p, k = request.partners.shape
        pairs = [new_key() for _ in range(p)]
        seeds = [os.urandom(KEY_BYTES) for _ in range(p)]
        return cls(
            request.server_round,
            request.threshold,
            request.minimum,
            False,
            request.clients,
            request.partners,
            is_foreign,
            rows_of(seeds, p, KEY_BYTES),
            rows_of([private for private, _ in pairs], p, KEY_BYTES),
            rows_of([public for _, public in pairs], p, KEY_BYTES),
            secrets,
            np.zeros((p, k, 2, SHARE_BYTES), np.uint8),
            ~is_foreign,
        )

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
        """Hand the shares ``[p, k, 2, 33]`` of our dealers to those holders that are ours too."""
        row, column = np.nonzero(~self.is_foreign)
        holders, mirrored = self.rows(self.partners[row, column]), self.k - 1 - column
        if (self.partners[holders, mirrored] != self.clients[row]).any():
            raise RefusedError("the partners are not mirrored")
        self.held[holders, mirrored] = shares[row, column]


def write_rounds(rounds: Iterable[ClientRound], others: dict[str, NDArray[np.generic]]) -> bytes:
    """Write rounds, and other arrays whose names have no slash."""
    arrays: dict[str, NDArray[np.generic]] = dict(others)
    for kept in rounds:
        numbers = [kept.number, kept.threshold, kept.minimum, kept.is_masked]
        arrays[f"{kept.number}/{NUMBERS}"] = np.array(numbers, np.int64)
        for name in (*ARRAYS, *CHANGING):
            arrays[f"{kept.number}/{name}"] = np.ascontiguousarray(getattr(kept, name))
    return save(arrays)


def read_rounds(state: bytes) -> tuple[dict[int, ClientRound], dict[str, NDArray[np.generic]]]:
    """Read what ``write_rounds`` wrote; ``StateLostError`` if it is something else."""
    try:
        arrays = load(state)
        rounds = {}
        for name in [name for name in arrays if name.endswith("/" + NUMBERS)]:
            number, threshold, minimum, is_masked = arrays.pop(name).tolist()
            fixed = [arrays.pop(f"{number}/{field}") for field in ARRAYS]
            changing = [arrays.pop(f"{number}/{field}").copy() for field in CHANGING]
            head = (number, threshold, minimum, bool(is_masked))
            rounds[number] = ClientRound(*head, *fixed, *changing)
    except (SafetensorError, KeyError, ValueError) as error:
        raise StateLostError(f"the state of the secure sum cannot be read: {error}") from error
    return rounds, arrays
