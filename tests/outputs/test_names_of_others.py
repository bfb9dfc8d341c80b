"""Names of data, classes and nodes are text: in tables, in pictures and on a terminal."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_graph.apps.cli.main import main
from flower_graph.errors import OutputError
from flower_graph.method.compare import Comparison
from flower_graph.outputs.files import Predictions, as_text, table_of
from flower_graph.records.rounds import RoundReport
from flower_graph.report.plots import confusion_panel, curves_panel, save
from flower_graph.report.writer import RunWriter

NAMES = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "fine"]
ESCAPES = "\x1b[2J\x1b]0;owned\x07"


def test_tables_have_no_formulas() -> None:
    assert [as_text(one)[0] for one in NAMES] == ["'"] * 5 + ["f"]
    for number in ("-1", "+1.5", "-1e-9", "0", "", "-inf"):
        assert as_text(number) == number
    numbers = np.arange(6)
    predictions = Predictions(
        client=np.full(6, -1), node=np.array(NAMES), predicted=numbers,
        probability=np.full(6, 0.5, np.float32), role=np.zeros(6, np.int8), label=numbers,
        classes=tuple(NAMES),
    )  # fmt: skip
    text = table_of(predictions).to_csv(index=False)
    for line in list(csv.reader(io.StringIO(text)))[1:]:
        assert len(line) == 6
        assert not any(cell[:1] in ("=", "+", "-", "@", "\t") and cell for cell in line), line
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


@pytest.mark.parametrize("name", ["a$b$c", "$\\frac$", "$x$", "$$", "a $ b"])
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
    assert name in curves_panel("x", {name: [[1.0, 2.0]]})


@pytest.mark.usefixtures("pictures")
def test_a_result_is_there_before_its_pictures(tmp_path: Path) -> None:
    def draw(*_: object) -> None:
        raise OutputError("no room for pictures")

    def report(number: int) -> RoundReport:
        return RoundReport(number, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 2, 2, confusion=[[1, 0], [0, 1]])

    config = {"seed": 0, "data": {"name": "a$\\frac$b"}, "metrics": ["accuracy"]}
    writer = RunWriter(tmp_path, config, draw=draw)
    writer.write_round(report(1))
    writer.write_round(report(2))
    with pytest.raises(OutputError):
        writer.finish({}, {"w": np.ones(3)})
    writer.close()
    assert {"result.json", "weights.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    again = RunWriter(tmp_path, config, resume_round=1)
    again.write_round(report(2))
    again.finish({})
    assert (tmp_path / "curves.png").exists() and (tmp_path / "confusion.png").exists()


def lay_data(folder: Path) -> Path:
    folder.mkdir()
    rows = [f"{node},{node % 2}.5,{'ab'[node % 2]}{ESCAPES}" for node in range(40)]
    (folder / "nodes.csv").write_text("\n".join(["id,x,label", *rows]) + "\n")
    edges = [f"{node},{(node + 2) % 40}" for node in range(40)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return folder


def test_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, data = lay_data(tmp_path / f"mine{ESCAPES}"), lay_data(tmp_path / "mine")
    run, people = str(tmp_path / "run"), tmp_path / "people.csv"
    given = [f"data.name={data}", "data.split=random", "data.ratios=[0.4,0.3,0.3]", "rounds=1"]
    given += ["partition.clients=2", "partition.method=random", "model.hidden=4"]
    given += ["data.features=as-is"]
    for command in (
        ["check", str(data)],
        ["run", "fedgta/cora-linqs", *given, "--out", run],
        ["predict", run, "--client", "0", "--out", str(people)],
        ["predict", str(shown)],
        ["check", "fedgta/cora-linqs", *given],
    ):
        code = main(command)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err and "\x07" not in said.out + said.err, command
        assert code == (2 if command[1] == str(shown) else 0), said.err
    assert ESCAPES in people.read_text()  # a file has the names as they are
