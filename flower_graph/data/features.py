"""The treatments of features when a graph is read: the choices of ``data.features``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import (
    AS_IS,
    AUTO,
    AUTO_DENSE,
    FEATURES,
    MEAN,
    PRESENCE,
    REFUSE,
    ROW,
    STANDARDISE,
)
from flower_graph.data.gaps import Columns, fill_gaps, missing_means
from flower_graph.data.graph import Treatment
from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor, pointers
from flower_graph.rng import chances

# What is done to the features, in words
CHANGES = {
    PRESENCE: "made 0 or 1",
    ROW: "row-normalised",
    STANDARDISE: "standardised over all nodes",
}
MOST_DENSE = 50_000_000  # entries that `auto-dense` keeps in full: 200 MB
ROWS = 4096  # that are looked at together: what is made of them stays in cache
EXACT, ROUNDED = 1e-12, 1e-7  # relative deviation, in float64 and float32, that is rounding
SPARSE = 1 / 3  # share of non-zero entries up to which features count as sparse
# A node's entries that are not 0, in the mean, up to which features stay as they are, or are made 0
# and 1. One step of Adam moves the weights of all of them: with hundreds, networks say one class
MOST_WORDS = 64


class Prepared(NamedTuple):
    """Features after their treatment."""

    features: list[Tensor]
    notes: tuple[str, ...]  # one for each change
    treatment: Treatment  # the treatment, for features of other nodes


def prepare_features(
    features: Sequence[Tensor],
    how: str,
    missing: str = REFUSE,
    columns: Columns | None = None,
    moved: tuple[float, torch.Generator] | None = None,
) -> Prepared:
    """Transform the features of a graph, or of all clients together, as ``data.features`` says.

    ``missing`` says what stands for missing numbers, ``moved`` the arguments of ``move_features``.
    """
    if how not in FEATURES:
        raise DataError(f"data.features = {how!r}: must be one of {', '.join(FEATURES)}")
    features, notes, fill, constant = list(features), list[str](), None, 0
    if missing == MEAN and all(x.layout == torch.strided for x in features):
        fill, count = missing_means(features, columns)
        features = [fill_gaps(x, fill) for x in features]
        notes += [f"{count} missing numbers: each feature's mean stands for them"] * bool(count)
    if moved is not None:
        features = [move_features(x, *moved) for x in features]
        notes.append(f"{moved[0]:.0%} of the features moved (data.feature_noise)")
    look = None if how == AS_IS else _Look(features)
    if look is not None and how in (AUTO, AUTO_DENSE):
        given, (how, why) = how, look.choice(is_dense=how == AUTO_DENSE)
        notes.append(f"data.features={given} chose {how}: {why}")
    treatment = Treatment(how, features[0].size(1), columns=columns)
    if look is not None and how == PRESENCE:
        why = "negative" if look.least < 0 else "dense"
        if look.least < 0 or (look.share > SPARSE and not look.is_binary):
            advice = "set data.features=as-is or auto"
            raise DataError(f"data.features=presence: features are {why} ({look}); {advice}")
    if how == STANDARDISE:
        treatment, constant = _standardised(treatment, features)
    also = f"; {constant} constant" if constant else ""
    notes += [f"features {CHANGES[how]}; before: {look}{also}"] if how in CHANGES else []
    prepared = [treatment.apply(x) for x in features]
    return Prepared(prepared, tuple(notes), treatment._replace(fill=fill))


def move_features(x: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    """Move each non-zero entry to another feature with probability ``chance``, as noise.

    Features are ``[n, f]``, dense or CSR, and the result has the same layout; if two entries meet,
    one is lost. ``DataError`` if there is no other feature.
    """
    n, f = x.shape
    if f < 2:
        raise DataError(f"data.feature_noise = {chance:g}: the graph has {f} features, not two")
    if x.layout == torch.strided:
        row, col = x.nonzero(as_tuple=True)
        value = x[row, col]
    else:
        row = torch.arange(n).repeat_interleave(x.crow_indices().diff())
        col, value = x.col_indices().long(), x.values()
    moves = torch.rand(col.numel(), generator=generator) < chance
    steps = torch.randint(1, f, (col.numel(),), generator=generator)  # never round to itself
    key, order = (row * f + torch.where(moves, (col + steps) % f, col)).sort(stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    row, col, value = key[first] // f, key[first] % f, value[order[first]]
    if x.layout == torch.strided:
        return torch.zeros_like(x).index_put_((row, col), value)
    return csr_tensor(pointers(row, n), col.to(x.col_indices().dtype), value, (n, f))


class _Look:
    def __init__(self, features: Sequence[Tensor]) -> None:
        self.entries = sum(x.numel() for x in features)
        self.share = sum(int(x.count_nonzero()) for x in features) / self.entries
        limits = [torch.aminmax(x) for x in features]
        self.least = min(float(each.min) for each in limits)
        self.most = max(float(each.max) for each in limits)
        self._features = features

    def __str__(self) -> str:
        percent = 100 * self.share
        shown = f"{percent:.0f}" if percent >= 1 or percent == 0 else f"{percent:.2g}"
        lowest = f"smallest value {self.least:.3g}, " if self.least < 0 else ""
        return f"{lowest}largest value {self.most:.3g}, {shown} % of the entries non-zero"

    @property
    def is_binary(self) -> bool:
        if self.least < 0 or self.most > 1:
            return False
        parts = (part for x in self._features for part in x.split(ROWS))
        return all(bool(((part == 0) | (part == 1)).all()) for part in parts)

    def choice(self, *, is_dense: bool) -> tuple[str, str]:
        """Choose a treatment, and say why; docs/results/own-graph.md has the measurements."""
        words = self.entries * self.share / sum(x.size(0) for x in self._features)
        if words > MOST_WORDS and (self.share > SPARSE or self.entries <= MOST_DENSE):
            return STANDARDISE, f"a node has {words:.0f} that are not 0, in the mean"
        if self.is_binary:
            return AS_IS, "all entries are 0 or 1"
        if self.least < 0:
            return STANDARDISE, "some entries are negative"
        if self.share > SPARSE:
            return STANDARDISE, "more than a third of the entries are not 0"
        why = "no entry is negative, and at most a third are not 0"
        if is_dense and self.entries <= MOST_DENSE:
            return STANDARDISE, f"{why}; all {self.entries:,} are kept"
        return PRESENCE, why


def _standardised(treatment: Treatment, features: Sequence[Tensor]) -> tuple[Treatment, int]:
    """Compute mean and deviation of each feature over all rows; count the constant ones."""
    # In float64, so that a large mean does not hide a small deviation.
    count = sum(x.size(0) for x in features)
    mean = sum((x.double().sum(0) for x in features), torch.zeros(1).double()) / count
    squares = (((x.double() - mean) ** 2).sum(0) for x in features)
    deviation = (sum(squares, torch.zeros(1).double()) / count).sqrt()
    rounded = EXACT if all(x.dtype == torch.float64 for x in features) else ROUNDED
    constant = deviation <= rounded * mean.abs()
    scale = torch.where(constant, torch.inf, deviation)
    return treatment._replace(mean=mean, scale=scale), int(constant.sum())


def sketched(x: Tensor, buckets: int, seed: int) -> Tensor:
    """Add up features ``[n, f]``, dense or CSR, by signed buckets, to dense ``[n, buckets]``.

    The seed and a feature's number decide its bucket: parties with the same seed hash alike.
    """
    number = torch.arange(x.shape[1])
    bucket = (chances(number, seed, "sketch-bucket") * buckets).long()
    sign = 1 - 2 * (chances(number, seed, "sketch-sign") < 0.5).to(x.dtype)
    result = torch.zeros(x.shape[0], buckets, dtype=x.dtype)
    if x.layout == torch.strided:
        return result.index_add_(1, bucket, x * sign)
    feature = x.col_indices().long()
    row = torch.repeat_interleave(torch.arange(x.shape[0]), x.crow_indices().diff())
    place = row * buckets + bucket[feature]
    result.view(-1).index_add_(0, place, x.values() * sign[feature])
    return result
