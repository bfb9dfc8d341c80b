"""Pictures of figures beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from flower_graph.report.plots import compared as plots_compared
from flower_graph.report.plots.compared import (
    Bar,
    Panel,
    plot_bars,
    plot_budgets,
    plot_matrices,
    plot_points,
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """Keep the axes of the picture instead of writing it."""
    kept: list[Axes] = []
    monkeypatch.setattr(plots_compared, "save", lambda figure, path: kept.extend(figure.axes))
    return kept


def test_bars_have_the_figures_and_the_papers_marks(drawn: list[Axes]) -> None:
    panels = {"Cora": {"a": Bar(0.8, 0.02, 0.7), "b": Bar(0.6, 0.0, None)}, "PubMed": {}}
    plot_bars(Path("x.png"), panels, label="accuracy")
    axes = drawn[0]
    assert [patch.get_height() for patch in axes.patches] == [0.8, 0.6]
    low, high = axes.get_ylim()
    assert 0.5 < low < 0.6
    assert high > 0.82
    marks = [line for line in axes.lines if line.get_marker() == "D"]
    assert [float(line.get_ydata()[0]) for line in marks] == [0.7]  # type: ignore[index]
    assert "cut" in axes.get_ylabel()


def test_the_first_papers_mark_is_in_the_legend(drawn: list[Axes]) -> None:
    """Also where the first bar has none."""
    panels = {"Cora": {"a": Bar(0.8, 0.0, None), "b": Bar(0.6, 0.0, 0.5), "c": Bar(0.6, 0, 0.4)}}
    plot_bars(Path("x.png"), panels, label="accuracy")
    assert drawn[0].get_legend_handles_labels()[1] == ["paper"]


def test_matrices_have_a_number_in_each_field(drawn: list[Axes]) -> None:
    numbers = [[0.1, 0.25, float("nan")], [0.3, 0.4, 0.5]]
    plot_matrices(Path("x.png"), {"test": numbers}, rows=("mu", (1, 5)), columns=("tau", (1, 2, 3)))
    assert [text.get_text() for text in drawn[0].texts] == [
        "0.100",
        "0.250",
        "0.300",
        "0.400",
        "0.500",
    ]


def test_points_are_joined_by_size(drawn: list[Axes]) -> None:
    plot_points(Path("x.png"), {("nodes", "s"): {"Cora": [(30.0, 2.0), (10.0, 1.0)]}})
    assert drawn[0].lines[0].get_xdata().tolist() == [10.0, 30.0]  # type: ignore[union-attr]
    assert (drawn[0].get_xscale(), drawn[0].get_yscale()) == ("log", "log")


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        plot_bars(tmp_path / "x.png", {"Cora": {}}, label="accuracy")
    with pytest.raises(ValueError, match="empty"):
        plot_matrices(tmp_path / "x.png", {}, rows=("a", ()), columns=("b", ()))
    with pytest.raises(ValueError, match="empty"):
        plot_points(tmp_path / "x.png", {})


def test_a_picture_is_written(tmp_path: Path) -> None:
    plot_points(tmp_path / "x.png", {("n", "s"): {"Cora": [(1.0, 2.0)]}})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


BUDGETS = {1e4: [0.5, 0.75], 10.0: [0.25, 0.25]}
LEVELS = {"LOC": [0.5], "FED": [0.5, 1.0]}


def test_accuracies_by_budget_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Axes] = []
    monkeypatch.setattr(plots_compared, "save", lambda figure, path: kept.extend(figure.axes))
    plot_budgets(Path("x.png"), {"a title": Panel(BUDGETS, LEVELS), "b": Panel(BUDGETS, {})})
    axes, other = kept
    assert other.get_title() == "b" and len(other.containers) == 1
    [points] = axes.containers
    assert points.lines[0].get_xdata().tolist() == [10, 1e4]
    assert points.lines[0].get_ydata().tolist() == [25, 62.5]
    levels = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert levels["LOC"] == 50 and levels["FED"] == 75
    assert axes.get_xscale() == "log" and axes.get_title() == "a title"


def test_the_file(tmp_path: Path) -> None:
    plot_budgets(tmp_path / "a.png", {"t": Panel(BUDGETS, LEVELS)})
    assert imread(tmp_path / "a.png").shape[2] == 4


@pytest.mark.parametrize("panel", [Panel({}, LEVELS), Panel({10.0: []}, LEVELS)])
def test_nothing_to_draw(panel: Panel) -> None:
    with pytest.raises(ValueError, match="t: every budget and level needs at least one accuracy"):
        plot_budgets(Path("x.png"), {"t": panel})
    with pytest.raises(ValueError, match="panels: empty"):
        plot_budgets(Path("x.png"), {})
