"""Metrics of every method are scikit-learn's of the predictions that all clients leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from federation import ALL, Setup, at, tried
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score

import flower_graph as fg
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport

FAST = ("nfedgnn", "fedscem", "fedgls", "fedpub")


def asked(setup: Setup) -> str:
    more = "" if setup.config.startswith("ppfl") else ",auc"
    return f"metrics=[macro-f1,accuracy,balanced-accuracy{more}]"


@pytest.mark.parametrize("name", tried(ALL, fast=FAST))
def test_metrics_are_those_of_all_predictions_together(name: str, tmp_path: Path) -> None:
    setup = ALL[name]
    done = setup.run(tmp_path / "run", "rounds=3", asked(setup), state_dir=None)
    kept, report = fg.load_run(done.out).predictions(), done.reports[-1]
    compared = []
    scores = report.scores
    for role in ("val", "test"):
        local = kept.of_role(role)
        if not len(local.label):
            continue
        pair = local.label, local.predicted
        assert scores["macro-f1"][role] == pytest.approx(f1_score(*pair, average="macro"))
        balanced = balanced_accuracy_score(*pair)
        assert scores["balanced-accuracy"][role] == pytest.approx(balanced)
        if role == "test":
            classes = range(len(report.confusion))
            assert report.confusion == confusion_matrix(*pair, labels=[*classes]).tolist()
        compared.append(role)
    assert "test" in compared
    assert done.result["best-round"] == best(done.reports).round
    assert done.result["test-macro-f1-at-best-val"] == best(done.reports).scores["macro-f1"]["test"]
    if "auc" in report.scores:
        assert all(0 <= one["auc"]["test"] <= 1 for one in (each.scores for each in done.reports))


def best(reports: list[RoundReport]) -> RoundReport:
    measured = [one for one in reports if one.scores["macro-f1"]["val"] >= 0]  # not if it is NaN
    return max(measured, key=lambda report: report.scores["macro-f1"]["val"])


@pytest.mark.parametrize("name", tried(["fedpub", "fedgls"], fast=["fedpub"]))
def test_metrics_go_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    setup, out = ALL[name], tmp_path / "run"
    words = ("rounds=3", asked(setup))
    whole = setup.run(tmp_path / "whole", *words)
    setup.run(out, *words, "checkpoint_every=1", stop_at=2)
    again = setup.run(out, *words, "checkpoint_every=1", resume=True)
    assert [one.scores for one in again.reports] == [one.scores for one in whole.reports]


@pytest.mark.parametrize("name", tried(ALL, fast=["fedpub"]))
def test_nothing_is_counted_unless_it_is_asked_for(name: str, tmp_path: Path) -> None:
    done = ALL[name].run(tmp_path / "run", "rounds=1")
    assert "scores" not in (done.out / "metrics.jsonl").read_text(encoding="utf-8")
    for pair in done.grid.exchanged:
        for message in pair:
            keys = {k for record in message.content.values() for k in record}
            assert not keys & {"counting", "counts"}


def test_a_reply_without_counts_is_left_out_and_named(tmp_path: Path) -> None:
    setup = ALL["fedgls"]
    drop = at(lambda content: content["config"].pop("counts"), rounds=[1], kind="evaluate")
    done = setup.run(tmp_path / "run", "rounds=2", asked(setup), faults=drop)
    first, second = done.reports
    assert "counts" in str(first.rejected) and not second.rejected
    assert sum(map(sum, first.confusion)) < sum(map(sum, second.confusion))


def test_impossible_metrics_are_refused() -> None:
    private = ["metrics=[macro-f1]", "privacy.epsilon=8"]
    for words in (["metrics=[]"], ["metrics=[accuracy,accuracy]"], ["metrics=[f1]"], private):
        with pytest.raises(ConfigError, match=words[-1].partition("=")[0]):
            load_config("fedpub/cora", words)
    load_config("nfedgnn/cora", private)  # the server measures
    with pytest.raises(ConfigError, match="auc"):  # a judge has no probabilities
        load_config("ppfl/cora-gat", ["metrics=[auc]"])
