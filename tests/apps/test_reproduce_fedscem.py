"""``flower-graph reproduce fedscem``: pages from made-up runs, and a small real comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from flower_graph.apps.reproduce import fedscem as reproduce_fedscem
from flower_graph.apps.reproduce.curves import Curves
from flower_graph.apps.reproduce.experiments import Job, Runs, missing_jobs
from flower_graph.apps.reproduce.fedscem_cells import (
    DATA,
    FEDSCEM,
    GLOBAL,
    LONG_FEDAVG,
    MASKED,
    METHODS,
    MU,
    PAPER,
    PAPERS_OWN,
    SELF,
    STRICT,
    STRICT_METHODS,
    TABLES,
    TAU,
    Plan,
    estimate,
    paper_of,
)
from flower_graph.apps.reproduce.fedscem_page import make_page
from flower_graph.apps.reproduce.fedscem_rows import GAIN, LAST_GAIN, MEMORY, make_rows
from flower_graph.apps.reproduce.text import LAST, TEST, find
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError, DataError
from flower_graph.strategies.masked_embedding_averaging.cost import Cost

EVERYTHING = Plan(("Cora",), (*METHODS, GLOBAL), TABLES, (0, 1), 3)
COSTS = {"Cora": [Cost(5, 20.0, 30.5, 0.0004, 2.0**20), Cost(5, 90.0, 200.0, 0.001, 2.0**22)]}


def made_up(plan: Plan) -> Runs:
    """Give every run its own figures: best validation in round 2, where test is 0.5 + a little."""
    runs: Runs = {}
    for number, job in enumerate(plan.jobs()):
        test = 0.5 + number / 1000
        runs.setdefault(job.cell, {})[job.seed] = Curves(
            [2.0, 1.5, 1.0], [0.1, 0.4, 0.3], [0.2, test, test - 0.1], {}, 0.25, 9.0, 2.0**28
        )
    return runs


def rounds_for(method: str, rounds: int) -> int:
    if "mu=" in method:
        return rounds // 3
    return 4 * rounds if method == LONG_FEDAVG else rounds


def only_row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = (r for r in rows if all(r.get(k) == v for k, v in wanted.items()))
    return found


# What is run -------------------------------------------------------------------------------------


def test_every_run_once_and_of_the_right_kind() -> None:
    jobs = EVERYTHING.jobs()
    assert len(jobs) == len(set(jobs))
    usual = [j for j in jobs if "partition.split=per-client" in j.cell.overrides]
    grid = [j for j in usual if "mu=" in j.cell.method]
    assert len(grid) == 2 * len(MU) * len(TAU)
    assert len(usual) - len(grid) == 2 * len(METHODS) + 1
    strict = {j.cell.method for j in jobs if "partition.split=global" in j.cell.overrides}
    assert strict == {*STRICT_METHODS, "FedProx", GLOBAL}
    (masked,) = (j for j in jobs if j.cell.method == MASKED)
    assert masked.seed == 0


def test_only_the_masked_row_has_masks_and_blinded_identities() -> None:
    for method in (*METHODS, MASKED):
        cell = EVERYTHING.cell("Cora", method)
        how: Any = load_config(cell.config, cell.overrides).strategy
        ours = how.name == "masked-embedding-averaging"
        assert ours == ("FedSCem" in method)
        if ours:
            kind = ("psi", "masked") if method == MASKED else ("plain", "plain")
            assert (how.alignment, how.aggregation) == kind


@pytest.mark.parametrize("data", DATA)
def test_seeds_and_rounds_by_default(data: str) -> None:
    plan = Plan((data,), (*METHODS, GLOBAL), TABLES)
    jobs = plan.jobs()
    rounds = load_config(f"fedscem/{data.lower()}").rounds
    for job in jobs:
        assert job.rounds == rounds_for(job.cell.method, rounds)
    assert {j.seed for j in jobs if j.cell == plan.cell(data, SELF)} == {0, 1, 2}
    assert {j.seed for j in jobs if "mu=" in j.cell.method} == ({0} if data == "Cora" else set())


@pytest.mark.parametrize(
    ("table", "methods"),
    [
        ("table-1", {SELF, "FedAvg", "FedProx", GLOBAL}),
        ("strict", {*STRICT_METHODS}),
        ("figure-6b", {*METHODS}),
        ("figure-8", set()),
    ],
)
def test_a_table_needs_its_own_runs(table: str, methods: set[str]) -> None:
    jobs = replace(EVERYTHING, tables=(table,)).jobs()
    assert {job.cell.method for job in jobs} == methods


def test_the_estimate_grows_with_the_rounds() -> None:
    jobs = EVERYTHING.jobs()
    longer = [job._replace(rounds=1000) for job in jobs]
    assert 0 < estimate(jobs) < estimate(longer) - 900 * 0.05 * len(jobs)


def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The shipped config may have changed since; its name has not."""
    job = Job(EVERYTHING.cell("Cora", FEDSCEM), 0, 3)
    from flower_graph.apps.reproduce import experiments as cells

    path, settings = cells._path(tmp_path, job), cells.settings_of(cells._config(job))
    for stored, is_missing in (
        (settings, False),
        ({}, False),  # older versions did not say
        (settings | {"strategy.mu": -1.0}, True),
        ({k: v for k, v in settings.items() if k != "strategy.mu"}, False),
    ):
        path.write_text(json.dumps({"settings": stored, "curves": {}}))
        assert (missing_jobs([job], tmp_path) == [job]) == is_missing


