"""What a run left is read back, in Python and by ``flower-graph predict``; what is refused."""

import csv
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import CLASSES, GRAPH, REPORT, make_run, weights

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.errors import OutputError
from flower_graph.method.run import latest_in
from flower_graph.models import GCN
from flower_graph.outputs.files import Predictions, Snapshot

Captured = pytest.CaptureFixture[str]
ROW = torch.tensor([[1.0, 0, 0], [0, 0.25, 0.75], [0, 1, 0]])


def chances(client: int) -> Any:
    """What a client's model says of ``GRAPH``, with features that sum to 1, and both directions."""
    model = GCN(3, 4, 2).eval()
    model.load_state_dict(weights(client))
    with torch.no_grad():
        return model(ROW, torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])).softmax(1).numpy()


def test_a_run_is_read_back_and_a_new_graph_is_treated_as_its_own(tmp_path: Path) -> None:
    run = fg.load_run(make_run(tmp_path / "run"))
    assert (run.result["test-accuracy"], run.config.app, list(run.seeds)) == (0.5, "fedgta", [0])
    assert run.metrics == [REPORT.to_record()]  # the second is cut short
    assert run.metrics.to_pandas()["bytes.up.weights"].tolist() == [8]
    found = run.predictions()
    assert found.client.tolist() == [0, 0, 1, 1] and found.node.tolist() == [0, 1, 2, 3]
    assert found.predicted.tolist() == [1, 0, 1, 0] and found.label.tolist() == [1, -1, 1, -1]
    assert found.classes == CLASSES and found.role.tolist() == [1, 3, 1, 3]
    assert run.predictions(client=1).node.tolist() == [2, 3]
    state = run.model(client=1).state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights(1).items())
    assert not run.model(client=1).training
    said = run.predict(**GRAPH, client=1)
    np.testing.assert_allclose(said, chances(1), atol=1e-6)
    with pytest.raises(OutputError):
        run.predict(**GRAPH)
    shared = fg.load_run(make_run(tmp_path / "shared", own=False))
    np.testing.assert_allclose(shared.predict(**GRAPH), chances(0), atol=1e-6)


def test_several_seeds_and_a_data_folders_last_run(tmp_path: Path) -> None:
    for seed in (3, 10):
        make_run(tmp_path / f"seed-{seed}", f"seed={seed}")
    (tmp_path / "summary.json").write_text('{"test-accuracy": {"mean": 0.5}}')
    run = fg.load_run(tmp_path)
    assert list(run.seeds) == [3, 10] and run.seeds[10].config.seed == 10
    assert run.result == {"test-accuracy": {"mean": 0.5}}
    with pytest.raises(OutputError, match=r"several seeds"):
        run.predictions()
    outputs = tmp_path / "data" / "outputs"
    shutil.copytree(tmp_path / "seed-3" / "clients" / "0", outputs / "b")
    shutil.copytree(tmp_path / "seed-3" / "clients" / "1", outputs / "a")
    os.utime(outputs / "b", (1, 1))
    assert latest_in(tmp_path / "data").predictions().client.tolist() == [1, 1]


def column(text: str, name: str) -> list[str]:
    return [row[name] for row in csv.DictReader(text.splitlines())]


def saved(folder: Path, **changes: Any) -> str:
    content = {key: value for key, value in (GRAPH | changes).items() if value is not None}
    torch.save(content, folder / "new.pt")
    return str(folder / "new.pt")


def test_predictions_as_a_table(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path / "run", names=True)
    assert main(["predict", str(run), "--client", "1"]) == 0
    assert column(capsys.readouterr().out, "node") == ["anna-1", "b,c"]
    Snapshot(Predictions.of(torch.eye(2), -1, ["u", "v"], [1, 3], [0, 1])).write(run)
    assert main(["predict", str(run), "--out", str(tmp_path / "all.csv")]) == 0
    named = ["server", "server", "0", "0", "1", "1"]
    assert column((tmp_path / "all.csv").read_text(), "client") == named
    assert (run / "predictions.csv").read_text().splitlines()[1].startswith("server,u,")


