"""What a run left is read back; a new graph is treated as the run's was."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_folders import CLASSES, GRAPH, by_hand, make_run, weights

import flower_graph as fg
from flower_graph.data.features import prepare_features
from flower_graph.data.graph import Treatment
from flower_graph.errors import OutputError
from flower_graph.method.run import latest_in

ROW = torch.tensor([[1.0, 0, 0], [0, 0.25, 0.75], [0, 1, 0]])


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = fg.load_run(make_run(tmp_path / "run"))
    assert (run.result["test-accuracy"], run.config.app, list(run.seeds)) == (0.5, "fedgta", [0])
    assert run.metrics == [{"round": 1, "bytes": {"up": {"weights": 8}}}]  # the second is cut short
    assert run.metrics.to_pandas()["bytes.up.weights"].tolist() == [8]
    found = run.predictions()
    assert found.client.tolist() == [0, 0, 1, 1] and found.node.tolist() == [0, 1, 2, 3]
    assert found.predicted.tolist() == [1, 0, 1, 0] and found.label.tolist() == [1, -1, 1, -1]
    assert found.classes == CLASSES and found.role.tolist() == [1, 3, 1, 3]
    assert run.predictions(client=1).node.tolist() == [2, 3]
    state = run.model(client=1).state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights(1).items())
    assert not run.model(client=1).training


def test_a_new_graph_is_treated_as_the_runs(tmp_path: Path) -> None:
    run = fg.load_run(make_run(tmp_path / "run"))
    said = run.predict(**GRAPH, client=1)
    np.testing.assert_allclose(said.numpy(), by_hand(1, ROW), atol=1e-6)
    with pytest.raises(OutputError):
        run.predict(**GRAPH)
    shared = fg.load_run(make_run(tmp_path / "shared", own=False))
    np.testing.assert_allclose(shared.predict(**GRAPH).numpy(), by_hand(0, ROW), atol=1e-6)


@pytest.mark.parametrize("how", ["as-is", "row", "presence", "standardise", "auto"])
def test_what_was_done_to_features_is_done_to_others(how: str) -> None:
    x = torch.tensor([[0.0, 2, 5, 0], [0, 0, 5, 0], [4, 0, 5, 0], [0, 0, 5, 0]])
    x = x if "presence" not in how else x * torch.tensor([1.0, 1, 0, 0])
    (made,), _, treatment = prepare_features([x], how)
    read = Treatment.from_json(treatment.to_json())
    assert torch.equal(read.apply(x), made)
    assert torch.equal(read.apply(x[2:3]), made[2:3])


def test_several_seeds(tmp_path: Path) -> None:
    for seed in (3, 10):
        make_run(tmp_path / f"seed-{seed}", f"seed={seed}")
    (tmp_path / "summary.json").write_text('{"test-accuracy": {"mean": 0.5}}')
    run = fg.load_run(tmp_path)
    assert list(run.seeds) == [3, 10] and run.seeds[10].config.seed == 10
    assert run.result == {"test-accuracy": {"mean": 0.5}}
    with pytest.raises(OutputError, match=r"seeds.*seed-3"):
        run.predictions()


def test_a_data_folders_last_run(tmp_path: Path) -> None:
    for number, token in enumerate(("b", "a")):
        source = make_run(tmp_path / f"run-{token}") / "clients" / str(number)
        shutil.copytree(source, tmp_path / "data" / "outputs" / token)
    import os

    os.utime(tmp_path / "data" / "outputs" / "b", (1, 1))
    assert latest_in(tmp_path / "data").predictions().client.tolist() == [1, 1]
