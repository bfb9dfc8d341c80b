"""The vector that a client adds to a round's sum, and what can be read of the sum.

Its parts are in a row (``Layout``): embeddings by slot, a one for each slot that the client holds,
its measurements, the weights if models are shared, and counts of predictions. Numbers are words of
a ring, or plain float64. Embeddings that are too long for the ring are shortened. If a client's
other numbers do not fit, the client is left out, never clipped.

*Pads* (``secure.align.client``) hide embeddings and ones from the server, even their sums: holders
of a slot add its pad, all clients the common pad. Where the server may lie, checks of all that show
whether it has changed the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.learner import NODES
from flower_graph.errors import (
    CHANGED_SUM,
    MalformedReplyError,
    RefusedError,
    UnreadableSumError,
)
from flower_graph.ops.counts import Counts, Errors
from flower_graph.ops.grouped import sums_by
from flower_graph.privacy.noise import ClientNoise
from flower_graph.secure.align.client import SlotTable
from flower_graph.secure.ring import CHECKS, Ring, SumPad
from flower_graph.strategies.fedscem.algorithm import (
    FIRST,
    METRIC_NAMES,
    EgoCohort,
    EgoGroup,
    Shared,
    mean_embeddings,
)
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import largest_size
from flower_graph.wire.codec import Whole
from flower_graph.wire.counts import as_counts, counts_size
from flower_graph.wire.keys import MAX_NUMBER, ROLES, TOTAL

LOG = logging.getLogger(__name__)
# Summed besides: how many clients could not read the means of the round before. They are not named,
# since a client that notices a wrong word holds its slot.
UNREAD = "unread"
SUMMED_NAMES = (*METRIC_NAMES, UNREAD)
ROUNDING = 1e-3  # of a client's accuracy in a plain sum
# Any: ring words, or plain numbers; the round has a ring or not
SumArray = NDArray[Any]
RELAYED = codec.Tensor(
    f"{keys.SUMS}/{keys.RELAYED}", shape="slots·(h+1)", dtype="uint32, uint64 or float64"
)


@dataclass
class Layout:
    """Sizes of the parts of a vector, and where each part is."""

    slots: int  # Slots, and numbers in an embedding
    hidden: int
    weights: int = 0  # Numbers in a model; 0 where models are not shared
    classes: int = 0  # Of predictions that are counted, and what is: see ``ops.counts``
    counting: str = ""
    is_checked: bool = False  # Whether embeddings and counts have checks: the server may lie

    def __post_init__(self) -> None:
        sizes = self.slots * self.hidden, self.slots, CHECKS * (self.is_checked and self.slots > 0)
        others = len(SUMMED_NAMES), self.weights, counts_size(self.classes, self.counting)
        ends = list(accumulate([*sizes, *others], initial=0))
        self.length = ends[-1]
        parts = [slice(*both) for both in pairwise(ends)]
        # Embeddings and ones slot by slot; a model's parameters one behind the other
        self.embeddings, self.counts, checks, self.metrics, self.model, self.predictions = parts
        self.relayed = slice(0, checks.stop)  # what the clients get back
        self.numbers = slice(self.metrics.start, self.model.stop)  # what the server decodes


class Sums(NamedTuple):
    """The server's sums of a round, for the clients."""

    server_round: Annotated[int, Whole("sums-round")]  # round of `sums`; left out without
    # number of the secure sum, which the pads belong to, and how many clients are in it
    origin: Annotated[list[int], codec.Numbers("contributors", shape="2", whole=True)]
    # the last round's sums under pads (plain: float64, without): embeddings by slot, how many
    # clients are in each slot, and 64 checks of both where the server may lie
    words: Annotated[SumArray, RELAYED]


class PlainNumbers:
    """Numbers of a sum in the clear, with what a ``Ring`` says of its words."""

    word, guard_bits, fraction_bits = 64, 0, 0
    dtype, limit = np.dtype(np.float64), float(np.finfo(np.float32).max)

    def encode(self, values: NDArray[np.floating]) -> SumArray:
        return values.astype(np.float64)

    def decode(self, total: SumArray) -> NDArray[np.float64]:
        return total

    def check_sums(self, sums: NDArray[np.float64], count: object) -> None:
        """Accept any: the server has read each vector."""


PLAIN = PlainNumbers()


