"""Messages of FedSCem: sums of embeddings down, one masked vector up.

The vector that a client adds to the sum has four parts in a row (``Layout``): embeddings by slot, a
one for each slot that the client holds, its measurements, and, if models are shared, its weights.
Entries of the secure sum and of the alignment travel in the same messages under keys of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.channel import framed
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire import keys
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import (
    Field,
    Known,
    Message,
    Part,
    Reading,
    Tensor,
    Writing,
)
from flower_graph.wire.counts import Counting, counts_size
from flower_graph.wire.fields import (
    Block,
    Bytes,
    Clients,
    Flag,
    NotSaved,
    Numbers,
    Raw,
    Real,
    Reasons,
    Resume,
    Saves,
    Token,
    Whole,
    Word,
)

# What a client measures, as sums over clients: accuracies with the number of clients that have
# such nodes, losses with the number of clients that have them.
METRIC_NAMES = (
    *("train", "has-train", "val", "has-val", "test", "has-test"),
    *("cross-entropy", "contrast", "has-contrast"),
)
# Summed besides: how many clients could not read the means of the round before. They are not named,
# since a client that notices a wrong word holds its slot.
UNREAD = "unread"
SUMMED_NAMES = (*METRIC_NAMES, UNREAD)

VERIFIED = "verified"  # blinded identities under a server that may lie

MAX_SECONDS = 1e6


class Layout(NamedTuple):
    """Sizes of the parts of a vector."""

    slots: int  # Slots, and numbers in an embedding
    hidden: int
    weights: int = 0  # Numbers in a model; 0 where models are not shared
    classes: int = 0  # Of predictions that are counted, and what is: see ``ops.counts``
    counting: str = ""
    checks: int = 0  # Of the embeddings and counts, where the server may lie

    @property
    def embeddings(self) -> slice:
        """``slots × hidden`` embeddings, slot by slot."""
        return slice(0, self.slots * self.hidden)

    @property
    def counts(self) -> slice:
        """``slots`` ones and zeros."""
        return slice(self.embeddings.stop, self.embeddings.stop + self.slots)

    @property
    def relayed(self) -> slice:
        """What the clients get back: embeddings and counts."""
        return slice(0, self.counts.stop)

    @property
    def metrics(self) -> slice:
        return slice(self.counts.stop, self.counts.stop + len(SUMMED_NAMES))

    @property
    def model(self) -> slice:
        """The first layer row by row, then all the rest."""
        return slice(self.metrics.stop, self.metrics.stop + self.weights)

    @property
    def predictions(self) -> slice:
        """Counts of predictions, in one row."""
        return slice(self.model.stop, self.model.stop + counts_size(self.classes, self.counting))

    @property
    def tags(self) -> slice:
        return slice(self.predictions.stop, self.predictions.stop + self.checks)

    @property
    def length(self) -> int:
        return int(self.tags.stop)


@dataclass
class EgoEnrolment(Message, down="query"):
    """Server to client: asks for its clients and keys, and names a checkpoint.

    The answer: ``KeyReply``.
    """

    # Of the secure sum
    run_id: Annotated[bytes, Raw("sum-run", group="Set-up of the sum")]
    alignment: Annotated[
        str,
        Word("alignment", "`psi`, `verified` or `plain`: what will follow"),
    ]
    # The run, and the checkpoint that the client is to load
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)


# Any: which of the two is told by whether the round has a ring
SumArray = NDArray[Any]  # ring words, or plain numbers
WORDS_OR_PLAIN = "uint32, uint64 or float64"


class Sums(NamedTuple):
    """The server's sums of a round, for the clients."""

    server_round: Annotated[int, Whole("sums-round", "round of `sums`; 0: there are none")]
    origin: Annotated[
        list[int],
        Numbers(
            "contributors",
            "number of the secure sum, which the pads belong to, and how many clients are in it",
            shape="2",
            whole=True,
        ),
    ]
    # Ring words under pads, or plain float64
    embeddings: Annotated[
        SumArray,
        Tensor(
            f"{keys.SUMS}/embeddings",
            "the last round's sum of embeddings, under pads (plain: float64, without)",
            shape="slots·h",
            dtype=WORDS_OR_PLAIN,
        ),
    ]
    counts: Annotated[
        SumArray,
        Tensor(
            f"{keys.SUMS}/{keys.HOLDER_COUNTS}",
            "how many clients are in each slot, likewise",
            shape="slots",
            dtype=WORDS_OR_PLAIN,
        ),
    ]
    members: Annotated[
        IntArray | None,
        Clients(
            "sums-members",
            "where the server may lie: the clients in it, each of which has a pad on its checks",
            shape="q",
            optional=True,
        ),
    ] = None
    checks: Annotated[
        Bytes | None,
        Block(
            "sums-checks",
            "likewise: checks of embeddings and counts, words of 64 bits under these pads",
            shape=f"{CHECKS} 8",
            optional=True,
        ),
    ] = None

    @property
    def sum_round(self) -> int:
        """Number of the secure sum, which the pads belong to."""
        return self.origin[0]

    @property
    def contributors(self) -> int:
        """How many clients are in it."""
        return self.origin[1]


ModelArrays = Sequence[NDArray[np.generic]]  # first layer, and the rest


