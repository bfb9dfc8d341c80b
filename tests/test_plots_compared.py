"""Pictures of any run, and of figures beside each other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from flower_graph.records.rounds import RoundReport
from flower_graph.report import plots
from flower_graph.report.plots import CurveSet, Interval, Panel, Spent

X = Path("x.png")  # not written


def test_baselines_are_grey_lines_and_mistakes_a_map_of_shares(drawn: list[Axes]) -> None:
    one, axes = RoundReport(1, 1.0, 1.0, 0.0, 0.9, 0.1, 0.2, 10, 10), drawn
    given = {"majority": 0.3, "logistic regression": 0.5}
    plots.save_curves(X, [one], title="test", baselines=given)
    grey = [line for line in axes[1].lines if line.get_color() == plots.GREY]
    assert {str(line.get_label()): line.get_ydata()[0] for line in grey} == given  # type: ignore[index]
    named = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert named == ["validation", "test", *given]
    axes.clear()
    one.scores = {"macro-f1": {"train": 0.9, "val": 0.2, "test": 0.3}}
    one.confusion = [[3, 1], [0, 0]]  # of the second class there is no node
    plots.save_curves(X, [one], title="test")
    drawn = {str(line.get_label()): line.get_ydata()[0] for line in axes[1].lines}  # type: ignore[index]
    assert drawn["test macro-f1"] == 0.3
    axes.clear()
    plots.save_confusion(X, one, title="test")
    assert axes[0].images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]  # type: ignore[union-attr]


def test_grid_draws_every_method_and_the_reference(tmp_path: Path) -> None:
    flat = CurveSet(accuracy=[[0.2, 0.4], [0.4, 0.6, 0.7]], loss=[[2.0, 1.0], [2.0, 1.5, 1.0]])
    columns = {"Cora": {"nFedGNN": flat}, "PubMed": {"nFedGNN": flat, "CNFGNN": flat}}
    plots.plot_grid(tmp_path / "plain.png", columns)
    plots.plot_grid(tmp_path / "grey.png", columns, {"Cora": 0.8})
    without, grey = imread(tmp_path / "plain.png"), imread(tmp_path / "grey.png")
    assert without.shape == grey.shape and not np.array_equal(without, grey)
    # A distribution of nothing is drawn empty.
    plots.plot_counts(
        tmp_path / "a.png", {"none": {}, "one": {3: 2}, "wide": {0: 1, 999: 1}}, title="t"
    )
    assert imread(tmp_path / "a.png").std() > 0


def test_points_have_their_intervals_and_the_papers_marks(drawn: list[Axes]) -> None:
    ours = {"a": Interval(0.8, 0.02, 0.7), "b": Interval(0.6, 0.0, None)}
    # The first mark is in the legend, also where the first method has none.
    marks = {"a": Interval(0.8, 0, None), "b": Interval(0.6, 0, 0.5), "c": Interval(0.6, 0, 0.4)}
    panels = {"Cora": ours, "PubMed": {}, "CiteSeer": marks}
    plots.plot_intervals(X, panels, label="accuracy")
    axes, _, other = drawn
    (points,) = axes.containers
    assert [tuple(one) for one in points.lines[0].get_xydata()] == [(0.8, 0), (0.6, 1)]  # type: ignore[index,union-attr]
    interval = points.lines[2][0].get_segments()[0]  # type: ignore[index,union-attr]
    assert interval[:, 0].tolist() == pytest.approx([0.78, 0.82])
    assert not axes.patches, "no bars, whose lengths a cut axis would make wrong"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    diamonds = [line for line in axes.lines if line.get_marker() == "D"]
    assert [float(line.get_xdata()[0]) for line in diamonds] == [0.7]  # type: ignore[index]
    assert other.get_legend_handles_labels()[1].count("paper") == 1


def test_matrices_have_a_number_in_each_field_and_one_scale(drawn: list[Axes]) -> None:
    numbers = [[0.1, 0.25, float("nan")], [0.3, 0.4, 0.5]]
    sides = {"rows": ("mu", (1, 5)), "columns": ("tau", (1, 2, 3))}
    plots.plot_matrices(X, {"test": numbers}, **sides, label="accuracy")  # type: ignore[arg-type]
    shown = ["0.100", "0.250", "0.300", "0.400", "0.500"]
    assert [text.get_text() for text in drawn[0].texts] == shown
    assert drawn[1].get_ylabel() == "accuracy", "the bar of the scale"
    del drawn[:]
    gains = {"small": [[0.1, -0.3], [0.0, math.nan]], "large": [[0.7, 0.1], [0.2, 0.0]]}
    plots.plot_matrices(X, gains, rows=("a", (1, 2)), columns=("b", (1, 2)), label="gain")
    small, large, _ = drawn
    assert small.images[0].get_clim() == large.images[0].get_clim() == (-0.7, 0.7)  # white is 0


def test_points_are_joined_by_size(drawn: list[Axes]) -> None:
    plots.plot_points(X, {("nodes", "s"): {"Cora": [(30.0, 2.0), (10.0, 1.0)]}})
    assert drawn[0].lines[0].get_xdata().tolist() == [10.0, 30.0]  # type: ignore[union-attr]
    assert (drawn[0].get_xscale(), drawn[0].get_yscale()) == ("log", "log")


def test_differences_are_drawn_in_points_by_what_is_varied(drawn: list[Axes]) -> None:
    panels = {
        "labels": {"Cora": {5: [0.02, 0.04], 60: [0.0, -0.02]}, "CiteSeer": {60: [0.01]}},
        "by": {"Cora": {"features": [0.01, 0.03], "encoder": [0.02, 0.0]}},
    }
    plots.plot_lines(X, panels, label="points")
    numbers, words = drawn
    zero, cora, citeseer = numbers.lines
    assert list(zero.get_ydata()) == [0, 0]
    assert list(cora.get_xdata()) == [5, 60] and list(cora.get_ydata()) == [3.0, -1.0]
    assert list(citeseer.get_ydata()) == [1.0]
    for cell, names in ((numbers, ["5", "60"]), (words, ["features", "encoder"])):
        assert [text.get_text() for text in cell.get_xticklabels()] == names
    assert list(words.lines[1].get_xdata()) == [0, 1]
    assert list(words.lines[1].get_ydata()) == [2.0, 1.0]


def test_what_ended_stays_and_what_costs_nothing_is_a_line_across(drawn: list[Axes]) -> None:
    paid, free = [[0.25, 0.5, 0.75], [0.25]], [[0.5, 0.5]]
    plots.plot_spent(X, {"MiB": {"a": Spent([1, 2, 3], paid), "b": Spent([0, 0], free)}})
    one, other = drawn[0].lines
    assert one.get_ydata().tolist() == [0.25, 0.375, 0.5]  # type: ignore[union-attr]
    assert (other.get_ydata()[0], drawn[0].get_xscale()) == (0.5, "log")  # type: ignore[index]


def test_curves_at_stake_are_marked_and_the_others_grey(drawn: list[Axes]) -> None:
    lines = {name: Spent([1, 2], [[0.1, end]]) for name, end in {"a": 0.8, "b": 0.82}.items()}
    lines |= {name: Spent([1, 2], [[0.1, 0.4]]) for name in ("c", "d")}
    plots.plot_spent(X, {"rounds": lines}, marked=("a", "b"))
    axes = drawn[0]
    handles, names = axes.get_legend_handles_labels()
    assert names[:2] == ["a", "b"] and len(names) == 3 and "others" in names[2]
    assert len({line.get_color() for line in handles}) == 3  # type: ignore[attr-defined]
    low, high = axes.get_ylim()
    assert 0.7 < low < 0.8 and 0.82 < high < 0.9, "where the marked ones end"
    del drawn[:]
    plots.plot_spent(X, {"rounds": lines})
    assert drawn[0].get_ylim()[0] < 0.2 and len(drawn[0].get_legend_handles_labels()[1]) == 4


BUDGETS = {1e4: [0.5, 0.75], 10.0: [0.25, 0.25]}
LEVELS = {"LOC": [0.5], "FED": [0.5, 1.0]}


def test_accuracies_by_budget_are_drawn(drawn: list[Axes]) -> None:
    plots.plot_budgets(X, {"a title": Panel(BUDGETS, LEVELS), "b": Panel(BUDGETS, {})})
    axes, other = drawn
    assert other.get_title() == "b" and len(other.containers) == 1
    [points] = axes.containers
    assert points.lines[0].get_xdata().tolist() == [10, 1e4]
    assert points.lines[0].get_ydata().tolist() == [25, 62.5]
    levels = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert levels["LOC"] == 50 and levels["FED"] == 75
    assert axes.get_xscale() == "log" and axes.get_title() == "a title"
