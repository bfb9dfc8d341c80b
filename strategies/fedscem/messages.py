"""Messages of FedSCem: sums of embeddings down, one masked vector up.

The vector that a client adds to the sum has four parts in a row (``Layout``): embeddings by slot, a
one for each slot that the client holds, its measurements, and, if models are shared, its weights.
It is written as words of a ring, under two kinds of pads that the server does not know
(``secure.align.client``), or as plain float64. Embeddings that are too long for the ring are
shortened. If a client's other numbers do not fit, the client is left out, never clipped.

Entries of the secure sum and of the alignment travel in the same messages under keys of their own.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.learner import NODES
from flower_graph.errors import MalformedReplyError, RefusedError, UnreadableSumError
from flower_graph.ops.counts import Counts, Errors
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.slots import SlotTable
from flower_graph.secure.channel import framed
from flower_graph.secure.relayed import CHECKS, REFUSAL, checks_of
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.cohort import EgoCohort, EgoGroup, Shared, largest_of
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import FloatArray, IntArray, largest_size
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
from flower_graph.wire.keys import MAX_NUMBER, ROLES, TOTAL

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
ROUNDING = 1e-3  # of a client's accuracy in a plain sum
LOG = logging.getLogger(__name__)
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
        return {k: v for k, v in {**reading.metrics, **reading.config}.items() if k not in others}


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
    slots: Annotated[Mapping[str, object], Rest()] = field(default_factory=dict)

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
    masked: Annotated[dict[str, object], Rest()] = field(default_factory=dict)

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


# A vector ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorEncoding:
    """The encoding of a round's vectors, and of their sum."""

    layout: Layout  # Their parts
    table: SlotTable  # Which client holds which slot
    ring: Ring | None  # None for plain sums
    pads: bytes  # What pads are made for: the run, and what the sum is of
    sum_round: int  # Number of the secure sum of this round

    def add_up(
        self,
        cohort: EgoCohort,
        group: EgoGroup,
        h: Tensor,
        metrics: NDArray[np.float64],
        logits: Tensor | None = None,
    ) -> tuple[SumArray, list[int], dict[int, str]]:
        """Add up the vectors of a group's clients."""
        # h [n, h], metrics [c, 10], logits [n, k]; without these predictions are not counted
        layout, ring, clients = self.layout, self.ring, group.graph.clients
        if ring:
            h = _shortened(h, ring.limit)
        left_out = self._unfit(group, h, metrics)
        present = [client for client in clients if client not in left_out]
        good = torch.tensor([client in present for client in clients], device=h.device)
        total = np.zeros(layout.length, np.int64 if ring else np.float64)
        slots = np.zeros(0, np.int64)
        if layout.slots:
            here = good[group.layout.owner].cpu().numpy()
            slots = np.where(here, self._slots(clients), -1)
            kept = slots >= 0
            rows, slots = self._encode(h[torch.from_numpy(kept)]), slots[kept]
            summed = rows.new_zeros(layout.slots, layout.hidden)
            summed.index_add_(0, torch.from_numpy(slots), rows)
            total[layout.embeddings] = summed.numpy().ravel()
            one = self._encode(torch.ones(1)).numpy()
            total[layout.counts] = np.bincount(slots, minlength=layout.slots) * one
        total[layout.metrics] = self._encode(torch.from_numpy(metrics)[good.cpu()]).sum(0).numpy()
        if layout.weights:
            once = dict.fromkeys(present, 1)
            names = [name for name, _ in cohort.module.named_parameters()]
            sums = [cohort.total(name, once, self._encode).flatten() for name in names]
            total[layout.model] = torch.cat(sums).numpy()
        if layout.counting and logits is not None:
            judged = group.judged(logits)
            masks = {role: mask & good[group.layout.owner] for role, mask in judged.masks.items()}
            counts = NODES.count(judged._replace(masks=masks), layout.counting)
            assert counts is not None
            # A node is one step of the ring's numbers, however long these are: sums are exact.
            total[layout.predictions] = counts.flat().numpy() << (ring.guard_bits if ring else 0)
        if ring is None:
            return total, present, left_out
        words = total.view(np.uint64)
        if self.table.group_key and layout.slots:  # the server must not see sums
            words = self._padded(words, slots, present)
        return words.astype(ring.dtype), present, left_out

    def means(self, sums: Sums, clients: Sequence[int], device: torch.device) -> Shared:
        """Remove the pads and divide: mean embeddings of nodes with two or more holders."""
        layout, table, ring = self.layout, self.table, self.ring
        counts, (_, contributors) = sums.counts, sums.origin
        embeddings = sums.embeddings.reshape(layout.slots, layout.hidden)
        slots, held = self._slots(clients), table.held
        if ring is None:
            counts, values = counts.astype(np.int64), embeddings[held]
        else:
            words, ones = embeddings[held], counts
            if table.group_key:
                common = self._common(ring, contributors)
                ones = ones - common[layout.counts]
                words = words - common[layout.embeddings].reshape(embeddings.shape)[held]
            decoded = ring.decode(ones)
            if not are_counts(decoded, contributors):
                raise UnreadableSumError(f"a number of holders is not from 0 to {contributors}")
            counts = decoded.astype(np.int64)
            if table.group_key:
                added = table.pads(self.pads, self.sum_round, layout.hidden).astype(ring.dtype)
                words = words - counts[held, None].astype(ring.dtype) * added
            values = ring.decode(words)
            ring.check_sums(values, counts[held, None])
        mean = np.zeros(embeddings.shape, np.float32)
        mean[held] = values / np.maximum(counts[held, None], 1)
        none = np.zeros(slots.size, bool)
        is_shared = (slots >= 0) & (counts[slots] >= 2) if counts.size else none
        place = torch.from_numpy(np.flatnonzero(is_shared))
        return Shared(place.to(device), torch.from_numpy(mean[slots[is_shared]]).to(device))

    def check(self, sums: Sums) -> None:
        """Refuse sums that differ from what the contributors sent, before any number is read."""
        assert self.ring is not None
        dtype, (_, contributors) = self.ring.dtype, sums.origin
        words = np.concatenate([sums.embeddings.ravel(), sums.counts]).astype(dtype)
        if sums.members is not None and sums.checks is not None:
            common, members = self._common(self.ring, contributors), sums.members.tolist()
            if words.size == common.size and len(members) == contributors:
                words = words - common
                pads = self.table.check_pads(self.pads, self.sum_round, members)
                tags = sums.checks.view("<u8").ravel() - pads
                check = self.table.check(self.pads, self.sum_round, words.size)
                if np.array_equal(checks_of(words, check), tags.astype(dtype)):
                    return
        raise RefusedError(REFUSAL)

    def _slots(self, clients: Sequence[int]) -> NDArray[np.int64]:
        """Return the slot of every node of the clients, ``[n]``."""
        return np.concatenate([self.table.by_client[client] for client in clients])

    def _common(self, ring: Ring, count: int) -> NDArray[np.unsignedinteger]:
        """Return the pads that all clients add to embeddings and counts, to hide the holders."""
        pad = self.table.group_pad(self.pads, self.sum_round, self.layout.relayed.stop)
        return (pad * np.uint64(count)).astype(ring.dtype)

    def _encode(self, values: Tensor) -> Tensor:
        """Encode numbers for the sum: int64 modulo 2^64, or float64."""
        if self.ring is None:
            return values.detach().double().cpu()
        words = self.ring.encode(values.detach().cpu().numpy())
        return torch.from_numpy(words.view(f"<i{self.ring.word // 8}").astype(np.int64))

    def _unfit(self, group: EgoGroup, h: Tensor, metrics: NDArray[np.float64]) -> dict[int, str]:
        """Find the clients with a number that is NaN, or beyond the ring's limit."""
        limit = self.ring.limit if self.ring else float(np.finfo(np.float32).max)
        clients = group.graph.clients
        worst = {
            "an embedding": largest_of(h, group.layout.owner, len(clients)),
            "a measurement": largest_of(torch.from_numpy(metrics), None, len(clients)),
        }
        if self.layout.weights:
            worst["a weight"] = group.largest()
        left_out = {}
        for what, values in worst.items():
            for client, value in zip(clients, values.tolist(), strict=True):
                if not value <= limit:
                    left_out[client] = f"{what} is outside the range of -{limit:g} to {limit:g}"
                    # For the client's own log: the server does not learn how large.
                    LOG.warning("client %d: %s: %.3g", client, left_out[client], value)
        return left_out

    def _padded(
        self, words: NDArray[np.uint64], slots: NDArray[np.int64], present: list[int]
    ) -> NDArray[np.uint64]:
        """Add the pads that hide the sums from the server, holders' and common, and the checks."""
        layout, table, what, result = self.layout, self.table, self.pads, words.copy()
        count = np.bincount(slots, minlength=layout.slots)[table.held]
        spread = result[layout.embeddings].reshape(layout.slots, layout.hidden)
        pads = table.pads(what, self.sum_round, layout.hidden)
        spread[table.held] += pads * count[:, None].astype(np.uint64)
        relayed = result[layout.relayed]
        if layout.checks:
            check = table.check(what, self.sum_round, relayed.size)
            tags = checks_of(relayed, check) + table.check_pads(what, self.sum_round, present)
            result[layout.tags] = tags
        relayed += table.group_pad(what, self.sum_round, relayed.size) * np.uint64(len(present))
        return result