@dataclass(frozen=True)
class Rest(Field[Mapping[str, object]]):
    """Entries of another message that travels with this one."""

    def write(self, value: Mapping[str, object], to: Writing) -> None:
        to.config.update(value)

    def read(self, name: str, reading: Reading) -> object:
        others = (keys.SERVER_ROUND, keys.NUM_EXAMPLES)
        return {k: v for k, v in {**reading.metrics, **reading.config}.items() if k not in others}


@dataclass
class EgoRequest(Message, down="train"):
    """Server to client: the last round's sums; asks for this round's vector."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND, "the round")]
    clients: Annotated[IntArray, Clients(keys.CLIENTS, "who takes part", shape="p")]
    variant: Annotated[str, Word("variant", "`full`, `iter` or `minus`")]
    # Of the round before; None before the first, and where it was skipped
    sums: Annotated[Sums | None, Part(make=Sums, when="sums-round", absent=0)] = None
    # The model to start from, where models are shared
    shares_model: Annotated[bool, Flag("shares-model", "whether `model` is there")] = False
    first: Annotated[
        FloatArray | None,
        Tensor(
            f"model/{keys.FIRST}",
            "first layer to start from, where models are shared",
            shape="f h",
            when="shares_model",
        ),
    ] = None
    rest: Annotated[
        FloatArray | None,
        Tensor(f"model/{keys.REST}", "all other weights, flat", shape="D", when="shares_model"),
    ] = None
    # How numbers are written, and the secure sum's part; None for plain sums
    ring: Annotated[
        Ring | None, Part("Ring", make=RING.make, fields=RING.fields, when=RING.when)
    ] = None
    mask: Annotated[MaskRequest | None, Part("Mask", make=MaskRequest, when=keys.RING_WORD)] = None
    # Whether training and sharing are over
    is_last: Annotated[bool, Flag(keys.IS_LAST, "after the last round: only measure")] = False
    checkpoint: Saves = False
    run: Token = ""
    counting: Counting = ""
    # Of the alignment's last message, when slots are new
    slots: Annotated[Mapping[str, object], Rest("")] = field(default_factory=dict)

    @property
    def model(self) -> ModelArrays | None:
        """First layer and rest of the model to start from."""
        return None if self.first is None or self.rest is None else (self.first, self.rest)

    def vector_layout(self, settings: EgoSettings, slots: int, *, checked: bool) -> Layout:
        """Return the parts of this round's vectors; after the last round, measurements alone."""
        hidden, about = settings.hidden, (settings.num_classes, self.counting)
        if self.is_last:
            return Layout(0, hidden, 0, *about)
        weights = sum(part.size for part in self.model or ())
        return Layout(slots, hidden, weights, *about, CHECKS if checked and slots else 0)


@dataclass(frozen=True)
class Seconds(Real):
    """A client's seconds; an impossible time counts as 0, since nothing is computed with it."""

    def decode(self, value: object, name: str, reading: Reading) -> float:
        if isinstance(value, (int, float)) and 0 <= value < MAX_SECONDS:
            return float(value)
        return 0.0


@dataclass
class EgoReply(Message, up="train"):
    """Client to server: the sum of its clients' vectors."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND, "as asked")]
    # Of the MaskedReply, which the secure sum checks; or, for plain sums, of a PlainEnrolment
    entries: Annotated[dict[str, object], Rest("")]
    total: Annotated[
        SumArray,
        Tensor(
            f"{keys.SUMS}/{keys.TOTAL}",
            "sum of the clients' vectors: embeddings by slot, ones for slots held, nine "
            "measurements, whether the last means could not be read, weights, counts if they are "
            "asked for, checks where the server may lie (`Layout` of `messages.py`); masked ring "
            "words, or plain",
            shape="L",
            dtype=WORDS_OR_PLAIN,
            limit=None,
        ),
    ]
    train_seconds: Annotated[float, Seconds("train-seconds", "what training took")]
    mask_seconds: Annotated[float, Seconds("mask-seconds", "what masking took")]
    not_saved: NotSaved = ""


@dataclass
class PlainEnrolment(Message, up="train"):
    """The clients of a plain sum: the entries of an ``EgoReply`` without masks."""

    clients: Annotated[IntArray, Clients("present", "plain: who is in the sum", shape="q")]
    left_out: Annotated[
        dict[int, str],
        Reasons(keys.LEFT_OUT, "plain: `number:reason` for each that is not in the sum"),
    ]

    def check(self, known: Known) -> None:
        if (strange := np.setdiff1d(self.clients, known["asked"])).size:
            raise MalformedReplyError(f"present: client {strange[0]} was not asked here")


def union_terms(epoch: int) -> SumTerms:
    """Return the terms of the sum of token tables; its length is the table's."""
    # Each alignment has another key, so its tables have nothing in common with others.
    return SumTerms(f"FedSCem union {epoch}", None)


def round_terms(server_round: int, ring: Ring | None, order: NDArray[np.uint8] | None) -> SumTerms:
    """Return the terms of a round's sum; server and clients put in their own order of slots."""
    # order [s, 12]: their tokens; None where identities are not blinded
    slots = b"" if order is None else hashlib.sha256(order.tobytes()).digest()
    return SumTerms("FedSCem round", ring, framed(b"%d" % server_round, slots), padded=True)
