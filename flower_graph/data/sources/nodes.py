"""The nodes of a table, GraphML or JSON, read one after another."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import MEAN, ONE_HOT
from flower_graph.data.description import if_nan, saying
from flower_graph.data.gaps import NO_GAPS, Columns, Gaps, encode_words
from flower_graph.data.graph import PARTS
from flower_graph.data.values import advice_of, number_of, word_of
from flower_graph.errors import DataError

LABEL, SPLIT, CLIENT, IDENTITY = OWN = ("label", "split", "client", "identity")
# Columns that name a node; the last is igraph's, of a graph that NetworkX made
NAMES = ("name", "id", "_nx_name")
INDEX = "_igraph_index"  # a number of no meaning
SPLITS = ("train", "val", "test")
# Columns that are no features, with the names that tables use for them
ELSEWHERE = {"n_id": IDENTITY, "identities": IDENTITY, **dict.fromkeys(PARTS, SPLIT)}
# Programs that draw graphs: columns by which their files are known, and columns of the drawing
_PLACES = {"r", "g", "b", "x", "y", "size"}
GEPHI, YED = "Gephi", "yEd"
DRAWN = (
    (GEPHI, _PLACES, _PLACES | {"z"}),
    (GEPHI, {"viz"}, {"viz"}),  # of its GEXF, as NetworkX reads it
    (GEPHI, {"label", "timeset"}, {"timeset"}),
)


class Roles(NamedTuple):
    """What each column of a graph's nodes is."""

    names: list[str]  # columns that name the nodes
    own: dict[str, str]  # the column of each of ``OWN``, where there is one
    features: list[str]
    notes: tuple[str, ...]


def roles_of(
    path: Path, columns: Sequence[str], gaps: Gaps, *, needs_labels: bool, program: str = ""
) -> Roles:
    """Tell what each column is; own ones in any case of letters."""
    lower = {key.lower(): key for key in reversed(columns)}
    own = {key: lower[key] for key in OWN if key in lower}
    out = {
        lower[key] for name, marks, drawn in DRAWN if marks <= {*lower} for key in drawn & {*lower}
    }
    program = program or next((name for name, marks, _ in DRAWN if marks <= {*lower}), "")
    out |= {INDEX} & {*columns}
    if program == YED:  # which writes them empty
        out |= {lower[key] for key in ("url", "description") if key in lower}
    if gaps.label is not None:
        chosen = gaps.label if gaps.label in columns else lower.get(gaps.label.lower())
        if chosen is None and needs_labels:
            raise DataError(
                f"file {path}: data.label = {gaps.label!r}: there is no such column, but "
                f"{', '.join(columns)}"
            )
        own = {key: one for key, one in own.items() if one != chosen}
        out |= {own.pop(LABEL)} if LABEL in own else set()
        own |= {} if chosen is None else {LABEL: chosen}
    taken = {*own.values()}
    names = [lower[key] for key in NAMES if key in lower and lower[key] not in taken]
    others = [key for key in columns if key not in taken and key not in names and key not in out]
    if program and gaps.label is None and needs_labels:
        raise DataError(
            f"file {path}: was saved by {program}, where a node's {LABEL} is its caption: name the "
            f"column of classes by data.label; there are {', '.join(others) or 'no others'} (or "
            f"data.label={LABEL}, if it is the class)"
        )
    left = ", ".join(sorted(out - taken))
    notes = (f"{left} of the nodes left out",) if left else ()
    return Roles(names, own, others, notes)


