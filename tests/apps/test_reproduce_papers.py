"""What one paper's tables alone have, and small real comparisons."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from app_helpers import InlinePool
from table_helpers import asked_of, made_up, only_row, report

from flower_graph.apps.reproduce import experiments, rows
from flower_graph.apps.reproduce.asked import Asked, Group
from flower_graph.apps.reproduce.command import draw, main
from flower_graph.apps.reproduce.experiments import (
    Runs,
    kept_runs,
    run_stages,
)
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.rows import (
    LAST,
    TEST,
    VALIDATION,
    find,
    make_rows,
    measured_rows,
    runs_of,
)
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.strategies.masked_embedding_averaging import tables as fedscem_tables


def group_of(asked: Asked, table: str, method: str, **keys: Any) -> Group:
    """Find a row's group on the first data set that has it."""
    return next(
        g for g in asked.groups(table) if g.method == method and keys.items() <= g.keys.items()
    )


def config_of(group: Group) -> Any:
    return load_config(group.experiments[0].config, group.experiments[0].overrides)


# nFedGNN -----------------------------------------------------------------------------------------


def test_validation_chooses_lambda() -> None:
    asked = asked_of("nfedgnn", data=("Cora",), models=("GCN",), rounds=None)
    runs = made_up(asked)
    group = group_of(asked, "comparison", "nFedGNN")
    assert (len(group.experiments), group.choosers) == (4, (3, 4))
    for seed in group.choosers:
        runs[group.tried[3]][seed].val_accuracy[0] = 0.5
    made = make_rows(asked, runs)
    best = only_row(made, table="Figure 4", method="nFedGNN", metric=TEST)
    assert best["settings"]["overrides"] == ["strategy.reg_weight=10", "patience=50"]
    assert best["paper"] == 0.719
    assert len([r for r in made if (r["table"], r["metric"]) == ("Figure 5", VALIDATION)]) == 10
    # The paper's bytes are those of 200 rounds.
    for rounds, paper in ((None, 34.06), (3, None)):
        less = asked_of("nfedgnn", data=("Cora",), models=("GCN",), rounds=rounds)
        made = make_rows(less, made_up(less))
        assert only_row(made, table="Table 1", method="nFedGNN")["paper"] == paper
    assert "| Cora | nFedGNN, best in the last round with seed " in make_page(
        asked, runs, make_rows(asked, runs)
    )
    assert group.keys == {}


# FedSCem -----------------------------------------------------------------------------------------

FEDSCEM, MASKED, OWN = "FedSCem", "FedSCem, masked", "FedSCem, paper's mu, tau, head"


def test_only_the_masked_row_has_masks_and_blinded_identities(tmp_path: Path) -> None:
    asked = asked_of("fedscem", data=("PubMed",))
    for group in [*asked.groups("table-3"), *asked_of("fedscem").groups("masks")]:
        how = config_of(group).strategy
        if how.name == "masked-embedding-averaging" and not group.experiments[0].centralised:
            kind = ("psi", "masked") if group.method == MASKED else ("plain", "plain")
            assert (how.alignment, how.aggregation) == kind
    own = config_of(group_of(asked_of("fedscem", data=("Cora",)), "table-3", OWN))
    assert (own.strategy.mu, own.strategy.tau, own.model.projection) == (5, 10, 32)
    # It is run where FedSCem is, and not asked for by its name.
    with pytest.raises(ConfigError, match=f"method={MASKED}"):
        main("fedscem", tmp_path, only={"method": [MASKED]}, seeds=None, rounds=None)
    less = asked_of("fedscem", methods=("FedAvg",))
    assert {run.experiment.method for run in less.runs()} == {"FedAvg"}


def test_gains_are_over_self_training_under_the_same_split() -> None:
    asked = asked_of("fedscem", data=("Cora",))
    runs = made_up(asked)
    made = make_rows(asked, runs)
    for table, name in (("table-3", "Table 3"), ("strict", "Table 3, strict split")):
        ours, alone = (
            runs_of(group_of(asked, table, method), runs) for method in (FEDSCEM, "Self-training")
        )
        gain = only_row(made, table=name, method=FEDSCEM, metric="gain-over-self-training")
        expected = [ours[s].test_at_best_val - alone[s].test_at_best_val for s in (0, 1)]
        assert gain["values"] == pytest.approx(expected)
        assert gain["paper"] == pytest.approx(0.0282)
    page = make_page(asked, runs, made)
    assert "0.8288 ± 0.0021" in page and "| Cora | Local, 3 rounds |" in page
    assert "test accuracies differ in no round by more than" in page
    assert len([r for r in made if r["table"] == "Figure 6a"]) == 3 * 4 * 5


