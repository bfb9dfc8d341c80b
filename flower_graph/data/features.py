"""How a run reads features: columns, words, values for empty cells, and their treatment.

A missing number is NaN until all nodes of a run are known. Features have the names of their
columns, which match them with another table's. A column of words becomes one feature for each word
that any node has; these features are the same at all clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import (
    AS_IS,
    AUTO,
    AUTO_DENSE,
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
from flower_graph.ops.graph import csr_tensor, entries, pointers
from flower_graph.rng import chances
from flower_graph.storage.reading import Tree

MOST_CATEGORIES = 1000  # different ones of a column; with more it is taken for names or free text


class ReadOptions(NamedTuple):
    """How graphs are read: settings of the section ``data``, and which parts of a graph count."""

    no_features: str = REFUSE  # stands for all features of a graph that has none
    missing: str = REFUSE  # stands for a number that a node lacks
    categories: str = REFUSE  # stands for a word in place of a number
    label: str | None = None  # column of nodes' classes; None: `label`
    weight: str | None = None  # column of edges' weights; None: `weight`
    decimal: str = POINT  # sign in numbers that are written as words
    features: str = AS_IS  # what is done to them
    targets: bool = False  # labels are numbers to learn
    weights: bool = False  # weights of edges count
    sparse: bool = False  # features of a generated graph may be CSR, if too many to be dense
    needs_labels: bool = True
    needs_edges: bool = True

    @classmethod
    def of(cls, config: RunConfig | DataConfig) -> ReadOptions:
        if isinstance(config, DataConfig):
            return cls(*(getattr(config, name) for name in cls._fields[:7]))
        learns_values = getattr(config, "task", None) == VALUES
        parts = learns_values, config.takes_edge_weights, config.takes_sparse
        return cls(*cls.of(config.data)[:7], *parts)


PLAIN = ReadOptions()


class Columns(tuple[tuple[str, str | None], ...]):
    """The column of each feature: its name, and the feature's word where it has words."""

    __slots__ = ()

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

    @classmethod
    def from_json(cls, pairs: Iterable[Sequence[str | None]]) -> Columns:
        return cls((str(name), None if word is None else str(word)) for name, word in pairs)

    @property
    def words(self) -> dict[str, list[str]]:
        """The words of each column, none if it has numbers."""
        result: dict[str, list[str]] = {}
        for name, word in self:
            result.setdefault(name, []).extend([] if word is None else [word])
        return result


def encode_words(numbers: Tensor, words: Mapping[int, str]) -> tuple[Tensor, list[str]]:
    """Make a feature of each word of a column ``[n]`` of ``numbers``, NaN for a word.

    ``words`` are those of the rows that have one. Returns ``[n, k]``, 1 for a node's own word and
    NaN if it has none, and the k words, sorted. More than ``MOST_CATEGORIES`` are a ``DataError``.
    """
    known = sorted(set(words.values()))
    if len(known) > MOST_CATEGORIES:
        raise DataError(f"has {len(known)} different words: at most {MOST_CATEGORIES} are features")
    encoded = torch.full((len(numbers), len(known)), torch.nan, dtype=numbers.dtype)
    number = {word: index for index, word in enumerate(known)}
    place = torch.tensor([number[word] for word in words.values()])
    encoded[[*words]] = torch.nn.functional.one_hot(place, len(known)).to(encoded.dtype)
    return encoded, known


def common_columns(clients: Sequence[Columns]) -> Columns:
    """Return the features of all clients: the first one's columns, with the words of all."""
    pairs, each = list[tuple[str, str | None]](), [columns.words for columns in clients]
    for name in each[0]:
        words = {word for one in each for word in one.get(name, ())}
        pairs += [(name, word) for word in sorted(words)] or [(name, None)]
    return Columns(pairs)


