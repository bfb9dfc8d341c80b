"""Graphs of many kinds, by a seed, on which ``<method>/own-graph`` is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flower_graph.data.graph import Graph
from flower_graph.data.sources.generators import csbm
from flower_graph.rng import generator

WORDS, COUNTS, SHARES, MEASURED, STANDARD = (
    "0 or 1",
    "counts",
    "rows that sum to one",
    "measurements of different scales",
    "standardised",
)
CLASSES, SEED = 5, 0


@dataclass(frozen=True)
class Kind:
    """A graph to be generated."""

    nodes: int
    features: int
    homophily: float  # share of the edges within a class
    form: str  # of the features
    signal: float = 0.25  # how much features tell; its measure is the form's
    ones: int = 0  # of a node's words, the mean, where some words and nodes have far more; else few
    classes: int = CLASSES
    degree: float = 10.0


KINDS = {
    "words-200": Kind(200, 64, 0.8, WORDS),
    "words-few": Kind(1000, 10, 0.7, WORDS, 0.5),
    "words-mixed": Kind(1000, 512, 0.4, WORDS, 0.2),
    "words-apart": Kind(600, 256, 0.05, WORDS, 0.2),
    "words-100": Kind(1500, 745, 0.6, WORDS, 0.4, ones=100, classes=8, degree=8),
    "words-300": Kind(2000, 767, 0.7, WORDS, 0.25, ones=300, classes=10),
    "words-260": Kind(7650, 745, 0.6, WORDS, 0.15, ones=260, classes=8),
    "counts": Kind(1000, 300, 0.7, COUNTS),
    "counts-many": Kind(600, 1000, 0.8, COUNTS),
    "shares": Kind(1000, 300, 0.8, SHARES),
    "measured": Kind(800, 8, 0.6, MEASURED, 0.7),
    "dense-16": Kind(600, 16, 0.8, STANDARD, 0.5),
    "dense-apart": Kind(800, 32, 0.2, STANDARD, 0.35),
    "dense-64": Kind(5000, 64, 0.9, STANDARD, 0.2),
}


def generated(kind: Kind, seed: int = SEED) -> Graph:
    """Generate a graph: edges of a block model, features of the kind's form."""
    active = max(1, kind.features // 16) if kind.features >= 64 else kind.features // 2
    graph = csbm(
        kind.nodes,
        kind.classes,
        degree=kind.degree,
        features=kind.features,
        active=active,
        homophily=kind.homophily,
        signal=kind.signal,
        seed=seed,
    )
    chance = generator(seed, "own-graph-features")
    make = _many_words if kind.ones else FORMS.get(kind.form)
    return graph if make is None else replace(graph, x=make(kind, graph, chance))


def _counts(kind: Kind, graph: Graph, chance: torch.Generator) -> Tensor:
    times = torch.empty_like(graph.x).exponential_(0.2, generator=chance).ceil()
    return graph.x * times


def _shares(kind: Kind, graph: Graph, chance: torch.Generator) -> Tensor:
    x = _counts(kind, graph, chance)
    return x / x.sum(1, keepdim=True)


def _many_words(kind: Kind, graph: Graph, chance: torch.Generator) -> Tensor:
    """Draw words of texts: few words are in most texts, and few texts have most words."""
    popular = torch.arange(1, kind.features + 1).double() ** -0.7
    tilts = torch.randn(kind.classes, kind.features, generator=chance, dtype=torch.double)
    length = torch.randn(kind.nodes, 1, generator=chance, dtype=torch.double).exp()
    rates = length * (popular * (kind.signal * tilts).exp())[graph.y]
    scale, most = 1.0, 1.0
    while _occurs(most, rates).sum(1).mean() < kind.ones:
        most *= 2
    least = 0.0
    for _ in range(40):
        scale = (least + most) / 2
        is_low = _occurs(scale, rates).sum(1).mean() < kind.ones
        least, most = (scale, most) if is_low else (least, scale)
    drawn = torch.rand(rates.shape, generator=chance, dtype=torch.double)
    return (drawn < _occurs(scale, rates)).float()


def _occurs(scale: float, rates: Tensor) -> Tensor:
    return -torch.expm1(-scale * rates)


def _standard(kind: Kind, graph: Graph, chance: torch.Generator) -> Tensor:
    means = kind.signal * torch.randn(CLASSES, kind.features, generator=chance)
    x = means[graph.y] + torch.randn(graph.x.shape, generator=chance)
    return (x - x.mean(0)) / x.std(0)


def _measured(kind: Kind, graph: Graph, chance: torch.Generator) -> Tensor:
    """Give the features units: from thousandths to thousands, and none below 0."""
    x = _standard(kind, graph, chance)
    return (x - x.min(0).values) * 10.0 ** torch.linspace(-3, 3, kind.features)


FORMS: dict[str, Callable[[Kind, Graph, torch.Generator], Tensor]] = {
    COUNTS: _counts,
    SHARES: _shares,
    MEASURED: _measured,
    STANDARD: _standard,
}


def write_graph(name: str, folder: Path) -> Path:
    """Write a generated graph as a user would save it, once."""
    path = folder / f"{name}.pt"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        graph = generated(KINDS[name])
        parts = {"x": graph.x, "edge_index": graph.edge_index, "y": graph.y}
        torch.save(parts, path)
    return path
