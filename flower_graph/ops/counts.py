"""Counts of right and wrong predictions, which add up over clients, and their metrics.

Macro-F1 and similar figures are no means of the clients' figures: they need the counts of all
clients. The sum of all clients' counts gives the metric of the pooled predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_graph.ops.links import HITS, ROLES, area_of, precision_of, rank_counts

BINS = 1000  # of a histogram
ERROR_SUMS = 3  # of a role: nodes, sum of absolute errors, sum of squared errors
RANKS = 2 + len(HITS)  # numbers of ``rank_counts``
# Log-odds from here on share a bin. Bins are narrow around an even guess and widen outwards as the
# logarithm does, since both untrained and very sure networks have to be told apart.
MOST_ODDS, FINEST = 30.0, 0.01


@dataclass(frozen=True)
class Counts:
    """Counts of predictions in ``r`` roles (training, validation, test) and ``k`` classes."""

    confusion: Tensor  # [r, k, k] int64, nodes by role, label and predicted class
    # [r, k, 2, BINS] int64, nodes by role, class, whether the label is another or this one, and bin
    # of the probability of this class
    histograms: Tensor | None = None
    ranks: Tensor | None = None  # [r, 4] int64, for pairs: the output of ``ops.links.rank_counts``

    # A run asks for the first, the first two or all three
    @property
    def parts(self) -> list[Tensor]:
        every = self.confusion, self.histograms, self.ranks
        return [part for part in every if part is not None]

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(self.parts, other.parts, strict=True)
        return Counts(*(one + two for one, two in pairs))

    def flat(self) -> Tensor:
        """Lay all counts in one row, ``[m]``."""
        return torch.cat([part.reshape(-1) for part in self.parts])

    @classmethod
    def of_flat(cls, values: Tensor, classes: int, parts: int) -> Counts:
        """Read the output of ``flat``; ``ValueError`` if no set of nodes can have these counts."""
        shapes = _shapes(classes, parts)
        sizes = [math.prod(shape) for shape in shapes]
        if values.numel() != sum(sizes) or bool((values < 0).any()):
            raise ValueError(f"counts: {values.numel()} numbers; {sum(sizes)} from 0 on are needed")
        rows = zip(values.split(sizes), shapes, strict=True)
        result = cls(*(row.view(shape) for row, shape in rows))
        own = result.confusion.sum(2)  # [r, k] nodes with this label
        every = torch.stack([own.sum(1, keepdim=True) - own, own], 2)
        if result.histograms is not None and not torch.equal(result.histograms.sum(3), every):
            raise ValueError("counts: histograms and confusion are of different nodes")
        return result


@dataclass(frozen=True)
class Errors:
    """Errors of predicted numbers, in ``r`` roles."""

    sums: Tensor  # [r, 3] float64: nodes, sum of absolute errors, sum of squared errors

    def __add__(self, other: Errors) -> Errors:
        return Errors(self.sums + other.sums)

    def flat(self) -> Tensor:
        """Lay all sums in one row, ``[3 r]`` float64."""
        return self.sums.reshape(-1)

    @classmethod
    def of_flat(cls, values: Tensor) -> Errors:
        """Read the output of ``flat``; ``ValueError`` if no nodes can have these errors."""
        if values.numel() != ROLES * ERROR_SUMS:
            raise ValueError(f"errors: {values.numel()} numbers, not {ROLES * ERROR_SUMS}")
        sums = values.double().view(ROLES, ERROR_SUMS)
        nodes, absolute, squared = sums.T
        good = bool(sums.isfinite().all()) and not bool((sums < 0).any())
        # The square of a mean is at most the mean of squares, but for rounding
        good = good and bool((nodes == nodes.floor()).all())
        good = good and bool((absolute.square() <= nodes * squared * (1 + 1e-6)).all())
        if not good:
            raise ValueError("errors: these are not sums of some nodes' errors")
        return cls(sums)

    @classmethod
    def of(cls, errors: Tensor, masks: Mapping[str, Tensor]) -> Errors:
        """Add up errors ``[n]`` by role; the result is on the CPU."""
        errors = errors.detach().double().cpu()
        rows = []
        for mask in masks.values():
            some = errors[mask.cpu()]
            rows.append(torch.stack([torch.ones_like(some), some.abs(), some.square()]).sum(1))
        return cls(torch.stack(rows))

    def mean(self, place: int, *, squared: bool) -> float:
        """Return the mean absolute or squared error of a role; NaN without nodes."""
        nodes, *totals = self.sums[place].tolist()
        return float(totals[squared] / nodes) if nodes else math.nan


def _shapes(classes: int, parts: int) -> list[tuple[int, ...]]:
    return [(ROLES, classes, classes), (ROLES, classes, 2, BINS), (ROLES, RANKS)][:parts]


def count_size(classes: int, parts: int) -> int:
    """Return how many numbers ``Counts.flat`` has; 0 without parts."""
    return sum(map(math.prod, _shapes(classes, parts)))


def count(logits: Tensor, y: Tensor, masks: Mapping[str, Tensor], parts: int) -> Counts:
    """Count predictions, on the CPU, in so many parts of ``Counts``."""
    # logits [n, k]; y [n], below 0 for nodes that do not count; masks [n] in the order of the
    # roles; edges are of class 1
    logits, y = logits.detach().cpu(), y.cpu()
    chosen = [(mask.cpu() & (y >= 0)).nonzero().flatten() for mask in masks.values()]
    confusion = confusion_of(logits.argmax(1), y, chosen, logits.shape[1])
    if parts == 1:
        return Counts(confusion)
    bins, k = bins_of(logits), logits.shape[1]
    cells = (torch.arange(k) * 2 + (y[:, None] == torch.arange(k))) * BINS + bins  # [n, k]
    size = k * 2 * BINS
    shares = [torch.bincount(cells[rows].flatten(), minlength=size) for rows in chosen]
    scores = logits[:, -1] - logits[:, 0]
    ranked = [rank_counts(scores[rows], y[rows] == 1) for rows in chosen if parts == 3]
    histogram = torch.stack(shares).view(-1, k, 2, BINS)
    return Counts(confusion, histogram, torch.stack(ranked) if ranked else None)


def confusion_of(predicted: Tensor, y: Tensor, chosen: Sequence[Tensor], classes: int) -> Tensor:
    """Count nodes by role, label and predicted class, ``[r, k, k]``."""
    # predicted, y [n]; chosen: numbers of each role's nodes
    cells = [torch.bincount(y[r] * classes + predicted[r], minlength=classes**2) for r in chosen]
    return torch.stack(cells).view(len(chosen), classes, classes)


def bins_of(logits: Tensor) -> Tensor:
    """Return the bin of each class's probability, ``[n, k]``; higher for a higher probability."""
    classes = logits.shape[1]
    share = logits.double().log_softmax(1)
    # Odds against an even guess; rounding may bring a share to 1.
    odds = share - torch.log1p(-share.exp().clamp(max=1 - 1e-15)) + math.log(max(classes - 1, 1))
    scaled = odds.sign() * torch.log1p(odds.abs() / FINEST) / math.log1p(MOST_ODDS / FINEST)
    return ((scaled + 1) / 2 * BINS).long().clamp(0, BINS - 1)


