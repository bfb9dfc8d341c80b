"""The README: its length, its picture, its commands and its Python."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from doc_helpers import DOCS, run_blocks, script

from flower_graph.apps.cli import main as cli

README = DOCS.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.fixture
def drawing() -> ModuleType:
    """Import the script that draws the picture."""
    return script(DOCS / "picture.py")


def test_it_is_short_and_says_what_is_not_there() -> None:
    assert len(TEXT.splitlines()) <= 130
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(block.splitlines()) <= 15
    (out,) = re.findall(r"## What it does not do\n(.*?)\n## ", TEXT, re.DOTALL)
    assert all(what in out for what in ("Whole graphs", "asynchronous", "one GPU"))
    # Figures stand before the link to the table that they are from.
    for said, table in re.findall(r"(.*?)\[table\]\(([^)]+)\)", TEXT, re.DOTALL):
        found = (DOCS.parent / table).read_text(encoding="utf-8")
        figures = re.findall(r"\d\.\d+ ± \d\.\d+", said)
        assert figures and all(figure in found for figure in figures)


def test_its_picture_is_what_the_script_draws(drawing: ModuleType) -> None:
    """It names the four methods, and no line is wider than its place on the sheet."""
    drawn = drawing.picture()
    assert drawing.FILE.read_text(encoding="utf-8") == drawn
    assert f"](docs/{drawing.FILE.relative_to(DOCS).as_posix()})" in TEXT
    lines = [one for one in ElementTree.fromstring(drawn).iter() if one.tag.endswith("text")]
    assert {"nFedGNN", "FedSCem", "FedGLS", "PPFL-GNN"} <= {one.text for one in lines}
    for one in lines:
        x, width = float(one.attrib["x"]), 0.55 * int(one.attrib["font-size"]) * len(one.text or "")
        left = x if one.attrib["text-anchor"] == "start" else x - width / 2
        assert left >= 0 and left + width <= drawing.WIDTH, one.text
        assert int(one.attrib["font-size"]) >= 14


def test_its_methods_and_settings_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    (table,) = re.findall(r"## Which method\n\n(.*?)\n\n", TEXT, re.DOTALL)
    named = set(re.findall(r"`([a-z]+)`", table))
    assert len(named) >= 6
    assert all(re.search(rf"\b{name}\b", listed) for name in named)
    for config in re.findall(r"flower-graph (?:run|sweep) ([\w/-]+)", TEXT):
        assert cli.main(["show", config, "--plain"]) == 0
        if key := re.search(rf"sweep {config} \S+ (\S+)=", TEXT):
            shown = capsys.readouterr().out
            assert key[1].split(".")[-1] in shown


@pytest.mark.slow
def test_its_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(README, 1)
    space = run_blocks(README, 1)  # again, in the folders of the first
    said = capsys.readouterr().out
    assert "difference" in said and "client 3, test nodes: 0." in said
    assert space["found"].client.tolist() == [3] * len(space["right"])
