"""Names of data, classes and nodes are text: in tables, in pictures and on a terminal."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_graph.apps.cli.main import main
from flower_graph.errors import OutputError
from flower_graph.method.compare import Comparison
from flower_graph.outputs.files import Predictions, as_text, table_of
from flower_graph.records.rounds import RoundReport
from flower_graph.report import writer as writing
from flower_graph.report.plots import confusion_panel, curves_panel, save
from flower_graph.report.writer import RunWriter, write_data_form

NAMES = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "fine"]
MATHS = ["a$b$c", "$\\frac$", "$x$", "$$", "a $ b"]
ESCAPES = "\x1b[2J\x1b]0;owned\x07"


# Tables -------------------------------------------------------------------------------------------


def test_text_is_no_formula_and_numbers_stay_numbers() -> None:
    assert [as_text(one)[0] for one in NAMES] == ["'"] * 5 + ["f"]
    for number in ("-1", "+1.5", "-1e-9", "0", "", "-inf"):
        assert as_text(number) == number


def test_predictions_have_no_formulas() -> None:
    numbers = np.arange(6)
    predictions = Predictions(
        client=np.full(6, -1), node=np.array(NAMES), predicted=numbers,
        probability=np.full(6, 0.5, np.float32), role=np.zeros(6, np.int8), label=numbers,
        classes=tuple(NAMES),
    )  # fmt: skip
    text = table_of(predictions).to_csv(index=False)
    for row in list(csv.reader(io.StringIO(text)))[1:]:
        assert len(row) == 6
        assert not any(cell[:1] in ("=", "+", "-", "@", "\t") and cell for cell in row), row


def test_a_comparison_has_no_formulas() -> None:
    figure = {"mean": -0.5, "std": 0.0, "values": [-0.5]}
    row = {
        "run": "=HYPERLINK(1)", "path": "@x", "app": "+a", "version": "-v", "seeds": [0],
        "settings": {"data.name": "=1+1"}, "figures": {"test-accuracy": figure},
        "metric": "accuracy", "baselines": {}, "beaten": [],
    }  # fmt: skip
    other = row | {"settings": {"data.name": "b"}}
    first, _ = csv.DictReader(io.StringIO(Comparison([row, other], []).to_csv()))
    words = {key: first[key] for key in ("run", "path", "app", "version", "data.name")}
    assert all(word.startswith("'") for word in words.values()), words
    assert first["test-accuracy"] == "-0.5"


# Pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MATHS)
def test_two_dollar_signs_make_no_formula(name: str, tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 10, 100], [1, 2, 3], label=name)
    axes.set_yticks([1, 2], [name, "b"])
    axes.set_xscale("log")
    axes.set_xlabel(name)
    figure.suptitle(name)
    axes.legend()
    save(figure, tmp_path / "a.png")
    shown = [one.get_text() for one in axes.get_xticklabels()]
    assert any("mathdefault" in one for one in shown), "powers are matplotlib's own formulas"
    assert confusion_panel([[1, 0], [0, 1]], [name, "b"]).startswith("<svg")
    assert name.replace("\\", "\\") in curves_panel("x", {name: [[1.0, 2.0]]})


def report(number: int) -> RoundReport:
    return RoundReport(number, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 2, 2, confusion=[[1, 0], [0, 1]])


def finished(out: Path, config: dict[str, Any], **how: Any) -> RunWriter:
    writer = RunWriter(out, config, **how)
    for number in (1, 2):
        writer.write_round(report(number))
    return writer


@pytest.mark.usefixtures("pictures")
def test_a_run_whose_data_have_dollar_signs_is_finished(tmp_path: Path) -> None:
    config = {"seed": 0, "data": {"name": "a$\\frac$b"}, "metrics": ["accuracy"]}
    finished(tmp_path / "run", config).finish({})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"result.json", "curves.png", "confusion.png"} <= names


@pytest.mark.usefixtures("pictures")
def test_a_result_is_there_before_its_pictures(tmp_path: Path) -> None:
    def draw(*_: object) -> None:
        raise OutputError("no room for pictures")

    writer = finished(tmp_path, {"seed": 0, "metrics": ["accuracy"]}, draw=draw)
    with pytest.raises(OutputError):
        writer.finish({}, {"w": np.ones(3)})
    writer.close()
    assert {"result.json", "weights.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    again = RunWriter(tmp_path, writer.config, resume_round=1)
    again.write_round(report(2))
    again.finish({})
    assert (tmp_path / "curves.png").exists()


# Terminals ----------------------------------------------------------------------------------------


def lay_data(folder: Path) -> Path:
    folder.mkdir()
    rows = [f"{node},{node % 2}.5,{'ab'[node % 2]}{ESCAPES}" for node in range(40)]
    (folder / "nodes.csv").write_text("\n".join(["id,x,label", *rows]) + "\n")
    edges = [f"{node},{(node + 2) % 40}" for node in range(40)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return folder


def test_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, data = lay_data(tmp_path / f"mine{ESCAPES}"), lay_data(tmp_path / "mine")
    run = tmp_path / "run"
    small = (
        "rounds=1",
        "partition.clients=2",
        "partition.method=random",
        "model.hidden=4",
        "data.features=as-is",
    )
    given = [f"data.name={data}", "data.split=random", "data.ratios=[0.4,0.3,0.3]", *small]
    commands = [
        ["check", str(data)],
        ["run", "fedgta/cora-linqs", *given, "--out", str(run)],
        ["predict", str(run), "--client", "0", "--out", str(tmp_path / "people.csv")],
        ["predict", str(shown)],
        ["check", "fedgta/cora-linqs", *given],
    ]
    for command in commands:
        code = main(command)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err and "\x07" not in said.out + said.err, command
        assert code == (2 if command[:2] == ["predict", str(shown)] else 0), said.err
    assert ESCAPES in (tmp_path / "people.csv").read_text()  # a file has the names as they are


# A full disk --------------------------------------------------------------------------------------


def test_a_full_disk_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    form: Any = type("Form", (), {"to_json": lambda _: {}})()
    with pytest.raises(OutputError):
        write_data_form(tmp_path, form)
    with pytest.raises(OutputError):
        writing.write_config(tmp_path, {"seed": 0})
    assert not [*tmp_path.iterdir()]