def macro_f1(confusion: Tensor) -> float:
    """Return the mean over classes of F1, as scikit-learn has it; NaN without any node."""
    # confusion [k, k]; classes without a label or prediction are left out
    right = confusion.diagonal().double()
    either = (confusion.sum(0) + confusion.sum(1)).double()
    return _mean_where(2 * right / either, either > 0)


def balanced_accuracy(confusion: Tensor) -> float:
    """Return the mean accuracy over the classes that occur."""
    # confusion [k, k]
    nodes = confusion.sum(1).double()
    return _mean_where(confusion.diagonal().double() / nodes, nodes > 0)


def auc(histograms: Tensor) -> float:
    """Return the mean over classes of the area under the ROC curve, one class against the rest."""
    # histograms [k, 2, BINS]; nodes of one bin are tied, a class with one kind of nodes left out
    others, own = histograms.double().unbind(1)  # [k, BINS] each
    areas = area_of(own, others)
    return _mean_where(areas, ~areas.isnan())


def binned_precision(histograms: Tensor) -> float:
    """Return the average precision of class 1 of two, such as edges among pairs of nodes."""
    # histograms [2, 2, BINS]
    others, own = histograms[1].flip(1)
    return precision_of(own, others)


def _mean_where(values: Tensor, chosen: Tensor) -> float:
    return float(values[chosen].mean()) if bool(chosen.any()) else math.nan
