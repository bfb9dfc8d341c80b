"""Settings that are tried, chosen by validation, and run once whenever a sweep is started."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import InlinePool
from own_graphs import valued
from run_folders import SMALL

import flower_graph as fg
from flower_graph.apps import parallel
from flower_graph.apps.cli import sweep as command
from flower_graph.apps.cli.main import main
from flower_graph.apps.cli.sweep import read_settings
from flower_graph.errors import ConfigError, DivergedError
from flower_graph.method.load import as_overrides, load_config, to_dict
from flower_graph.storage.files import write_text

BASE = ["fedgta/own-graph", *as_overrides(SMALL | {"rounds": 1})]
HIDDEN = [one for one in BASE if "hidden" not in one]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Have runs be in this process; the folders of those that were run."""
    folders: list[Path] = []
    whole = command.run

    def run(config: Any, out: Path, **how: Any) -> Any:
        folders.append(out)
        return whole(config, out, **how)

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.chdir(tmp_path)
    return folders


def test_of_errors_the_least_is_the_best(ran: list[Path]) -> None:
    torch.save(valued(60), "graph.pt")
    words = ["sweep", "fedavg/own-graph", "data.name=graph.pt", "task=values", "metrics=[mae]"]
    words += ["partition.clients=2", "partition.method=random", "rounds=5", "--out", "swept"]
    assert main([*words, "strategy.learning_rate=0.05,1e-9"]) == 0
    best = load_config("swept/best.yaml")
    assert best.strategy.learning_rate == 0.05  # type: ignore[attr-defined]
    assert len(ran) == 2


def test_the_best_by_validation_is_written_and_nothing_runs_twice(
    ran: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, "strategy.learning_rate=1e-9,0.1", "--seeds", "0,1"]
    assert main(["sweep", *words]) == 0
    out = Path("runs/sweep-fedgta-own-graph").absolute()
    shown = capsys.readouterr()
    assert len(ran) == 4 and "4 runs (2 settings × 2 seeds), 0 done before" in shown.err
    assert "left" in shown.err
    assert "flower-graph run runs/sweep-fedgta-own-graph/best.yaml" in shown.out
    rows = fg.compare(out, by="val").rows
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]]
    best = load_config(str(out / "best.yaml"))
    (row,) = [
        row
        for row in rows
        if row["settings"]["strategy.learning_rate"] == best.strategy.learning_rate
    ]
    assert row["figures"]["val-accuracy"]["mean"] == rows[0]["figures"]["val-accuracy"]["mean"]
    chosen = load_config(
        BASE[0], [*BASE[1:], f"strategy.learning_rate={best.strategy.learning_rate}"]
    )
    assert to_dict(best) == to_dict(chosen)
    with (out / "table.csv").open() as file:
        assert {row["run"] for row in csv.DictReader(file)} == {row["run"] for row in rows}
    assert fg.load_run(next(out.glob("*1e-9*"))).seeds[1].predictions().node.size == 60
    # Started again, and with one value more
    words[len(BASE)] += ",0.2"
    assert main(["sweep", *words]) == 0
    assert (
        len(ran) == 6 and "6 runs (3 settings × 2 seeds), 4 done before" in capsys.readouterr().err
    )
    assert main(["sweep", *words]) == 0
    assert len(ran) == 6


def test_the_choice_looks_at_validation_alone(ran: list[Path], monkeypatch: Any) -> None:
    """The test accuracy of the chosen settings is the lower one here."""
    whole = command.run

    def run(config: Any, out: Path, **how: Any) -> Any:
        result = whole(config, out, **how)
        value = 0.9 if config.model.hidden == 3 else 0.1
        result |= {"best-val-accuracy": value, "test-accuracy-at-best-val": 1 - value}
        write_text(out / "result.json", json.dumps(result))
        return result

    monkeypatch.setattr(command, "run", run)
    Path("mine.yaml").write_text("defaults: fedgta/own-graph\nmodel: {dropout: 0.25}\n")
    words = ["mine.yaml", *HIDDEN[1:], "model.hidden=2,3,4", "--out", "deep/out"]
    assert main(["sweep", *words]) == 0
    best = load_config("deep/out/best.yaml").model
    assert (best.hidden, best.dropout) == (3, 0.25)


