"""``flower-graph docs`` finds each page that the code names, wherever the pages are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from doc_helpers import DOCS
from test_docs import anchors

from flower_graph.apps.cli import documentation
from flower_graph.apps.cli.main import _COMMANDS, main
from flower_graph.errors import ConfigError

FOLDERS = ("flower_graph", "strategies", "apps")


def _texts() -> Iterator[tuple[str, str]]:
    """Give all texts in the code that a person may read, without docstrings."""
    for folder in FOLDERS:
        for path in (DOCS.parent / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            own = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            for node in ast.walk(tree):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_text and id(node) not in own:
                    yield path.name, node.value


@pytest.fixture
def guides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "SITE", Path("nowhere"))


@pytest.mark.usefixtures("guides")
def test_each_page_that_a_text_names_is_there_and_none_is_named_as_a_file() -> None:
    named: list[str] = []
    for file, text in _texts():
        assert not re.search(r"\bdocs/[\w/-]+\.md", text), (file, text)
        named += re.findall(r"flower-graph docs ([\w/#-]+)", text)
    assert len(named) >= 12
    for page in named:
        address, _, anchor = documentation.address_of(page).partition("#")
        text = Path(address.removeprefix("file://")).read_text(encoding="utf-8")
        assert not anchor or anchor in anchors(text), page


def test_a_page_is_found_in_the_site_by_its_name_or_the_end_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documentation, "SITE", tmp_path)
    for name in ("index", "own-data", "reference/configuration", "results/heat-map/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.html").touch()
    opened: list[str] = []
    monkeypatch.setattr(documentation.webbrowser, "open", opened.append)
    for asked, file in (
        ([], "index.html"),
        (["own-data#splits"], "own-data.html#splits"),
        (["configuration"], "reference/configuration.html"),
        (["results/heat-map"], "results/heat-map/README.html"),
    ):
        assert main(["docs", *asked]) == 0
        assert opened[-1] == capsys.readouterr().out.strip() == f"{tmp_path.as_uri()}/{file}"
    assert main(["docs", "own-data", "--path"]) == 0 and len(opened) == 4
    with pytest.raises(ConfigError, match="own-data"):
        documentation.address_of("own-dta")


def test_without_pages_the_projects_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SITE", "GUIDES"):
        monkeypatch.setattr(documentation, name, tmp_path)
    said = Message()
    monkeypatch.setattr(documentation, "metadata", lambda name: said)
    with pytest.raises(ConfigError, match="address"):
        documentation.address_of("own-data")
    said["Project-URL"] = "Documentation, https://git.example/x/tree/v1/docs"
    found = documentation.address_of("own-data#splits")
    assert found == "https://git.example/x/tree/v1/docs/own-data.md#splits"


@pytest.mark.usefixtures("guides")
def test_without_a_site_a_page_is_printed_with_the_tables_that_code_declares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documentation.webbrowser, "open", None)  # nothing is opened
    for page, words in (
        ("own-data", "# Graphs of your own"),
        ("configuration", "| `strategy.learning_rate` |"),
        ("command-line", "--overwrite"),
        ("api", "\n- `fg.errors.ConfigError`: "),
        ("promises", "| words | tests |"),
    ):
        assert main(["docs", page]) == 0
        text = capsys.readouterr().out
        assert words in text and "eval-rst" not in text, page
    assert main(["docs", "outputs#checkpoints"]) == 0
    assert capsys.readouterr().out.startswith("### Checkpoints\n")


def test_commands_that_the_page_lists_are_all() -> None:
    text = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    listed = text.partition("whole: ")[2].partition(".")[0]
    assert re.findall(r"`([\w-]+)`", listed) == list(_COMMANDS)
