"""Settings that validation chooses on other seeds, runs to their end, and what accuracy costs."""

import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel
from table_helpers import K3, K7, K9, grid_lines, own_lines, report, run_lines, written

from flower_graph.apps.reproduce.page import marks, to_the_end, value_of, winner
from flower_graph.apps.reproduce.page import written as written_as
from flower_graph.apps.reproduce.runs import Curves, curves_of
from flower_graph.apps.reproduce.table import TEST, WITHIN, Figure
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.report.significance import correct, holm, paired


def test_other_seeds_choose_and_all_that_was_tried_is_named(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time everything is there
        page = run_lines(grid_lines(), tmp_path)
    ran = [(config.seed, config.graph.neighbours) for config in simulated]  # type: ignore[attr-defined]
    tried = [(10, 3), (10, 7), (10, 7), (10, 9), (11, 3), (11, 7), (11, 7), (11, 9)]
    assert ran == [*tried, (0, 7), (0, 7), (1, 7), (1, 7)]
    said = capsys.readouterr().out
    assert "12 runs, 0 of them" in said and "12 runs, 12 of them" in said
    choices = written(tmp_path, "choices")
    assert [(one["method"], one["tried"], one["taken"]) for one in choices] == [
        *(("mine", K3, False), ("mine", K7, True), ("other", K7, True), ("other", K9, False)),
    ]
    for one in choices:
        assert (one["seeds"], one["rounds"], one["ended"]) == ([10, 11], [3, 3], True)
        assert one["metric"] == "best-val-accuracy"
        assert one["mean"] == pytest.approx(0.8 if one["taken"] else 0.7)
    text = (tmp_path / "choices.md").read_text()
    line = "| Table one, Cora, GCN, mine | {} | {} ± 0.000 | 10, 11 | 3, 3 | yes |"
    assert line.format("graph.neighbours=3", "0.700") in text
    assert line.format("**graph.neighbours=7**", "0.800") in text
    rows = written(tmp_path)
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1)}
    assert "graph.neighbours=7" in rows[0]["settings"]["overrides"]
    assert "| mine | 0.800 ± 0.000 | 0.7500 |" in page and "| neighbours=7 | 2 |" in page


def test_what_chooses_may_run_elsewhere(tmp_path: Path, simulated: list[RunConfig]) -> None:
    run_lines(grid_lines(tried_on=["graph.tau=0.9"]), tmp_path, method=["mine"])
    taus = {(config.seed, config.graph.tau) for config in simulated}  # type: ignore[attr-defined]
    assert taus == {(10, 0.9), (11, 0.9), (0, 0.2), (1, 0.2)}