def _shortened(h: Tensor, limit: float) -> Tensor:
    """Shorten embeddings with a number beyond the limit until it is there, in their direction."""
    # The direction is what the contrast compares (cosines, equation 9), whereas ``L_nc`` has
    # embeddings grow as long as clients train. Those with NaN or infinity stay without a number.
    largest = h.abs().amax(1, keepdim=True)
    # The product may be rounded up, hence the second bound.
    return torch.where(largest > limit, (h * (limit / largest)).clamp(-limit, limit), h)


def contrast_scale(tau: float) -> float:
    """Return the divisor of the contrastive loss on the wire, which grows with ``1 / tau``."""
    # The quotient is below ``2 + log(2 n_c)``, which fits the ring at any temperature.
    return 1 + 1 / tau


def mean_metrics(sums: Mapping[str, float], tau: float) -> dict[str, float]:
    """Turn sums over clients of ``measure``'s results into means; NaN where no client has any."""

    def mean(name: str, count: str) -> float:
        return sums[name] / sums[count] if sums[count] > 0 else math.nan

    means = {name: mean(name, f"has-{name}") for name in (*ROLES, "contrast")}
    means["contrast"] *= contrast_scale(tau)
    return means | {"cross-entropy": mean("cross-entropy", "has-train")}


def measure(
    accuracy: Tensor, loss: Tensor, contrast: Tensor | None, tau: float
) -> NDArray[np.float64]:
    """Return the measurements of ``METRIC_NAMES``, ``[c, 9]``; zeros without such nodes."""
    # accuracy [c, 3], loss, contrast [c]
    shares = torch.stack([accuracy.nan_to_num(0.0), (~accuracy.isnan()).to(accuracy)], 2)
    # A client without training nodes has no loss; the loss of one that diverged is NaN.
    loss = torch.where(accuracy[:, 0].isnan(), 0.0, loss)
    contrast = torch.full_like(loss, torch.nan) if contrast is None else contrast
    scaled = contrast.nan_to_num(0.0) / contrast_scale(tau)
    columns = [*shares.flatten(1).T, loss, scaled, ~contrast.isnan()]
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


