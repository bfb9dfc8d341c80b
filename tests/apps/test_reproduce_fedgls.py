"""``flower-graph reproduce fedgls``: what its table alone has, and a small real comparison."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from app_helpers import InlinePool
from table_helpers import asked_of, made_up, only_row

from flower_graph.apps.reproduce import experiments
from flower_graph.apps.reproduce.command import main
from flower_graph.apps.reproduce.experiments import kept_runs, run_stages
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.rows import make_rows, missing_runs
from flower_graph.apps.reproduce.table import read_table
from flower_graph.apps.reproduce.text import LAST, SECONDS, TEST, VALIDATION, find
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError
from flower_graph.strategies.structure_fedavg.config import METHODS as CONFIG_METHODS

MLP, KNN, FEDGLS, FIXED = "Fed-MLP", "Fed-GNN_k", "FedGLS", "FedGLS, phi fixed"
EVERYTHING = asked_of("fedgls", data=("Cora", "CiteSeer", "PubMed"))


def test_methods_are_the_configs_and_one_learner_stands_still() -> None:
    groups = {(g.data, g.method): g for g in EVERYTHING.groups("table-1")}
    by_method: dict[str, Any] = {
        method: load_config(one.experiments[0].config, one.experiments[0].overrides)
        for (data, method), one in groups.items()
        if data == "PubMed"
    }
    assert {config.strategy.name for config in by_method.values()} == {*CONFIG_METHODS}
    by_method[FIXED].graph.learning_rate = by_method[FEDGLS].graph.learning_rate
    assert by_method[FIXED] == by_method[FEDGLS]


def test_tables_2_and_3_change_one_setting_and_share_the_usual_runs() -> None:
    usual = {g.method: g.experiments for g in EVERYTHING.groups("table-1") if g.data == "PubMed"}
    for table, key, values in (
        ("table-2", "strategy.local_epochs", {"3": 3, "5": 5, "10": 10}),
        ("table-3", "graph.graphless_ratio", {"12:4": 0.25, "8:8": 0.5, "4:12": 0.75}),
    ):
        section, name = key.split(".")
        groups = [g for g in EVERYTHING.groups(table) if g.data == "PubMed"]
        assert len(groups) == 9
        for group in groups:
            (experiment,), varied = group.experiments, group.keys["varied"]
            config: Any = load_config(experiment.config, experiment.overrides)
            is_usual = varied in ("5", "8:8") or (table, group.method) == ("table-3", MLP)
            assert (experiment == usual[group.method][0]) == is_usual
            expected = 0.5 if is_usual and table == "table-3" else values[varied]
            assert getattr(getattr(config, section), name) == expected


def test_flickrs_ratios_are_of_twenty_clients() -> None:
    shares: dict[str, float] = {}
    for group in asked_of("fedgls", data=("Flickr",), methods=(FEDGLS,)).groups("table-3"):
        experiment = group.experiments[0]
        config: Any = load_config(experiment.config, experiment.overrides)
        shares[group.keys["varied"]] = config.graph.graphless_ratio
        assert config.partition.clients == sum(map(int, group.keys["varied"].split(":")))
    assert shares == {"12:8": 0.4, "10:10": 0.5, "8:12": 0.6}


def test_rows_have_the_figures_of_the_runs_and_the_paper() -> None:
    runs = made_up(EVERYTHING)
    rows = make_rows(EVERYTHING, runs)
    first = {g.method: g.experiments[0] for g in EVERYTHING.groups("table-1") if g.data == "Cora"}
    knn, ours = runs[first[KNN]], runs[first[FEDGLS]]
    key = {"table": "Table 1", "data": "Cora", "method": FEDGLS}
    best = only_row(rows, metric=TEST, **key)
    assert best["values"] == [ours[0].test_accuracy[1], ours[1].test_accuracy[1]]
    assert (best["paper"], best["seeds"], best["varied"]) == (0.8180, [0, 1], "")
    assert best["std"] == pytest.approx(stdev(best["values"]))
    last = only_row(rows, metric=LAST, **key)
    assert last["values"] == pytest.approx([v - 0.1 for v in best["values"]])
    assert only_row(rows, metric=VALIDATION, **key)["values"] == [0.4, 0.4]
    assert only_row(rows, metric=SECONDS, **key)["mean"] == 0.25
    over = only_row(rows, metric="gain-over-fed-gnn_k", **key)
    expected = [ours[s].test_accuracy[1] - knn[s].test_accuracy[1] for s in (0, 1)]
    assert over["values"] == pytest.approx(expected)
    assert over["paper"] == pytest.approx(0.8180 - 0.7891)
    assert only_row(rows, metric="gain-over-fed-gnn_k-last", **key)["values"] == pytest.approx(
        expected
    )
    assert only_row(rows, metric="precision", **key)["values"] == [
        ours[s].structure["precision"] for s in (0, 1)
    ]
    assert find(rows, metric="precision", method=MLP) is None
    # Compared under the same setting; Fed-MLP's runs are the same ones at every ratio.
    key = {"table": "Table 2", "data": "CiteSeer", "varied": "10", "method": FEDGLS}
    assert only_row(rows, metric="gain-over-fed-gnn_k", **key)["paper"] == pytest.approx(
        0.8015 - 0.7859
    )
    places = {g.place: g for g in EVERYTHING.groups("table-3") if g.method == FEDGLS}
    (group,) = (g for g in places.values() if g.keys["varied"] == "4:12")
    mine = runs[group.experiments[0]]
    theirs = runs[
        next(g for g in EVERYTHING.groups("table-1") if g.data == "PubMed").experiments[0]
    ]
    key = {"table": "Table 3", "data": "PubMed", "varied": "4:12", "method": FEDGLS}
    assert only_row(rows, metric="gain-over-fed-mlp", **key)["values"] == pytest.approx(
        [mine[s].test_accuracy[1] - theirs[s].test_accuracy[1] for s in (0, 1)]
    )
    assert only_row(rows, metric=TEST, **key)["paper"] == 0.8422


def test_runs_that_are_missing_leave_a_gap() -> None:
    runs = made_up(EVERYTHING)
    gone = {("Table 1", "Cora", FEDGLS), ("Table 2", "PubMed", KNN)}
    for g in EVERYTHING.groups():
        if (g.part.table, g.data, g.method) in gone and g.keys.get("varied") in ("", "3"):
            runs[g.experiments[0]].pop(1)
            if g.method == KNN:
                del runs[g.experiments[0]]
    missing = missing_runs(EVERYTHING, runs)
    assert missing == [
        "Table 1, Cora, FedGLS: 1 of 2 runs",
        "Figure 3, Cora, FedGLS: 1 of 2 runs",
        "Table 2, PubMed, 3, Fed-GNN_k: 0 of 2 runs",
    ]
    rows = make_rows(EVERYTHING, runs)
    key = {"table": "Table 2", "data": "PubMed", "varied": "3"}
    assert find(rows, metric="gain-over-fed-gnn_k", **key) is None
    assert find(rows, metric="gain-over-fed-mlp", **key) is not None
    page = make_page(EVERYTHING, runs, rows, missing)
    (line,) = (text for text in page.splitlines() if text.startswith("| PubMed | 3 |"))
    assert line.split(" | ")[4:6] == ["–", "–"]
    assert line.endswith("| 2, 0, 2 |")
    for part in (
        *("## Table 1, Cora", "## Table 2: local epochs", "## Table 3: graph:graphless"),
        *("Every method has the settings of its data set", "| 0.8180 |"),
        "- Cora, Fed-GNN_k: `graph.neighbours=5`",
    ):
        assert part in page
    other = make_page(asked_of("fedgls", data=("PubMed",)), {}, [])
    assert "as far as it uses them.\n" in other


def test_the_papers_tables_are_complete() -> None:
    table = read_table("fedgls")
    (first,) = table.tables["table-1"]
    assert {*first.paper} == {*table.data}
    for figures in first.paper.values():
        assert {*figures} == {*table.methods} - {FIXED}
    # Tables 2 and 3 repeat Table 1 where they vary nothing.
    for name, data, varied in (
        *(("table-2", "CiteSeer", "5"), ("table-2", "PubMed", "5"), ("table-3", "PubMed", "8:8")),
        ("table-3", "Flickr", "10:10"),
    ):
        part = table.tables[name][0]
        for method, figure in part.paper[data][varied].items():
            assert figure == first.paper[data][method]


def test_a_row_that_no_table_has_is_refused(tmp_path: Path) -> None:
    only = {"table": ["table-3"], "method": ["FedProto"], "data": ["Cora"]}
    small = ["data.name=cora-linqs"]
    with pytest.raises(ConfigError, match="no table has such a row"):
        main("fedgls", tmp_path / "out", only=only, seeds=[0], rounds=1, overrides=small)
    assert not (tmp_path / "out").exists()


# A real run --------------------------------------------------------------------------------------

SMALL = ("data.name=cora-linqs", "partition.clients=4")


@pytest.mark.slow
def test_a_small_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = {"data": ["Cora"], "method": [KNN, FEDGLS], "table": ["table-1", "figure-3"]}
    with monkeypatch.context() as inline:
        inline.setattr(experiments, "ProcessPoolExecutor", InlinePool)
        main("fedgls", tmp_path, only=only, seeds=[0], rounds=2, overrides=SMALL)
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
    asked = asked_of(
        *("fedgls",),
        **{"data": ("Cora",), "methods": (FEDGLS,), "tables": ("table-1",), "seeds": (0,)},
        **{"rounds": 2, "overrides": SMALL},
    )
    run_stages(asked.stages(), tmp_path / "fresh", lambda: None, fresh=True)
    (fresh,) = kept_runs(asked.runs(), tmp_path / "fresh").values()
    (kept,) = kept_runs(asked.runs(), tmp_path / "runs").values()
    assert fresh[0].test_accuracy == kept[0].test_accuracy
    assert fresh[0].cross_entropy == pytest.approx(kept[0].cross_entropy, rel=1e-6)
    assert fresh[0].peak_bytes > 50 * 2**20
