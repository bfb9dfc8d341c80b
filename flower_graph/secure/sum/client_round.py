"""A SuperNode's state in one round of the secure sum, and its checks of requests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import RefusedError
from flower_graph.secure import channel
from flower_graph.secure.channel import KEY_BYTES
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
NUMBERS = ("number", "threshold", "minimum", "is_masked")
ARRAYS = ("partners", "seed", "private", "public", "secrets")
CHANGING = ("held", "has", "live")


@dataclass
class ClientRound:
    """A SuperNode's secrets in one round, and its partners' shares."""

    number: int  # As in PrepareRequest
    threshold: int
    minimum: int
    is_masked: bool  # Whether the sum has left, so that no key may be used again
    partners: Integers  # [k]
    seed: Bytes = field(repr=False)  # [32] of the self mask, and the mask key
    private: Bytes = field(repr=False)
    public: Bytes
    secrets: Bytes = field(repr=False)  # [k, 32] what the channel keys agree on
    # [k, 2, 33] shares of the partners' seeds and mask keys, and [k] which are there
    held: Bytes = field(repr=False)
    has: NDArray[np.bool_]
    live: NDArray[np.bool_]  # [k] partners that take part, as the server said with the packets

    @classmethod
    def begin(cls, request: PrepareRequest, secrets: Bytes) -> ClientRound:
        """Make the seed and the mask key of a round."""
        k, (private, public) = request.partners.shape[1], channel.new_key()
        return cls(
            request.server_round,
            request.threshold,
            request.minimum,
            False,
            request.partners[0],
            np.frombuffer(os.urandom(KEY_BYTES), np.uint8),
            np.frombuffer(private, np.uint8),
            np.frombuffer(public, np.uint8),
            secrets,
            np.zeros((k, 2, SHARE_BYTES), np.uint8),
            np.zeros(k, np.bool_),
            np.zeros(k, np.bool_),
        )

    def columns(self, request: MaskRequest) -> Integers:
        """Return the columns of the live partners, in the request's order."""
        if request.live.shape != self.partners.shape:
            raise RefusedError(f"live has shape {request.live.shape}, not {self.partners.shape}")
        column = np.flatnonzero(request.live)
        if column.size != request.packets.shape[0]:
            raise RefusedError(f"{request.packets.shape[0]} packets for {column.size} partners")
        return column


def check_terms(request: PrepareRequest) -> None:
    """Refuse a threshold, a minimum or partners with which too few could open a sum."""
    # With more than half of the partners, no two groups of holders that were told different things
    # can give back both secrets of a party. Without partners there are no secrets. The
    # minimum, which is larger, is more than half of the parties that are known here.
    k, threshold, minimum = request.partners.shape[1], request.threshold, request.minimum
    fewest, above = min(k, k // 2 + 1), max(threshold, 1)
    if not fewest <= threshold <= k or minimum <= above:
        raise RefusedError(
            f"threshold is {threshold} and minimum {minimum}; for {k} partners they must be from "
            f"{fewest} to {k}, and above {above}"
        )
    if np.unique(request.partners).size < k or request.clients[0] in request.partners:
        raise RefusedError("a client is its own partner, or has one twice")


def check_unmask(kept: ClientRound, request: UnmaskRequest) -> None:
    """Refuse a request for shares that contradicts the known members of the sum."""
    kinds = request.kinds[0]
    if ((kinds != NOTHING) & ~kept.live).any():
        raise RefusedError("a partner that took no part is asked about: nothing is revealed")
    if (present := int((kinds == SEED).sum())) > request.contributors:
        raise RefusedError(
            f"{present} of our partners are said to be among {request.contributors} clients: "
            "nothing is revealed"
        )
    if present < kept.threshold:
        raise RefusedError(
            f"{present} of our partners are in the sum, at least {kept.threshold} must be: "
            "nothing is revealed"
        )
