"""What PPFL-GNN's secure consensus tells clients besides: where in the sum their rows go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records.keys import (
    IS_TARGET,
    ROTATIONS_ONLY,
    SEED,
    SLOTS,
    pack_integers,
    unpack_integers,
)
from flower_graph.records.public_nodes import split_rows

ABSENT = -1  # slot of a node that is not in the sum


@dataclass
class SumOrder:
    """Server to client, beside a ``PublicRequest`` whose targets are rows of the common mean.

    Attributes
    ----------
    slots : list of ndarray
        Of each client that is asked: the place of each of its public nodes in the sum, int64
        ``[p]``, or ``ABSENT``.
    seed : int
        Seed of the points that everybody turns to as long as there is no common mean.
    is_target : bool
        Whether the common mean is good enough to learn from; else it is only turned to.
    rotations_only : bool
        Leave reflections out.
    """

    slots: list[NDArray[np.int64]]
    seed: int
    is_target: bool
    rotations_only: bool

    def to_config(self) -> dict[str, Any]:
        """Write the entries."""
        return {
            SLOTS: pack_integers(np.concatenate(self.slots)),
            SEED: self.seed,
            IS_TARGET: self.is_target,
            ROTATIONS_ONLY: self.rotations_only,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], sizes: Sequence[int]) -> SumOrder:
        """Read them at the client.

        Parameters
        ----------
        config : mapping
            Entries of the message.
        sizes : sequence of int
            Public nodes of each client that is asked.

        Raises
        ------
        MalformedReplyError
            If there are not as many slots as public nodes.
        """
        slots = unpack_integers(config.get(SLOTS), SLOTS)
        if slots.size != sum(sizes):
            raise MalformedReplyError(f"{SLOTS}: {slots.size} came, expected {sum(sizes)}")
        return cls(
            split_rows(slots, sizes),
            int(config[SEED]),
            bool(config[IS_TARGET]),
            bool(config[ROTATIONS_ONLY]),
        )