def test_what_was_killed_or_diverged_is_no_run(
    ran: list[Path], monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = command.run

    def run(config: Any, out: Path, **how: Any) -> Any:
        assert not out.exists()
        if config.model.hidden == 2:
            raise DivergedError("no number")
        return whole(config, out, **how)

    monkeypatch.setattr(command, "run", run)
    sweep = command.Trial(HIDDEN[0], tuple(HIDDEN[1:]), Path("out").absolute(), (0,))
    cut = sweep.vary(["model.hidden=3"]).folder / "seed-0"
    cut.mkdir(parents=True)
    (cut / "metrics.jsonl").write_text("cut")
    assert main(["sweep", *HIDDEN, "model.hidden=2,3", "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert "diverged" in shown.err and "left out: hidden=2" in shown.err
    assert len(fg.load_run(cut).metrics) == 1 and not list(Path("out").glob("hidden=2*/*"))
    assert main(["sweep", *HIDDEN, "model.hidden=2", "--out", "none"]) == 2


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.hidden=4..8"], "model.hidden"),
        (["seed=1,2"], "seed"),
        (["model.hiden=1,2"], "model.hiden"),
        (["model.hidden=1,zwei"], "model.hidden"),
        (["model.hidden=8..4", "--optuna", "2"], "model.hidden"),
        (["model.hidden=8", "--optuna", "2"], "--optuna"),
    ],
)
def test_wrong_values_are_refused_before_a_run(
    words: list[str], key: str, ran: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *HIDDEN, *words]) == 2
    assert key in capsys.readouterr().err and not ran and not Path("runs").exists()


def test_values_are_separated_at_commas_outside_brackets() -> None:
    given = ["a=1,2", "b=[1,2]", "c=[1,2],[3,4]", "d='x,y',z", "e=1", "f={a: 1, b: 2}"]
    fixed, varied = read_settings(given)
    assert fixed == ["b=[1,2]", "e=1", "f={a: 1, b: 2}"]
    assert varied == {
        "a": ["a=1", "a=2"],
        "c": ["c=[1,2]", "c=[3,4]"],
        "d": ["d='x,y'", "d=z"],
    }
    with pytest.raises(ConfigError):
        read_settings(["a"])


def test_optuna_proposes_the_same_again(ran: list[Path], capsys: Any) -> None:
    pytest.importorskip("optuna")
    words = ["sweep", *HIDDEN, "model.hidden=2..6", "model.dropout=0,0.5", "--out", "out"]
    words += ["strategy.learning_rate=0.001..1", "--optuna"]
    assert main([*words, "5"]) == 0
    shown = capsys.readouterr().err
    assert "5 runs (5 settings" in shown and len(ran) == 5
    rates = {row["settings"]["strategy.learning_rate"] for row in fg.compare("out").rows}
    assert len(rates) == 5 and all(0.001 <= rate <= 1 for rate in rates)
    assert main([*words, "6"]) == 0
    assert len(ran) == 6


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its workers end with it, and only what is missing is run."""
    words = [sys.executable, "-m", "flower_graph.apps.cli.main", "sweep", *HIDDEN]
    words += ["model.hidden=2,3,4", "--seeds", "0,1", "--out", "out", "rounds=40"]

    def done() -> dict[Path, int]:
        paths = (tmp_path / "out").glob("*/seed-*/result.json")
        return {path: path.stat().st_mtime_ns for path in paths}

    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as command:
        while not done() and command.poll() is None:
            time.sleep(0.05)
        workers = subprocess.run(
            ["ps", "--ppid", str(command.pid), "-o", "pid="], capture_output=True, text=True
        ).stdout.split()
        os.kill(command.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)
    before = done()
    assert 0 < len(before) < 6
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"6 runs (3 settings × 2 seeds), {len(before)} done before" in again.stderr
    assert len(done()) == 6 and before.items() <= done().items()