def test_costs_are_measured_in_the_place_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [({"group": 1, "clients": 5}, {"nodes": 20.0, "peak-mib": 2.0})]
    monkeypatch.setattr(fedscem_tables, "costs", lambda config: figures)
    monkeypatch.setattr(rows, "ProcessPoolExecutor", InlinePool)
    asked = asked_of("fedscem", data=("Cora",), tables=("figure-8",))
    assert asked.runs() == []
    made = measured_rows(asked)
    assert only_row(made, metric="nodes") | {"clients": 5, "group": 1} == made[0]
    assert "| Cora | 5 | 20.0 | – | – | 2.00 |" in make_page(asked, {}, made)


def test_a_measured_row_stands_beside_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(experiments, "simulate_whole", lambda config: ([report(1, 0.5, 0.5)], {}))
    asked = asked_of("fedscem", data=("Cora",), methods=(FEDSCEM,), tables=("costs",))
    seconds, memory = measured_rows(asked)
    assert (seconds["mean"], seconds["paper"]) == (report(1, 0.5, 0.5).seconds, 3.795)
    assert memory["mean"] > 50 and memory["paper-gpu-memory-percent"] == 13.21
    # Another table may have run the same; its run is no row here
    asked = asked_of("fedscem", data=("Cora",), methods=(FEDSCEM,), tables=("masks", "costs"))
    made = make_rows(asked, made_up(asked))
    assert {row["table"] for row in made} == {"Masks"}


# FedGLS ------------------------------------------------------------------------------------------

MLP, KNN, FEDGLS = "Fed-MLP", "Fed-GNN_k", "FedGLS"


def test_gains_are_seed_by_seed_at_the_same_place() -> None:
    asked = asked_of("fedgls", data=("PubMed",))
    runs = made_up(asked)
    made = make_rows(asked, runs)
    ours, theirs = (
        runs[group_of(asked, "table-3", method, varied="4:12").experiments[0]]
        for method in (FEDGLS, MLP)
    )
    key = {"table": "Table 3", "data": "PubMed", "varied": "4:12", "method": FEDGLS}
    assert only_row(made, metric="gain-over-fed-mlp", **key)["values"] == pytest.approx(
        [ours[s].test_at_best_val - theirs[s].test_at_best_val for s in (0, 1)]
    )
    assert only_row(made, metric=TEST, **key)["paper"] == 0.8422
    gain = only_row(made, metric="gain-over-fed-gnn_k", **key)
    assert gain["paper"] == pytest.approx(0.8422 - 0.8351)
    assert find(made, metric="precision", method=MLP) is None
    del runs[group_of(asked, "table-2", KNN, varied="3").experiments[0]]
    made = make_rows(asked, runs)
    (line,) = (t for t in make_page(asked, runs, made).splitlines() if t.startswith("| PubMed | 3"))
    assert line.split(" | ")[4:6] == ["–", "–"] and line.endswith("| 2, 0, 2 |")


# PPFL-GNN ----------------------------------------------------------------------------------------


def with_costs(runs: Runs) -> Runs:
    """Have every client take 20 steps a round and send a MiB in the last."""
    for curves in (curves for by_seed in runs.values() for curves in by_seed.values()):
        curves.steps, curves.up = [20.0, 40.0, 60.0], [0.0, 0.0, 2.0**20]
    return runs


def test_fed_less_loc_is_of_the_best_rounds_of_what_validation_chose() -> None:
    asked = asked_of("ppfl", data=("Cora",))
    runs = with_costs(made_up(asked))
    group = group_of(asked, "table-1", "FED")
    for curves in runs[group.tried[1]].values():
        curves.val_accuracy[1] = 0.9
    made = make_rows(asked, runs)
    alone = runs[group_of(asked, "table-1", "LOC").experiments[0]]
    gain = only_row(made, table="Table 1", metric="fed-less-loc")
    fed = runs[group.experiments[1]]
    expected = [fed[s].test_at_best_val - alone[s].test_at_best_val for s in (0, 1)]
    assert gain["values"] == pytest.approx(expected) and gain["p"] is not None
    assert gain["paper"] == pytest.approx(fmean((81.4, 78.7, 77.9, 78.0)) / 100 - 0.76825)
    assert gain["settings"]["overrides"][:2] == ["deepwalk.learning_rate=0.1", "deepwalk.decay=0.6"]
    whole = only_row(made, table="Table 1", metric=TEST, method="full graph")
    assert (whole["paper"], whole["seeds"]) == (0.82, [0, 1])
    cost = [r for r in made if (r["table"], r["metric"]) == ("Table 2", "test-accuracy-within")]
    assert {(r["method"], r["within"]) for r in cost if r["data"] == "Cora"} == {
        *product(("LOC", "FED"), ("2 rounds", "10 rounds", "100 steps", "0.2 MiB", "the end"))
    }
    key = {"table": "Table 3", "metric": "fed-less-loc", "model": "GAT"}
    assert only_row(made, public="degree", share=30, **key)["paper"] == 0.021
    assert only_row(made, public="cover", share=5, **key)["paper"] is None
    page = make_page(asked, runs, made)
    # Nobody has stopped improving after three rounds
    line = next(one for one in page.splitlines() if one.startswith("| FED, 3 rounds |"))
    assert " | 79.0 | " in line and line.endswith(" | 0.1 | 0.6 | 3 | 60 | 1.00 | 2 |")
    assert "| FED − LOC | " in page and " of 2) | +2.2 |" in page
    assert "| public | LOC | paper | FED | paper | FED − LOC |" in page
    assert "## Table 2, Cora, 15 % noise: GAT" in page
    assert "## What accuracy costs: Table 2, Cora, 15 % noise" in page


