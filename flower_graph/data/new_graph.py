"""Reads graphs that a run has not seen, and gives them the run's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import MEAN, ONE_HOT, REFUSE
from flower_graph.data.description import (
    WHOLE,
    NewGraph,
    by_columns,
    describe_graph,
    number_classes,
    saying,
    words_of,
)
from flower_graph.data.features import PLAIN, ReadOptions, Treatment
from flower_graph.data.graph import Scale
from flower_graph.data.sources.datasets import describe_file
from flower_graph.errors import DataError
from flower_graph.storage.reading import Tree

# In ``data.json``; the treatment of features has a ``scale`` too
SCALE, WEIGHTS = "target-scale", "edge-weights"
COLUMNS = ("label", "weight", "decimal")  # settings of files that ``data.json`` has too


class DataForm(NamedTuple):
    """The form of a run's data, which new graphs must have."""

    treatment: Treatment  # the treatment of the features
    num_classes: int
    classes: tuple[str, ...] | None  # the classes' names, if these are not the numbers
    given: ReadOptions = PLAIN  # how the run's own files were read
    scale: Scale | None = None  # that of numbers that are learnt; None where classes are
    weights: bool = False  # whether the run's edges have weights

    @property
    def how(self) -> ReadOptions:
        """How files of new graphs are read: as the run's own, whose words are known."""
        return self.given._replace(
            categories=self.given.categories if self.treatment.columns is None else ONE_HOT,
            missing=REFUSE if self.treatment.fill is None else MEAN,
            targets=self.scale is not None,
            weights=self.weights,
            needs_labels=False,
            needs_edges=False,
        )

    def to_json(self) -> dict[str, object]:
        own = {name: getattr(self.given, name) for name in COLUMNS}
        return self.treatment.to_json() | {
            "num-classes": self.num_classes,
            "classes": None if self.classes is None else list(self.classes),
            "no-features": self.given.no_features,
            **({} if self.scale is None else {SCALE: [*self.scale]}),
            **({WEIGHTS: True} if self.weights else {}),
            **{name: one for name, one in own.items() if one != getattr(PLAIN, name)},
        }

    @classmethod
    def from_json(cls, record: Tree) -> DataForm:
        classes, scale = record["classes"], record.get(SCALE)
        if scale is not None:
            scale = Scale(*map(float, scale))
            if not (isfinite(scale.mean) and 0 < scale.deviation < inf):
                raise ValueError(f"{SCALE}: {[*scale]}: must be finite, the second above 0")
        own: dict[str, Any] = {key: str(record[key]) for key in COLUMNS if key in record}
        return cls(
            Treatment.from_json(record),
            int(record["num-classes"]),
            None if classes is None else tuple(map(str, classes)),
            PLAIN._replace(no_features=str(record["no-features"]), **own),
            scale,
            bool(record.get(WEIGHTS)),
        )


def new_graph(x: object, edge_index: object, of: DataForm, edge_weight: object = None) -> NewGraph:
    """Make a graph from untreated features, and from edges in any direction."""
    given = {"x": x, "edge_index": edge_index, "edge_weight": edge_weight}
    return _formed(describe_graph(given, of.how), of)


def read_new_graph(path: Path, of: DataForm) -> NewGraph:
    """Read a file or a folder with tables; ``DataError`` if it does not fit the run's models."""
    found = describe_file(path, of.how)
    with saying(found.where):
        if found.values.get("x") is not None:
            x = by_columns(found.where, found.x, found.columns, of.treatment.columns)
            found = replace(found, x=x)
        elif of.given.no_features == ONE_HOT:
            raise DataError("has no x, and data.no_features=one-hot stands for none here")
        return _formed(found, of)


def _formed(found: NewGraph, of: DataForm) -> NewGraph:
    y, labels = found.targets, found.y
    if y is None:
        classes: Sequence[str] | None = of.classes
        if isinstance(labels, Tensor) and classes is not None:
            words = words_of(labels)
            # As when labels have gaps, numbers may be names of classes, and not their places
            if {*words} <= {*classes, None} or all(WHOLE.fullmatch(one) for one in classes):
                labels = words
        elif not isinstance(labels, Tensor) and classes is None:
            classes = [*map(str, range(of.num_classes))]
        (y,) = number_classes([labels], of.num_classes, classes, may_lack=True).y
        y = y if of.scale is None else torch.full(y.shape, torch.nan)
    return replace(found, x=of.treatment.apply(found.x), y=y)
