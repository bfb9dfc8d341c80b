"""A page about runs stands alone; trackers are shown every round; neither shows a secret."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from run_folders import SMALL

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.config import common, rules
from flower_graph.errors import ConfigError
from flower_graph.method.load import as_overrides
from flower_graph.method.page import page
from flower_graph.report import trackers
from flower_graph.report.trackers import Tracker

WORDS = ["run", "fedgta/cora-linqs", *as_overrides(SMALL), "checkpoint_every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    metrics = {**SMALL, "metrics": ["accuracy", "macro-f1"]}
    fg.run("fedgta/cora-linqs", metrics, seed=(0, 1), out=folder / "several <i>", quiet=True)
    fedgls = {k: v for k, v in SMALL.items() if k != "model.hidden"} | {"graph.neighbours": 3}
    fg.run("fedgls/cora-linqs", fedgls, out=folder / "one", quiet=True)
    return folder


def test_a_page_stands_alone_and_has_all_that_is_known(folder: Path) -> None:
    text = page(folder / "several <i>")
    elements = [*ElementTree.fromstring(text).iter()]  # which all end
    names = {one.tag.rpartition("}")[2] for one in elements}
    assert {"svg", "table"} <= names and names.isdisjoint({"script", "link", "iframe", "img", "i"})
    given = [(key.rpartition("}")[2], value) for one in elements for key, value in one.items()]
    assert all(v.startswith(("#", "data:image/png")) for k, v in given if k in ("src", "href"))
    assert str(folder) not in text and "several &lt;i&gt;" in text
    summary = json.loads((folder / "several <i>" / "summary.json").read_text())
    reached = summary["test-accuracy-at-best-val"]
    assert f"{reached['mean']:.3f} ± {reached['std']:.3f}" in text
    found = " ".join(re.findall(r"<figcaption>([\w-]+)", text))
    assert found == "Loss Accuracy Macro-f1 Payload Clients Who Test Nodes Share"
    assert re.search(r"<figcaption>Payload so far \((B|[KMG]iB)\)<", text)
    assert "Comparison" not in text and "<td>model.hidden</td><td>4</td>" in text


def test_several_runs_are_compared_first(folder: Path) -> None:
    text = page(folder)
    links, places = re.findall('<a href="#(.*?)"', text), re.findall('<h2 id="(.*?)"', text)
    assert len(places) == 2 and links == places
    assert text.index("<h2>Comparison</h2>") < text.index(f'<h2 id="{places[0]}"')
    assert "no seed is judged on the same nodes" in text  # of FedGLS and nFedGNN
    assert "Structure, 0 to 1" in text
    table = text[text.index("<table") : text.index("</table>")]
    assert table.index("test-accuracy") < table.index("strategy.name")


def test_the_command_writes_one_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(folder / "one"), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>") and len([*out.parent.iterdir()]) == 1
    assert main(["report", str(folder / "one"), "--out", str(tmp_path / "page.pdf")]) == 2
    assert main(["report", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


# Trackers -----------------------------------------------------------------------------------------


class Fake(Tracker):
    """Notes what a tracker is shown; ``fails`` says where all of them fail."""

    fails = ""
    started: list[Fake]

    def start(self) -> None:
        Fake.started.append(self)
        self.known_as = self.identity
        if Fake.fails == "start":
            raise RuntimeError("no server at http://me:word@host")
        self.identity = self.identity or f"of-{self.group}"
        self.rounds: list[tuple[int, Mapping[str, float]]] = []
        self.final: Any = "not told"

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        if Fake.fails == "log":
            raise RuntimeError("gone")
        if Fake.fails == f"stop in {server_round}":
            raise KeyboardInterrupt
        self.rounds.append((server_round, figures))

    def finish(self, final: Mapping[str, float] | None) -> None:
        self.final = final


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Fake]:
    monkeypatch.setattr(Fake, "started", [], raising=False)
    for name in common.TRACKERS:
        monkeypatch.setitem(trackers.TRACKERS, name, Fake)
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    return Fake.started


def test_every_round_and_the_end_are_shown_and_seeds_are_a_group(fakes: list[Fake]) -> None:
    run = fg.run("fedgta/cora-linqs", SMALL, seed=(0, 1), out="both", track=["mlflow"])
    assert [one.group for one in fakes] == ["both", "both"]
    assert [one.name for one in fakes] == ["both/seed-0", "both/seed-1"]
    first = fakes[0]
    assert first.beside == Path.cwd()
    assert [number for number, _ in first.rounds] == [1, 2]
    assert first.rounds[1][1]["loss"] == run.seeds[0].metrics[1]["loss"]
    assert first.final["final/best-round"] == run.seeds[0].result["best-round"]
    assert run.config.track == ["mlflow"]


def test_a_resumed_run_goes_on_in_the_same_record(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Fake, "fails", "stop in 2")
        assert main([*WORDS, "track=[wandb]", "--out", "run"]) == 130
    assert fakes[0].final is None
    assert main(["run", "--resume", "run"]) == 0
    again = fakes[1]
    assert (again.known_as, again.first_round) == (fakes[0].identity, 2)
    assert [number for number, _ in again.rounds] == [2] and again.final is not None


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("fails", ["start", "log"])
def test_a_tracker_that_fails_is_a_warning(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Fake, "fails", fails)
    run = fg.run("fedgta/cora-linqs", SMALL, track=["tensorboard", "mlflow"])
    assert len(run.metrics) == 2
    told = [one.getMessage() for one in caplog.records if one.name == trackers.__name__]
    assert len(told) == 2 and "tensorboard" in told[0] and "mlflow" in told[1]
    assert "word" not in "".join(told)


def test_no_place_of_keys_and_files_is_shown(tmp_path: Path) -> None:
    data = {"name": str(tmp_path / "clients"), "root": "/secret"}
    strategy = {"registry": "/secret/registry.json", "name": "fedgls"}
    shown = trackers.visible({"seed": 1, "data": data, "strategy": strategy})
    assert shown == {"seed": 1, "data.name": "clients", "strategy.name": "fedgls"}


def test_a_missing_library_is_refused_before_the_run_and_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flower-graph\[wandb\]") as error:
        fg.run("fedgta/cora-linqs", SMALL, track=["wandb"], out=tmp_path / "out")
    assert error.value.key == "track" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", common.TRACKERS)
def test_a_real_tracker_has_all_rounds_of_a_resumed_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main([*WORDS, f"track=[{name}]", "--out", "run", "--quiet"]) == 0
    assert main(["run", "run/config.yaml", "--resume", "run", "rounds=3", "--quiet"]) == 0
    if name == "tensorboard":
        reader = import_module("tensorboard.backend.event_processing.event_accumulator")
        events = reader.EventAccumulator("run/tensorboard")
        events.Reload()
        assert [event.step for event in events.Scalars("val-accuracy")] == [1, 2, 3]
        assert events.Scalars("final/best-round")
    elif name == "mlflow":
        client = library.MlflowClient((tmp_path / "mlruns").as_uri())
        experiment = client.get_experiment_by_name(trackers.PROJECT)
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "val-accuracy")
        assert [entry.step for entry in history] == [1, 2, 3]
        assert run.info.status == "FINISHED" and run.data.params["model.hidden"] == "4"
        assert run.data.tags["group"] == "run"
        assert str(tmp_path) not in str(run.to_dictionary()["data"])
    else:
        first, second = Path("run").glob("wandb/offline-run-*")
        assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
        about = "files/wandb-metadata.json"  # command, machine
        assert not (first / about).exists() and not (second / about).exists()
