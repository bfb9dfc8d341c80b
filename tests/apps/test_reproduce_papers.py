"""What one paper's tables alone have, and small real comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from app_helpers import InlinePool
from table_helpers import asked_of, made_up, only_row

from flower_graph.apps.reproduce import experiments, rows
from flower_graph.apps.reproduce.command import main
from flower_graph.apps.reproduce.experiments import kept_runs, run_stages
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.rows import LAST, TEST, VALIDATION, find, make_rows, measured_rows
from flower_graph.apps.reproduce.table import Asked, Group
from flower_graph.config.load import load_config
from flower_graph.errors import ConfigError
from flower_graph.strategies.masked_embedding_averaging import tables as fedscem_tables
from flower_graph.strategies.structure_fedavg.config import METHODS as FEDGLS_METHODS


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
    for one, by_seed in runs.items():
        if one.method == "lambda=10":
            for curves in by_seed.values():
                curves.val_accuracy[0] = 0.5
    made = make_rows(asked, runs)
    best = only_row(made, table="Figure 4", method="nFedGNN", metric=TEST)
    assert (best["settings"]["overrides"], best["paper"]) == (["strategy.reg_weight=10"], 0.719)
    assert len([r for r in made if (r["table"], r["metric"]) == ("Figure 5", VALIDATION)]) == 10
    # The paper's bytes are those of 200 rounds.
    for rounds, paper in ((None, 34.06), (3, None)):
        less = asked_of("nfedgnn", data=("Cora",), models=("GCN",), rounds=rounds)
        made = make_rows(less, made_up(less))
        assert only_row(made, table="Table 1", method="nFedGNN")["paper"] == paper
    assert "| Cora | GCN | nFedGNN |" in make_page(asked, runs, make_rows(asked, runs))
    assert group.keys == {}


# FedSCem -----------------------------------------------------------------------------------------

FEDSCEM, MASKED, OWN = "FedSCem", "FedSCem, masked", "FedSCem, paper's mu, tau, head"


def test_only_the_masked_row_has_masks_and_blinded_identities(tmp_path: Path) -> None:
    asked = asked_of("fedscem", data=("PubMed",))
    for group in asked.groups("table-3"):
        how = config_of(group).strategy
        if how.name == "masked-embedding-averaging":
            kind = ("psi", "masked") if group.method == MASKED else ("plain", "plain")
            assert (how.alignment, how.aggregation) == kind
    assert group_of(asked, "table-3", MASKED).seeds == (0,)
    own = config_of(group_of(asked, "table-3", OWN))
    assert (own.strategy.mu, own.strategy.tau, own.model.projection) == (10, 1, 32)
    # It is run where FedSCem is, and not asked for by its name.
    with pytest.raises(ConfigError, match=f"method={MASKED}: unknown"):
        main("fedscem", tmp_path, only={"method": [MASKED]}, seeds=None, rounds=None)
    less = asked_of("fedscem", methods=("FedAvg",))
    assert {run.experiment.method for run in less.runs()} == {"FedAvg"}


def test_gains_are_over_self_training_under_the_same_split() -> None:
    asked = asked_of("fedscem", data=("Cora",))
    runs = made_up(asked)
    made = make_rows(asked, runs)
    for table, name in (("table-3", "Table 3"), ("strict", "Table 3, strict split")):
        ours, alone = (
            runs[group_of(asked, table, method).experiments[0]]
            for method in (FEDSCEM, "Self-training")
        )
        gain = only_row(made, table=name, method=FEDSCEM, metric="gain-over-self-training")
        expected = [ours[s].test_at_best_val - alone[s].test_at_best_val for s in (0, 1)]
        assert gain["values"] == pytest.approx(expected)
        assert gain["paper"] == pytest.approx(0.0282)
    memory = only_row(made, table="Table 3", method=FEDSCEM, metric="peak-mib")
    assert (memory["mean"], memory["paper-gpu-memory-percent"]) == (256.0, 13.21)
    page = make_page(asked, runs, made)
    assert "0.8288 ± 0.0021" in page and "| Cora | Local |" in page
    assert "blinded alignment and masks included, for seed 0;" in page
    assert len([r for r in made if r["table"] == "Figure 6a"]) == 2 * 4 * 5
    assert not [g for g in asked_of("fedscem", data=("PubMed",)).groups("figure-6a")]
    named = asked_of("fedscem", data=("PubMed",), named=frozenset({"data", "table"}))
    assert len(named.groups("figure-6a")) == 20


def test_costs_are_measured_in_the_place_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [({"group": 1, "clients": 5}, {"nodes": 20.0, "peak-mib": 2.0})]
    monkeypatch.setattr(fedscem_tables, "costs", lambda config: figures)
    monkeypatch.setattr(rows, "ProcessPoolExecutor", InlinePool)
    asked = asked_of("fedscem", data=("Cora",), tables=("figure-8",))
    assert asked.runs() == []
    made = measured_rows(asked)
    assert only_row(made, metric="nodes") | {"clients": 5, "group": 1} == made[0]
    assert "| Cora | 5 | 20.0 | – | – | 2.00 |" in make_page(asked, {}, made)


# FedGLS ------------------------------------------------------------------------------------------

MLP, KNN, FEDGLS, FIXED = "Fed-MLP", "Fed-GNN_k", "FedGLS", "FedGLS, phi fixed"


def test_fedglss_methods_are_the_configs_and_one_learner_stands_still() -> None:
    asked = asked_of("fedgls", data=("PubMed",))
    by_method = {g.method: config_of(g) for g in asked.groups("table-1")}
    assert {config.strategy.name for config in by_method.values()} == {*FEDGLS_METHODS}
    by_method[FIXED].graph.learning_rate = by_method[FEDGLS].graph.learning_rate
    assert by_method[FIXED] == by_method[FEDGLS]


def test_tables_2_and_3_change_one_setting_and_share_the_usual_runs() -> None:
    asked = asked_of("fedgls", data=("PubMed", "Flickr"))
    usual = {g.method: g.experiments for g in asked.groups("table-1") if g.data == "PubMed"}
    for table, key, values in (
        ("table-2", "strategy.local_epochs", {"3": 3, "5": 5, "10": 10}),
        ("table-3", "graph.graphless_ratio", {"12:4": 0.25, "8:8": 0.5, "4:12": 0.75}),
    ):
        section, name = key.split(".")
        groups = [g for g in asked.groups(table) if g.data == "PubMed"]
        assert len(groups) == 9
        for group in groups:
            varied = group.keys["varied"]
            is_usual = varied in ("5", "8:8") or (table, group.method) == ("table-3", MLP)
            assert (group.experiments == usual[group.method]) == is_usual
            expected = 0.5 if is_usual and table == "table-3" else values[varied]
            assert getattr(getattr(config_of(group), section), name) == expected
    for group in asked.groups("table-3"):  # Flickr's ratios are of twenty clients
        assert config_of(group).partition.clients == sum(map(int, group.keys["varied"].split(":")))


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


def test_global_is_the_sum_of_the_clients_differences() -> None:
    asked = asked_of("ppfl", data=("Cora",))
    runs = made_up(asked)
    fed, loc = (
        runs[group_of(asked, "table-1", method).experiments[0]] for method in ("FED", "LOC")
    )
    fed[1].judged["svc"]["test"].pop()  # a run that lacks a client has no figures
    made = make_rows(asked, runs)
    key = {"table": "Table 1", "classifier": "svc", "role": "test"}
    total = only_row(made, metric="sum-of-fed-less-loc", over="LOC", **key)
    ours, theirs = (one[0].judged["svc"]["test"] for one in (fed, loc))
    assert total["values"] == [pytest.approx(sum(ours) - sum(theirs))]
    assert (total["seeds"], total["paper"]) == ([0], pytest.approx(0.0872))
    gain = only_row(made, metric="fed-less-loc", over="LOC", **key)
    assert gain["mean"] == pytest.approx(total["mean"] / 4)
    assert gain["paper"] == pytest.approx(fmean((81.4, 78.7, 77.9, 78.0)) / 100 - 0.76825)
    assert only_row(made, metric="micro-f1", method="full graph", **key)["paper"] == 0.82
    client = only_row(made, metric="micro-f1-client", method="LOC", client=2, **key)
    assert (client["values"][0], client["paper"]) == (theirs[1], 0.775)
    key["table"] = "Table 3"
    level = only_row(made, metric="fed-less-loc", model="GAT", public="degree", share=30, **key)
    assert level["paper"] == 0.021
    few = only_row(made, metric="fed-less-loc", model="GAT", public="cover", share=5, **key)
    assert few["paper"] is None
    steps = [r for r in made if (r["table"], r["metric"]) == ("Figure 5", "precision-1")]
    assert [(r["iteration"], r["mean"]) for r in steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    page = make_page(asked, runs, made)
    assert "|  | paper | 79.3 | 81.4 | 77.5 | 78.7 | 75.5 | 77.9 | 75.0 | 78.0 | 76.8 |" in page
    assert "| Figure 5: Cora, 15 % noise, GAT | 0.250 ± 0.000 → 0.500 ± 0.000 → 0.750" in page


def test_table_3_varies_choice_and_share_of_public_nodes() -> None:
    asked = asked_of("ppfl", data=("Cora",))
    for group in asked.groups("table-3"):
        config = config_of(group)
        part, keys = config.partition, group.keys
        assert (part.public, part.public_share) == (keys["public"], keys["share"] / 100)
        assert part.ratios == ([0.0, 0.0, 1.0] if group.model == "DeepWalk" else [0.6, 0.0, 0.4])
        assert (config.judge.every, config.judge.mlp) == (3, False)
    noisy = [g for g in asked.groups("table-2") if config_of(g).partition.label_noise == 0.15]
    assert [g.method for g in noisy] == ["LOC", "FED", "LOC, own settings"]


# Real runs ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "fedgls": {
        "only": {"method": [KNN, FEDGLS], "table": ["table-1", "figure-3"]},
        "overrides": ["data.name=cora-linqs", "partition.clients=4"],
    },
    "fedscem": {
        "only": {
            "method": ["Self-training", FEDSCEM, "Global"],
            "table": ["table-1", "table-3", "strict", "figure-8"],
        },
        "overrides": ["data.name=cora-linqs", "partition.clients=8"],
    },
    "ppfl": {
        "only": {"table": ["table-1", "table-2", "figures"]},
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
@pytest.mark.parametrize("name", ["fedscem", "fedgls", "ppfl"])
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
        key: dict[str, Any] = {"table": "Table 3", "metric": TEST}
        masked, plain = (only_row(made, method=m, **key)["mean"] for m in (MASKED, FEDSCEM))
        assert masked == pytest.approx(plain, abs=0.02)  # masks change nothing but the rounding
        assert 0 <= only_row(made, table="Table 1", method="Global")["mean"] <= 1
    if name == "ppfl":
        key = {"metric": "micro-f1", "method": "FED", "model": "DeepWalk", "role": "test"}
        last = only_row(made, table="Figure 3", iteration=2, **key)
        whole = only_row(made, table="Table 1", classifier="svc", **key)
        assert last["mean"] == pytest.approx(whole["mean"])
    if name == "fedgls":
        # The graphless clients are the same ones, so their true edges are.
        assert len({r["mean"] for r in made if r["metric"] == "true-degree"}) == 1
        # This process gives what fresh ones, which do one run each, give.
        what: dict[str, Any] = {"data": ("Cora",), "methods": (FEDGLS,), "tables": ("table-1",)}
        how = {"seeds": (0,), "rounds": 2, "overrides": tuple(SMALL[name]["overrides"])}
        asked = asked_of("fedgls", **what, **how)
        run_stages(asked.stages(), tmp_path / "fresh", lambda: None, fresh=True)
        (fresh,) = kept_runs(asked.runs(), tmp_path / "fresh").values()
        (kept,) = kept_runs(asked.runs(), tmp_path / "runs").values()
        assert fresh[0].test_accuracy == kept[0].test_accuracy
        assert fresh[0].peak_bytes > 50 * 2**20

    # What is there is not run again.
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    small_comparison(name, tmp_path)
    said = capsys.readouterr().out.split()
    assert said[0] == said[2]  # of the runs, so many are there already
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == before
