"""Messages of FedSCem: sums of embeddings down, one masked vector up.

The vector that a client adds to the sum has four parts in a row (``Layout``): embeddings by slot, a
one for each slot that the client holds, its measurements, and, if models are shared, its weights.
It is written as words of a ring, under two kinds of pads that the server does not know
(``secure.align.client``), or as plain float64. Embeddings that are too long for the ring are
shortened. If a client's other numbers do not fit, the client is left out, never clipped.

Entries of the secure sum and of the alignment travel in the same messages under keys of their own.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.channel import framed
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import (
    Block,
    Bytes,
    Clients,
    Field,
    Flag,
    Known,
    Message,
    NotSaved,
    Numbers,
    Part,
    Raw,
    Reading,
    Real,
    Reasons,
    Resume,
    Saves,
    Token,
    Whole,
    Word,
    Writing,
)
from flower_graph.wire.counts import Counting, counts_size
from flower_graph.wire.keys import TOTAL

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
# Any: ring words, or plain numbers; the round has a ring or not
SumArray = NDArray[Any]
# A sum, or a part of one
SumTensor = partial(codec.Tensor, dtype="uint32, uint64 or float64")


@dataclass
class Layout:
    """Sizes of the parts of a vector, and where each part is."""

    slots: int  # Slots, and numbers in an embedding
    hidden: int
    weights: int = 0  # Numbers in a model; 0 where models are not shared
    classes: int = 0  # Of predictions that are counted, and what is: see ``ops.counts``
    counting: str = ""
    checks: int = 0  # Of the embeddings and counts, where the server may lie

    def __post_init__(self) -> None:
        sizes = self.slots * self.hidden, self.slots, len(SUMMED_NAMES), self.weights
        predictions = counts_size(self.classes, self.counting)
        ends = list(accumulate([*sizes, predictions, self.checks], initial=0))
        self.length = ends[-1]
        parts = [slice(*both) for both in pairwise(ends)]
        # Embeddings and ones slot by slot; a model's parameters one behind the other
        self.embeddings, self.counts, self.metrics, self.model, self.predictions, self.tags = parts
        self.relayed = slice(0, self.counts.stop)  # what the clients get back


class EgoEnrolment(Message, down="query"):
    """Server to client: asks for its clients and keys, and names a checkpoint.

    The answer: ``KeyReply``.
    """

    run_id: Annotated[bytes, Raw("sum-run", group="Set-up of the sum")]
    alignment: Annotated[str, Word()]  # `psi`, `verified` or `plain`: what will follow
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)


class Sums(NamedTuple):
    """The server's sums of a round, for the clients."""

    server_round: Annotated[int, Whole("sums-round")]  # round of `sums`; 0: there are none
    # number of the secure sum, which the pads belong to, and how many clients are in it
    origin: Annotated[list[int], Numbers("contributors", shape="2", whole=True)]
    # the last round's sum of embeddings, under pads (plain: float64, without)
    embeddings: Annotated[SumArray, SumTensor(f"{keys.SUMS}/embeddings", shape="slots·h")]
    # how many clients are in each slot, likewise
    counts: Annotated[SumArray, SumTensor(f"{keys.SUMS}/{keys.HOLDER_COUNTS}", shape="slots")]
    # where the server may lie: the clients in it, each of which has a pad on its checks
    members: Annotated[IntArray | None, Clients("sums-members", shape="q")] = None
    # likewise: checks of embeddings and counts, words of 64 bits under these pads
    checks: Annotated[Bytes | None, Block("sums-checks", shape=f"{CHECKS} 8")] = None


@dataclass(frozen=True)
class Rest(Field[Mapping[str, object]]):
    """Entries of another message that travels with this one."""

    def write(self, value: Mapping[str, object], to: Writing) -> None:
        to.config.update(value)

    def read(self, name: str, reading: Reading) -> object:
        others = (keys.SERVER_ROUND, keys.NUM_EXAMPLES)
        return {k: v for k, v in reading.config.items() if k not in others}