def read_sum(
    total: SumArray, layout: Layout, ring: Ring | None, clients: int
) -> tuple[dict[str, float], NDArray[np.float64], Counts | Errors | None]:
    """Read the measurements, weights and counts of a sum over so many clients.

    Refuse what is impossible for them. Without counts that were asked for, the last is None.
    """
    numbers, weights, words = (total[one] for one in (layout.metrics, layout.model, layout.counts))
    counted, rounding = total[layout.predictions], ROUNDING
    if ring is None:
        check_counts(words, clients)
    else:
        steps = 2.0**ring.fraction_bits
        counted, rounding = ring.decode(counted) * steps, 1 / steps
        numbers, weights = ring.decode(numbers), ring.decode(weights)
        ring.check_sums(numbers, clients)
        ring.check_sums(weights, clients)
    measured = dict(zip(SUMMED_NAMES, numbers.tolist(), strict=True))
    counts = [n for name, n in measured.items() if name.startswith("has-") or name == UNREAD]
    check_counts(np.array(counts), clients)
    for role in ROLES:
        over = -measured[role], measured[role] - measured[f"has-{role}"]
        if not max(over) <= clients * rounding:
            raise MalformedReplyError(
                f"{TOTAL}: {role} is {measured[role]:g}, a sum of "
                f"{measured[f'has-{role}']:g} accuracies"
            )
    if not layout.counting:
        return measured, weights, None
    whole = np.rint(counted).astype(np.int64)
    return measured, weights, as_counts(whole, layout.classes, layout.counting)


def check_plain_sum(total: SumArray, layout: Layout, clients: int) -> None:
    """Refuse a plain sum that is impossible for its number of clients."""
    # total [L]
    if total.dtype != np.float64:
        raise MalformedReplyError(f"{TOTAL} has type {total.dtype}, expected float64")
    if total.size and (largest := largest_size(total)) > clients * MAX_NUMBER:
        raise MalformedReplyError(
            f"{TOTAL} has a number of size {largest:g}, {clients} clients can make "
            f"{clients * MAX_NUMBER:g} at most"
        )
    read_sum(total, layout, None, clients)


def check_counts(found: NDArray[np.float64], clients: int) -> None:
    """Refuse sums that are no counts of this many clients."""
    if not are_counts(found, clients):
        raise MalformedReplyError(f"{TOTAL}: expected counts from 0 to {clients} clients")


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Return whether all are whole numbers that this many clients can reach."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())
