"""What PPFL-GNN's secure consensus tells clients besides: where in the sum their rows go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flower_graph.messages.codec import Message
from flower_graph.messages.fields import Flag, Whole
from flower_graph.messages.keys import IS_TARGET, ROTATIONS_ONLY, SEED, SLOTS
from flower_graph.messages.packed import Ragged

ABSENT = -1  # slot of a node that is not in the sum


@dataclass
class SumOrder(Message, down="train"):
    """Server to client, beside a ``PublicRequest`` whose targets are rows of the common mean."""

    # Of each client that is asked, int64 [p]
    slots: Annotated[
        list[NDArray[np.int64]],
        Ragged(SLOTS, "place of each public node in the sum; −1: it is not in it", shape="rows"),
    ]
    seed: Annotated[int, Whole(SEED, "of the points that all turn to first")]
    is_target: Annotated[
        bool, Flag(IS_TARGET, "whether the common mean may be learnt from; else only turned to")
    ]
    rotations_only: Annotated[bool, Flag(ROTATIONS_ONLY, "leave reflections out")]
