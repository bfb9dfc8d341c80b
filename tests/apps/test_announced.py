"""What a run says of work that takes long, what a resumed one is called, what `check` measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from app_helpers import MakeConfig, own_graph

from flower_graph.apps import run as runner
from flower_graph.apps.cli import check, launch
from flower_graph.apps.cli.main import main
from flower_graph.errors import EngineFailedError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of

Captured = pytest.CaptureFixture[str]


def test_a_resumed_run_is_titled_by_its_config(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(own_graph(), "graph.pt")
    words = ["data.name=graph.pt", "device=cpu", "checkpoint_every=1", "rounds=1", "--quiet"]
    assert main(["run", "nfedgnn/own-graph", *words, "--out", "g1"]) == 0
    for rounds in (2, 3):  # the name is kept by a resumed run too
        capsys.readouterr()
        assert main(["run", "--resume", "g1", f"rounds={rounds}", "--quiet"]) == 0
        assert capsys.readouterr().out.startswith("nfedgnn/own-graph: ")


@pytest.mark.parametrize(
    ("name", "override", "number", "other"),
    [
        ("ppfl/cora-linqs-gat", "judge.mlp=true", 22, 21),
        ("fedscem/cora-linqs", "seed=0", 1, 2),
    ],
)
def test_a_method_says_which_rounds_are_long(
    name: str, override: str, number: int, other: int
) -> None:
    config = load_config(name, [override, "rounds=22"])
    method = method_of(config)
    assert method.long_work(config, number) and not method.long_work(config, other)


def test_a_long_round_is_announced_before_it_is_run(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(own_graph(), "rounds=3")
    method = method_of(config)
    said: list[Any] = []
    monkeypatch.setattr(type(method), "long_work", lambda *_: "does more" if _[2] != 2 else "")
    how: Any = {"progress": lambda report: said.append(report.round), "on_wait": said.append}
    runner.run(config, tmp_path / "out", **how)
    assert said == ["round 1: does more", 1, 2, "round 3: does more", 3]


def test_flowers_engine_says_that_it_starts(
    config_of: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    config_of(own_graph())
    monkeypatch.chdir(tmp_path)

    def fail(*_: Any, meanwhile: Callable[[], None], **how: Any) -> None:
        meanwhile()
        raise EngineFailedError("not started")

    monkeypatch.setattr(launch, "flwr_run", fail)
    assert main(["run", "own.yaml", "--engine", "flwr", "--out", "out"]) == 1
    assert "Flower's engine starts" in capsys.readouterr().err


def test_check_estimates_by_later_rounds(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    config_of(own_graph())
    monkeypatch.chdir(tmp_path)
    assert len(runner.first_rounds(load_config("own.yaml", ["rounds=100"]))) == runner.TRIED
    slow = [SimpleNamespace(seconds=seconds) for seconds in (5.0, 3.0, 0.1, 0.1, 0.1)]
    monkeypatch.setattr(check, "first_rounds", lambda config: slow)
    assert main(["check", "own.yaml", "rounds=100"]) == 0
    assert "about 15 s for 100 rounds" in capsys.readouterr().out
