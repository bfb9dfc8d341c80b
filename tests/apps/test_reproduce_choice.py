"""Settings that validation chooses on other seeds, runs to their end, and what accuracy costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import ttest_rel
from table_helpers import OWN, report, written

from flower_graph.apps.reproduce import experiments
from flower_graph.apps.reproduce.command import main
from flower_graph.apps.reproduce.experiments import Curves, Experiment, curves_of
from flower_graph.apps.reproduce.marks import marks
from flower_graph.apps.reproduce.page import formatted
from flower_graph.apps.reproduce.rows import FIGURES, TEST, WITHIN, to_the_end
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.report.significance import correct, holm, paired

K3, K7, K9 = (["graph.neighbours=3"], ["graph.neighbours=7"], ["graph.neighbours=9"])
GRID = {"seeds": [10, 11], "methods": {"mine": [K3, K7], "other": [K7, K9]}}
BUDGETS = ["1 rounds", "10 steps", "2.5 MiB", "the end"]
AXES = {
    "heading": "Axes, {data}",
    "for": ["data"],
    "rows": {"metric": WITHIN},
    "each": ["method"],
    "columns": [
        ["method", "{method}"],
        {"for": {"within": None}, "is": [["{within}", "accuracy", WITHIN]]},
    ],
    "lines": [
        {
            "each": {},
            "cells": [
                "best",
                {
                    "for": {"within": None},
                    "is": [["winner", {"metric": WITHIN, "method": "all"}]],
                },
            ],
        }
    ],
}


def grid_table(**changes: Any) -> dict[str, Any]:
    """Give a table whose two methods choose of two settings each, with patience of one round."""
    tree: dict[str, Any] = yaml.safe_load(OWN) | {"grid": GRID}
    part = tree["tables"]["one"][0]
    part |= {"choose": True, "settings": ["patience=1"]} | changes
    part["rows"].append({"metric": WITHIN, "each": {"within": BUDGETS}})
    tree["page"].append(AXES)
    picture = {"file": "axes-{data!l}.png", "kind": "axes", "asked": "one", "each_data": True}
    tree["pictures"] = [picture | {"tables": {"Table one": None}}]
    return tree


def run_table(tree: dict[str, Any], out: Path, seeds: list[int] | None = None) -> str:
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree))
    main(str(file), out, only={"data": ["Cora"]}, seeds=seeds, rounds=3)
    return (out / "table.md").read_text()


def test_other_seeds_choose_and_all_that_was_tried_is_named(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time everything is there
        page = run_table(grid_table(), tmp_path / "out")
    ran = [(config.seed, config.graph.neighbours) for config in simulated]  # type: ignore[attr-defined]
    tried = [(10, 3), (10, 7), (10, 7), (10, 9), (11, 3), (11, 7), (11, 7), (11, 9)]
    assert ran == [*tried, (0, 7), (0, 7), (1, 7), (1, 7)]
    said = capsys.readouterr().out
    assert "12 runs, 0 of them" in said and "12 runs, 12 of them" in said
    choices = written(tmp_path / "out", "choices")
    assert [(one["method"], one["tried"], one["taken"]) for one in choices] == [
        *(("mine", K3, False), ("mine", K7, True), ("other", K7, True), ("other", K9, False)),
    ]
    for one in choices:
        assert (one["seeds"], one["rounds"], one["ended"]) == ([10, 11], [3, 3], True)
        assert one["metric"] == "best-val-accuracy"
        assert one["mean"] == pytest.approx(0.8 if one["taken"] else 0.7)
    text = (tmp_path / "out" / "choices.md").read_text()
    line = "| {}, mine | {} | {} ± 0.000 | 10, 11 | 3, 3 | yes |"
    assert line.format("Table one, Cora", "graph.neighbours=3", "0.700") in text
    assert line.format("Table one, Cora", "**graph.neighbours=7**", "0.800") in text
    rows = written(tmp_path / "out")
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1)}
    assert "graph.neighbours=7" in rows[0]["settings"]["overrides"]
    assert "| mine | 0.800 ± 0.000 | 0.75 |" in page


def test_a_setting_that_only_one_method_has_is_tried_with_each_that_all_have(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    tree = grid_table()
    decays = [["strategy.weight_decay=0.1"], ["strategy.weight_decay=0.2"]]
    tree["grid"] = {**GRID, "seeds": [10], "also": {"mine": decays}}
    run_table(tree, tmp_path / "out")
    choices = written(tmp_path / "out", "choices")
    tried = [one["tried"] for one in choices if one["method"] == "mine"]
    assert tried == [[*shared, *also] for shared in (K3, K7) for also in decays]
    text = (tmp_path / "out" / "choices.md").read_text()
    assert "mine 4, the others 2" in text
    run_table(grid_table(), tmp_path / "even")
    assert "the others" not in (tmp_path / "even" / "choices.md").read_text()


def test_choices_name_the_metric_that_decides(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run_table(grid_table(settings=["patience=1", "metrics=[auc,accuracy]"]), tmp_path / "out")
    choices = written(tmp_path / "out", "choices")
    assert {one["metric"] for one in choices} == {"best-val-auc"}
    text = (tmp_path / "out" / "choices.md").read_text()
    assert "validation auc" in text and "accuracy" not in text
    assert "test auc 0.800 at the best validation" in capsys.readouterr().out


def test_a_data_set_may_have_fewer_seeds(tmp_path: Path, simulated: list[RunConfig]) -> None:
    tree = grid_table()
    tree["data"]["Cora"]["seeds"] = 1
    page = run_table(tree, tmp_path / "out")
    assert {config.seed for config in simulated} == {10, 11, 0} and "Not run" not in page


def test_a_data_set_may_try_the_first_of_each(tmp_path: Path, simulated: list[RunConfig]) -> None:
    tree = grid_table()
    tree["data"]["Cora"]["tries"] = 1
    run_table(tree, tmp_path / "out")
    ran = [(config.seed, config.graph.neighbours) for config in simulated]  # type: ignore[attr-defined]
    assert ran == [(10, 3), (10, 7), (11, 3), (11, 7), (0, 3), (0, 7), (1, 3), (1, 7)]
    tree["data"]["Cora"]["tries"] = 0
    with pytest.raises(ConfigError, match=r"data\.Cora.*0"):
        run_table(tree, tmp_path / "none")


def test_what_accuracy_costs_and_who_wins(tmp_path: Path, simulated: list[RunConfig]) -> None:
    page = run_table(grid_table(), tmp_path / "out")
    # A round has five steps and a MiB for each client
    assert "| method | 1 rounds | 10 steps | 2.5 MiB | the end |" in page
    figures = "| 0.600 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 |"
    assert f"| mine {figures}" in page and f"| other {figures}" in page
    assert "| best | mine (not apart: other) | mine (not apart: other) |" in page
    assert "`axes-cora.png`" in page and (tmp_path / "out" / "axes-cora.png").exists()


def test_a_row_that_still_improved_has_its_rounds_in_its_name(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    page = run_table(grid_table(settings=["patience=2"]), tmp_path / "out")
    assert "| mine, 3 rounds | 0.800" in page and "| best | mine, 3 rounds (not" in page
    rows = written(tmp_path / "out")
    assert {(*row["rounds"], row["ended"]) for row in rows} == {(3, 3, False)}
    unasked = run_table(grid_table(settings=[]), tmp_path / "unasked")
    assert "| mine, 3 rounds | 0.800" in unasked  # fewer than anybody would wait


def test_a_column_s_method_is_marked_in_the_lines_that_still_improved(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    tree = grid_table(settings=["patience=2"])
    columns = {"for": {"method": ["mine"]}, "is": [["{method}", "accuracy", TEST]]}
    beside = {"rows": {"table": "Table one"}, "each": ["data"], "columns": [columns]}
    tree["page"] = [beside]
    page = run_table(tree, tmp_path / "out")
    assert "| mine |" in page and "| 0.800 ± 0.000, 3 rounds |" in page


def test_a_run_that_ended_in_its_best_round_is_named() -> None:
    rows = [{"best_last": [2]}, {"best_last": [2]}, {"ended": True}]
    assert marks(rows) == ", best in the last round with seed 2" and marks(rows[2:]) == ""


def test_a_row_that_went_without_clients_says_so(
    tmp_path: Path, simulated: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = experiments.simulate_whole

    def one_left_out(config: RunConfig) -> Any:
        reports, final = whole(config)
        if config.graph.neighbours == 7:  # type: ignore[attr-defined]
            reports[1].answered -= 1
        return reports, final

    monkeypatch.setattr(experiments, "simulate_whole", one_left_out)
    page = run_table(grid_table(), tmp_path / "out")
    assert "| mine, at most 1 left out | 0.800" in page
    rows = written(tmp_path / "out")
    assert {row["left_out"] for row in rows} == {1}


@pytest.mark.parametrize(
    ("change", "part", "seeds", "said"),
    [
        ({"methods": {"mine": [K3], "other": [K3, K7]}}, {}, None, "'mine'.*1"),
        ({"methods": {"mine": [K3]}}, {}, None, "'other'.*0.*tables.one"),
        ({"methods": {"mine": {"": [K3]}, "other": [K3, K7]}}, {}, None, "'mine, '.*1"),
        ({"methods": dict.fromkeys(("mine", "other"), [K3] * 5)}, {}, None, "most 4"),
        ({"seeds": [1, 2]}, {}, None, r"grid.seeds: \(1, 2\).*seeds"),
        ({}, {}, [3, 11], r"seeds \(3, 11\)"),
        ({"methods": {**GRID["methods"], "thrid": [K3, K7]}}, {}, None, "thrid"),  # type: ignore[dict-item]
        ({"also": {"thrid": [K3]}}, {}, None, r"thrid.*grid\.also"),
        ({"also": {"mine": []}}, {}, None, r"grid\.also.*'mine'.*0"),
        ({"also": {"mine": [K3] * 5}}, {}, None, r"grid\.also.*'mine'.*5.*4"),
        ({}, {"choose": "last"}, None, "choose: 'last'"),
        ({"seed": [1]}, {}, None, "seed"),
    ],
)
def test_unfair_choices_are_refused(
    change: dict[str, Any],
    part: dict[str, Any],
    seeds: list[int] | None,
    said: str,
    tmp_path: Path,
    simulated: list[RunConfig],
) -> None:
    tree = grid_table(**part)
    tree["grid"] = {**GRID, **change}
    with pytest.raises(ConfigError, match=said):
        run_table(tree, tmp_path / "out", seeds)
    assert not simulated


CURVES = Curves([1.0] * 4, [0.1, 0.4, 0.3, math.nan], [0.2, 0.6, 0.9, 0.7])
CURVES.steps, CURVES.up = [2.0, 4.0, 6.0, 8.0], [2.0**20 * n for n in range(1, 5)]


@pytest.mark.parametrize(
    ("within", "figure"),
    [
        ("1 rounds", 0.2),
        ("3 rounds", 0.6),
        ("100 rounds", 0.6),
        ("1 steps", None),  # the first round takes more
        ("4 steps", 0.6),
        ("1.5 MiB", 0.2),
        ("the end", 0.6),
    ],
)
def test_accuracy_within_a_budget(within: str, figure: float | None) -> None:
    assert FIGURES[WITHIN](CURVES, {"within": within}, None) == figure
    for wrong, said in (("3 hours", "'hours' is not one of"), ("few steps", "write NUMBER steps")):
        with pytest.raises(ConfigError, match=said):
            FIGURES[WITHIN](CURVES, {"within": wrong}, None)


def test_of_errors_the_least_is_the_best_round() -> None:
    scores = {"mse": {"val": [4.0, math.nan, 2.0, 3.0], "test": [5.0, 1.0, 2.5, 2.0]}}
    curves = Curves([1.0] * 4, [math.nan] * 4, [math.nan] * 4, scores=scores, metric="mse")
    assert (curves.best_round, curves.best_val) == (2, 2.0)
    assert curves.score("mse", "test", curves.best_round) == 2.5 and not curves.ended(2)


@pytest.mark.parametrize(("patience", "ended"), [(1, True), (2, True), (3, False)])
def test_a_run_has_ended_if_validation_did_not_improve(patience: int, ended: bool) -> None:
    assert CURVES.ended(patience) is ended


def test_what_patience_ended_has_ended_even_if_the_round_on_its_way_was_better() -> None:
    better = Curves([1.0] * 4, [0.1, 0.4, 0.3, 0.5], [0.2] * 4)
    for patience, most, ended in ((2, 9, True), (2, 4, False), (0, 9, False)):
        one = Experiment("Cora", "", "mine", "fedgls/cora", (f"patience={patience}",))
        assert to_the_end(one, {7: better}, most) == {
            "rounds": [4],
            "ended": ended,
            **({"best_last": [7]} if ended else {}),
        }


def test_clients_that_are_not_asked_spend_nothing() -> None:
    reports = [report(1, 0.5, 0.5), report(2, 0.5, 0.5)]
    reports[0].asked = 1
    curves = curves_of(reports, {}, clients=2, local_steps=4)
    assert (curves.steps, curves.up) == ([2.0, 6.0], [2.0**20, 2.0**21])
    assert FIGURES["steps-a-client"](curves, {}, None) == 6.0
    assert FIGURES["MiB-a-client"](Curves([1.0], [0.1], [0.2]), {}, None) is None


def test_differences_are_tested_by_pairs() -> None:
    ours, theirs = [0.8, 0.9, 0.7, 0.85], [0.75, 0.91, 0.6, 0.8]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    result = paired(differences)
    assert result["p"] == pytest.approx(ttest_rel(ours, theirs).pvalue)
    assert result["agree"] == 3
    assert paired([0.1]) == {"p": None, "agree": 1} and paired([0.0, 0.0])["p"] is None
    assert paired([0.1, math.nan])["p"] is None
    row = {"mean": 0.0475, "std": 0.045, "values": differences, "seeds": [0, 1, 2, 3], **result}
    assert formatted("paired", [{**row, "holm": 0.26}]) == "+4.8 ± 4.5 (p 0.13, Holm 0.26, 3 of 4)"
    raw = formatted("paired:change", [{**row, "holm": 0.26}])
    assert raw == "+0.05 ± 0.04 (p 0.13, Holm 0.26, 3 of 4)"


def test_many_tests_are_corrected_by_holm() -> None:
    # Holm's own example of step-down, and R's p.adjust(c(0.01, 0.02, 0.03, 0.005), "holm")
    assert holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    assert holm([0.5, None, 0.4]) == [pytest.approx(0.8), None, pytest.approx(0.8)]
    assert holm([0.9, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_a_family_is_the_tests_of_one_table_and_metric() -> None:
    places = [("A", "Cora", "gain"), ("A", "CiteSeer", "gain"), ("B", "Cora", "gain")]
    rows = [{"table": t, "data": d, "metric": m, "p": 0.03} for t, d, m in places]
    rows += [{**rows[0], "metric": "other", "p": None}, {"table": "A", "metric": "gain"}]
    correct(rows)
    assert [row.get("holm", "none") for row in rows] == [0.06, 0.06, 0.03, None, "none"]


def test_the_best_is_told_apart_by_corrected_tests() -> None:
    """Of many rivals one may be below by chance: 0.03 of two tests is 0.06."""
    seeds, best = [0, 1, 2], [0.9, 0.9, 0.9]
    near = [0.9 - one for one in (0.05, 0.06, 0.08)]  # p 0.019
    far = [0.9 - one for one in (0.04, 0.08, 0.1)]  # p 0.055

    def made(method: str, values: list[float]) -> dict[str, Any]:
        mean = sum(values) / 3
        return {"method": method, "mean": mean, "values": values, "seeds": seeds}

    rivals = [made("near", near), made("far", far)]
    assert formatted("winner", [made("best", best), rivals[0]]) == "best"
    assert formatted("winner", [made("best", best), *rivals]) == "best (not apart: far)"
    errors = [{**one, "metric": "test-mse-at-best-val"} for one in (made("best", best), rivals[0])]
    assert formatted("winner", errors) == "near"  # the least
    rivals = [made(name, near) for name in ("one", "two", "three")]
    assert formatted("winner", [made("best", best), *rivals]) == (
        "best (not apart: one, two, three)"
    )
