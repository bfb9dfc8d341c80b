"""Messages of FedSCem: sums of embeddings down, one masked vector up.

The vector that a client adds to the sum has four parts in a row (``Layout``): embeddings by slot, a
one for each slot that the client holds, its measurements, and, if models are shared, its weights.
It is written as words of a ring, under two kinds of pads that the server does not know
(``secure.align.client``), or as plain float64. Embeddings that are too long for the ring are
shortened. If a client's other numbers do not fit, the client is left out, never clipped.

Entries of the secure sum and of the alignment travel in the same messages under keys of their own.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.engine.graph_batch import Metrics, count_batch
from flower_graph.engine.stacked_weights import sum_first_layers
from flower_graph.errors import MalformedReplyError, RefusedError, UnreadableSumError
from flower_graph.ops.counts import Counts
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.slots import SlotTable
from flower_graph.secure.channel import framed
from flower_graph.secure.relayed import CHECKS, REFUSAL, checks_of
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.cohort import EgoCohort, Shared
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import Field, Known, Message, Part, Reading, Writing
from flower_graph.wire.counts import Counting, as_counts, counts_size
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
from flower_graph.wire.keys import ROLES, TOTAL

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
LOG = logging.getLogger(__name__)


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
        # Embeddings and ones slot by slot; a model's first layer row by row, then all the rest
        self.embeddings, self.counts, self.metrics, self.model, self.predictions, self.tags = parts
        self.relayed = slice(0, self.counts.stop)  # what the clients get back


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
        codec.Tensor(
            f"{keys.SUMS}/embeddings",
            "the last round's sum of embeddings, under pads (plain: float64, without)",
            shape="slots·h",
            dtype=WORDS_OR_PLAIN,
        ),
    ]
    counts: Annotated[
        SumArray,
        codec.Tensor(
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
        codec.Tensor(
            f"model/{keys.FIRST}",
            "first layer to start from, where models are shared",
            shape="f h",
            when="shares_model",
        ),
    ] = None
    rest: Annotated[
        FloatArray | None,
        codec.Tensor(
            f"model/{keys.REST}", "all other weights, flat", shape="D", when="shares_model"
        ),
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


class EgoReply(Message, up="train"):
    """Client to server: the sum of its clients' vectors."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND, "as asked")]
    # Of the MaskedReply, which the secure sum checks; or, for plain sums, of a PlainEnrolment
    entries: Annotated[dict[str, object], Rest("")]
    total: Annotated[
        SumArray,
        codec.Tensor(
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


# A vector ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorEncoding:
    """The encoding of a round's vectors, and of their sum."""

    layout: Layout  # Their parts
    table: SlotTable  # Which client holds which slot
    ring: Ring | None  # None for plain sums
    pads: bytes  # What pads are made for: the run, and what the sum is of
    sum_round: int  # Number of the secure sum of this round

    def slots(self, clients: Iterable[int], without: Container[int] = ()) -> NDArray[np.int64]:
        """Return the slot of every node of the clients, ``[n]``; -1 for clients left out."""
        slots = [(client, self.table.by_client[client]) for client in clients]
        return np.concatenate([np.full_like(s, -1) if c in without else s for c, s in slots])

    def holder_pads(self) -> NDArray[np.uint64]:
        """Return the pads of the slots held here, ``[s, h]``."""
        return self.table.pads(self.pads, self.sum_round, self.layout.hidden)

    def common_pad(self) -> NDArray[np.uint64]:
        """Return the pad that all clients add to embeddings and counts, to hide the holders."""
        return self.table.group_pad(self.pads, self.sum_round, self.layout.relayed.stop)

    def check_pads(self, clients: Iterable[int]) -> NDArray[np.uint64]:
        return self.table.check_pads(self.pads, self.sum_round, clients)

    def checks(self, words: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        return checks_of(words, self.table.check(self.pads, self.sum_round, words.size))


def add_up(
    chosen: EgoCohort,
    h: Tensor,
    metrics: NDArray[np.float64],
    writing: VectorEncoding,
    logits: Tensor | None = None,
) -> tuple[SumArray, list[int], dict[int, str]]:
    """Add up the vectors of the chosen clients."""
    # h [n, h], metrics [c, 10], logits [n, k]; without these predictions are not counted
    layout, clients = writing.layout, list(chosen.batch.clients)
    if writing.ring:
        h = _shortened(h, writing.ring.limit)
    left_out = _unfit(chosen, h, metrics, writing)
    good = [client not in left_out for client in clients]
    present = [client for client in clients if client not in left_out]
    total = np.zeros(layout.length, np.int64 if writing.ring else np.float64)
    if layout.slots:
        slots = writing.slots(clients, left_out)
        kept = slots >= 0
        rows = torch.from_numpy(_encode(writing.ring, h.cpu().numpy()[kept]))
        place, size = torch.from_numpy(slots[kept]), (layout.slots, layout.hidden)
        summed = torch.zeros(size, dtype=rows.dtype).index_add_(0, place, rows)
        total[layout.embeddings] = summed.numpy().ravel()
        step = 1 if writing.ring is None else _encode(writing.ring, np.ones(1))
        total[layout.counts] = np.bincount(slots[kept], minlength=layout.slots) * step
    total[layout.metrics] = _encode(writing.ring, metrics[good]).sum(0)
    if layout.weights:
        total[layout.model] = _weights(chosen, good, writing.ring)
    if layout.counting and logits is not None:
        counts = count_batch(chosen.batch, logits, torch.tensor(good), layout.counting)
        assert counts is not None
        # A node is one step of the ring's numbers, however long these are: sums are exact.
        guard = 0 if writing.ring is None else writing.ring.guard_bits
        total[layout.predictions] = counts.flat().numpy() << guard
    if writing.ring is None:
        return total, present, left_out
    words = total.view(np.uint64)
    if writing.table.group_key and layout.slots:  # the server must not see sums
        words = _padded(writing, words, slots, present)
    return words.astype(writing.ring.dtype), present, left_out


def read_shared(sums: Sums, chosen: EgoCohort, reading: VectorEncoding) -> Shared:
    """Remove the pads and divide: mean embeddings of nodes with two or more holders."""
    layout, table, ring = reading.layout, reading.table, reading.ring
    counts, embeddings = sums.counts, sums.embeddings.reshape(layout.slots, layout.hidden)
    slots, held = reading.slots(chosen.batch.clients), table.held
    if ring is None:
        counts, values = counts.astype(np.int64), embeddings[held]
    else:
        words, ones = embeddings[held], counts
        if table.group_key:
            common = reading.common_pad().astype(ring.dtype) * ring.dtype.type(sums.contributors)
            ones = ones - common[layout.counts]
            words = words - common[layout.embeddings].reshape(embeddings.shape)[held]
        decoded = ring.decode(ones)
        if not are_counts(decoded, sums.contributors):
            raise UnreadableSumError(f"a number of holders is not from 0 to {sums.contributors}")
        counts = decoded.astype(np.int64)
        if table.group_key:
            added = reading.holder_pads().astype(ring.dtype)
            words = words - counts[held, None].astype(ring.dtype) * added
        values = ring.decode(words)
        ring.check_sums(values, counts[held, None])
    mean = np.zeros(embeddings.shape, np.float32)
    mean[held] = values / np.maximum(counts[held, None], 1)
    is_shared = (slots >= 0) & (counts[slots] >= 2) if counts.size else np.zeros(slots.size, bool)
    place = torch.from_numpy(np.flatnonzero(is_shared))
    device = chosen.batch.y.device
    return Shared(place.to(device), torch.from_numpy(mean[slots[is_shared]]).to(device))


def _shortened(h: Tensor, limit: float) -> Tensor:
    """Shorten embeddings with a number beyond the limit until it is there, in their direction."""
    # The direction is what the contrast compares (cosines, equation 9), whereas ``L_nc`` has
    # embeddings grow as long as clients train. Those with NaN or infinity stay without a number.
    largest = h.abs().amax(1, keepdim=True)
    # The product may be rounded up, hence the second bound.
    return torch.where(largest > limit, (h * (limit / largest)).clamp(-limit, limit), h)


def _unfit(
    chosen: EgoCohort, h: Tensor, metrics: NDArray[np.float64], writing: VectorEncoding
) -> dict[int, str]:
    """Find the clients with a number that is NaN, or beyond the ring's limit."""
    limit = writing.ring.limit if writing.ring else float(np.finfo(np.float32).max)
    largest = h.abs().amax(1).nan_to_num(torch.inf, posinf=torch.inf)
    of_client = torch.zeros(chosen.batch.size, device=h.device)
    of_client.scatter_reduce_(0, chosen.batch.node_client, largest, "amax")
    measured = np.nan_to_num(np.abs(metrics), nan=np.inf).max(1)
    worst = {"an embedding": of_client.tolist(), "a measurement": measured.tolist()}
    if writing.layout.weights:
        worst["a weight"] = chosen.largest().tolist()
    left_out = {}
    for what, values in worst.items():
        for client, value in zip(chosen.batch.clients, values, strict=True):
            if not value <= limit:
                left_out[client] = f"{what} is outside the range of -{limit:g} to {limit:g}"
                # For the client's own log: the server does not learn how large.
                LOG.warning("client %d: %s: %.3g", client, left_out[client], value)
    return left_out


def _encode(ring: Ring | None, values: NDArray[np.floating]) -> NDArray[np.number]:
    """Encode numbers for the sum: int64 modulo 2^64, or float64."""
    if ring is None:
        return values.astype(np.float64)
    return ring.encode(values).view(f"<i{ring.word // 8}").astype(np.int64)


def _weights(chosen: EgoCohort, good: list[bool], ring: Ring | None) -> NDArray[np.generic]:
    """Add up the clients' weights: active rows, and for the others the row without a feature."""
    first, rest = (weight.cpu() for weight in chosen.weights())
    owner, feature = chosen.batch.row_client.cpu(), chosen.batch.feature.cpu()
    keep = torch.tensor(good)
    kept = keep[owner]
    active = torch.from_numpy(_encode(ring, first[kept].numpy()))
    inactive = torch.from_numpy(_encode(ring, chosen.inactive_rows().cpu().numpy()))
    holders = torch.bincount(feature[kept], minlength=inactive.shape[0])
    total = sum_first_layers(active, feature[kept], inactive, keep.sum() - holders)
    others = _encode(ring, rest[keep].numpy()).sum(0)
    return np.concatenate([total.numpy().ravel(), others])


def _padded(
    writing: VectorEncoding, words: NDArray[np.uint64], slots: NDArray[np.int64], present: list[int]
) -> NDArray[np.uint64]:
    """Add the pads that hide the sums from the server, holders' and common, and the checks."""
    layout, table, result = writing.layout, writing.table, words.copy()
    count = np.bincount(slots[slots >= 0], minlength=layout.slots)[table.held]
    spread = result[layout.embeddings].reshape(layout.slots, layout.hidden)
    spread[table.held] += writing.holder_pads() * count[:, None].astype(np.uint64)
    if layout.checks:
        tags = writing.checks(result[layout.relayed]) + writing.check_pads(present)
        result[layout.tags] = tags
    result[layout.relayed] += writing.common_pad() * np.uint64(len(present))
    return result


def check_shared(sums: Sums, reading: VectorEncoding) -> None:
    """Refuse sums that differ from what the contributors sent, before any number is read."""
    assert reading.ring is not None
    dtype = reading.ring.dtype
    words = np.concatenate([sums.embeddings.ravel(), sums.counts]).astype(dtype)
    if sums.members is not None and sums.checks is not None:
        common = reading.common_pad().astype(dtype)
        if words.size == common.size and sums.members.size == sums.contributors:
            words = words - common * dtype.type(sums.contributors)
            tags = sums.checks.view("<u8").ravel() - reading.check_pads(sums.members.tolist())
            if np.array_equal(reading.checks(words), tags.astype(dtype)):
                return
    raise RefusedError(REFUSAL)


def contrast_scale(tau: float) -> float:
    """Return the divisor of the contrastive loss on the wire, which grows with ``1 / tau``."""
    # The quotient is below ``2 + log(2 n_c)``, which fits the ring at any temperature.
    return 1 + 1 / tau


@dataclass
class RoundSum:
    """The result of a round's sum."""

    server_round: int  # The round, and the number of its secure sum
    sum_round: int
    total: SumArray | None = None  # [L] the sum; None if the round was skipped
    answered: Sequence[int] = ()  # Clients in it
    skipped: str = ""  # Why there is no sum
    # Clients and SuperNodes that were left out, and errors of clients
    rejected: list[dict[str, object]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)  # Seconds of the round's parts


def mean_metrics(sums: Mapping[str, float], tau: float) -> dict[str, float]:
    """Turn sums over clients of ``measure``'s results into means; NaN where no client has any."""

    def mean(name: str, count: str) -> float:
        return sums[name] / sums[count] if sums[count] > 0 else math.nan

    means = {name: mean(name, f"has-{name}") for name in (*ROLES, "contrast")}
    means["contrast"] *= contrast_scale(tau)
    return means | {"cross-entropy": mean("cross-entropy", "has-train")}


def measure(judged: Metrics, contrast: Tensor | None, tau: float) -> NDArray[np.float64]:
    """Return the measurements of ``METRIC_NAMES``, ``[c, 9]``; zeros without such nodes."""
    # contrast [c]
    columns = []
    for accuracy in judged.accuracy.T:
        columns += [accuracy.nan_to_num(0.0), (~accuracy.isnan()).double()]
    # A client without training nodes has no loss; the loss of one that diverged is NaN.
    columns.append(torch.where(judged.accuracy[:, 0].isnan(), 0.0, judged.loss))
    if contrast is None:
        contrast = torch.full_like(judged.loss, torch.nan)
    columns += [contrast.nan_to_num(0.0) / contrast_scale(tau), (~contrast.isnan()).double()]
    assert len(columns) == len(METRIC_NAMES)
    return torch.stack([column.double() for column in columns], 1).numpy()


def add_noise(
    noise: ClientNoise,
    state: RecordDict,
    h: Tensor,
    measured: NDArray[np.float64],
    writing: VectorEncoding,
    clients: Sequence[int],
) -> tuple[Tensor, NDArray[np.float64]]:
    """Clip each client's embeddings, add noise, and remove its measurements."""
    # No mod can add it, since a SuperNode's reply is already the masked sum over its clients. A
    # client's slots, and so the number of nodes that it shares, get no noise.
    # h [n, h], measured [c, 9]
    if writing.layout.weights:
        raise RefusedError("the weights that are asked for would have no noise")
    shown = np.zeros_like(measured) if noise.withholds else measured
    if not writing.layout.slots:  # after the last round
        return torch.zeros_like(h), shown
    noise.count(state)
    local, start = h.detach().cpu().numpy(), 0
    result = np.zeros_like(local)
    for client in clients:
        slots = writing.table.by_client[client]
        place = start + np.flatnonzero(slots >= 0)
        start += slots.size
        if not np.isfinite(local[place]).all():
            result[place] = np.nan  # cannot be clipped: this client alone is left out, and told
        elif place.size:
            result[place] = noise.protect(local[None, place])[0]
    return torch.from_numpy(result).to(h.device), shown


# What can be known of a sum -----------------------------------------------------------------------


def read_counted(total: SumArray, layout: Layout, ring: Ring | None) -> Counts | None:
    """Read the counts in a sum; None if no counts were asked for."""
    if not layout.counting:
        return None
    words = total[layout.predictions]
    numbers = words if ring is None else ring.decode(words) * 2.0**ring.fraction_bits
    return as_counts(np.rint(numbers).astype(np.int64), layout.classes, layout.counting)


def check_measured(sums: NDArray[np.float64], clients: int, rounding: float) -> None:
    """Refuse sums of measurements that are impossible for this many clients."""
    measured = dict(zip(SUMMED_NAMES, sums.tolist(), strict=True))
    counts = [n for name, n in measured.items() if name.startswith("has-") or name == UNREAD]
    check_counts(np.array(counts), clients)
    for role in ROLES:
        if not -rounding <= measured[role] <= measured[f"has-{role}"] + rounding:
            raise MalformedReplyError(
                f"{TOTAL}: {role} is {measured[role]:g}, a sum of "
                f"{measured[f'has-{role}']:g} accuracies"
            )


def check_counts(found: NDArray[np.float64], clients: int) -> None:
    """Refuse sums that are no counts of this many clients."""
    if not are_counts(found, clients):
        raise MalformedReplyError(f"{TOTAL}: expected counts from 0 to {clients} clients")


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Return whether all are whole numbers that this many clients can reach."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())