class Nodes:
    """The nodes of a graph, as they are read one after another."""

    def __init__(
        self,
        path: Path,
        unit: str,
        columns: Sequence[str],
        needs_labels: bool = True,
        gaps: Gaps = NO_GAPS,
        notes: Sequence[str] = (),
    ) -> None:
        for key in columns:
            if key in ELSEWHERE:
                raise DataError(f"file {path}: {key} is no feature; name it {ELSEWHERE[key]}")
        # `unit` is the word for an entry of the file: line or node.
        self.path, self.unit, self.columns = path, unit, list(columns)
        self.needs_labels = needs_labels  # nodes to predict have none
        self.gaps, self.notes = gaps, list(notes)
        self.places: dict[str, int] = {}
        self.rows = array("q")
        self.own: dict[str, list[str | None]] = {key: [] for key in OWN}
        self.features = array("d")  # NaN where there is a word, or nothing
        self.words: list[dict[int, str]] = [{} for _ in columns]  # of each column, by row

    # Any: what ``float`` reads, or refuses
    def add(self, place: int, name: object, own: Sequence[object], features: Sequence[Any]) -> None:
        """Add a node; `own` in the order of ``OWN``, with None for missing values."""
        name = self.word(place, "name", name)
        if name is None:
            raise self.wrong(place, "name: is empty; every node needs a name of its own")
        if name in self.places:
            first = self.rows[self.places[name]]
            raise self.wrong(place, f"name: {name!r} is there already, {self.unit} {first}")
        self.places[name] = len(self.places)
        self.rows.append(place)
        for key, value in zip(OWN, own, strict=True):
            self.own[key].append(self.word(place, key, value))
        split = self.own[SPLIT][-1]
        if split is not None and split not in SPLITS:
            raise self.wrong(place, f"split: {split!r} must be {', '.join(SPLITS)} or empty")
        if len(features) != len(self.columns):
            count, wanted = len(features), len(self.columns)
            raise self.wrong(place, f"{count} features, but the first node has {wanted}")
        try:  # all at once, as long as all are numbers by Python's own rule
            if self.gaps.has_comma:
                raise ValueError("a point is no decimal sign here")
            self.features.extend(array("d", map(float, features)))
        except (TypeError, ValueError, OverflowError):
            row = len(self.rows) - 1
            numbers = [self._number(row, column, one) for column, one in enumerate(features)]
            self.features.extend(numbers)

    def word(self, place: int, key: str, value: object) -> str | None:
        try:
            return word_of(value, comma=self.gaps.has_comma)
        except DataError as error:
            raise self.wrong(place, f"{key}: {error}") from error

    def wrong(self, place: int, why: str) -> DataError:
        return DataError(f"file {self.path}, {self.unit} {place}: {why}")

    def _number(self, row: int, column: int, given: Any) -> float:
        """Return a feature; NaN for a word or nothing, if these are allowed."""
        key, comma = self.columns[column], self.gaps.has_comma
        number = number_of(given, comma=comma)
        if number is not None and not math.isnan(number):
            return number
        if number is not None and self.gaps.missing == MEAN:
            return math.nan
        if number is not None:
            raise self.wrong(
                self.rows[row],
                f"{key}: is empty; a feature needs a number at every node, or set "
                f"data.missing={MEAN}",
            )
        if advice := advice_of(given, comma=comma):
            raise self.wrong(self.rows[row], f"{key}: {given!r:.40} is no number: {advice}")
        if isinstance(given, str) and self.gaps.categories == ONE_HOT:
            self.words[column][row] = word_of(given) or ""
            return math.nan
        raise self.wrong(
            self.rows[row],
            f"{key}: {given!r:.40} is no number; whatever is not name, {', '.join(OWN)} is a "
            f"feature: leave {key} out, make numbers of it, or set data.categories={ONE_HOT}; if "
            f"it is the class, set data.label={key}",
        )

    def x(self) -> tuple[Tensor | None, Columns | None]:
        """Return the features, float64 ``[n, f]``, and their columns; None without any.

        Missing values are NaN until all nodes of a run are known.
        """
        width = len(self.columns)
        if width == 0:
            return None, None
        numbers = torch.frombuffer(self.features, dtype=torch.float64).reshape(-1, width)
        self._check_numbers(numbers.float())
        if not any(self.words):
            return numbers, Columns(tuple(self.columns), (None,) * width)
        parts, columns = list[Tensor](), list[tuple[str, str | None]]()
        for column, (key, words) in enumerate(zip(self.columns, self.words, strict=True)):
            if not words:
                parts.append(numbers[:, column : column + 1])
                columns.append((key, None))
                continue
            with saying(f"file {self.path}, {key}"):
                encoded, known = encode_words(numbers[:, column], words)
            parts.append(encoded)
            columns += [(key, word) for word in known]
        return torch.cat(parts, 1), Columns.from_json(columns)

    def _check_numbers(self, x: Tensor) -> None:
        """Refuse numbers that are not finite, and a column with words and numbers."""
        wrong = torch.isinf(x) if self.gaps.missing == MEAN else ~torch.isfinite(x)
        for column, words in enumerate(self.words):
            if words:
                wrong[list(words), column] = False
                if (numbers := ~torch.isnan(x[:, column])).any():
                    row, other = int(numbers.nonzero()[0]), next(iter(words))
                    raise self.wrong(
                        self.rows[row],
                        f"{self.columns[column]}: {x[row, column]:g} is a number, but "
                        f"{self.unit} {self.rows[other]} has the word {words[other]!r:.40}: a "
                        "column has only words, or only numbers",
                    )
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            value = self.features[row * x.size(1) + column]
            why = f"{self.columns[column]}: {value} must be finite, below 3e38{if_nan(value)}"
            raise self.wrong(self.rows[row], why)

    def check(self) -> None:
        if not self.places:
            raise DataError(f"file {self.path}: has no nodes")
        if self.needs_labels and not any(self.own[LABEL]):
            columns = ", ".join(self.columns) or "none"
            raise DataError(
                f"file {self.path}: no {LABEL} (a node's class) at any node: that column or "
                f"attribute is missing, or empty everywhere; data.label names another of these: "
                f"{columns}"
            )
