"""A run from a config on the in-process engine: outputs, own graphs, refusals, going on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import MakeConfig
from graph_helpers import small_graph
from safetensors.torch import load_file

from flower_graph.apps.run import run, simulate
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import DivergedError
from flower_graph.method.load import load_config, to_dict
from flower_graph.records.rounds import RoundReport
from flower_graph.storage.reading import read_lines
from flower_graph.strategies.nfedgnn.strategy import SplitGradientRelay

ROOT = Path(__file__).resolve().parents[2]


# Outputs -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pictures")
def test_a_run_writes_everything(config_of: MakeConfig, tmp_path: Path) -> None:
    config, out = config_of(small_graph(30)), tmp_path / "new" / "out"
    simulated = simulate(config, supernodes=2)
    assert {path.name for path in tmp_path.iterdir()} == {"graph.pt", "own.yaml"}
    seen: list[RoundReport] = []
    result = run(config, out, supernodes=3, progress=seen.append)
    rows = read_lines(out / "metrics.jsonl")
    written = json.loads((out / "result.json").read_text())
    assert written == result
    assert written["config"] == to_dict(config)
    assert (written["clients"], written["rounds"], written["engine"]) == (30, 6, "in-process")
    assert written["bytes"] == {"up": {"latent": 6 * 480}, "down": {"gradient": 6 * 480}}
    assert written["seconds"].keys() == {"total", "first-round", "per-round-median"}
    assert [row["round"] for row in rows] == [*range(1, 7)]
    assert [report.round for report in seen] == [*range(1, 7)]
    assert [report.loss for report in simulated] == [row["loss"] for row in rows]
    assert written["test-accuracy"] == rows[-1]["test-accuracy"]
    best = max(range(6), key=lambda place: (rows[place]["val-accuracy"], -place))
    assert written["test-accuracy-at-best-val"] == rows[best]["test-accuracy"]
    assert load_config(str(out / "config.yaml")) == config
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(out / "weights.safetensors")
    assert weights["latent"].shape == (30, 4)
    assert weights["server.linear.weight"].shape == (3, 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, DivergedError])
def test_a_run_that_ends_before_its_first_round_leaves_its_folder_as_it_was(
    error: type[BaseException],
    config_of: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(small_graph(30), "checkpoint_every=1")

    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(SplitGradientRelay, "round", fail)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "new" / "out"):
        with pytest.raises(error):
            run(config, out)
    assert [*(tmp_path / "empty").iterdir()] == [] and not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert run(config, tmp_path / "empty")["rounds"] == 6


def test_a_long_round_is_announced_before_it_is_run(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_graph(30), "rounds=3")
    said: list[Any] = []
    monkeypatch.setattr(type(config), "long_work", lambda *_: "does more" if _[1] != 2 else "")
    how: Any = {"progress": lambda report: said.append(report.round), "on_wait": said.append}
    run(config, tmp_path / "out", **how)
    assert said == ["round 1: does more", 1, 2, "round 3: does more", 3]


# Under Flower, and data of several runs ----------------------------------------------------------


def test_the_data_are_loaded_anew_when_something_changes(config_of: MakeConfig) -> None:
    config = config_of(small_graph(30))
    first = cached_data(config)
    assert cached_data(config) is first
    assert cached_data(config_of(small_graph(30), "data.features=as-is")) is not first
    assert cached_data(config_of(small_graph(30), "seed=1")) is not first
    wider = small_graph(30, x=torch.cat([small_graph(30).x, small_graph(30).x], 1))
    assert cached_data(config_of(wider)).x.shape == (30, 16)  # of the same name, saved anew


def test_a_process_loads_no_method_before_it_is_asked_to() -> None:
    script = (
        "import sys; from flower_graph.apps import client_app, server_app;"
        "print([name for name in sys.modules if name.startswith('flower_graph.strategies')])"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
