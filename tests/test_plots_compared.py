"""Pictures of any run, and of figures beside each other."""

from functools import partial
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from flower_graph.records.rounds import RoundReport
from flower_graph.report import plots
from flower_graph.report.plots import Interval, Panel

X = Path("x.png")  # not written


def test_a_runs_panels_and_its_mistakes_as_shares(drawn: list[Axes]) -> None:
    one = RoundReport(1, 1.0, 1.0, 0.0, 0.9, 0.1, 0.2, 10, 10)
    one.scores = {"macro-f1": {"train": 0.9, "val": 0.2, "test": 0.3}}
    one.structure = {"precision": 0.25, "degree": 6.0}  # counts would flatten shares
    given = {"majority": 0.3, "logistic regression": 0.5}
    plots.plot_panels(X, [plots.panels_of([[one]], ["accuracy", "macro-f1"], given)])
    labels = ["loss", "accuracy", "macro-f1", "payload so far (B)", "clients"]
    assert [axes.get_ylabel() for axes in drawn] == [*labels, "structure, 0 to 1", "structure"]
    values = [[float(line.get_ydata()[0]) for line in axes.lines] for axes in drawn]  # type: ignore[index]
    assert values[1:3] == [[0.9, 0.1, 0.2, 0.3, 0.5], [0.9, 0.2, 0.3]]
    assert values[-2:] == [[0.25], [6.0]]
    grey = [line.get_label() for line in drawn[1].lines if line.get_color() == plots.GREY]
    assert grey == [*given]
    drawn.clear()
    confusion = partial(plots.draw_confusion, nodes=[[3, 1], [0, 0]])  # no node of the second
    plots.plot(X, [[confusion]])
    assert drawn[0].images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]  # type: ignore[union-attr]


def test_grid_draws_every_method_and_the_reference(drawn: list[Axes], tmp_path: Path) -> None:
    flat = [[0.25, 0.5], [0.75, 0.5, 0.75]]  # the first run ended early
    upper = [Panel({"a": flat}, levels={"centralised": 0.8}), Panel({"b": flat, "a": flat})]
    plots.plot_panels(X, [upper, [Panel({"a": flat}), Panel({"b": flat})]])
    first, second, *_ = drawn
    assert first.lines[0].get_ydata().tolist() == [0.5, 0.5, 0.625]  # type: ignore[union-attr]
    assert first.get_legend_handles_labels()[1] == ["a", "centralised"]
    assert first.lines[1].get_ydata()[0] == 0.8  # type: ignore[index]
    # A method has one colour in all columns
    assert first.lines[0].get_color() == second.lines[1].get_color() != plots.GREY
    # A distribution of nothing is drawn empty.
    counts: dict[str, dict[int, int]] = {"none": {}, "one": {3: 2}, "wide": {0: 1, 999: 1}}
    plots.plot_counts(tmp_path / "a.png", counts, title="t")
    assert len(drawn) == 7


def test_points_have_their_intervals_and_the_papers_marks(drawn: list[Axes]) -> None:
    ours = {"a": Interval(0.8, 0.02, 0.7), "b": Interval(0.6, 0.0, None)}
    # The first mark is in the legend, also where the first method has none.
    marks = {"a": Interval(0.8, 0, None), "b": Interval(0.6, 0, 0.5), "c": Interval(0.6, 0, 0.4)}
    panels = {"Cora": ours, "PubMed": {}, "CiteSeer": marks}
    plots.plot_intervals(X, panels, label="accuracy", mark="paper")
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


def test_all_names_of_curves_stand_within_the_picture() -> None:
    names = ["train", "val", "test", *("a baseline of a long name" + " x" * n for n in range(5))]
    panel = Panel({name: [[0.1, 0.2]] for name in names})
    for size in ((4.6, 3.3), (14.8, 3.2)):
        figure = plots.picture([[partial(plots.draw_panel, panel=panel)]], size)
        figure.draw_without_rendering()
        inside = figure.legends[0].get_window_extent()
        assert inside.x0 >= 0 and inside.x1 <= figure.bbox.x1