def align(x: Tensor, own: Columns, common: Columns) -> Tensor:
    """Reorder features ``[n, f]`` with columns of their own into the columns of a run.

    ``DataError`` if a column or a word is not in both, or one has words and the other numbers.
    """
    if own == common:
        return x
    mine, known, found = own.words, common.words, list[Tensor]()
    for name in sorted({*mine} ^ {*known}):
        raise DataError(f"column {name} is missing here or elsewhere; must be {', '.join(known)}")
    for name, word in own:
        if word is not None and word not in known[name]:
            allowed = f"one of {', '.join(known[name])}" if known[name] else "a number"
            raise DataError(f"{name}: {word!r:.40} must be {allowed}")
    place = {pair: at for at, pair in enumerate(own)}
    for name, word in common:
        if (name, word) in place:
            found.append(x[:, place[name, word]])
            continue
        # It is of another word, or a column without anything
        some = x[:, next(at for at, pair in enumerate(own) if pair[0] == name)]
        if not mine[name] and not bool(torch.isnan(some).all()):
            raise DataError(f"{name}: has numbers, others have {', '.join(known[name])}")
        found.append(torch.where(torch.isnan(some), some, 0.0))
    return torch.stack(found, 1)


# The choices of ``data.features`` ----------------------------------------------------------------

# What is done to the features, in words
CHANGES = {
    PRESENCE: "made 0 or 1",
    ROW: "row-normalised",
    STANDARDISE: "standardised over all nodes",
}
MOST_DENSE = 50_000_000  # entries that `auto-dense` keeps in full: 200 MB
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
    scale: Tensor | None = None  # likewise; 0 where a feature was constant
    fill: Tensor | None = None  # float64 [f], for missing numbers (``data.missing``)
    columns: Columns | None = None  # of the features, where these have names

    def apply(self, x: Tensor) -> Tensor:
        if x.size(1) != self.width:
            raise DataError(f"x has {x.size(1)} features: must be the {self.width} of the run")
        if self.fill is not None:
            x = torch.where(torch.isnan(x), self.fill.to(x.dtype), x)
        if self.mean is not None and self.scale is not None:
            scale = torch.where(self.scale > 0, self.scale, torch.inf)
            return ((x.double() - self.mean) / scale).float()
        x = x.float()
        if self.how == PRESENCE:
            return (x != 0).to(x.dtype)
        # By the sum of absolute values; PyG's `NormalizeFeatures` never divides by less than 1
        return torch.nn.functional.normalize(x, p=1) if self.how == ROW else x

    def to_json(self) -> dict[str, object]:
        """Return the treatment as JSON; the scale of a constant feature is ``null``."""
        given: dict[str, object] = {"features": self.how, "width": self.width}
        for name in _VECTORS:
            if (vector := getattr(self, name)) is not None:
                none = 0.0 if name == "scale" else None
                given[name] = [None if v == none else v for v in vector.tolist()]
        return given if self.columns is None else given | {"columns": [*self.columns]}

    @classmethod
    def from_json(cls, record: Tree) -> Treatment:
        how, width, pairs = str(record["features"]), int(record["width"]), record.get("columns")
        columns = None if pairs is None else Columns.from_json(pairs)
        vectors = {
            name: torch.tensor([v or 0.0 for v in record[name]], dtype=torch.float64)
            for name in _VECTORS
            if record.get(name) is not None
        }
        if ({"mean", "scale"} <= vectors.keys()) != (how == STANDARDISE):
            raise ValueError("mean and scale are missing, or are not of these features")
        sizes = [*map(len, vectors.values()), width if columns is None else len(columns)]
        if {*sizes} != {width}:
            raise ValueError(f"mean, scale, fill and columns are not those of {width} features")
        return cls(how, width, columns=columns, **vectors)


_VECTORS = ("mean", "scale", "fill")