class EgoRequest(Message, down="train"):
    """Server to client: the last round's sums; asks for this round's vector."""

    server_round: Annotated[int, Whole()]  # the round
    clients: Annotated[IntArray, Clients(shape="p")]  # who takes part
    variant: Annotated[str, Word()]  # `full`, `iter` or `minus`
    # Of the round before; None before the first, and where it was skipped
    sums: Annotated[Sums | None, Part(make=Sums, when="sums-round", absent=0)] = None
    shares_model: Annotated[bool, Flag()] = False  # whether `model` is there
    # the model to start from, where models are shared: the parameters of `EgoGCN` in a row
    weights: Annotated[
        FloatArray | None, codec.Tensor("model/weights", shape="D", when="shares_model")
    ] = None
    # How numbers are written, and the secure sum's part; None for plain sums
    ring: Annotated[Ring | None, RING] = None
    mask: Annotated[MaskRequest | None, Part("Mask", make=MaskRequest, when=keys.RING_WORD)] = None
    is_last: Annotated[bool, Flag()] = False  # after the last round: only measure
    checkpoint: Saves = False
    run: Token = ""
    counting: Counting = ""
    # Of the alignment's last message, when slots are new
    slots: Annotated[Mapping[str, object], Rest("")] = field(default_factory=dict)

    def vector_layout(self, settings: EgoSettings, slots: int, *, checked: bool) -> Layout:
        """Return the parts of this round's vectors; after the last round, measurements alone."""
        hidden, about = settings.hidden, (settings.num_classes, self.counting)
        if self.is_last:
            return Layout(0, hidden, 0, *about)
        weights = 0 if self.weights is None else self.weights.size
        return Layout(slots, hidden, weights, *about, CHECKS if checked and slots else 0)


@dataclass(frozen=True)
class Seconds(Real):
    """A client's seconds; an impossible time counts as 0, since nothing is computed with it."""

    def decode(self, value: object, name: str, reading: Reading) -> float:
        if isinstance(value, (int, float)) and 0 <= value < MAX_SECONDS:
            return float(value)
        return 0.0


class EgoReply(Message, up="train"):
    """Client to server: the sum of its clients' vectors."""

    server_round: Annotated[int, Whole()]  # as asked
    # sum of the clients' vectors: embeddings by slot, ones for slots held, nine measurements,
    # whether the last means could not be read, weights, counts if they are asked for, checks where
    # the server may lie (`Layout` of `messages.py`); masked ring words, or plain
    total: Annotated[SumArray, SumTensor(f"{keys.SUMS}/{TOTAL}", shape="L", limit=None)]
    train_seconds: Annotated[float, Seconds()]  # what training took
    mask_seconds: Annotated[float, Seconds()]  # what masking took
    not_saved: NotSaved = ""
    # plain: who is in the sum
    clients: Annotated[IntArray, Clients("present", shape="q")] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    # plain: `number:reason` for each that is not in the sum
    left_out: Annotated[dict[int, str], Reasons()] = field(default_factory=dict)
    # Of the ``MaskedReply``, which the secure sum checks
    masked: Annotated[dict[str, object], Rest("")] = field(default_factory=dict)

    def check(self, known: Known) -> None:
        """Refuse clients of a plain sum that are not among those ``asked``."""
        if (asked := known.get("asked")) is None:
            return
        if not self.clients.size:
            raise MalformedReplyError("present: there is no client")
        if (strange := np.setdiff1d(self.clients, asked)).size:
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


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Return whether all are whole numbers that this many clients can reach."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())


def contrast_scale(tau: float) -> float:
    """Return the divisor of the contrastive loss on the wire, which grows with ``1 / tau``."""
    # The quotient is below ``2 + log(2 n_c)``, which fits the ring at any temperature.
    return 1 + 1 / tau
