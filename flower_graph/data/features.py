"""How a run reads features: columns, words, values for empty cells, and their treatment.

A missing number is NaN until all nodes of a run are known. Features have the names of their
columns, which match them with another table's. A column of words becomes one feature for each word
that any node has; these features are the same at all clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import (
    AS_IS,
    AUTO,
    AUTO_DENSE,
    COMMA,
    FEATURES,
    MEAN,
    POINT,
    PRESENCE,
    REFUSE,
    ROW,
    STANDARDISE,
    VALUES,
    DataConfig,
    RunConfig,
)
from flower_graph.errors import DataError
from flower_graph.ops.graph import csr_tensor, pointers
from flower_graph.rng import chances
from flower_graph.storage.reading import Tree

MOST_CATEGORIES = 1000  # different ones of a column; with more it is taken for names or free text


class Uses(NamedTuple):
    """Which parts of a graph a run reads besides features, edges and classes."""

    targets: bool = False  # labels are numbers to learn
    weights: bool = False  # weights of edges count
    sparse: bool = False  # features of a generated graph may be CSR, if too many to be dense

    @classmethod
    def of(cls, config: RunConfig) -> Uses:
        learns_values = getattr(config, "task", None) == VALUES
        return cls(learns_values, config.takes_edge_weights, config.takes_sparse)


PLAIN = Uses()


class Gaps(NamedTuple):
    """How files are read: settings of the section ``data``."""

    no_features: str = REFUSE  # stands for all features of a graph that has none
    missing: str = REFUSE  # stands for a number that a node lacks
    categories: str = REFUSE  # stands for a word in place of a number
    label: str | None = None  # column of nodes' classes; None: `label`
    weight: str | None = None  # column of edges' weights; None: `weight`
    decimal: str = POINT  # sign in numbers that are written as words

    @classmethod
    def of(cls, config: DataConfig) -> Gaps:
        return cls(**{name: getattr(config, name) for name in cls._fields})

    @property
    def has_comma(self) -> bool:
        return self.decimal == COMMA


NO_GAPS = Gaps()  # all are refused


class Columns(NamedTuple):
    """The column of each feature, and its word where the column has words."""

    names: tuple[str, ...]
    words: tuple[str | None, ...]

    @classmethod
    def of(cls, given: object, width: int) -> Columns | None:
        """Return a graph's names of its features; None if there are not ``width``."""
        if isinstance(given, Columns):
            return given
        if not isinstance(given, list | tuple) or len(given) != width:
            return None
        pairs = [(one, None) if isinstance(one, str) else one for one in given]
        is_pair = (isinstance(one, list | tuple) and len(one) == 2 for one in pairs)
        return cls.from_json(pairs) if all(is_pair) else None

    def to_json(self) -> list[list[str | None]]:
        return [[name, word] for name, word in zip(self.names, self.words, strict=True)]

    @classmethod
    def from_json(cls, pairs: Sequence[Sequence[str | None]]) -> Columns:
        words = tuple(None if word is None else str(word) for _, word in pairs)
        return cls(tuple(str(name) for name, _ in pairs), words)

    def words_of(self, name: str) -> list[str]:
        """Return the words of a column; none if it has numbers."""
        pairs = zip(self.names, self.words, strict=True)
        return [word for one, word in pairs if one == name and word is not None]


def encode_words(numbers: Tensor, words: Mapping[int, str]) -> tuple[Tensor, list[str]]:
    """Make a feature of each word of a column ``[n]`` of ``numbers``, NaN for a word.

    ``words`` are those of the rows that have one. Returns ``[n, k]``, 1 for a node's own word and
    NaN if it has none, and the k words, sorted. More than ``MOST_CATEGORIES`` are a ``DataError``.
    """
    known = sorted(set(words.values()))
    if len(known) > MOST_CATEGORIES:
        raise DataError(f"has {len(known)} different words: at most {MOST_CATEGORIES} are features")
    number = {word: index for index, word in enumerate(known)}
    encoded = torch.full((len(numbers), len(known)), torch.nan, dtype=numbers.dtype)
    rows = torch.tensor(list(words))
    encoded[rows] = 0
    encoded[rows, torch.tensor([number[word] for word in words.values()])] = 1
    return encoded, known


def common_columns(clients: Sequence[Columns]) -> Columns:
    """Return the features of all clients: the first one's columns, with the words of all."""
    pairs: list[tuple[str, str | None]] = []
    for name in dict.fromkeys(clients[0].names):
        words = sorted({word for columns in clients for word in columns.words_of(name)})
        pairs += [(name, word) for word in words] if words else [(name, None)]
    return Columns.from_json(pairs)


