"""The picture of learned graphs against true ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
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
    some = {name: value for name, value in FIGURES.items() if name != "recall"}
    METHOD.draw(Path(), [report(3, FIGURES), report(4, later), report(5, {}), report(6, some)], "")
    edges, homophily, degree = drawn
    # A round without a figure is drawn through.
    assert curves(edges) == {"precision": [0.25, 0.125, 0.25], "recall": [0.5, 0.25]}
    assert curves(homophily) == {"learned": [0.75, 0.375, 0.75], "true": [0.875, 0.4375, 0.875]}
    assert curves(degree) == {"learned": [6.0, 3.0, 6.0], "true": [4.0, 2.0, 4.0]}
    assert all(np.asarray(axes.lines[0].get_xdata()).tolist() == [3, 4, 6] for axes in drawn)


def test_nothing_is_drawn_where_no_round_compares_graphs(tmp_path: Path) -> None:
    METHOD.draw(tmp_path, [report(1, {})], "")
    assert list(tmp_path.iterdir()) == []