def test_a_setting_that_only_one_method_has_is_tried_with_each_that_all_have(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    decays = [["strategy.weight_decay=0.1"], ["strategy.weight_decay=0.2"]]
    lines = grid_lines(choosers=(10,), each={"mine": {"alone": decays}})
    run_lines(lines, tmp_path / "out")
    choices = written(tmp_path / "out", "choices")
    tried = [one["tried"] for one in choices if one["method"] == "mine"]
    assert tried == [[*shared, *also] for shared in (K3, K7) for also in decays]
    assert "mine 4, the others 2" in (tmp_path / "out" / "choices.md").read_text()
    run_lines(grid_lines(), tmp_path / "even")
    assert "the others" not in (tmp_path / "even" / "choices.md").read_text()


def test_choices_name_the_metric_that_decides(
    tmp_path: Path, simulated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run_lines(grid_lines(settings=["patience=1", "metrics=[auc,accuracy]"]), tmp_path)
    assert {one["metric"] for one in written(tmp_path, "choices")} == {"best-val-auc"}
    text = (tmp_path / "choices.md").read_text()
    assert "validation auc" in text and "accuracy" not in text
    assert "test auc 0.800 at the best validation" in capsys.readouterr().out


def test_what_accuracy_costs_and_who_wins(tmp_path: Path, simulated: list[RunConfig]) -> None:
    page = run_lines(grid_lines(), tmp_path)
    # A round has five steps and a MiB for each client
    assert "| method | 1 rounds | 10 steps | 2.5 MiB | the end | settings | n |" in page
    figures = "| 0.600 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 | 0.800 ± 0.000 |"
    assert f"| mine {figures}" in page and f"| other {figures}" in page
    assert "| *Best* | mine (not apart: other) | mine (not apart: other) |" in page
    assert "`axes-cora.png`" in page and (tmp_path / "axes-cora.png").exists()


def test_a_row_that_still_improved_has_its_rounds_in_its_name(
    tmp_path: Path, simulated: list[RunConfig]
) -> None:
    page = run_lines(grid_lines(settings=["patience=2"]), tmp_path / "out")
    assert "| mine, 3 rounds | 0.800" in page and "| *Best* | mine, 3 rounds (not" in page
    rows = written(tmp_path / "out")
    assert {(*row["rounds"], row["ended"]) for row in rows} == {(3, 3, False)}
    unasked = run_lines(grid_lines(settings=[]), tmp_path / "unasked")
    assert "| mine, 3 rounds | 0.800" in unasked  # fewer than anybody would wait


def test_a_run_that_ended_in_its_best_round_is_named() -> None:
    rows = [{"best_last": [2]}, {"best_last": [2]}, {"ended": True}]
    assert marks(rows) == ", best in the last round with seed 2" and marks(rows[2:]) == ""
    assert marks([{"left_out": 1}]) == ", at most 1 left out"


@pytest.mark.parametrize(
    ("change", "seeds", "said"),
    [
        ({"each": {"mine": {"tries": [K3]}}}, None, "mine: tries has 1"),
        ({"each": {"other": {"tries": []}}}, None, "other: tries has 0"),
        ({"each": {name: {"tries": [K3] * 5} for name in ("mine", "other")}}, None, "tries has 5"),
        ({"choosers": (1, 2)}, None, r"seeds.*\[1\]"),
        ({}, [3, 11], r"seeds.*\[11\]"),
        ({"each": {"mine": {"alone": []}}}, None, "alone 0"),
        ({"each": {"mine": {"alone": [K3] * 5}}}, None, "alone 5"),
    ],
)
def test_unfair_choices_are_refused(
    change: dict[str, Any], seeds: list[int] | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_lines(grid_lines(**change), tmp_path / "out", seeds=seeds)
    assert not (tmp_path / "out").exists()


CURVES = Curves([1.0] * 4, [0.1, 0.4, 0.3, math.nan], [0.2, 0.6, 0.9, 0.7])
CURVES.steps, CURVES.up = [2.0, 4.0, 6.0, 8.0], [2.0**20 * n for n in range(1, 5)]


def test_accuracy_within_a_budget() -> None:
    figures = {
        **{"1 rounds": 0.2, "3 rounds": 0.6, "100 rounds": 0.6, "4 steps": 0.6},
        **{"1 steps": None, "1.5 MiB": 0.2, "the end": 0.6},  # the first round takes more steps
    }
    for within, figure in figures.items():
        assert value_of(WITHIN, CURVES, {"within": within}, None) == figure
    for wrong in ("3 hours", "few steps"):
        with pytest.raises(ConfigError, match=f"within: '{wrong}'"):
            value_of(WITHIN, CURVES, {"within": wrong}, None)


def test_of_errors_the_least_is_the_best_round() -> None:
    scores = {"mse": {"val": [4.0, math.nan, 2.0, 3.0], "test": [5.0, 1.0, 2.5, 2.0]}}
    curves = Curves([1.0] * 4, [math.nan] * 4, [math.nan] * 4, scores=scores, metric="mse")
    assert (curves.best_round, curves.best_val) == (2, 2.0)
    assert curves.score("mse", "test") == 2.5 and not curves.ended(2)


def test_what_patience_ended_has_ended_even_if_the_round_on_its_way_was_better() -> None:
    assert [CURVES.ended(patience) for patience in (1, 2, 3)] == [True, True, False]
    better = Curves([1.0] * 4, [0.1, 0.4, 0.3, 0.5], [0.2] * 4)
    for patience, most, ended in ((2, 9, True), (2, 4, False), (0, 9, False)):
        found = to_the_end(own_lines(rounds=most)[0], {7: better}, (f"patience={patience}",))
        assert found == {"rounds": [4], "ended": ended} | ({"best_last": [7]} if ended else {})
    better.left_out = 2
    assert to_the_end(own_lines()[0], {7: better}, ())["left_out"] == 2


def test_clients_that_are_not_asked_spend_nothing() -> None:
    reports = [report(1, 0.5, 0.5), report(2, 0.5, 0.5)]
    reports[0].asked, reports[1].answered = 1, 1
    curves = curves_of(reports, {}, clients=2, local_steps=4)
    assert (curves.steps, curves.up) == ([2.0, 6.0], [2.0**20, 2.0**21])
    assert curves.left_out == 1
    assert value_of("steps-a-client", curves, {}, None) == 6.0
    assert value_of("MiB-a-client", Curves([1.0], [0.1], [0.2]), {}, None) is None


def test_differences_are_tested_by_pairs() -> None:
    ours, theirs = [0.8, 0.9, 0.7, 0.85], [0.75, 0.91, 0.6, 0.8]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    result = paired(differences)
    assert result["p"] == pytest.approx(ttest_rel(ours, theirs).pvalue)
    assert result["agree"] == 3
    assert paired([0.1]) == {"p": None, "agree": 1} and paired([0.0, 0.0])["p"] is None
    assert paired([0.1, math.nan])["p"] is None
    row = {"mean": 0.0475, "std": 0.045, "values": differences, "seeds": [0, 1, 2, 3], **result}
    gain = Figure("gain", TEST, "other")
    assert written_as(gain, {**row, "holm": 0.26}, 100) == "+4.8 ± 4.5 (p 0.13, Holm 0.26, 3 of 4)"
    change = Figure("change", "test-mse-at-best-val", "other")
    raw = written_as(change, {**row, "holm": 0.26}, 1)
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
    assert winner([made("best", best), rivals[0]]) == "best"
    assert winner([made("best", best), *rivals]) == "best (not apart: far)"
    errors = [{**one, "metric": "test-mse-at-best-val"} for one in (made("best", best), rivals[0])]
    assert winner(errors) == "near"  # the least
    rivals = [made(name, near) for name in ("one", "two", "three")]
    assert winner([made("best", best), *rivals]) == ("best (not apart: one, two, three)")
