"""A run from a config on the in-process engine: outputs, own graphs, refusals, going on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import MakeConfig, own_graph
from safetensors.torch import load_file
from torch_geometric.data import Data

from flower_graph.apps.run import run, simulate
from flower_graph.client import state
from flower_graph.config.checkpoints import CHECKPOINTS
from flower_graph.config.load import load_config, to_dict
from flower_graph.errors import CheckpointError, DataError, OutputError
from flower_graph.report.rounds import RoundReport
from flower_graph.storage import checkpoint

KEYS = {"config", "seed", "clients", "rounds", "test-accuracy", "val-accuracy"} | {
    *("test-accuracy-at-best-val", "bytes", "seconds", "peak-memory-bytes", "engine"),
    *("best-val-accuracy", "best-round", "loss", "wire-bytes", "rejected", "versions"),
}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def interrupt_at(number: int) -> Callable[[RoundReport], None]:
    def progress(report: RoundReport) -> None:
        if report.round == number:
            raise KeyboardInterrupt

    return progress


# Outputs -----------------------------------------------------------------------------------------


def test_a_run_writes_everything(config_of: MakeConfig, tmp_path: Path) -> None:
    config, out = config_of(own_graph()), tmp_path / "new" / "out"
    seen: list[RoundReport] = []
    result = run(config, out, supernodes=3, progress=seen.append)
    written = json.loads((out / "result.json").read_text())
    assert written == result
    assert written.keys() >= KEYS
    assert written["config"] == to_dict(config)
    assert (written["clients"], written["rounds"], written["engine"]) == (30, 6, "in-process")
    assert written["bytes"] == {"up": {"latent": 6 * 480}, "down": {"gradient": 6 * 480}}
    assert written["seconds"].keys() == {"total", "first-round", "per-round-median"}
    assert [row["round"] for row in lines(out)] == [*range(1, 7)]
    assert [report.round for report in seen] == [*range(1, 7)]
    assert written["test-accuracy"] == lines(out)[-1]["test-accuracy"]
    best = max(range(6), key=lambda place: (lines(out)[place]["val-accuracy"], -place))
    assert written["test-accuracy-at-best-val"] == lines(out)[best]["test-accuracy"]
    assert load_config(str(out / "config.yaml")) == config
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    weights = load_file(out / "weights.safetensors")
    assert weights["latent"].shape == (30, 4)
    assert weights["server.linear.weight"].shape == (3, 4)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "result.json", "curves.png"} | {
        "participation.png",
        "weights.safetensors",
        CHECKPOINTS,
    }


def test_simulate_writes_nothing_and_says_the_same(config_of: MakeConfig, tmp_path: Path) -> None:
    config = config_of(own_graph())
    reports = simulate(config, supernodes=2)
    assert {path.name for path in tmp_path.iterdir()} == {"graph.pt", "own.yaml"}
    run(config, tmp_path / "out", supernodes=1)
    rows = lines(tmp_path / "out")
    assert [report.loss for report in reports] == [row["loss"] for row in rows]


@pytest.mark.parametrize(
    ("overrides", "latent"),
    [
        (["model.name=sage"], 8),
        (["model.name=gat", "model.heads=3", "strategy.learning_rate=0.01"], 12),
        (["strategy.participation=0.5", "strategy.average_every=2"], 4),
        (["strategy.average_every=1", "strategy.average_over=all", "model.user_bias=true"], 4),
        (["data.split=random", "data.ratios=[0.5,0.2,0.3]"], 4),
        (["data.normalize=false", "device=cpu", "strategy.reg_weight=0"], 4),
    ],
)
def test_settings_reach_the_run(
    overrides: list[str], latent: int, config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(own_graph(), *overrides)
    result = run(config, tmp_path / "out", supernodes=2)
    users = 15 if config.strategy.participation == 0.5 else 30
    assert result["bytes"]["up"]["latent"] == 6 * users * latent * 4
    weights = result["bytes"]["up"].get("weights", 0)
    rows = 6 + config.model.user_bias
    times = 6 // config.strategy.average_every if config.strategy.average_every else 0
    assert weights == times * users * rows * 4 * 4


def test_a_generated_graph(tmp_path: Path) -> None:
    overrides = ["data.name=csbm", "data.nodes=200", "data.features=40", "data.active=8"]
    overrides += ["data.split=random", "data.ratios=[0.5,0.2,0.3]", "rounds=3"]
    result = run(load_config("quickstart", overrides), tmp_path / "out", supernodes=2)
    assert result["clients"] == 200


# Graphs that can and cannot be trained on --------------------------------------------------------


def test_isolated_nodes_are_allowed(config_of: MakeConfig, tmp_path: Path) -> None:
    edges = own_graph().edge_index
    config = config_of(own_graph(edge_index=edges[:, (edges < 20).all(0)]))
    assert run(config, tmp_path / "out")["clients"] == 30


def nan_features() -> Data:
    x = own_graph().x
    x[4, 2] = float("nan")
    return own_graph(x=x)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (nan_features(), r"x\[4, 2\] is nan"),
        (own_graph(y=torch.arange(30) % 3 - 1), r"y\[0\] is -1"),
        (own_graph(y=torch.arange(30) % 3, num_classes=2), r"y\[2\] is 2"),
        (own_graph(train_mask=torch.zeros(30, dtype=torch.bool)), "train_mask is empty"),
        (own_graph(train_mask=torch.ones(3, dtype=torch.bool)), "train_mask"),
        (own_graph(edge_index=torch.tensor([[0], [30]])), r"edge_index\[1, 0\] is 30"),
        (Data(x=torch.ones(3, 2)), "edge_index"),
    ],
)
def test_a_graph_that_is_unfit_is_refused_before_training(
    data: Data, said: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        run(config_of(data), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_missing_is_refused_before_training(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(own_graph(), f"data.name={tmp_path / 'nothing.pt'}")
    with pytest.raises(DataError, match="no such file"):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_saved_anew_is_read_anew(config_of: MakeConfig, tmp_path: Path) -> None:
    first = run(config_of(own_graph()), tmp_path / "a")
    wider = own_graph(x=torch.cat([own_graph().x, own_graph().x], 1))
    second = run(config_of(wider), tmp_path / "b")
    assert first["loss"] != second["loss"]


@pytest.mark.parametrize("supernodes", [0, -1, 31])
def test_impossible_supernodes(supernodes: int, config_of: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"supernodes.* {supernodes}"):
        run(config_of(own_graph()), tmp_path / "out", supernodes=supernodes)
    assert not (tmp_path / "out").exists()


# Output folders ----------------------------------------------------------------------------------


def test_a_folder_that_exists_is_refused_and_left_alone(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(config_of(own_graph()), out)
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match="exists and is not empty"):
        run(config_of(own_graph(), "seed=1"), out)
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_an_unwritable_folder_is_said_before_training(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    seen: list[RoundReport] = []
    with pytest.raises(OutputError):
        run(config_of(own_graph()), tmp_path / "file" / "out", progress=seen.append)
    assert not seen


# Going on ----------------------------------------------------------------------------------------


def test_ctrl_c_leaves_what_resume_needs(config_of: MakeConfig, tmp_path: Path) -> None:
    config = config_of(own_graph(), "strategy.participation=0.5", "strategy.average_every=3")
    whole = run(config, tmp_path / "whole", supernodes=3)
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, supernodes=3, progress=interrupt_at(5))
    assert [row["round"] for row in lines(out)] == [*range(1, 6)]
    assert checkpoint.last_round(out / CHECKPOINTS) == 4
    assert not (out / "result.json").exists()

    result = run(config, out, supernodes=3, resume=True)
    rows = without_times(lines(out))
    assert rows == without_times(lines(tmp_path / "whole"))
    left, right = (load_file(f / "weights.safetensors") for f in (out, tmp_path / "whole"))
    assert all(torch.equal(left[name], right[name]) for name in right)
    for key in ("bytes", "wire-bytes", "loss", "test-accuracy-at-best-val", "rounds"):
        assert result[key] == whole[key]


def test_a_run_that_is_done_can_be_resumed_for_nothing(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    first = run(config_of(own_graph()), tmp_path / "out")
    seen: list[RoundReport] = []
    again = run(config_of(own_graph()), tmp_path / "out", resume=True, progress=seen.append)
    assert not seen
    for key in ("bytes", "loss", "test-accuracy-at-best-val", "rounds"):
        assert again[key] == first[key]
    with pytest.raises(CheckpointError, match="num_rounds: 3 is less than round 6"):
        run(config_of(own_graph(), "rounds=3"), tmp_path / "out", resume=True)


def test_a_run_without_a_checkpoint_cannot_be_resumed(
    config_of: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run(config_of(own_graph()), tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    config = config_of(own_graph(), "checkpoint_every=0")
    run(config, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run(config, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("overrides", "supernodes", "said"),
    [
        (["seed=1"], 3, "its seed is 0, this run's is 1"),
        ([], 2, "as many SuperNodes as before"),
    ],
)
def test_a_resume_that_does_not_fit_leaves_the_run_as_it_was(
    overrides: list[str], supernodes: int, said: str, config_of: MakeConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config_of(own_graph()), out, supernodes=3, progress=interrupt_at(5))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=said):
        run(config_of(own_graph(), *overrides), out, supernodes=supernodes, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


# After a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["fedgls/cora-linqs", "fedscem/cora-linqs"])
def test_a_run_leaves_nothing_of_its_clients_in_the_process(config: str) -> None:
    overrides = ["rounds=1", "partition.clients=4"]
    overrides += ["strategy.name=fedavg"] if config.startswith("fedscem") else []
    before = {number: len(kept) for number, kept in enumerate((state._LIVE, state._TOKENS))}
    simulate(load_config(config, overrides))
    after = {number: len(kept) for number, kept in enumerate((state._LIVE, state._TOKENS))}
    assert after == before
