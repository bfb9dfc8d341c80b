"""What a run says of work that takes long, what a resumed one is called, what `check` measures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app_helpers import MakeConfig, own_graph

from flower_graph.apps import run as runner
from flower_graph.apps.cli import check
from flower_graph.apps.cli.main import main
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of

Captured = pytest.CaptureFixture[str]


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
