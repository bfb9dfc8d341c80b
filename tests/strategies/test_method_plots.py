"""Pictures of runs: alignment precision and accuracy, learned graphs against true ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.fedgls.config import StructureSettings
from flower_graph.strategies.fedgls.plots import save_structure
from flower_graph.strategies.fedgls.strategy import StructureFedAvg
from flower_graph.strategies.ppfl.plots import save_alignment

FIGURES = {"precision-1": 0.25, "precision-5": 0.5, "precision-10": 0.75}


def report(number: int, val: float = 0.5, test: float = 0.625, **figures: Any) -> RoundReport:
    return RoundReport(number, 1.0, 1.0, 0.0, 0.5, val, test, 4, 4, **figures)


def curves(axes: Axes) -> dict[str, list[float]]:
    """Give the panel's curves by the name that its legend has."""
    found: dict[str, Any] = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return {name: np.asarray(line.get_ydata()).tolist() for name, line in found.items()}


def test_a_runs_precision_is_beside_its_accuracy_and_curves_bridge_rounds_without_figures(
    drawn: list[Axes],
) -> None:
    later, none = {name: value / 2 for name, value in FIGURES.items()}, math.nan
    reports = [report(3, alignment=FIGURES), report(4, none, none)]
    reports += [report(5, none, 0.875, alignment=later)]
    save_alignment(Path("x.png"), reports, title="")
    (precision,) = drawn
    assert curves(precision) == {"P@1": [0.25, 0.125], "P@5": [0.5, 0.25], "P@10": [0.75, 0.375]}
    assert np.asarray(precision.lines[0].get_xdata()).tolist() == [3, 5]


STRUCTURE = {
    "precision": 0.25,
    "recall": 0.5,
    "homophily": 0.75,
    "true-homophily": 0.875,
    "degree": 6.0,
    "true-degree": 4.0,
}


def test_learned_figures_are_beside_the_true_ones(drawn: list[Axes]) -> None:
    later = {name: value / 2 for name, value in STRUCTURE.items()}
    some = {name: value for name, value in STRUCTURE.items() if name != "recall"}
    shown = enumerate([STRUCTURE, later, {}, some], start=3)
    save_structure(Path(), [report(number, structure=one) for number, one in shown], title="")
    edges, homophily, degree = drawn
    # A round without a figure is drawn through.
    assert curves(edges) == {"precision": [0.25, 0.125, 0.25], "recall": [0.5, 0.25]}
    assert curves(homophily) == {"learned": [0.75, 0.375, 0.75], "true": [0.875, 0.4375, 0.875]}
    assert curves(degree) == {"learned": [6.0, 3.0, 6.0], "true": [4.0, 2.0, 4.0]}
    assert all(np.asarray(axes.lines[0].get_xdata()).tolist() == [3, 4, 6] for axes in drawn)


def test_nothing_is_drawn_where_no_round_compares_graphs(tmp_path: Path) -> None:
    strategy = StructureFedAvg(StructureSettings(2, 2))
    strategy.draw_pictures(tmp_path, [report(1)], "")
    assert list(tmp_path.iterdir()) == []