# A client's part ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorEncoding:
    """The encoding of a round's vectors, and of their sum."""

    layout: Layout  # Their parts
    table: SlotTable  # Which client holds which slot
    ring: Ring | None  # None for plain sums
    pads: bytes  # the run and the sum that pads are made for
    sum_round: int  # Number of the secure sum of this round

    @property
    def form(self) -> Ring | PlainNumbers:
        return self.ring or PLAIN

    @property
    def has_pads(self) -> bool:
        """Whether embeddings and ones are under pads: the server must not see sums."""
        return self.ring is not None and bool(self.table.group_key and self.layout.slots)

    @property
    def common(self) -> SumPad:
        """The pad that all clients add to embeddings and ones: it hides the holders."""
        size = self.layout.counts.stop
        checked = self.layout.is_checked
        return self.table.common_pad(self.pads, self.sum_round, size, checked=checked)

    def slot_pads(self, dtype: np.dtype[np.generic]) -> NDArray[np.unsignedinteger]:
        """Return the pads of the slots that are held here, ``[s, h]``."""
        # Above the guard bits, so that these bits are zeros in every sum. Otherwise the lowest bits
        # of a sum would show the factors of two in the slot's number of holders in the round.
        pads = self.table.pads(self.pads, self.sum_round, self.layout.hidden)
        return (pads << np.uint64(self.form.guard_bits)).astype(dtype)

    def add_up(
        self,
        cohort: EgoCohort,
        group: EgoGroup,
        h: Tensor,
        metrics: NDArray[np.float64],
        logits: Tensor | None = None,
    ) -> tuple[SumArray, list[int], dict[int, str]]:
        """Add up the vectors of a group's clients (step 6)."""
        # h [n, h], metrics [c, 10], logits [n, k]; without these predictions are not counted
        layout, form, clients = self.layout, self.form, group.graph.clients
        if self.ring:
            h = _shortened(h, form.limit)
        left_out = self._unfit(group, h, metrics)
        present = [client for client in clients if client not in left_out]
        good = torch.tensor([client in present for client in clients], device=h.device)
        total = np.zeros(layout.length, np.int64 if self.ring else np.float64)
        slots = np.zeros(0, np.int64)
        if layout.slots:
            here = good[group.graph.owner].cpu().numpy()
            slots = np.where(here, self._slots(clients), -1)
            kept = slots >= 0
            rows, slots = self._encode(h[torch.from_numpy(kept)]), slots[kept]
            summed, holders = sums_by(torch.from_numpy(slots), rows, layout.slots)
            total[layout.embeddings] = summed.numpy().ravel()
            total[layout.counts] = holders.numpy() * self._encode(torch.ones(1)).numpy()
        total[layout.metrics] = self._encode(torch.from_numpy(metrics)[good.cpu()]).sum(0).numpy()
        if layout.weights:
            once = dict.fromkeys(present, 1)
            names = [name for name, _ in cohort.module.named_parameters()]
            sums = [cohort.total(name, once, self._encode).flatten() for name in names]
            total[layout.model] = torch.cat(sums).numpy()
        if layout.counting and logits is not None:
            judged = group.graph.judged(logits)
            masks = {role: mask & good[group.graph.owner] for role, mask in judged.masks.items()}
            counts = NODES.count(judged._replace(masks=masks), layout.counting)
            assert counts is not None
            # A node is one step of the ring's numbers, however long these are: sums are exact.
            total[layout.predictions] = counts.flat().numpy() << form.guard_bits
        if self.has_pads:
            self._pad(total.view(np.uint64), slots, present)
        words = total if self.ring is None else total.view(np.uint64).astype(form.dtype)
        return words, present, left_out

    def opened(self, sums: Sums) -> SumArray:
        """Remove the common pad; refuse sums that the server has changed, where it may."""
        words = sums.words.astype(self.form.dtype)
        if self.layout.is_checked and words.size != self.layout.relayed.stop:
            raise RefusedError(CHANGED_SUM)
        return self.common.take_off(words, sums.origin[1]) if self.has_pads else words

    def means(
        self, words: SumArray, contributors: int, clients: Sequence[int], device: torch.device
    ) -> Shared:
        """Remove the slots' pads from ``opened`` sums, and divide (step 3)."""
        layout, form, held = self.layout, self.form, self.table.held
        holders = form.decode(words[layout.counts])
        if not are_counts(holders, contributors):
            raise UnreadableSumError(f"a number of holders is not from 0 to {contributors}")
        holders = holders[held].astype(np.int64)
        rows = words[layout.embeddings].reshape(layout.slots, layout.hidden)[held]
        if self.has_pads:
            rows = rows - holders[:, None].astype(form.dtype) * self.slot_pads(form.dtype)
        values = form.decode(rows)
        form.check_sums(values, holders[:, None])
        slots = self._slots(clients)
        places = np.where(slots >= 0, np.searchsorted(held, slots), -1)
        shared = mean_embeddings(*map(torch.from_numpy, (values, holders, places)))
        return Shared(*(one.to(device) for one in shared))

    def _slots(self, clients: Sequence[int]) -> NDArray[np.int64]:
        return np.concatenate([self.table.by_client[client] for client in clients])

    def _encode(self, values: Tensor) -> Tensor:
        numbers = self.form.encode(values.detach().cpu().numpy())
        if self.ring is not None:
            numbers = numbers.view(f"<i{self.ring.word // 8}").astype(np.int64)
        return torch.from_numpy(numbers)

    def _unfit(self, group: EgoGroup, h: Tensor, metrics: NDArray[np.float64]) -> dict[int, str]:
        limit, clients = self.form.limit, group.graph.clients
        worst = {
            "an embedding": largest_of(h, group.graph.owner, len(clients)),
            "a measurement": largest_of(torch.from_numpy(metrics), None, len(clients)),
        }
        if self.layout.weights:
            owner, of_each = {FIRST: group.graph.rows.owner}, group.module.named_parameters()
            stacks = [(stack.detach(), owner.get(name)) for name, stack in of_each]
            largest = [largest_of(*one, len(clients)) for one in stacks]
            worst["a weight"] = torch.stack(largest).amax(0)
        left_out = {}
        for what, values in worst.items():
            for client, value in zip(clients, values.tolist(), strict=True):
                if not value <= limit:
                    left_out[client] = f"{what} is outside the range of -{limit:g} to {limit:g}"
                    # For the client's own log: the server does not learn how large.
                    LOG.warning("client %d: %s: %.3g", client, left_out[client], value)
        return left_out

    def _pad(self, words: NDArray[np.uint64], slots: NDArray[np.int64], present: list[int]) -> None:
        """Add the pads that hide the sums from the server, holders' and common, and the checks."""
        layout, held = self.layout, self.table.held
        count = np.bincount(slots, minlength=layout.slots)[held]
        spread = words[layout.embeddings].reshape(layout.slots, layout.hidden)
        spread[held] += self.slot_pads(words.dtype) * count[:, None].astype(np.uint64)
        words[layout.relayed] = self.common.put_on(words[: layout.counts.stop], len(present))


