"""``flower-graph reproduce ppfl``: pages from made-up runs, and a small real comparison."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from app_helpers import InlinePool

from flower_graph.apps.reproduce import command as reproduce
from flower_graph.apps.reproduce import experiments as cells
from flower_graph.apps.reproduce import ppfl as reproduce_ppfl
from flower_graph.apps.reproduce import ppfl_cells, ppfl_page
from flower_graph.apps.reproduce.curves import Curves, curves_of, read_curves
from flower_graph.apps.reproduce.experiments import Job, Runs, kept_runs
from flower_graph.apps.reproduce.ppfl_cells import (
    CHOSEN,
    DATA,
    DEEPWALK,
    FED,
    FIGURES,
    FULL,
    GAT,
    LEVELS,
    LOC,
    MODELS,
    NAMES,
    OWN,
    PAPER,
    PAPER_FULL,
    PAPER_LEVELS,
    TABLES,
    Case,
    Plan,
    estimate,
)
from flower_graph.apps.reproduce.ppfl_page import make_page
from flower_graph.apps.reproduce.ppfl_rows import (
    ACCURACY,
    CLIENT,
    GAIN,
    SUM,
    make_rows,
    missing_runs,
    paper_of,
)
from flower_graph.apps.reproduce.text import SECONDS, find
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError, DataError
from flower_graph.report.rounds import RoundReport
from flower_graph.strategies.procrustes_alignment.config import PPFLConfig
from flower_graph.strategies.procrustes_alignment.evaluation import MLP, SVC

EVERYTHING = Plan(DATA, MODELS, TABLES, (0, 1), 3)
CORA = Case("Table 1", DEEPWALK, "Cora")
PRECISION = {f"precision-{k}": [0.25, 0.5, 0.5 + k / 100] for k in (1, 5, 10)}
# By method: test accuracy of clients 1 to 4 with seed 0
TESTED = {LOC: [0.5, 0.625, 0.5, 0.25], FED: [0.75, 0.625, 0.75, 0.5], OWN: [0.5, 0.5, 0.75, 0.5]}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], tuple[str, ...]]:
    """Settings that clients which train alone have for themselves: none, unless a test has some."""
    settings: dict[tuple[str, str], tuple[str, ...]] = {}
    monkeypatch.setattr(ppfl_cells, "OWN_SETTINGS", settings)
    monkeypatch.setattr(ppfl_page, "OWN_SETTINGS", settings)
    return settings


def made_up(plan: Plan) -> Runs:
    """Give every run figures: with seed 1 an eighth better, by MLP a sixteenth worse."""
    runs: Runs = {}
    for job in plan.jobs():
        clients = TESTED.get(job.cell.method, [0.875])
        svc = [value + job.seed / 8 for value in clients]
        judged = {
            name: {role: [v - less - (name == MLP) / 16 for v in svc]}
            for name in NAMES
            for role, less in (("test", 0.0),)
        }
        for name in NAMES:
            judged[name]["val"] = [v - 0.03125 for v in judged[name]["test"]]
        last = fmean(svc)
        curves = Curves([1.5, 1.25, 1.0], [math.nan] * 3, [last - 0.25, last - 0.125, last])
        curves.judged, curves.seconds_per_round = judged, 0.25
        if job.cell.method == FED:
            curves.alignment = {name: list(values) for name, values in PRECISION.items()}
        runs.setdefault(job.cell, {})[job.seed] = curves
    return runs


def only_row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = (r for r in rows if all(r.get(k) == v for k, v in wanted.items()))
    return found


# What is run -------------------------------------------------------------------------------------


def test_every_run_once_whole_seeds_first() -> None:
    jobs = EVERYTHING.jobs()
    assert len(jobs) == len(set(jobs))
    # LOC, FED and full graph of two data sets; of two with the GAT, and LOC and FED under noise;
    # LOC and FED of nine choices for two data sets and two models. Figures need no runs of theirs.
    assert [len(stage) for stage in EVERYTHING.stages()] == [6, 6, 8, 8, 72, 72]
    seeds = [{job.seed for job in stage} for stage in EVERYTHING.stages()]
    assert seeds == [{0}, {1}] * 3
    table_3 = EVERYTHING.stages()[4]
    assert [job.cell.data for job in table_3] == ["CiteSeer"] * 36 + ["Cora"] * 36


def test_figures_alone_need_their_eight_cells() -> None:
    cells_of = {job.cell for job in replace(EVERYTHING, tables=("figures",)).jobs()}
    everything = {job.cell for job in EVERYTHING.jobs()}
    assert len(cells_of) == 8 and cells_of < everything
    assert {cell.method for cell in cells_of} == {LOC, FED}


def test_a_model_and_a_data_set_alone() -> None:
    plan = replace(EVERYTHING, models=(GAT,), data=("CiteSeer",))
    assert {(job.cell.data, job.cell.model) for job in plan.jobs()} == {("CiteSeer", GAT)}
    assert [len(stage) for stage in plan.stages()] == [3, 3, 18, 18]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("model", MODELS)
def test_three_seeds_and_the_configs_rounds_by_default(model: str, data: str) -> None:
    jobs = Plan((data,), (model,), TABLES).jobs()
    config = load_config(f"ppfl/{data.lower()}-{model.lower()}")
    assert {job.rounds for job in jobs} == {config.rounds}
    assert {job.seed for job in jobs} == {0, 1, 2}


def test_methods_differ_in_who_trains_and_in_nothing_else() -> None:
    fed, loc, full = (EVERYTHING.settings(CORA, method) for method in (FED, LOC, FULL))
    shipped = load_config("ppfl/cora-deepwalk")
    assert isinstance(shipped, PPFLConfig)
    assert fed == shipped
    assert loc == replace(fed, strategy=replace(fed.strategy, name="local"))
    part = replace(loc.partition, clients=1, public_share=1.0, private_share=0.0)
    assert full == replace(loc, partition=part)


def test_noise_is_a_setting_of_its_own_cells() -> None:
    noisy = EVERYTHING.settings(replace(FIGURES["Figure 5"]), FED)
    clean = EVERYTHING.settings(Case("Table 2", GAT, "Cora"), FED)
    assert noisy == replace(clean, partition=replace(clean.partition, label_noise=0.15))
    methods = [EVERYTHING.methods(case) for case in EVERYTHING.cases("table-2")]
    assert methods == [[LOC, FED, FULL], [LOC, FED], [LOC, FED, FULL]]


@pytest.mark.parametrize("model", MODELS)
def test_table_3_varies_choice_and_share_of_public_nodes(model: str) -> None:
    cases = [c for c in EVERYTHING.cases("table-3") if (c.model, c.data) == (model, "Cora")]
    assert {(c.public, c.share) for c in cases} == {
        (public, share) for public, shares in CHOSEN.items() for share in shares
    }
    for case in cases:
        for method in case.methods():
            config = EVERYTHING.settings(case, method)
            part = config.partition
            assert (part.public, part.public_share) == (case.public, case.share / 100)
            assert part.private_share == 0.15
            assert part.ratios == ([0.0, 0.0, 1.0] if model == DEEPWALK else [0.6, 0.0, 0.4])
            assert config.judge.every == 3  # after the last of its three rounds


def test_clients_that_train_alone_may_have_their_own_settings(own: dict[Any, Any]) -> None:
    own[DEEPWALK, "Cora"] = ("deepwalk.epochs=7",)
    assert EVERYTHING.methods(CORA) == [LOC, FED, OWN, FULL]
    assert EVERYTHING.methods(replace(CORA, data="CiteSeer")) == [LOC, FED, FULL]
    assert EVERYTHING.methods(Case("Table 3", DEEPWALK, "Cora")) == [LOC, FED]
    config = EVERYTHING.settings(CORA, OWN)
    assert (config.strategy.name, config.deepwalk.epochs) == ("local", 7)


def test_the_estimate_grows_with_rounds_and_clients() -> None:
    jobs = EVERYTHING.jobs()
    assert 0 < estimate(jobs) < estimate([job._replace(rounds=300) for job in jobs]) / 10
    usual, few = (
        estimate([Job(EVERYTHING.cell(Case("Table 3", GAT, "Cora", share=share), FED), 0, 100)])
        for share in (40, 5)
    )
    assert usual > 2 * few


SHIPPED = dict(ppfl_cells.OWN_SETTINGS)


def test_shipped_settings_of_clients_that_train_alone_are_settings(own: dict[Any, Any]) -> None:
    own.update(SHIPPED)
    for model, data in SHIPPED:
        case = Case("Table 1" if model == DEEPWALK else "Table 2", model, data)
        assert EVERYTHING.settings(case, OWN) != EVERYTHING.settings(case, LOC)


# The paper ---------------------------------------------------------------------------------------


def test_the_papers_sums_follow_from_its_clients() -> None:
    for printed in (line for lines in PAPER.values() for line in lines.values()):
        gains = [fed - loc for loc, fed in zip(printed[:-1:2], printed[1:-1:2], strict=True)]
        assert sum(gains) == pytest.approx(printed[-1], abs=0.15)  # the paper rounds each
    for levels in PAPER_LEVELS.values():
        assert tuple(levels) == LEVELS
        for loc, fed, gain in levels.values():
            assert fed - loc == pytest.approx(gain, abs=0.25)  # one of them by 0.2


def test_every_row_of_the_paper_has_its_figures() -> None:
    for table in ("table-1", "table-2"):
        for case in EVERYTHING.cases(table):
            assert {*PAPER[case.model, case.data, case.noise]} == {*NAMES}
    assert {*PAPER_FULL} == {(model, data) for model in MODELS for data in DATA}
    assert paper_of(CORA, LOC, MLP) == pytest.approx((0.791 + 0.76 + 0.743 + 0.75) / 4)
    assert paper_of(CORA, FED, SVC) == pytest.approx((0.814 + 0.787 + 0.779 + 0.78) / 4)
    assert paper_of(CORA, FULL, SVC) == 0.82
    assert paper_of(CORA, OWN, SVC) is None
    degree = Case("Table 3", GAT, "Cora", public="degree", share=20)
    assert paper_of(degree, FED, SVC) == 0.735
    assert paper_of(degree, FED, MLP) is None
    assert paper_of(replace(degree, public="cover", share=5), FED, SVC) is None


# What is made of it ------------------------------------------------------------------------------


def test_rows_have_the_figures_of_the_runs_and_the_paper() -> None:
    rows = make_rows(EVERYTHING, made_up(EVERYTHING))
    key = {"table": "Table 1", "data": "Cora", "model": DEEPWALK, "role": "test"}
    loc = only_row(rows, metric=ACCURACY, method=LOC, classifier=SVC, **key)
    assert (loc["values"], loc["seeds"]) == ([0.46875, 0.59375], [0, 1])
    assert loc["std"] == pytest.approx(stdev([0.46875, 0.59375]))
    assert loc["paper"] == pytest.approx((0.793 + 0.775 + 0.755 + 0.75) / 4)
    val = only_row(rows, metric=ACCURACY, method=LOC, classifier=SVC, **key | {"role": "val"})
    assert (val["mean"], val["paper"]) == (loc["mean"] - 0.03125, None)
    full = only_row(rows, metric=ACCURACY, method=FULL, classifier=MLP, **key)
    assert (full["values"], full["paper"]) == ([0.8125, 0.9375], 0.799)
    fourth = only_row(rows, metric=CLIENT, method=FED, classifier=MLP, client=4, **key)
    assert (fourth["values"], fourth["paper"]) == ([0.4375, 0.5625], 76.6 / 100)


def test_global_is_the_sum_of_the_clients_differences() -> None:
    rows = make_rows(EVERYTHING, made_up(EVERYTHING))
    key = {"table": "Table 1", "data": "CiteSeer", "classifier": SVC, "role": "test"}
    total = only_row(rows, metric=SUM, over=LOC, **key)
    assert (total["values"], total["paper"]) == ([0.75, 0.75], 0.188)
    gain = only_row(rows, metric=GAIN, over=LOC, **key)
    assert gain["values"] == [0.1875, 0.1875]
    assert gain["paper"] == pytest.approx(0.188 / 4)
    key |= {"table": "Table 3", "data": "Cora", "model": GAT, "public": "degree", "share": 30}
    assert only_row(rows, metric=GAIN, **key)["paper"] == 0.021
    assert find(rows, metric=SUM, **key) is None


def test_figures_have_the_first_the_second_and_the_last_iteration() -> None:
    rows = [r for r in make_rows(EVERYTHING, made_up(EVERYTHING)) if r["table"] == "Figure 5"]
    assert {(r["data"], r["model"]) for r in rows} == {("Cora, 15 % noise", GAT)}
    values = [only_row(rows, metric="precision-1", iteration=i)["mean"] for i in (1, 2, 3)]
    assert values == [0.25, 0.5, 0.51]
    judged = [only_row(rows, metric=ACCURACY, method=LOC, iteration=i)["mean"] for i in (1, 2, 3)]
    assert judged == [0.53125 - 0.25, 0.53125 - 0.125, 0.53125]


def test_runs_that_are_missing_are_named_and_the_others_shown(tmp_path: Path) -> None:
    runs = made_up(EVERYTHING)
    del runs[EVERYTHING.cell(CORA, FED)][1]
    noisy, cover = FIGURES["Figure 5"], Case("Table 3", GAT, "Cora", public="cover", share=5)
    del runs[EVERYTHING.cell(noisy, LOC)]
    del runs[EVERYTHING.cell(cover, FED)]
    missing = missing_runs(EVERYTHING, runs)
    assert missing == [
        "Table 1, Cora, DeepWalk, FED: 1 of 2 runs",
        "Table 2, Cora, 15 % noise, GAT, LOC: 0 of 2 runs",
        "Table 3, Cora, GAT, 5 % by cover, FED: 0 of 2 runs",
    ]
    rows = make_rows(EVERYTHING, runs)
    key = {"table": "Table 1", "data": "Cora", "classifier": SVC, "role": "test"}
    assert only_row(rows, metric=SUM, **key)["seeds"] == [0]
    key |= {"table": "Table 2", "data": "Cora, 15 % noise"}
    assert find(rows, metric=SUM, **key) is None
    pictures = reproduce_ppfl.draw(tmp_path, EVERYTHING, runs)
    page = make_page(EVERYTHING, rows, missing, [], pictures)
    assert "- Table 3, Cora, GAT, 5 % by cover, FED: 0 of 2 runs" in page
    (line,) = (t for t in page.splitlines() if t.startswith("| Cora, 15 % noise (SVC) | ours |"))
    assert line.endswith("| – | 71.9 ± 8.8 | – | 0, 2 |")


def test_a_run_that_lacks_a_client_has_no_figures() -> None:
    runs = made_up(EVERYTHING)
    runs[EVERYTHING.cell(CORA, FED)][1].judged[SVC]["test"].pop()
    rows = make_rows(EVERYTHING, runs)
    key = {"table": "Table 1", "data": "Cora", "classifier": SVC, "role": "test"}
    assert only_row(rows, metric=ACCURACY, method=FED, **key)["seeds"] == [0]
    assert only_row(rows, metric=CLIENT, method=FED, client=1, **key)["seeds"] == [0]
    assert only_row(rows, metric=SUM, **key)["seeds"] == [0]


def test_nothing_run_is_an_empty_page() -> None:
    assert make_rows(EVERYTHING, {}) == []
    page = make_page(EVERYTHING, [], missing_runs(EVERYTHING, {}), [], [])
    assert "## Table" not in page and "## What of the paper" not in page
    assert "- Table 2, CiteSeer, GAT, full graph: 0 of 2 runs" in page


def test_page_and_picture(tmp_path: Path) -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs)
    pictures = reproduce_ppfl.draw(tmp_path, EVERYTHING, runs)
    assert pictures == [path.name for path in tmp_path.iterdir()] == ["figures-3-to-6.png"]
    page = make_page(EVERYTHING, rows, [], ["CiteSeer: not there"], pictures)
    each = "56.2 | 81.2 | 68.8 | 68.8 | 56.2 | 81.2 | 31.2 | 56.2"
    for part in (
        *("## Table 1: DeepWalk", "## Table 2: GAT", "## Table 3", "CiteSeer, GAT:"),
        f"| Cora (SVC) | ours | {each} | 53.1 ± 8.8 | 71.9 ± 8.8 | +75.0 ± 0.0 | 2 |",
        "|  | paper | 79.3 | 81.4 | 77.5 | 78.7 | 75.5 | 77.9 | 75.0 | 78.0 | 76.8 | 79.0 | +8.7 |",
        "| Cora (full graph) | 87.5 ± 8.8 | 79.9 | 93.8 ± 8.8 | 82.0 | 2 |",
        "| 5 % | 53.1 ± 8.8 | 57.1 | 71.9 ± 8.8 | 61.8 | +18.8 ± 0.0 | +4.7 | 2 |",
        "| Cora | GAT | 10 % | 53.1 ± 8.8 | 71.9 ± 8.8 | +18.8 ± 0.0 | 53.1",
        "| Figure 5: Cora, 15 % noise, GAT | 0.250 ± 0.000 → 0.500 ± 0.000 → 0.510 ± 0.000 |",
        "| Table 1, Cora (SVC) | +75.0 ± 0.0 | +8.7 | yes | 2 of 2 | 53.1 ± 8.8 | 76.8 | no |",
        "- P@1 above 0.9 at the end, CiteSeer: not reached, 0.510 ± 0.000",
        *("- CiteSeer: not there", "| `ppfl/citeseer-gat` | 3 | 4 | 16 |", "| 0, 0.2, 0.8 |"),
        "(figures-3-to-6.png)",
    ):
        assert part in page
    assert "nan" not in page and OWN not in page
    for above, line in pairwise(page.splitlines()):
        if above.startswith("|") and line.startswith("|"):
            assert above.count("|") == line.count("|")  # every line has all columns of its table


def test_settings_of_clients_that_train_alone_are_named(own: dict[Any, Any]) -> None:
    own[DEEPWALK, "Cora"] = ("deepwalk.epochs=7",)
    rows = make_rows(EVERYTHING, made_up(EVERYTHING))
    page = make_page(EVERYTHING, rows, [], [], [])
    assert "- Cora, DeepWalk: `deepwalk.epochs=7`" in page
    assert f"|  | {OWN} |{' – |' * 8} 62.5 ± 8.8 | 71.9 ± 8.8 | +37.5 ± 0.0 | 2 |" in page


def test_a_plan_of_one_part_has_one_page() -> None:
    plan = Plan(("Cora",), (DEEPWALK,), ("figures",), (0,), 1)
    runs = made_up(plan)
    for found in runs.values():
        found[0].alignment, found[0].judged = {}, {}
    rows = make_rows(plan, runs)
    assert {r["metric"] for r in rows} == {ACCURACY}
    page = make_page(plan, rows, [], [], [])
    assert "| Figure 3: Cora, DeepWalk | – | – | – |" in page
    assert "Table 1:" not in page and "ppfl/cora-gat`" not in page


# Runs with a stub in place of training -----------------------------------------------------------


def report(number: int) -> RoundReport:
    made = RoundReport(number, 1.0, 1.0, 0.0, math.nan, 0.5, 0.5 + number / 8, 4, 4)
    made.alignment = {"precision-1": number / 4, "precision-5": math.nan} if number > 1 else {}
    return made


JUDGED = {name: {"val": [0.5] * 4, "test": [0.625, math.nan, 0.75, 0.5]} for name in NAMES}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[PPFLConfig]:
    """Have runs take no time; the configs that were run."""
    ran: list[PPFLConfig] = []

    def simulate(config: PPFLConfig) -> tuple[list[RoundReport], dict[str, Any]]:
        ran.append(config)
        return [report(number) for number in (1, 2, 3)], {"judged": JUDGED}

    monkeypatch.setattr(cells, "simulate_whole", simulate)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(reproduce_ppfl, "cached_data", lambda config: None)
    return ran


ONLY = {"data": ["Cora"], "model": [DEEPWALK], "table": ["figures"]}


@pytest.mark.slow
def test_runs_are_kept_with_alignment_and_judgement(
    tmp_path: Path, simulated: list[PPFLConfig]
) -> None:
    reproduce.main("ppfl", tmp_path, only=ONLY, seeds=[3, 1], rounds=3)
    names = [(c.seed, c.strategy.name) for c in simulated]
    ours = "procrustes-alignment"
    assert names == [(3, "local"), (3, ours), (1, "local"), (1, ours)]
    plan = Plan(("Cora",), (DEEPWALK,), ("figures",), (3, 1), 3)
    curves = kept_runs(plan.jobs(), tmp_path / "runs")[plan.cell(CORA, FED)][1]
    assert math.isnan(curves.alignment["precision-1"][0])
    assert curves.alignment["precision-1"][1:] == [0.5, 0.75]
    assert curves.judged[MLP]["val"] == [0.5] * 4
    assert math.isnan(curves.judged[SVC]["test"][1])  # NaN there and back
    page = (tmp_path / "table.md").read_text()
    assert "| – → 0.500 ± 0.000 → 0.750 ± 0.000 |" in page
    assert (tmp_path / "figures-3-to-6.png").exists()

    reproduce.main("ppfl", tmp_path, only=ONLY, seeds=[3, 1], rounds=3)
    assert len(simulated) == 4  # what is there is not run again
    assert (tmp_path / "table.md").read_text() == page


def test_files_of_older_versions_still_load() -> None:
    older = {"cross_entropy": [1.0], "val_accuracy": [None], "test_accuracy": [0.5]}
    curves = read_curves(older)
    assert (curves.alignment, curves.judged, curves.structure) == ({}, {}, {})
    assert math.isnan(curves.val_accuracy[0]) and curves.best_round == 0
    assert curves_of([report(1)], {}).judged == {}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"method": [FED]}, "method"),
        ({"data": ["Coral"]}, "data=Coral: unknown; allowed are Cora, CiteSeer"),
        ({"model": ["x"]}, "allowed are DeepWalk, GAT"),
        ({"table": ["table-4"]}, "allowed are table-1, table-2, table-3, figures"),
        ({"table": ["table-1"], "model": [GAT]}, "no table has such a row"),
    ],
)
def test_unknown_words_are_refused(
    only: dict[str, list[str]], said: str, tmp_path: Path, simulated: list[PPFLConfig]
) -> None:
    with pytest.raises(ConfigError, match=said):
        reproduce.main("ppfl", tmp_path / "out", only=only, seeds=[0], rounds=1)
    assert not (tmp_path / "out").exists()


def test_data_that_cannot_be_had_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[PPFLConfig]
) -> None:
    def load(config: PPFLConfig) -> None:
        if config.data.name != "Cora":
            raise DataError("not in /some/folder")

    monkeypatch.setattr(reproduce_ppfl, "cached_data", load)
    reproduce.main("ppfl", tmp_path, only={"table": ["figures"]}, seeds=[0], rounds=3)
    page = (tmp_path / "table.md").read_text()
    assert "- CiteSeer: not in the data root, and it could not be downloaded" in page
    assert "/some/folder" not in page and "Figure 4" not in page


# A real run --------------------------------------------------------------------------------------

SMALL = [
    *("data.name=cora-linqs", "deepwalk.walks=1", "deepwalk.length=10", "gat.epochs=2"),
    # Few nodes to judge: the MLPs would take most of the time.
    *("judge.folds=2", "partition.ratios=[0.8,0.1,0.1]"),
]


@pytest.mark.slow
def test_a_small_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "ProcessPoolExecutor", InlinePool)
    only = {"data": ["Cora"], "table": ["table-1", "table-2", "figures"]}
    settings: dict[str, Any] = {"only": only, "rounds": 2, "overrides": SMALL}
    reproduce_ppfl.reproduce(tmp_path, seeds=[0], **settings)
    rows = json.loads((tmp_path / "table.json").read_text())
    for table, model in (("Table 1", DEEPWALK), ("Table 2", GAT)):
        key = {"table": table, "data": "Cora", "model": model}
        for method in (LOC, FED, FULL):
            for classifier in NAMES:
                one = {"classifier": classifier, "role": "test", "method": method, **key}
                assert 0.1 < only_row(rows, metric=ACCURACY, **one)["mean"] < 1
            assert only_row(rows, metric=SECONDS, method=method, **key)["mean"] > 0
        one = {"classifier": SVC, "role": "test", **key}
        each = [only_row(rows, metric=CLIENT, method=FED, client=n, **one) for n in (1, 2, 3, 4)]
        whole = only_row(rows, metric=ACCURACY, method=FED, **one)
        assert fmean(r["mean"] for r in each) == pytest.approx(whole["mean"])
        assert 0 < only_row(rows, metric="precision-1", method=FED, **key)["mean"] <= 1
    # The round's figure is the SVC's of the last judgement.
    last = only_row(rows, table="Figure 3", metric=ACCURACY, method=FED, iteration=2)
    key = {"table": "Table 1", "classifier": SVC, "role": "test", "method": FED}
    assert last["mean"] == pytest.approx(only_row(rows, metric=ACCURACY, **key)["mean"])
    assert (tmp_path / "figures-3-to-6.png").exists()


def test_the_privacy_curve_is_run_if_it_is_asked_for_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        reproduce_ppfl, "privacy_curve", lambda out, **more: asked.append((out, more))
    )
    reproduce_ppfl.reproduce(tmp_path, only={"table": ["privacy"]}, seeds=[3], rounds=2)
    assert asked == [(tmp_path, {"seeds": (3,), "overrides": ["rounds=2"]})]
    assert list(tmp_path.iterdir()) == []