def test_the_papers_figures_are_both_classifiers_after_the_last_round() -> None:
    asked = asked_of("ppfl", data=("Cora",), tables=("table-1",))
    runs = with_costs(made_up(asked))
    fed, alone = (
        runs[group_of(asked, "table-1", method).experiments[0]] for method in ("FED", "LOC")
    )
    for by_seed, accuracy in ((fed, [0.8, 0.7, 0.9, 0.6]), (alone, [0.7, 0.6, 0.8, 0.7])):
        for seed in (0, 1):
            by_seed[seed].judged["mlp"]["test"] = [one - seed / 10 for one in accuracy]
    fed[1].judged["mlp"]["test"][0] += 0.02
    made = make_rows(asked, runs)
    mlp: dict[str, Any] = {"table": "Table 1", "classifier": "mlp"}
    total = only_row(made, metric="sum-of-fed-less-loc", **mlp)
    assert total["values"] == pytest.approx([0.2, 0.22]) and total["paper"] == 0.0441
    mean = only_row(made, metric="micro-f1", method="FED", **mlp)
    assert mean["values"] == pytest.approx([0.75, 0.655])
    assert mean["paper"] == pytest.approx(fmean((80.1, 76.0, 76.1, 76.6)) / 100)
    third = only_row(made, metric="micro-f1-client", method="LOC", client=3, **mlp)
    assert (third["values"], third["paper"]) == (pytest.approx([0.8, 0.7]), pytest.approx(0.743))
    whole = only_row(made, metric="micro-f1", method="full graph", **mlp)
    assert (whole["paper"], len(whole["values"])) == (0.799, 2)
    svc = only_row(made, **{**mlp, "classifier": "svc"}, metric="sum-of-fed-less-loc")
    assert svc["paper"] == pytest.approx(0.0872)
    page = make_page(asked, runs, made)
    line = (
        "| Cora (MLP) | ours | 65.0 | 76.0 | 55.0 | 65.0 | 75.0 | 85.0 | 65.0 | 55.0 | 65.0 ± 7.1 "
    )
    assert line in page and "| +21.0 ± 1.4 (p 0.03, Holm 0." in page
    assert "|  | paper | 79.1 | 80.1 | 76.0 | 76.0 | 74.3 | 76.1 | 75.0 | 76.6 | 76.1 |" in page
    assert "| Table 1, Cora (MLP) | +21.0 ± 1.4 | +4.4 | yes | 2 of 2 |" in page
    fed[0].judged["mlp"]["test"].pop()  # a client that did not answer
    made = make_rows(asked, runs)
    assert only_row(made, metric="sum-of-fed-less-loc", **mlp)["seeds"] == [1]


def test_figures_3_to_6_are_of_the_runs_of_tables_1_and_2(tmp_path: Path) -> None:
    asked = asked_of("ppfl", data=("Cora",), seeds=(0,))
    without = asked_of("ppfl", data=("Cora",), seeds=(0,), tables=("table-1", "table-2", "table-3"))
    assert asked.runs() == without.runs()
    runs = made_up(asked)
    group = group_of(asked, "figures", "FED")
    ended = runs[group.experiments[0]][0]
    ended.alignment["precision-1"].pop()  # a run that ended stays where it was
    steps = [
        (r["iteration"], r["mean"])
        for r in make_rows(asked, runs)
        if (r["table"], r["metric"]) == ("Figure 3", "precision-1")
    ]
    assert steps == [(1, 0.25), (2, 0.5), (3, 0.5)]
    page = make_page(asked, runs, make_rows(asked, runs))
    assert "| Figure 3: Cora, DeepWalk | 0.250 → 0.500 → 0.500 |" in page
    # Another model may run longer: each row has its own last iteration
    made = make_rows(asked, runs)
    for r in made:
        if r["model"] == "GAT" and r.get("iteration") == 3:
            r["iteration"] = 5
    assert "| Figure 3: Cora, DeepWalk | 0.250 → 0.500 → 0.500 | 0." in make_page(asked, runs, made)
    assert draw(tmp_path, asked, with_costs(runs), []) == [
        *("axes-deepwalk-cora.png", "axes-gat-cora.png", "figures-3-to-6.png"),
    ]


