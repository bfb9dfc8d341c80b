"""Rows of ``table.json`` and how a page writes them."""

from __future__ import annotations

from math import isnan, nan, sqrt

import pytest

from flower_graph.apps.reproduce.experiments import Experiment
from flower_graph.apps.reproduce.text import (
    NONE,
    accuracy,
    find,
    markdown,
    number,
    paper_percent,
    paper_points,
    percent,
    points,
    row,
    show_pictures,
)

CELL = Experiment("Cora", "GCN", "FedGLS", "fedgls/cora", ("strategy.name=structure-fedavg",))


def test_a_row_has_mean_deviation_and_what_was_run() -> None:
    made = row("Table 1", CELL, "x", {3: 0.5, 1: 0.75}, 100, 0.6)
    assert (made["mean"], made["std"]) == (0.625, pytest.approx(0.125 * sqrt(2)))
    assert (made["values"], made["seeds"], made["paper"]) == ([0.5, 0.75], [3, 1], 0.6)
    assert made["settings"] == {
        "config": "fedgls/cora",
        "overrides": ["strategy.name=structure-fedavg"],
        "rounds": 100,
        "centralised": False,
    }


def test_one_value_has_no_deviation_and_nan_stays_one() -> None:
    assert row("t", CELL, "x", {0: 0.5}, 1)["std"] == 0.0
    made = row("t", CELL, "x", {0: 0.5, 1: nan}, 1)
    assert isnan(made["mean"])
    assert isnan(made["std"])
    assert find([made], metric="x") is None


def test_find_wants_every_entry() -> None:
    rows = [row("t", CELL, metric, {0: value}, 1) for metric, value in (("a", 0.1), ("b", 0.2))]
    assert find(rows, metric="b", table="t") is rows[1]
    assert find(rows, metric="b", table="u") is None
    assert find(rows, missing="b") is None


def test_figures_as_text() -> None:
    two = row("t", CELL, "x", {0: 0.011, 1: 0.013}, 1, 0.0289)
    assert accuracy(two) == "0.012 ± 0.001"
    assert (percent(two), paper_percent(two)) == ("1.2 ± 0.1", "2.9")
    assert points(two) == "+1.2 ± 0.1"
    assert paper_points(two) == "+2.9"
    one = row("t", CELL, "x", {0: -0.25}, 1)
    assert (accuracy(one), points(one), paper_points(one)) == ("-0.250", "-25.0", NONE)
    assert (percent(one), paper_percent(one)) == ("-25.0", NONE)
    assert percent(None) == paper_percent(None) == NONE
    assert accuracy(None) == points(None) == paper_points(None) == NONE
    assert (number(0.125, ".2f"), number(nan, ".2f"), number(None, ".2f")) == ("0.12", NONE, NONE)


def test_a_table_and_pictures_in_markdown() -> None:
    lines = markdown(["a", "b"], [["1", "2"], ["3", "4"]])
    assert lines == ["| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 | 4 |"]
    assert show_pictures(["figure-3-cora.png"])[1] == "![Figure 3 cora](figure-3-cora.png)"
    assert show_pictures([]) == []