# What is made of it ------------------------------------------------------------------------------


def test_rows_have_the_figures_of_the_runs_and_the_paper() -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs, COSTS)
    alone, ours = (runs[EVERYTHING.cell("Cora", m)] for m in (SELF, FEDSCEM))
    key = {"table": "Table 3", "data": "Cora", "method": FEDSCEM}
    best = only_row(rows, metric=TEST, **key)
    assert best["values"] == [ours[0].test_accuracy[1], ours[1].test_accuracy[1]]
    assert (best["paper"], best["paper-std"]) == (0.8288, 0.0021)
    assert best["std"] == pytest.approx(stdev(best["values"]))
    last = only_row(rows, metric=LAST, **key)
    assert last["values"] == pytest.approx([v - 0.1 for v in best["values"]])
    gain = only_row(rows, metric=GAIN, **key)
    expected = [ours[s].test_accuracy[1] - alone[s].test_accuracy[1] for s in (0, 1)]
    assert gain["values"] == pytest.approx(expected)
    assert gain["paper"] == pytest.approx(0.0282)
    assert only_row(rows, metric=LAST_GAIN, **key)["values"] == pytest.approx(expected)
    memory = only_row(rows, metric=MEMORY, **key)
    assert (memory["mean"], memory["paper-gpu-memory-percent"]) == (256.0, 13.21)
    assert find(rows, metric=GAIN, table="Table 3", method=SELF) is None
    # The strict rows compare with Self-training under the same split.
    strict = only_row(rows, metric=GAIN, **key | {"table": "Table 3, strict split"})
    theirs = runs[EVERYTHING.cell("Cora", SELF, STRICT)]
    ours = runs[EVERYTHING.cell("Cora", FEDSCEM, STRICT)]
    assert strict["values"] == pytest.approx(
        [ours[s].test_at_best_val - theirs[s].test_at_best_val for s in (0, 1)]
    )
    assert only_row(rows, table="Table 1", method=GLOBAL)["paper"] == 0.8399
    assert len([r for r in rows if r["table"] == "Figure 6a"]) == 2 * len(MU) * len(TAU)
    assert only_row(rows, table="Figure 8", group=2, metric="peak-mib")["mean"] == 4.0


def test_a_row_says_the_rounds_that_it_had() -> None:
    rows = make_rows(EVERYTHING, made_up(EVERYTHING), {})
    for row in rows:
        assert row["settings"]["rounds"] == rounds_for(row["method"], 3)


def test_the_papers_settings_are_those_of_its_row() -> None:
    how: Any = load_config("fedscem/pubmed", EVERYTHING.cell("PubMed", PAPERS_OWN).overrides)
    assert (how.strategy.mu, how.strategy.tau, how.model.projection) == (10, 1, 32)