def test_what_is_right_is_said_by_role(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    # By client, role and predicted class; the label is 1: of client 0 one of three test nodes is
    # right, of client 1 the only one; a node in no part is wrong, and one has no label.
    rows = {0: [(1, 1), (3, 1), (3, 0), (3, 0)], 1: [(3, 1), (0, 0), (2, 1)]}
    for client, own in rows.items():
        roles, guesses = zip(*own, strict=True)
        labels = [-1 if role == 2 else 1 for role in roles]
        found = Predictions.of(torch.eye(2)[[*guesses]], client, range(len(own)), roles, labels)
        Snapshot(found).write(run / "clients" / str(client))
        (run / "clients" / str(client) / "outputs.json").write_text('{"round": 7}')
    (run / "config.yaml").write_text("app: fedgta\n", encoding="utf-8")
    assert main(["predict", str(run), "--out", str(tmp_path / "all.csv")]) == 0
    said = capsys.readouterr().err
    assert "7 predictions of round 7" in said
    assert all(part in said for part in ("train 1.000 of 1", "test 0.667 of 4", "0.000 of 1 "))


def test_a_new_file(tmp_path: Path, capsys: Captured) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out.csv"
    words = ["predict", str(run), "--client", "1", "--out", str(out), "--data"]
    assert main([*words, saved(tmp_path, y=["cat", None, "dog"], names=["a", "b", "c"])]) == 0
    expected, text = chances(1), out.read_text()
    assert column(text, "node") == ["a", "b", "c"]
    assert column(text, "class") == [["cat", "dog"][k] for k in expected.argmax(1)]
    said = column(text, "probability")
    np.testing.assert_allclose([*map(float, said)], expected.max(1), atol=1e-5)
    right = np.mean([expected[0].argmax() == 0, expected[2].argmax() == 1])
    assert f"{right:.3f} of the 2 " in capsys.readouterr().err
    tables = tmp_path / "people"  # without labels
    tables.mkdir()
    (tables / "nodes.csv").write_text("name,a,b,c\nu,2,0,0\nv,0,1,3\nw,0,4,0\n")
    (tables / "edges.csv").write_text("source,target\nu,v\nv,w\n")
    assert main([*words, str(tables)]) == 0
    assert column(out.read_text(), "probability") == said


def refusal(capsys: Captured, *words: str) -> str:
    assert main(["predict", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


X = GRAPH["x"]
NAN = X.clone()
NAN[1, 2] = torch.nan
ONE = ["--client", "1"]
# A new graph, or None; files of the run that are gone, or with ! cut short; options; what is said
REFUSED: list[tuple[dict[str, Any] | None, str, list[str], str]] = [
    ({"x": X[:, :2]}, "", ONE, "x has 2"),
    ({"x": None}, "", ONE, "no x"),
    ({"edge_index": None}, "", ONE, "no edges"),
    ({"edge_index": torch.zeros(2, 0).long()}, "", ONE, "has no edges"),
    ({"edge_index": torch.tensor([[0], [3]])}, "", ONE, "edge_index["),
    ({"x": NAN}, "", ONE, "x[1, 2]"),
    ({"y": ["cat", "cow", None]}, "", ONE, "'cow'"),
    ({"y": torch.tensor([0, 2, -1])}, "", ONE, "y[1] is 2"),
    ({}, "", ["--client", "7"], "client 7: "),
    ({}, "", [], "--client"),
    (None, "", ["--client", "7"], "clients [0, 1]"),
    (None, "!predictions.npz", [], "not predictions of a run"),
    (None, "predictions.npz", [], "no predictions"),
    ({}, "model.safetensors", ONE, "not models of a run"),
    ({}, "model.*", ONE, "no models"),
    ({}, "config.yaml", ONE, "config.yaml"),
    ({}, "data.json", ONE, "data.json:"),
]


@pytest.mark.parametrize(("changes", "lost", "options", "why"), REFUSED)
def test_what_is_refused_is_said_in_a_line_and_nothing_is_written(
    changes: Any, lost: str, options: list[str], why: str, tmp_path: Path, capsys: Captured
) -> None:
    run = make_run(tmp_path / "run")
    for path in run.rglob(lost.lstrip("!")) if lost else ():
        path.write_bytes(path.read_bytes()[:20]) if lost.startswith("!") else path.unlink()
    words = [str(run), "--out", str(tmp_path / "out.csv"), *options]
    words += [] if changes is None else ["--data", saved(tmp_path, **changes)]
    before = sorted(tmp_path.rglob("*"))
    assert why in refusal(capsys, *words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["none", "empty", "save=none"])
@pytest.mark.parametrize("words", [[], ["--data-folder"]])
def test_folders_without_outputs(
    words: list[str], name: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "empty").mkdir()
    for path in make_run(tmp_path / "save=none", "save=none").glob("clients/*/*"):
        path.unlink()
    assert name in refusal(capsys, *words, str(tmp_path / name))
