"""Messages of FedSage+ before its rounds: generators, and the other clients' gradients for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fed_sage.modules import LATENT, NEIGHBOURS
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import Known, Message, Tensor
from flower_graph.wire.fields import Exact, Flag, Whole
from flower_graph.wire.keys import CLIENTS, EPOCH, ROWS


@dataclass
class GeneratorRequest(Message, down="train.generate"):
    """Server to client: train alone (epoch 0), or with the other clients' gradients."""

    epoch: Annotated[int, Whole(EPOCH, "0: train alone; from 1 on: step by the gradients")]
    share: Annotated[bool, Flag("share", "whether to show the generators")]
    gradient: Annotated[
        FloatArray | None,
        Tensor(
            "arrays/gradient",
            "gradients of each client here by the weights of its `fGen`, `lin1` to `lin3`",
            shape="c w",
            when="epoch",
        ),
    ] = None
    others: Annotated[int, Whole("others", "clients that the gradients are summed over")] = 0


@dataclass
class Generators(Message, down="train.compare", up="train.generate"):
    """Client to server, and on to all others: the clients' generators and encoded nodes."""

    epoch: Annotated[int, Whole(EPOCH, "the epoch in which they are to be compared")]  # from 1
    clients: Annotated[IntArray, Exact(CLIENTS, "authors of the generators", shape="c")]
    rows: Annotated[IntArray, Exact(ROWS, "nodes that each of them shows", shape="c")]
    missing: Annotated[
        IntArray, Exact("missing", "neighbours that each of these misses", shape="n")
    ]
    encoded: Annotated[
        FloatArray, Tensor("arrays/encoded", "the nodes, encoded, with noise", shape=f"n {LATENT}")
    ]
    weights: Annotated[FloatArray, Tensor("arrays/weights", "each `fGen`, flat", shape="c w")]

    @property
    def examples(self) -> int:
        return int(self.clients.size)

    def check(self, known: Known) -> None:
        """Refuse rows that do not add up, and more neighbours than can be missing."""
        rows, missing = self.rows, self.missing
        if (rows < 0).any() or rows.sum() != missing.size:
            raise MalformedReplyError(f"{ROWS}: counts for {missing.size} nodes, got {rows[:5]}...")
        if missing.size and (missing.min() < 1 or missing.max() > NEIGHBOURS):
            raise MalformedReplyError(f"missing: expected 1 to {NEIGHBOURS}")

    @classmethod
    def join(cls, parts: Sequence[Generators]) -> Generators:
        return cls(
            parts[0].epoch,
            np.concatenate([part.clients for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.missing for part in parts]),
            np.concatenate([part.encoded for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )


@dataclass
class PeerGradients(Message, up="train.compare"):
    """Client to server: the gradients that move generators towards the nodes here."""

    epoch: Annotated[int, Whole(EPOCH, "the epoch")]
    gradient: Annotated[
        FloatArray,
        Tensor(
            "arrays/gradient",
            "gradients by each author's weights, summed over the clients here",
            shape="a w",
        ),
    ]