def _shortened(h: Tensor, limit: float) -> Tensor:
    """Shorten embeddings with a number beyond the limit until it is there, in their direction."""
    # The direction is what the contrast compares (cosines, equation 9), whereas ``L_nc`` has
    # embeddings grow as long as clients train. Those with NaN or infinity stay without a number.
    largest = h.abs().amax(1, keepdim=True)
    # The product may be rounded up, hence the second bound.
    return torch.where(largest > limit, (h * (limit / largest)).clamp(-limit, limit), h)


def largest_of(rows: Tensor, owner: Tensor | None, clients: int) -> Tensor:
    """Return each client's largest absolute number, ``[c]``; infinity for NaN."""
    # rows [n, ...], owner [n]; by default each client has one row
    size = rows.abs().flatten(1).amax(1).nan_to_num(torch.inf, posinf=torch.inf).double().cpu()
    owner = torch.arange(clients) if owner is None else owner.cpu()
    return size.new_zeros(clients).scatter_reduce_(0, owner, size, "amax")


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


# What the server reads of a sum ------------------------------------------------------------------


def read_sum(
    total: SumArray, layout: Layout, ring: Ring | None, clients: int
) -> tuple[dict[str, float], NDArray[np.float64], Counts | Errors | None]:
    """Read the measurements, weights and counts of a sum over so many clients.

    Refuse what is impossible for them. Without counts that were asked for, the last is None.
    """
    form, rounding = (PLAIN, ROUNDING) if ring is None else (ring, 2.0**-ring.fraction_bits)
    if ring is None:  # otherwise under pads
        check_counts(total[layout.counts], clients)
    numbers = form.decode(total[layout.numbers])
    form.check_sums(numbers, clients)
    figures, weights = np.split(numbers, [len(SUMMED_NAMES)])
    measured = dict(zip(SUMMED_NAMES, figures.tolist(), strict=True))
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
    counted = form.decode(total[layout.predictions]) * 2.0**form.fraction_bits
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


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Return whether all are whole numbers that this many clients can reach."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())


def check_counts(found: NDArray[np.float64], clients: int) -> None:
    """Refuse sums that are no counts of this many clients."""
    if not are_counts(found, clients):
        raise MalformedReplyError(f"{TOTAL}: expected counts from 0 to {clients} clients")
