"""What one paper's tables alone have, and small real comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from app_helpers import InlinePool
from table_helpers import asked_of, made_up, only_row, report, written

from flower_graph.apps import parallel
from flower_graph.apps.reproduce import experiments
from flower_graph.apps.reproduce.asked import Asked, Group
from flower_graph.apps.reproduce.command import main
from flower_graph.apps.reproduce.experiments import (
    Store,
    kept_runs,
    run_stages,
)
from flower_graph.apps.reproduce.page import make_page
from flower_graph.apps.reproduce.rows import (
    LAST,
    TEST,
    VALIDATION,
    make_rows,
    measured_rows,
)
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.strategies.fedscem import tables as fedscem_tables


def group_of(asked: Asked, table: str, method: str, **keys: Any) -> Group:
    """Find a row's group on the first data set that has it."""
    return next(
        g for g in asked.groups(table) if g.method == method and keys.items() <= g.keys.items()
    )


def config_of(group: Group) -> Any:
    return load_config(group.experiments[0].config, group.experiments[0].overrides)


# nFedGNN -----------------------------------------------------------------------------------------


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


def test_costs_are_measured_in_the_place_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [({"group": 1, "clients": 5}, {"nodes": 20.0, "peak-mib": 2.0})]
    monkeypatch.setattr(fedscem_tables, "costs", lambda config: figures)
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    asked = asked_of("fedscem", data=("Cora",), tables=("figure-8",))
    assert asked.runs() == []
    made = measured_rows(asked)
    assert only_row(made, metric="nodes") | {"clients": 5, "group": 1} == made[0]
    assert "| Cora | 5 | 20.0 | – | – | 2.00 |" in make_page(asked, {}, made)


def test_a_measured_row_stands_beside_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
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


# PPFL-GNN ----------------------------------------------------------------------------------------


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
    return written(out)


def test_one_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
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
        kept = kept_runs(asked.runs(), Store(tmp_path))
        (run,) = [
            run
            for run in asked.runs()
            if run.seed in kept.get(run.experiment, {}) and run.seed == 0
        ]  # the others were tried on other seeds
        (tmp_path / "other").mkdir()
        store = Store(tmp_path / "other")
        run_stages([[run]], store, lambda: None)
        other = kept_runs([run], store)[run.experiment][0]
        assert other.test_accuracy == kept[run.experiment][0].test_accuracy

    # What is there is not run again.
    capsys.readouterr()
    before = written(tmp_path, "runs")
    small_comparison(name, tmp_path)
    said = capsys.readouterr().out.split()
    assert said[0] == said[2]  # of the runs, so many are there already
    assert written(tmp_path, "runs") == before