def prepare_features(
    features: Sequence[Tensor],
    how: str,
    missing: str = REFUSE,
    columns: Columns | None = None,
    moved: tuple[float, torch.Generator] | None = None,
) -> tuple[list[Tensor], tuple[str, ...], Treatment]:
    """Transform the features of a graph, or of all clients together, as ``data.features`` says.

    ``missing`` says what stands for missing numbers, ``moved`` the arguments of ``move_features``.
    Returns the features, a note for each change, and the treatment for features of other nodes.
    """
    x, notes = features[0] if len(features) == 1 else torch.cat([*features]), list[str]()
    treatment = Treatment(how, x.size(1), columns=columns)
    if missing == MEAN and x.layout == torch.strided:
        known = (~torch.isnan(x)).sum(0)
        if (known == 0).any():
            column = int((known == 0).nonzero()[0])
            name = f"x[:, {column}]" if columns is None else columns[column][0]
            raise DataError(f"{name}: no node has a number there; leave it out")
        fill = x.double().nansum(0) / known
        if count := x.numel() - int(known.sum()):
            notes.append(f"{count} missing numbers: each feature's mean stands for them")
        x = torch.where(torch.isnan(x), fill.to(x.dtype), x)
        treatment = treatment._replace(fill=fill)
    if moved is not None:
        x = move_features(x, *moved)
        notes.append(f"{moved[0]:.0%} of the features moved (data.feature_noise)")
    if how != AS_IS:
        others = int(x.count_nonzero())  # than 0
        share, (least, most) = others / x.numel(), map(float, torch.aminmax(x))
        is_binary = least >= 0 and most <= 1 and int((x == 1).count_nonzero()) == others
        look = f"values {least:.3g} to {most:.3g}, {100 * share:.3g} % of the entries non-zero"
        if how in (AUTO, AUTO_DENSE):  # docs/results/own-graph.md has the measurements
            words, is_small = x.size(1) * share, x.numel() <= MOST_DENSE
            chosen, why = PRESENCE, "no entry is negative, and at most a third are not 0"
            if words > MOST_WORDS and (share > SPARSE or is_small):
                chosen, why = STANDARDISE, f"a node has {words:.0f} that are not 0, in the mean"
            elif is_binary:
                chosen, why = AS_IS, "all entries are 0 or 1"
            elif least < 0 or share > SPARSE:
                chosen, why = STANDARDISE, "entries are negative, or more than a third are not 0"
            elif how == AUTO_DENSE and is_small:
                chosen, why = STANDARDISE, f"{why}; all {x.numel():,} are kept"
            notes.append(f"data.features={how} chose {chosen}: {why}")
            treatment = treatment._replace(how=chosen)
        if how == PRESENCE and (least < 0 or (share > SPARSE and not is_binary)):
            why = f"features are {'negative' if least < 0 else 'dense'} ({look})"
            raise DataError(f"data.features=presence: {why}; set data.features=as-is or auto")
        if treatment.how == STANDARDISE:
            # In float64, so that a large mean does not hide a small deviation.
            mean = x.double().sum(0) / len(x)
            deviation = (((x.double() - mean) ** 2).sum(0) / len(x)).sqrt()
            is_exact = all(one.dtype == torch.float64 for one in features)
            constant = deviation <= (EXACT if is_exact else ROUNDED) * mean.abs()
            treatment = treatment._replace(mean=mean, scale=deviation.masked_fill(constant, 0))
            look += f"; {int(constant.sum())} constant" if constant.any() else ""
        if treatment.how in CHANGES:
            notes.append(f"features {CHANGES[treatment.how]}; before: {look}")
    x = treatment._replace(fill=None).apply(x)  # missing numbers are filled
    if len(features) == 1:
        return [x], tuple(notes), treatment
    # Copies: a view would carry all clients' features with it
    return [one.clone() for one in x.split([*map(len, features)])], tuple(notes), treatment


def move_features(x: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    """Move each non-zero entry to another feature with probability ``chance``, as noise.

    Features are ``[n, f]``, dense or CSR, and the result has the same layout; if two entries meet,
    one is lost. ``DataError`` if there is no other feature.
    """
    n, f = x.shape
    if f < 2:
        raise DataError(f"data.feature_noise = {chance:g}: the graph has {f} features, not two")
    row, col, value = entries(x)
    moves = torch.rand(col.numel(), generator=generator) < chance
    steps = torch.randint(1, f, (col.numel(),), generator=generator)  # never round to itself
    key, order = (row * f + torch.where(moves, (col + steps) % f, col)).sort(stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    row, col, value = key[first] // f, key[first] % f, value[order[first]]
    if x.layout == torch.strided:
        return torch.zeros_like(x).index_put_((row, col), value)
    return csr_tensor(pointers(row, n), col.to(x.col_indices().dtype), value, (n, f))


def sketched(x: Tensor, buckets: int, seed: int) -> Tensor:
    """Add up features ``[n, f]``, dense or CSR, by signed buckets, to dense ``[n, buckets]``.

    The seed and a feature's number decide its bucket: parties with the same seed hash alike.
    """
    number = torch.arange(x.shape[1])
    bucket = (chances(number, seed, "sketch-bucket") * buckets).long()
    sign = 1 - 2 * (chances(number, seed, "sketch-sign") < 0.5).to(x.dtype)
    row, feature, value = entries(x)
    result = torch.zeros(len(x) * buckets, dtype=x.dtype)
    result.index_add_(0, row * buckets + bucket[feature], value * sign[feature])
    return result.view(len(x), buckets)
