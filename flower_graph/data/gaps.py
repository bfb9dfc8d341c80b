"""How a run reads graphs: which parts, the meanings of columns, and values for empty cells.

A missing number is NaN until all nodes of a run are known. Features have the names of their
columns, which match them with another table's. A column of words becomes one feature for each word
that any node has; these features are the same at all clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import COMMA, POINT, REFUSE, VALUES, DataConfig, RunConfig
from flower_graph.errors import DataError

MOST_WORDS = 1000  # different ones of a column; with more it is taken for names or free text


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
    NaN if it has none, and the k words, sorted. More than ``MOST_WORDS`` are a ``DataError``.
    """
    known = sorted(set(words.values()))
    if len(known) > MOST_WORDS:
        raise DataError(f"has {len(known)} different words: at most {MOST_WORDS} are features")
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