def test_page_and_pictures(tmp_path: Path) -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs, COSTS)
    pictures = reproduce_fedscem.draw(tmp_path, EVERYTHING, runs, rows)
    assert sorted(pictures) == sorted(path.name for path in tmp_path.iterdir())
    assert {"figure-5a.png", "figure-5b.png", "figure-6a-cora.png", "figure-8.png"} < {*pictures}
    page = make_page(EVERYTHING, runs, rows, ["PubMed: not there"], pictures)
    for part in (
        *("## Table 3, Cora: accuracy", "## Table 3, Cora: cost", "## Table 1", "## Figure 8"),
        *("- PubMed: not there", "0.8288 ± 0.0021", "| +2.8 |", "best validation accuracy by mu"),
    ):
        assert part in page
    for line in page.splitlines():
        if line.startswith("| Fed"):
            assert line.count("|") in (7, 12)  # the columns of the two tables
    for name in pictures:
        assert f"({name})" in page
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_numbers_that_are_not_there_leave_a_gap(tmp_path: Path) -> None:
    """No peak memory is known on other systems; a method may have been left out."""
    plan = replace(EVERYTHING, methods=("FedAvg", FEDSCEM), tables=("table-3", "figure-5"))
    runs = made_up(plan)
    for curves in (c for by_seed in runs.values() for c in by_seed.values()):
        curves.peak_bytes = float("nan")
    rows = make_rows(plan, runs, {})
    assert find(rows, metric=GAIN) is None
    assert find(rows, metric=MEMORY) is None
    page = make_page(plan, runs, rows, [], reproduce_fedscem.draw(tmp_path, plan, runs, rows))
    assert "nan" not in page
    assert f"| {SELF} |" not in page


def test_the_papers_table_is_complete() -> None:
    assert {*PAPER} == {*DATA}
    own = [m for m in METHODS if m not in (PAPERS_OWN, LONG_FEDAVG)]
    assert {len(rows) for rows in PAPER.values()} == {len(own)}
    assert own == list(METHODS)[: len(own)]  # rows are found by their place
    assert paper_of("PubMed", "FedSCem-") == (0.8338, 0.0019, 5.115, 97.36)
    assert paper_of("Cora", MASKED) == paper_of("Cora", PAPERS_OWN) == paper_of("Cora", FEDSCEM)
    assert paper_of("Cora", LONG_FEDAVG) == (None,) * 4
    assert paper_of("PubMed", GLOBAL) == (None,) * 4


# A real run --------------------------------------------------------------------------------------

SMALL = ["data.name=cora-linqs", "partition.clients=8"]
ONLY = {
    "data": ["Cora"],
    "method": [SELF, FEDSCEM, GLOBAL],
    "table": ["table-1", "table-3", "strict", "figure-8"],
}


@pytest.mark.slow
def test_a_small_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"seeds": [0], "rounds": 3, "overrides": SMALL}
    reproduce_fedscem.reproduce(tmp_path, only=ONLY, **settings)
    assert capsys.readouterr().out.startswith("6 runs, 0 of them there already; the others take")
    rows = json.loads((tmp_path / "table.json").read_text())
    for method in (SELF, FEDSCEM, MASKED):
        key = {"table": "Table 3", "method": method}
        assert 0 <= only_row(rows, metric=TEST, **key)["mean"] <= 1
        assert only_row(rows, metric="seconds-per-round", **key)["mean"] > 0
        assert only_row(rows, metric=MEMORY, **key)["mean"] > 50
    assert 0 <= only_row(rows, table="Table 1", method=GLOBAL)["mean"] <= 1
    assert len([r for r in rows if r["table"] == "Figure 8"]) == 8 * 4
    # Masks change nothing but the rounding.
    masked, plain = (
        only_row(rows, table="Table 3", method=m, metric=TEST)["mean"] for m in (MASKED, FEDSCEM)
    )
    assert masked == pytest.approx(plain, abs=0.02)

    # What is there is not run again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    reproduce_fedscem.reproduce(tmp_path, only=ONLY | {"table": ["table-3"]}, **settings)
    assert "3 runs, 3 of them there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == before


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"dat": ["Cora"]}, "dat"),
        ({"data": ["Coral"]}, "data=Coral: unknown; allowed are Cora, CiteSeer"),
        ({"method": ["x"]}, f"allowed are {SELF}, FedAvg"),
        ({"table": ["table-2"]}, "allowed are table-1, table-3"),
        ({"table": ["figure-6a"], "method": ["FedAvg"]}, "no table has such a row"),
    ],
)
def test_unknown_words_are_refused(only: dict[str, list[str]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        reproduce_fedscem.reproduce(
            tmp_path / "out", only=only, seeds=[0], rounds=1, overrides=SMALL
        )
    assert not (tmp_path / "out").exists()


def test_without_data_there_is_nothing_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: Any) -> Any:
        raise DataError("not on disk")

    monkeypatch.setattr(reproduce_fedscem, "cached_data", missing)
    with pytest.raises(DataError, match="none of the data sets is there: Cora: not in the data"):
        reproduce_fedscem.reproduce(tmp_path, only={"data": ["Cora"]}, seeds=[0], rounds=1)
