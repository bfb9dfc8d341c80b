"""The picture of accuracy against a privacy budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from flower_graph.report.plots import privacy as plots_privacy
from flower_graph.report.plots.privacy import Panel, plot_budgets

BUDGETS = {1e4: [0.5, 0.75], 10.0: [0.25, 0.25]}
LEVELS = {"LOC": [0.5], "FED": [0.5, 1.0]}


def test_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Axes] = []
    monkeypatch.setattr(plots_privacy, "save", lambda figure, path: kept.extend(figure.axes))
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
