"""Messages of FedSage+ before its rounds: generators, and the other clients' gradients for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fed_sage.networks import FEATURES, LATENT, NEIGHBOURS
from flower_graph.wire.arrays import FloatArray, IntArray, read_array
from flower_graph.wire.codec import Field, Known, Message, Reading, Tensor, Writing
from flower_graph.wire.fields import Exact, Flag, Whole
from flower_graph.wire.keys import CLIENTS, EPOCH, ROWS

Arrays = dict[str, FloatArray]


@dataclass(frozen=True)
class Named(Field[Mapping[str, NDArray[np.generic]]]):
    """Named arrays: all of them are there, or none."""

    names: tuple[str, ...] = ()
    first: str = ""  # the letter of a first axis that all arrays have
    turn = 1

    @property
    def described(self) -> str:
        head = [self.first] if self.first else []
        shapes = (", ".join([*head, *"ij"[:n]]) for n in (1, 2))
        return "float32 " + " or ".join(f"`[{shape}]`" for shape in shapes)

    def write(self, value: Mapping[str, NDArray[np.generic]], to: Writing) -> None:
        record = self.key.partition("/")[0]
        to.records.append(record)
        to.arrays |= {f"{record}/{name}": values for name, values in value.items()}

    def read(self, name: str, reading: Reading) -> dict[str, NDArray[np.generic]]:
        if not isinstance(reading.arrays, RecordDict):
            result, reading.arrays = reading.arrays, []
            if result and len(result) != len(self.names):
                raise MalformedReplyError(f"{self.key}: {len(result)} came of {len(self.names)}")
            return dict(zip(self.names, result, strict=False))
        record, head = self.key.partition("/")[0], reading.shape(self.first)
        shapes = reading.known["shapes"]
        return {
            name: read_array(reading.arrays, record, name, (*head, *shapes[name]))
            for name in self.names
        }


@dataclass
class GeneratorRequest(Message, down="train.generate"):
    """Server to client: train alone (epoch 0), or with the other clients' gradients."""

    epoch: Annotated[int, Whole(EPOCH, "0: train alone; from 1 on: step by the gradients")]
    share: Annotated[bool, Flag("share", "whether to show the generators")]
    gradient: Annotated[
        Arrays,
        Named(
            "arrays/lin*",
            "gradients by `lin1.weight`, `.bias`, to `lin3`, of each client here",
            names=FEATURES,
            first="c",
        ),
    ] = field(default_factory=dict)
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
    weights: Annotated[Arrays, Named("arrays/lin*", "weights", names=FEATURES, first="c")]

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
            {name: np.concatenate([part.weights[name] for part in parts]) for name in FEATURES},
        )


@dataclass
class PeerGradients(Message, up="train.compare"):
    """Client to server: the gradients that move generators towards the nodes here."""

    epoch: Annotated[int, Whole(EPOCH, "the epoch")]
    gradient: Annotated[
        Arrays,
        Named(
            "arrays/lin*",
            "gradients by each author's weights, summed over the clients here",
            names=FEATURES,
            first="a",
        ),
    ]
