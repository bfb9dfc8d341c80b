"""``flower-graph predict``: tables of a run's predictions and of new nodes; what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import GRAPH, by_hand, make_run
from test_reading_runs import ROW

from flower_graph.apps.cli.main import main
from flower_graph.outputs.files import Predictions, write_outputs


def table(text: str) -> list[dict[str, str]]:
    """Read a table."""
    return list(csv.DictReader(text.splitlines()))


def saved(folder: Path, **changes: Any) -> str:
    """Save a new graph; None leaves something out."""
    content = {key: value for key, value in (GRAPH | changes).items() if value is not None}
    torch.save(content, folder / "new.pt")
    return str(folder / "new.pt")


def test_predictions_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", names=True)
    assert main(["predict", str(run), "--client", "1"]) == 0
    rows = table(capsys.readouterr().out)
    assert [row["node"] for row in rows] == ["anna-1", "b,c"]
    assert [row["class"] for row in rows] == ["dog", "cat"]
    assert [row["role"] for row in rows] == ["train", "test"]
    assert [row["label"] for row in rows] == ["dog", ""]
    assert main(["predict", str(run), "--out", str(tmp_path / "all.csv")]) == 0
    assert len(table((tmp_path / "all.csv").read_text())) == 4


def test_what_is_right_is_said_by_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    # By client, role and predicted class; the label is 1: of client 0 one of three test nodes is
    # right, of client 1 the only one; a node in no part is wrong, and one has no label.
    rows = [(0, 1, 1), (0, 3, 1), (0, 3, 0), (0, 3, 0), (1, 3, 1), (1, 0, 0), (1, 2, 1)]
    for client in (0, 1):
        own = [(role, guess) for number, role, guess in rows if number == client]
        logits = torch.eye(2)[[guess for _, guess in own]]
        labels = [-1 if role == 2 else 1 for role, _ in own]
        found = Predictions.of(logits, client, range(len(own)), [role for role, _ in own], labels)
        write_outputs(run / "clients" / str(client), found, [])
        said = json.dumps({"round": 7})
        (run / "clients" / str(client) / "outputs.json").write_text(said, encoding="utf-8")
    (run / "config.yaml").write_text("app: fedgta\n", encoding="utf-8")
    assert main(["predict", str(run), "--out", str(tmp_path / "all.csv")]) == 0
    said = capsys.readouterr().err
    assert "7 predictions of round 7" in said
    assert all(part in said for part in ("train 1.000 of 1", "test 0.667 of 4", "0.000 of 1 "))


def test_of_no_client_is_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    write_outputs(run, Predictions.of(torch.eye(2), -1, [8, 9], [1, 3], [0, 1]), [])
    assert main(["predict", str(run)]) == 0
    rows = table(capsys.readouterr().out)
    assert [row["client"] for row in rows] == ["server", "server", "0", "0", "1", "1"]
    assert (run / "predictions.csv").read_text().splitlines()[1].startswith("server,8,")


def test_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out.csv"
    words = ["predict", str(run), "--client", "1", "--out", str(out), "--data"]
    assert main([*words, saved(tmp_path, y=["cat", None, "dog"], names=["a", "b", "c"])]) == 0
    expected = by_hand(1, ROW)
    rows = table(out.read_text())
    assert [row["node"] for row in rows] == ["a", "b", "c"]
    assert [row["class"] for row in rows] == [["cat", "dog"][k] for k in expected.argmax(1)]
    said = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(said, expected.max(1), atol=1e-5)
    right = np.mean([expected[0].argmax() == 0, expected[2].argmax() == 1])
    assert f"{right:.3f} of the 2 " in capsys.readouterr().err
    tables = tmp_path / "people"  # without labels
    tables.mkdir()
    (tables / "nodes.csv").write_text("name,a,b,c\nu,2,0,0\nv,0,1,3\nw,0,4,0\n")
    (tables / "edges.csv").write_text("source,target\nu,v\nv,w\n")
    assert main([*words, str(tables)]) == 0
    again = table(out.read_text())
    assert [row["probability"] for row in again] == [row["probability"] for row in rows]


def cut(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for path in run.rglob(name):
            path.write_bytes(path.read_bytes()[:20])

    return damage


def gone(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for path in run.rglob(name):
            path.unlink()

    return damage


X = GRAPH["x"]
NAN = X.clone()
NAN[1, 2] = torch.nan
REFUSED: dict[str, tuple[dict[str, Any] | None, Callable[[Path], None] | None, list[str], str]] = {
    "wrong width": ({"x": X[:, :2]}, None, [], "x has 2"),
    "no x": ({"x": None}, None, [], "no x"),
    "no edges": ({"edge_index": None}, None, [], "no edges"),
    "none of the edges": ({"edge_index": torch.zeros(2, 0).long()}, None, [], "has no edges"),
    "an edge to nowhere": ({"edge_index": torch.tensor([[0], [3]])}, None, [], "edge_index["),
    "NaN": ({"x": NAN}, None, [], "x[1, 2]"),
    "unknown class": ({"y": ["cat", "cow", None]}, None, [], "'cow'"),
    "unknown number": ({"y": torch.tensor([0, 2, -1])}, None, [], "y[1]"),
    "no such client": ({}, None, ["--client", "7"], "client 7: no model of it in"),
    "which client": ({}, None, ["--client"], "--client"),
    "no predictions of a client": (None, None, ["--client", "7"], "there are those of 0, 1"),
    "predictions cut short": (None, cut("predictions.npz"), [], "not predictions of a run"),
    "no predictions": (None, gone("predictions.npz"), [], "no predictions"),
    "weights gone": ({}, gone("model.safetensors"), [], "not models of a run"),
    "no models": ({}, gone("model.*"), [], "no models"),
    "no settings": ({}, gone("config.yaml"), [], "so the settings are not known"),
    "no form of data": ({}, gone("data.json"), [], "data.json:"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_a_line_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, damage, more, why = REFUSED[name]
    run, out = make_run(tmp_path / "run"), tmp_path / "out.csv"
    if damage is not None:
        damage(run)
    words = ["predict", str(run), "--out", str(out)]
    if changes is not None:
        words += ["--data", saved(tmp_path, **changes)]
        more = {"--client": []}.get(" ".join(more), more or ["--client", "1"])
    before = sorted(tmp_path.rglob("*"))
    assert main([*words, *more]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and why in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["none", "empty"])
@pytest.mark.parametrize("words", [[], ["--data-folder"]])
def test_folders_that_are_no_runs(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["predict", *words, str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and name in said


def test_save_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "save=none")
    for path in run.glob("clients/*/*"):
        path.unlink()
    assert main(["predict", str(run)]) == 2
    assert "(save=none)" in capsys.readouterr().err
