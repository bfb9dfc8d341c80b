"""Trackers are shown every round and nothing secret; their failures end no run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.config import common, rules
from flower_graph.errors import ConfigError
from flower_graph.report import trackers
from flower_graph.report.trackers import Subject

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "csbm", "nodes": 40, "classes": 2, "num_features": 8, "active": 3},
    "data.split": "random",
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
}


class Fake:
    """Notes what a tracker is shown; fails where it is told to."""

    def __init__(self, subject: Subject, failing: str) -> None:
        if failing == "start":
            raise RuntimeError("no server at http://me:word@host")
        self.subject, self.failing = subject, failing
        self.identity = subject.known_as or f"of-{subject.group}"
        self.rounds: list[tuple[int, Mapping[str, float]]] = []
        self.final: Any = "not told"

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        if self.failing == "log":
            raise RuntimeError("gone")
        self.rounds.append((server_round, figures))

    def finish(self, final: Mapping[str, float] | None) -> None:
        self.final = final


class Started(list[Fake]):
    """All that were started."""

    failing = ""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    started = Started()

    def start(subject: Subject) -> Fake:
        started.append(Fake(subject, started.failing))
        return started[-1]

    for name in common.TRACKERS:
        monkeypatch.setitem(trackers.TRACKERS, name, start)  # type: ignore[arg-type]
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    return started


def test_every_round_and_the_end_are_shown_and_seeds_are_a_group(fakes: Started) -> None:
    seen: list[int] = []
    run = fg.run(
        "fedgta/cora-linqs",
        SMALL,
        seed=(0, 1),
        out="both",
        track=["mlflow"],
        on_round=lambda report: seen.append(report.round),
    )
    assert seen == [1, 2, 1, 2]
    first, second = fakes
    assert (first.subject.group, second.subject.group) == ("both", "both")
    assert [one.subject.name for one in fakes] == ["both/seed-0", "both/seed-1"]
    assert first.subject.beside == Path.cwd()
    assert [number for number, _ in first.rounds] == [1, 2]
    assert first.rounds[1][1]["loss"] == run.seeds[0].metrics[1]["loss"]
    assert first.final["best-round"] == run.seeds[0].result["best-round"]
    assert run.config.track == ["mlflow"]


def test_a_resumed_run_goes_on_in_the_same_record(
    fakes: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "fedgta/cora-linqs", *fg.method.load.as_overrides(SMALL)]
    words += ["checkpoint_every=1", "track=[wandb]"]

    def stop(self: Fake, server_round: int, figures: Mapping[str, float]) -> None:
        if server_round == 2 and len(fakes) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Fake, "log", stop)
        assert main([*words, "--out", "run"]) == 130
    assert fakes[0].final is None
    assert main(["run", "--resume", "run"]) == 0
    again = fakes[1]
    assert (again.subject.known_as, again.subject.first_round) == (fakes[0].identity, 2)
    assert [number for number, _ in again.rounds] == [2] and again.final is not None


@pytest.mark.parametrize("failing", ["start", "log"])
def test_a_tracker_that_fails_is_a_warning(
    failing: str, fakes: Started, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.failing = failing
    with caplog.at_level(logging.WARNING):
        run = fg.run("fedgta/cora-linqs", SMALL, track=["tensorboard", "mlflow"])
    assert len(run.metrics) == 2
    told = [one.getMessage() for one in caplog.records if one.name == trackers.__name__]
    assert [("tensorboard" in told[0]), ("mlflow" in told[1])] == [True, True] and len(told) == 2
    assert "word" not in "".join(told)


def test_no_place_of_keys_and_files_is_shown(tmp_path: Path) -> None:
    settings = {
        "seed": 1,
        "data": {"name": str(tmp_path / "clients"), "root": "/secret"},
        "strategy": {"registry": "/secret/registry.json", "name": "fedgls"},
    }
    assert trackers.visible(settings) == {
        "seed": 1,
        "data.name": "clients",
        "strategy.name": "fedgls",
    }


def test_a_missing_library_is_refused_before_the_run_and_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flower-graph\[wandb\]") as error:
        fg.run("fedgta/cora-linqs", SMALL, track=["wandb"], out=tmp_path / "out")
    assert error.value.key == "track" and not (tmp_path / "out").exists()


def installed(name: str) -> pytest.MarkDecorator:
    why = f"{name} is missing: pip install 'flower-graph[{name}]'"
    return pytest.mark.skipif(find_spec(name) is None, reason=why)


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs to the end, then again from the round before."""
    monkeypatch.chdir(tmp_path)

    def do(name: str) -> Path:
        words = fg.method.load.as_overrides({**SMALL, "checkpoint_every": 1})
        out = fg.run("fedgta/cora-linqs", words, track=[name], seed=0, out="run", quiet=True).path
        longer = ["run", str(out / "config.yaml"), "--resume", str(out), "rounds=3", "--quiet"]
        assert main(longer) == 0
        return out

    return do


@installed("tensorboard")
def test_tensorboard(resumed: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed("tensorboard") / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val-accuracy")] == [1, 2, 3]
    assert events.Scalars("final/best-round")


@installed("mlflow")
def test_mlflow(resumed: Any) -> None:
    from mlflow import MlflowClient

    out = resumed("mlflow")
    client = MlflowClient((out.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name(trackers.PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "val-accuracy")
    assert [entry.step for entry in history] == [1, 2, 3]
    assert run.info.status == "FINISHED" and run.data.params["model.hidden"] == "4"
    assert run.data.tags["group"] == "run"
    assert str(out) not in str(run.to_dictionary()["data"])


@installed("wandb")
def test_wandb(resumed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folders = sorted(resumed("wandb").glob("wandb/offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # both are one run's
    assert not any([*f.glob("files/wandb-metadata.json")] for f in folders)  # command, machine
