"""The picture of learned graphs against true ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import imread
from test_plots_alignment import curves

from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.fedgls.method import METHOD

FIGURES = {
    "precision": 0.25,
    "recall": 0.5,
    "homophily": 0.75,
    "true-homophily": 0.875,
    "degree": 6.0,
    "true-degree": 4.0,
}


def report(number: int, structure: dict[str, float]) -> RoundReport:
    return RoundReport(number, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 8, 8, structure=structure)


def test_learned_figures_are_beside_the_true_ones(drawn: list[Axes]) -> None:
    later = {name: value / 2 for name, value in FIGURES.items()}
    METHOD.draw(Path(), [report(3, FIGURES), report(4, later)], "two rounds")
    edges, homophily, degree = drawn
    assert curves(edges) == {"precision": [0.25, 0.125], "recall": [0.5, 0.25]}
    assert curves(homophily) == {"learned": [0.75, 0.375], "true": [0.875, 0.4375]}
    assert curves(degree) == {"learned": [6.0, 3.0], "true": [4.0, 2.0]}
    assert all(np.asarray(a.lines[0].get_xdata()).tolist() == [3, 4] for a in drawn)


def test_a_round_without_figures_leaves_a_gap(drawn: list[Axes]) -> None:
    some = {name: value for name, value in FIGURES.items() if name != "recall"}
    METHOD.draw(Path(), [report(1, FIGURES), report(2, {}), report(3, some)], "")
    precision, recall = curves(drawn[0]).values()
    assert precision[0] == precision[2] == 0.25 and math.isnan(precision[1])
    assert recall[0] == 0.5 and math.isnan(recall[1]) and math.isnan(recall[2])


def test_one_round_alone_can_be_seen(tmp_path: Path) -> None:
    METHOD.draw(tmp_path, [report(1, FIGURES)], "one round")
    picture = imread(tmp_path / "structure.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 3 * picture.shape[0]
    assert np.unique(picture).size > 10


def test_nothing_is_drawn_where_no_round_compares_graphs(tmp_path: Path) -> None:
    METHOD.draw(tmp_path, [report(1, {})], "")
    assert list(tmp_path.iterdir()) == []
