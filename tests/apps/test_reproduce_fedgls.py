"""``flower-graph reproduce fedgls``: pages from made-up runs, and a small real comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from app_helpers import InlinePool

from flower_graph.apps import cells, fedgls_cells, reproduce_fedgls
from flower_graph.apps.cells import Job, Runs, kept_runs
from flower_graph.apps.curves import Curves
from flower_graph.apps.fedgls_cells import (
    COMPARED,
    DATA,
    FEDGLS,
    FIXED,
    KNN,
    METHODS,
    MLP,
    PAPER,
    TABLES,
    Plan,
    estimate,
)
from flower_graph.apps.fedgls_page import make_page
from flower_graph.apps.fedgls_rows import gain, make_rows, missing_runs
from flower_graph.apps.tables import LAST, SECONDS, TEST, VALIDATION, find
from flower_graph.config import FedGLSConfig, load_config
from flower_graph.config_fedgls import METHODS as CONFIG_METHODS
from flower_graph.errors import ConfigError, DataError
from flower_graph.report import RoundReport

EVERYTHING = Plan(DATA[:3], (*METHODS,), TABLES, (0, 1), 3)
GRAPH = {
    **{"precision": 0.3, "recall": 0.4, "homophily": 0.7, "degree": 12.0},
    **{"true-homophily": 0.8, "true-degree": 4.0},
}


def made_up(plan: Plan) -> Runs:
    """Give every run its own figures: best validation in round 2, where test is 0.5 + a little."""
    runs: Runs = {}
    for number, job in enumerate(plan.jobs()):
        test = 0.5 + number / 1000
        curves = Curves([2.0, 1.5, 1.0], [0.1, 0.4, 0.3], [0.2, test, test - 0.1])
        curves.seconds_per_round = 0.25
        if job.cell.method in (FEDGLS, KNN):
            curves.structure = dict(GRAPH)
            curves.structure_last = GRAPH | {"precision": 0.2}
        runs.setdefault(job.cell, {})[job.seed] = curves
    return runs


def only_row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = (r for r in rows if all(r.get(k) == v for k, v in wanted.items()))
    return found


# What is run -------------------------------------------------------------------------------------


def test_every_run_once_whole_seeds_first() -> None:
    jobs = EVERYTHING.jobs()
    assert len(jobs) == len(set(jobs))
    # Eight rows on three data sets, then 12:4 and 4:12 without Fed-MLP, then E = 3 and 10 on two.
    assert [len(stage) for stage in EVERYTHING.stages()] == [24, 24, 4, 4, 12, 12]
    seeds = [[job.seed for job in stage] for stage in EVERYTHING.stages()]
    assert [set(each) for each in seeds] == [{0}, {1}] * 3
    first = [job.cell.data for job in EVERYTHING.stages()[0]]
    assert first == ["Cora"] * 8 + ["CiteSeer"] * 8 + ["PubMed"] * 8


@pytest.mark.parametrize("data", DATA)
def test_five_seeds_and_the_configs_rounds_by_default(data: str) -> None:
    jobs = Plan((data,), (*METHODS,), ("table-1",)).jobs()
    papers = dict(zip(DATA, (100, 100, 200, 300, 2000), strict=True))
    assert {job.rounds for job in jobs} == {papers[data]}
    assert {job.seed for job in jobs} == {0, 1, 2, 3, 4}


def test_the_row_without_learning_changes_the_learner_alone() -> None:
    learned, fixed = (EVERYTHING.settings("PubMed", method) for method in (FEDGLS, FIXED))
    assert learned.graph.learning_rate > 0
    assert fixed == replace(learned, graph=replace(learned.graph, learning_rate=0.0))


def test_methods_are_the_configs() -> None:
    assert {*METHODS.values()} == {*CONFIG_METHODS}
    for method, name in METHODS.items():
        assert EVERYTHING.settings("Cora", method).strategy.name == name


@pytest.mark.parametrize(
    ("table", "data", "methods"),
    [
        ("table-1", {*DATA[:3]}, {*METHODS}),
        ("figure-3", {"Cora"}, {FEDGLS, KNN}),
    ],
)
def test_a_table_needs_its_own_runs(table: str, data: set[str], methods: set[str]) -> None:
    jobs = replace(EVERYTHING, tables=(table,)).jobs()
    assert {job.cell.data for job in jobs} == data
    assert {job.cell.method for job in jobs} == methods


def test_tables_2_and_3_change_one_setting_and_share_the_usual_runs() -> None:
    for table, key, values in (
        ("Table 2", "strategy.local_epochs", {"3": 3, "5": 5, "10": 10}),
        ("Table 3", "graph.graphless_ratio", {"12:4": 0.25, "8:8": 0.5, "4:12": 0.75}),
    ):
        section, name = key.split(".")
        entries = [e for e in EVERYTHING.entries() if (e.table, e.data) == (table, "PubMed")]
        assert len(entries) == 9
        for entry in entries:
            config: Any = load_config(entry.cell.config, entry.cell.overrides)
            is_usual = entry.varied in ("5", "8:8") or (table, entry.method) == ("Table 3", MLP)
            assert (entry.cell == EVERYTHING.cell("PubMed", entry.method)) == is_usual
            expected = 0.5 if is_usual and table == "Table 3" else values[entry.varied]
            assert getattr(getattr(config, section), name) == expected


def test_flickrs_ratios_are_of_twenty_clients() -> None:
    plan = replace(EVERYTHING, data=("Flickr",), methods=(FEDGLS,), tables=("table-3",))
    shares: dict[str, float] = {}
    for entry in plan.entries():
        config: Any = load_config(entry.cell.config, entry.cell.overrides)
        shares[entry.varied] = config.graph.graphless_ratio
        assert config.partition.clients == sum(map(int, entry.varied.split(":")))
    assert shares == {"12:8": 0.4, "10:10": 0.5, "8:12": 0.6}


def test_settings_of_one_method_alone_hold_in_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("graph.neighbours=7",)
    monkeypatch.setattr(fedgls_cells, "TUNED", {("PubMed", KNN): own})
    plan = replace(EVERYTHING, overrides=("graph.tau=0.3",))
    for entry in plan.entries():
        config: Any = load_config(entry.cell.config, entry.cell.overrides)
        tuned = (entry.data, entry.method) == ("PubMed", KNN)
        assert (config.graph.neighbours == 7) == tuned
        assert config.graph.tau == 0.3


def test_the_estimate_grows_with_rounds_and_epochs() -> None:
    jobs = EVERYTHING.jobs()
    longer = [job._replace(rounds=1000) for job in jobs]
    assert 0 < estimate(jobs) < estimate(longer) / 10
    three, ten = (
        [Job(EVERYTHING.epochs_cell("PubMed", FEDGLS, epochs), 0, 100)] for epochs in (3, 10)
    )
    assert estimate(ten) > 3 * estimate(three)


# What is made of it ------------------------------------------------------------------------------


def test_rows_have_the_figures_of_the_runs_and_the_paper() -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs)
    knn, ours = (runs[EVERYTHING.cell("Cora", m)] for m in (KNN, FEDGLS))
    key = {"table": "Table 1", "data": "Cora", "method": FEDGLS}
    best = only_row(rows, metric=TEST, **key)
    assert best["values"] == [ours[0].test_accuracy[1], ours[1].test_accuracy[1]]
    assert (best["paper"], best["seeds"], best["varied"]) == (0.8180, [0, 1], "")
    assert best["std"] == pytest.approx(stdev(best["values"]))
    last = only_row(rows, metric=LAST, **key)
    assert last["values"] == pytest.approx([v - 0.1 for v in best["values"]])
    assert only_row(rows, metric=VALIDATION, **key)["values"] == [0.4, 0.4]
    assert only_row(rows, metric=SECONDS, **key)["mean"] == 0.25
    over = only_row(rows, metric=gain(KNN), **key)
    expected = [ours[s].test_accuracy[1] - knn[s].test_accuracy[1] for s in (0, 1)]
    assert over["values"] == pytest.approx(expected)
    assert over["paper"] == pytest.approx(0.8180 - 0.7891)
    assert only_row(rows, metric=gain(KNN, LAST), **key)["values"] == pytest.approx(expected)
    assert only_row(rows, metric=gain(MLP), **key)["paper"] == pytest.approx(0.8180 - 0.6141)
    assert only_row(rows, metric="precision", **key)["values"] == [0.3, 0.3]
    assert only_row(rows, metric="precision-last", **key)["values"] == [0.2, 0.2]
    assert find(rows, metric="precision", method=MLP) is None


def test_tables_2_and_3_compare_under_the_same_setting() -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs)
    ours, theirs = (
        runs[EVERYTHING.epochs_cell("CiteSeer", method, 10)] for method in (FEDGLS, KNN)
    )
    key = {"table": "Table 2", "data": "CiteSeer", "varied": "10", "method": FEDGLS}
    assert only_row(rows, metric=gain(KNN), **key)["values"] == pytest.approx(
        [ours[s].test_accuracy[1] - theirs[s].test_accuracy[1] for s in (0, 1)]
    )
    assert only_row(rows, metric=gain(KNN), **key)["paper"] == pytest.approx(0.8015 - 0.7859)
    # Fed-MLP's runs are the same ones at every ratio; only FedGLS's differ.
    ours = runs[EVERYTHING.ratio_cell("PubMed", FEDGLS, 0.75)]
    theirs = runs[EVERYTHING.cell("PubMed", MLP)]
    key = {"table": "Table 3", "data": "PubMed", "varied": "4:12", "method": FEDGLS}
    assert only_row(rows, metric=gain(MLP), **key)["values"] == pytest.approx(
        [ours[s].test_accuracy[1] - theirs[s].test_accuracy[1] for s in (0, 1)]
    )
    assert only_row(rows, metric=TEST, **key)["paper"] == 0.8422


def test_runs_that_are_missing_are_named_and_the_others_shown(tmp_path: Path) -> None:
    runs = made_up(EVERYTHING)
    del runs[EVERYTHING.cell("Cora", FEDGLS)][1]
    del runs[EVERYTHING.epochs_cell("PubMed", KNN, 3)]
    assert missing_runs(EVERYTHING, runs) == [
        "Table 1, Cora, FedGLS: 1 of 2 runs",
        "Figure 3, Cora, FedGLS: 1 of 2 runs",
        "Table 2, PubMed, 3, Fed-GNN_k: 0 of 2 runs",
    ]
    rows = make_rows(EVERYTHING, runs)
    assert only_row(rows, table="Table 1", data="Cora", metric=gain(KNN))["seeds"] == [0]
    key = {"table": "Table 2", "data": "PubMed", "varied": "3"}
    assert find(rows, metric=gain(KNN), **key) is None
    assert find(rows, metric=gain(MLP), **key) is not None
    pictures = reproduce_fedgls.draw(tmp_path, EVERYTHING, runs, rows)
    page = make_page(EVERYTHING, rows, missing_runs(EVERYTHING, runs), [], pictures)
    assert "- Table 2, PubMed, 3, Fed-GNN_k: 0 of 2 runs" in page
    (line,) = (text for text in page.splitlines() if text.startswith("| PubMed | 3 |"))
    assert line.split(" | ")[4:6] == ["–", "–"]
    assert line.endswith("| 2, 0, 2 |")


def test_nothing_run_is_an_empty_page() -> None:
    assert make_rows(EVERYTHING, {}) == []
    page = make_page(EVERYTHING, [], missing_runs(EVERYTHING, {}), [], [])
    assert "## Table" not in page
    assert "- Table 1, PubMed, Fed-GNN: 0 of 2 runs" in page


def test_page_and_pictures(tmp_path: Path) -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs)
    pictures = reproduce_fedgls.draw(tmp_path, EVERYTHING, runs, rows)
    assert sorted(pictures) == sorted(path.name for path in tmp_path.iterdir())
    assert {"figure-3-cora.png", "figure-3-pubmed.png", "structure-homophily.png"} < {*pictures}
    page = make_page(EVERYTHING, rows, [], ["Flickr: not there"], pictures)
    for part in (
        *("## Table 1, Cora", "## Table 2: local epochs", "## Table 3: graph:graphless"),
        *("- Flickr: not there", "| FedGLS − Fed-GNN_k | +0.1 ± 0.0 | +2.9 | +0.1 ± 0.0 |"),
        "| Cora | FedGLS | 0.300 ± 0.000 | 0.400 ± 0.000 | 0.700 ± 0.000 | 0.800 ± 0.000 | 12.0 |",
        *("Every method has the settings of its data set", "| 0.8180 |"),
    ):
        assert part in page
    assert "nan" not in page
    lines = page.splitlines()
    for above, line in pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert above.count("|") == line.count("|")  # every line has all columns of its table
    for name in pictures:
        assert f"({name})" in page
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_names_the_settings_of_one_method_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {(data, FEDGLS): ("graph.neighbours=7",) for data in ("Cora", "Flickr")}
    monkeypatch.setattr(fedgls_cells, "TUNED", tuned)
    monkeypatch.setattr("flower_graph.apps.fedgls_page.TUNED", tuned)
    page = make_page(EVERYTHING, [], [], [], [])
    assert "- Cora, FedGLS: `graph.neighbours=7`" in page
    # The table above is of what all methods have in common.
    config = load_config("fedgls/cora")
    assert isinstance(config, FedGLSConfig)
    assert f"| {config.graph.neighbours} | {config.graph.tau:g} | 16 |" in page
    assert "Flickr" not in page


def test_the_papers_tables_are_complete() -> None:
    assert {*PAPER} == {*DATA}
    plan = replace(EVERYTHING, data=DATA)
    papers = {(*e.place, e.method): e.paper for e in plan.entries() if e.table != "Figure 3"}
    assert len(papers) == 5 * 8 + 2 * 9 + 2 * 9
    assert [place for place, paper in papers.items() if paper is None] == [
        ("Table 1", data, "", FIXED) for data in DATA
    ]
    assert papers["Table 1", "PubMed", "", "Fed-GNN"] == 0.8629
    # Tables 2 and 3 repeat Table 1 where they vary nothing.
    for table, data, varied in (
        *(("Table 2", "CiteSeer", "5"), ("Table 2", "PubMed", "5"), ("Table 3", "PubMed", "8:8")),
        ("Table 3", "Flickr", "10:10"),
    ):
        for method in COMPARED:
            assert papers[table, data, varied, method] == papers["Table 1", data, "", method]


# Runs with a stub in place of training -----------------------------------------------------------


def report(number: int, val: float, test: float) -> RoundReport:
    made = RoundReport(number, 1.0, 1.0, 0.0, 0.9, val, test, 1, 1)
    made.structure = GRAPH | {"precision": 0.1 * number, "recall": float("nan")}
    return made


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[FedGLSConfig]:
    """Have runs take no time; the configs that were run."""
    ran: list[FedGLSConfig] = []

    def simulate(config: FedGLSConfig) -> tuple[list[RoundReport], dict[str, Any]]:
        if config.strategy.name == "fedproto" and config.seed == 7:
            raise RuntimeError("the run broke")
        ran.append(config)
        return [report(1, 0.5, 0.6), report(2, 0.7, 0.8), report(3, 0.6, 0.9)], {}

    monkeypatch.setattr(cells, "simulate_whole", simulate)
    monkeypatch.setattr(cells, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(reproduce_fedgls, "cached_data", lambda config: None)
    return ran


CORA = {"data": ["Cora"], "method": [MLP, "FedProto", FEDGLS], "table": ["table-1"]}


def test_runs_are_kept_with_the_structure_of_best_and_last_round(
    tmp_path: Path, simulated: list[FedGLSConfig]
) -> None:
    InlinePool.limits.clear()
    reproduce_fedgls.reproduce(tmp_path, only=CORA, seeds=[3, 1], rounds=3)
    assert InlinePool.limits == [None, None]  # processes are used again, seed by seed
    assert [(c.seed, c.strategy.name) for c in simulated] == [
        (seed, METHODS[method]) for seed in (3, 1) for method in CORA["method"]
    ]
    plan = Plan(("Cora",), tuple(CORA["method"]), ("table-1",), (3, 1), 3)
    runs = kept_runs(plan.jobs(), tmp_path / "runs")
    curves = runs[plan.cell("Cora", FEDGLS)][1]
    assert (curves.structure["precision"], curves.structure_last["precision"]) == (0.2, 0.1 * 3)
    assert curves.structure["recall"] != curves.structure["recall"]  # NaN there and back
    assert curves.peak_bytes != curves.peak_bytes  # a shared process has no peak of one run
    page = (tmp_path / "table.md").read_text()
    assert "| FedGLS | 0.800 ± 0.000 | 0.8180 | 0.900 ± 0.000 | 0.700 ± 0.000 |" in page
    assert "| Cora | FedGLS | 0.200 ± 0.000 | – | 0.700 ± 0.000 |" in page

    reproduce_fedgls.reproduce(tmp_path, only=CORA, seeds=[3, 1], rounds=3)
    assert len(simulated) == 6  # what is there is not run again
    assert (tmp_path / "table.md").read_text() == page


def test_a_run_that_breaks_leaves_a_page_of_what_is_there(
    tmp_path: Path, simulated: list[FedGLSConfig]
) -> None:
    with pytest.raises(RuntimeError, match="the run broke"):
        reproduce_fedgls.reproduce(tmp_path, only=CORA, seeds=[0, 7], rounds=3)
    page = (tmp_path / "table.md").read_text()
    assert "- Table 1, Cora, FedProto: 1 of 2 runs" in page
    rows = json.loads((tmp_path / "table.json").read_text())
    assert only_row(rows, method="FedProto", metric=TEST)["seeds"] == [0]
    assert only_row(rows, method=MLP, metric=TEST)["seeds"] == [0, 7]


# A real run --------------------------------------------------------------------------------------

SMALL = ["data.name=cora-linqs", "partition.clients=4"]


def test_a_small_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = {"data": ["Cora"], "method": [KNN, FEDGLS], "table": ["table-1", "figure-3"]}
    settings: dict[str, Any] = {"only": only, "rounds": 2, "overrides": SMALL}
    with monkeypatch.context() as inline:
        inline.setattr(cells, "ProcessPoolExecutor", InlinePool)
        reproduce_fedgls.reproduce(tmp_path, seeds=[0], **settings)
    assert capsys.readouterr().out.startswith("2 runs, 0 of them there already; the others take")
    rows = json.loads((tmp_path / "table.json").read_text())
    for method in (KNN, FEDGLS):
        key = {"table": "Table 1", "data": "Cora", "method": method}
        for metric in (TEST, LAST, VALIDATION, "precision", "homophily", "true-homophily"):
            assert 0 <= only_row(rows, metric=metric, **key)["mean"] <= 1
        assert only_row(rows, metric=SECONDS, **key)["mean"] > 0
    assert (tmp_path / "figure-3-cora.png").exists()
    # The graphless clients are the same ones, so their true edges are.
    true = [r["mean"] for r in rows if r["metric"] == "true-degree"]
    assert len(true) == 2
    assert len(set(true)) == 1

    # This process, which had other runs before, gave what a fresh one gives.
    plan = Plan(("Cora",), (FEDGLS,), ("table-1",), (0,), 2, tuple(SMALL))
    (fresh,) = cells.run_jobs(plan.jobs(), tmp_path / "fresh").values()
    (kept,) = kept_runs(plan.jobs(), tmp_path / "runs").values()
    assert fresh[0].test_accuracy == kept[0].test_accuracy
    assert fresh[0].cross_entropy == pytest.approx(kept[0].cross_entropy, rel=1e-6)
    assert fresh[0].peak_bytes > 50 * 2**20


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"dat": ["Cora"]}, "dat"),
        ({"data": ["Coral"]}, "data=Coral: unknown; allowed are Cora, CiteSeer"),
        ({"method": ["x"]}, f"allowed are {MLP}, Fed-GNNMLP"),
        ({"table": ["table-4"]}, "allowed are table-1, table-2"),
        ({"table": ["table-3"], "method": ["FedProto"]}, "no table has such a row"),
    ],
)
def test_unknown_words_are_refused(
    only: dict[str, list[str]],
    said: str,
    tmp_path: Path,
    simulated: list[FedGLSConfig],
) -> None:
    with pytest.raises(ConfigError, match=said):
        reproduce_fedgls.reproduce(tmp_path / "out", only=only, seeds=[0], rounds=1)
    assert not (tmp_path / "out").exists()


def test_data_that_cannot_be_had_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[FedGLSConfig]
) -> None:
    def load(config: FedGLSConfig) -> None:
        if config.data.name != "Cora":
            raise DataError("not in /some/folder")

    monkeypatch.setattr(reproduce_fedgls, "cached_data", load)
    only = {"method": [MLP], "table": ["table-1"]}
    reproduce_fedgls.reproduce(tmp_path, only=only, seeds=[0], rounds=1)
    page = (tmp_path / "table.md").read_text()
    for data in DATA[1:]:
        assert f"- {data}: not in the data root, and it could not be downloaded" in page
    assert "/some/folder" not in page
    with pytest.raises(DataError, match="none of the data sets is there: Flickr: not in the data"):
        reproduce_fedgls.reproduce(tmp_path, only=only | {"data": ["Flickr"]}, seeds=[0], rounds=1)