def align(x: Tensor, own: Columns, common: Columns) -> Tensor:
    """Reorder features ``[n, f]`` with columns of their own into the columns of a run.

    ``DataError`` if a column or a word is not in both, or one has words and the other numbers.
    """
    if own == common:
        return x
    for name in sorted({*own.names} ^ {*common.names}):
        problem = "is missing here" if name in common.names else "is not among the others'"
        raise DataError(f"column {name} {problem}; they are {', '.join({}.fromkeys(common.names))}")
    place = {pair: at for at, pair in enumerate(zip(*own, strict=True))}
    for name, word in place:
        known = common.words_of(name)
        if word is not None and word not in known:
            allowed = f"must be one of {', '.join(known)}" if known else "must be a number"
            raise DataError(f"{name}: {word!r:.40} {allowed}")
    found = []
    for name, word in zip(*common, strict=True):
        if (name, word) in place:
            found.append(x[:, place[name, word]])
            continue
        some = x[:, own.names.index(name)]  # of another word, or a column without anything
        if (name, None) in place and not bool(torch.isnan(some).all()):
            words = ", ".join(common.words_of(name))
            raise DataError(f"{name}: has numbers, others have words: {words}")
        found.append(torch.where(torch.isnan(some), some, 0.0))
    return torch.stack(found, 1)


def missing_means(features: Sequence[Tensor], columns: Columns | None) -> tuple[Tensor, int]:
    """Return each feature's mean over all nodes of all clients, ``[f]``, and how many are missing.

    The means are float64, and stand for missing values.
    """
    nothing = [torch.isnan(x) for x in features]
    total = sum((x.double().nansum(0) for x in features), torch.zeros(1).double())
    known = sum(((~each).sum(0) for each in nothing), torch.zeros(1, dtype=torch.int64))
    if (known == 0).any():
        column = int((known == 0).nonzero()[0])
        name = f"x[:, {column}]" if columns is None else columns.names[column]
        raise DataError(f"{name}: no node has a number there; leave it out")
    return total / known, sum(int(each.sum()) for each in nothing)


def fill_gaps(x: Tensor, fill: Tensor) -> Tensor:
    """Replace NaN by the feature's fill value."""
    return torch.where(torch.isnan(x), fill.to(x.dtype), x)


# The choices of ``data.features`` ----------------------------------------------------------------

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


class Treatment(NamedTuple):
    """The treatment of a run's features (``data.features``), for those of other nodes."""

    how: str  # as-is, row, presence or standardise
    width: int  # features of a node
    mean: Tensor | None = None  # float64 [f], of standardise
    scale: Tensor | None = None  # likewise; infinite where a feature was constant
    fill: Tensor | None = None  # float64 [f], for missing numbers (``data.missing``)
    columns: Columns | None = None  # of the features, where these have names

    def apply(self, x: Tensor) -> Tensor:
        if x.size(1) != self.width:
            raise DataError(f"x has {x.size(1)} features: must be the {self.width} of the run")
        if self.fill is not None:
            x = fill_gaps(x, self.fill)
        if self.how != STANDARDISE:
            x = x.float()
        if self.how == PRESENCE:
            x = (x != 0).to(x.dtype)
        if self.how == ROW:
            x = normalize_rows(x)
        if self.how == STANDARDISE:
            assert self.mean is not None and self.scale is not None
            x = ((x.double() - self.mean) / self.scale).float()
        return x

    def to_json(self) -> dict[str, object]:
        """Return the treatment as JSON; the scale of a constant feature is ``null``."""
        record: dict[str, object] = {"features": self.how, "width": self.width}
        for name in _VECTORS:
            if (vector := getattr(self, name)) is not None:
                record[name] = [None if value == inf else value for value in vector.tolist()]
        if self.columns is not None:
            record["columns"] = self.columns.to_json()
        return record

    @classmethod
    def from_json(cls, record: Tree) -> Treatment:
        how, width = str(record["features"]), int(record["width"])
        vectors = {
            name: torch.tensor([inf if v is None else v for v in record[name]], dtype=torch.float64)
            for name in _VECTORS
            if record.get(name) is not None
        }
        if how == STANDARDISE and not {"mean", "scale"} <= vectors.keys():
            raise ValueError("mean and scale are missing")
        named = record.get("columns")
        columns = None if named is None else Columns.from_json(named)
        sizes = [*map(len, vectors.values()), *([] if columns is None else [len(columns.names)])]
        if any(size != width for size in sizes):
            raise ValueError(f"mean, scale, fill and columns are not those of {width} features")
        return cls(how, width, columns=columns, **vectors)


_VECTORS = ("mean", "scale", "fill")


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


def normalize_rows(x: Tensor) -> Tensor:
    """Divide each row by the sum of its absolute values; a zero row stays zero.

    For non-negative features this is what PyG's ``NormalizeFeatures`` gives, as long as some entry
    is 0 and no row sum lies between 0 and 1 (PyG shifts by the smallest entry, and never divides by
    less than 1). That holds for Cora, CiteSeer and PubMed.
    """
    norm = torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=True)
    return x / torch.where(norm > 0, norm, torch.ones_like(norm))
