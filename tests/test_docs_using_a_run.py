"""The page on using a run: its commands and its Python run as they stand, for fewer rounds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from doc_helpers import DOCS, run_blocks

from flower_graph.apps.cli.main import main
from flower_graph.config.common import DataConfig
from flower_graph.data.sources.datasets import load_graph

PAGE = DOCS / "using-a-run.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_first_commands_and_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = load_graph(DataConfig())
    new = {"x": (graph.x[:300] > 0).float(), "edge_index": graph.edge_index}
    inside = (new["edge_index"] < 300).all(0)
    torch.save(new | {"edge_index": new["edge_index"][:, inside]}, "new-papers.pt")
    first, *others = re.findall(r"```\n(flower-graph .+?)```", TEXT, re.DOTALL)
    deployed = next(block for block in others if "--data-folder" in block)
    for line in first.splitlines():
        words = shlex.split(line, comments=True)[1:]
        words = [word.replace("rounds=20", "rounds=2") for word in words]
        assert main(words) == 0, capsys.readouterr().err
    assert len(Path("cora.csv").read_text().splitlines()) > 500
    capsys.readouterr()
    space = run_blocks(PAGE, 1, space={"__name__": "page"})
    assert "right" in capsys.readouterr().out
    run = space["run"]
    assert run.config.model.hidden == 32 and run.seeds[0] is run
    shown = [shlex.split(line)[1:] for line in deployed.splitlines()]
    assert all(words[:2] == ["predict", "--data-folder"] for words in shown)