# Real runs ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "fedgls": {
        "only": {"method": [KNN, FEDGLS], "table": ["table-1"]},
        "overrides": ["data.name=cora-linqs", "partition.clients=4"],
    },
    "fedscem": {
        "only": {
            "method": ["Self-training", FEDSCEM, "Global"],
            "table": ["table-1", "table-3", "strict", "masks", "figure-8"],
        },
        "overrides": ["data.name=cora-linqs", "partition.clients=8"],
    },
    "ppfl": {
        "only": {"model": ["DeepWalk"], "table": ["table-1", "figures"]},
        # Few nodes to evaluate: the MLPs would take most of the time.
        "overrides": [
            *("data.name=cora-linqs", "deepwalk.walks=1", "deepwalk.length=10", "gat.epochs=2"),
            *("judge.folds=2", "partition.ratios=[0.8,0.1,0.1]"),
        ],
    },
}


def small_comparison(name: str, out: Path, **only: list[str]) -> list[dict[str, Any]]:
    how = SMALL[name]
    words = {"data": ["Cora"], **how["only"], **only}
    main(name, out, only=words, seeds=[0], rounds=2, overrides=how["overrides"])
    made: list[dict[str, Any]] = json.loads((out / "table.json").read_text())
    return made


def test_one_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "ProcessPoolExecutor", InlinePool)
    made = small_comparison("fedgls", tmp_path, method=[FEDGLS])
    for metric in (TEST, LAST, VALIDATION, "precision", "homophily", "true-homophily"):
        assert 0 <= only_row(made, metric=metric, table="Table 1")["mean"] <= 1
    assert (tmp_path / "figure-3-cora.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("fedscem", marks=pytest.mark.release), "fedgls", "ppfl"]
)
def test_a_small_comparison(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = small_comparison(name, tmp_path)
    for r in made:
        if r["metric"] in (TEST, LAST, "micro-f1", "precision-1"):
            assert 0 <= r["mean"] <= 1
        if r["metric"] in ("seconds-per-round", "peak-mib"):
            assert r["mean"] > 0
    assert "Not run" not in (tmp_path / "table.md").read_text()
    if name == "fedscem":
        assert len([r for r in made if r["table"] == "Figure 8"]) == 8 * 4
        key: dict[str, Any] = {"table": "Masks", "metric": LAST}
        masked, plain = (only_row(made, method=m, **key)["mean"] for m in (MASKED, FEDSCEM))
        assert masked == pytest.approx(plain, abs=0.02)  # masks change nothing but the rounding
        assert 0 <= only_row(made, table="Table 1", method="Global")["mean"] <= 1
    if name == "ppfl":
        key = {"method": "FED", "model": "DeepWalk"}
        last = only_row(made, metric="micro-f1", table="Figure 3", iteration=2, **key)
        whole = only_row(made, metric=LAST, table="Table 1", **key)
        assert last["mean"] == pytest.approx(whole["mean"])
    if name == "fedgls":
        # The graphless clients are the same ones, so their true edges are.
        assert len({r["mean"] for r in made if r["metric"] == "true-degree"}) == 1
        # This process gives what another one gives.
        what: dict[str, Any] = {"data": ("Cora",), "methods": (FEDGLS,), "tables": ("table-1",)}
        how = {"seeds": (0,), "rounds": 2, "overrides": tuple(SMALL[name]["overrides"])}
        asked = asked_of("fedgls", **what, **how)
        kept = kept_runs(asked.runs(), tmp_path / "runs")
        (run,) = [
            run
            for run in asked.runs()
            if run.seed in kept.get(run.experiment, {}) and run.seed == 0
        ]  # the others were tried on other seeds
        run_stages([[run]], tmp_path / "other", lambda: None)
        other = kept_runs([run], tmp_path / "other")[run.experiment][0]
        assert other.test_accuracy == kept[run.experiment][0].test_accuracy

    # What is there is not run again.
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    small_comparison(name, tmp_path)
    said = capsys.readouterr().out.split()
    assert said[0] == said[2]  # of the runs, so many are there already
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == before
