"""All pages: what they name is there; their tables say what declarations and results say."""

import ast
import json
import re
from collections.abc import Iterator
from inspect import ismodule
from pathlib import Path
from types import ModuleType

import pytest
from doc_helpers import DOCS, script

import flower_graph
from benchmarks import run as benchmarks
from flower_graph.apps.cli import documentation
from flower_graph.apps.cli.main import _COMMANDS, main
from flower_graph.config.schema import known_keys, settings_of
from flower_graph.errors import ConfigError
from flower_graph.lazy import declared
from flower_graph.method.registry import known_apps, schema_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([page for page in ROOT.glob("docs/**/*.md") if "results" not in page.parts])
WRITTEN = sorted(ROOT.glob("docs/results/**/*.md"))  # by commands, or about what these wrote
# Files that a page has its reader make
MADE = ("my_methods/", "DIR/", "runs/")


def anchors(text: str) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *PAGES, *WRITTEN],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_headings_and_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`([\w-]+/[\w/-]+\.(?:py|sh|yaml|md|json|png))`", page.read_text("utf-8"))
    roots = (ROOT, ROOT / "flower_graph", ROOT / "docs", ROOT / "examples")
    gone = [name for name in named if not any((root / name).is_file() for root in roots)]
    gone = [name for name in gone if not name.startswith(MADE)]
    assert not gone, gone


@pytest.mark.parametrize("title", ["Where to look", "One round"])
def test_where_to_look_names_files_and_functions_that_are_there(title: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition(f"## {title}")[2].partition("\n## ")[0]
    rows = [row for row in table.split("|---|---|")[1].splitlines() if row.startswith("|")]
    assert len(rows) >= 8
    for row in rows:
        assert re.search(r"`[\w/]+\.py`", row), row
        for function, name in re.findall(r"`(\w+)` in `([\w/]+\.py)`", row):
            path = next(p for p in (ROOT / name, ROOT / "flower_graph" / name) if p.is_file())
            assert f"def {function}(" in path.read_text("utf-8"), row


def test_every_guide_is_in_the_contents_of_the_site() -> None:
    listed = set[Path]()
    for page in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            names = [line for line in block.splitlines() if line and line[0] != ":"]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert {page.resolve() for page in PAGES} - listed == {ROOT / "docs" / "index.md"}
    assert all(page.is_file() for page in listed)


# `flower-graph docs` ------------------------------------------------------------------------------


CODE = ("flower_graph", "strategies", "apps")


def _texts() -> Iterator[tuple[str, str]]:
    """Give all texts in the code that a person may read, without docstrings."""
    for folder in CODE:
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
    for name in ("index", "own-data", "reference/configuration", "results/fedgls/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.html").touch()
    opened: list[str] = []
    monkeypatch.setattr(documentation.webbrowser, "open", opened.append)
    for asked, file in (
        ([], "index.html"),
        (["own-data#splits"], "own-data.html#splits"),
        (["configuration"], "reference/configuration.html"),
        (["results/fedgls"], "results/fedgls/README.html"),
    ):
        assert main(["docs", *asked]) == 0
        assert opened[-1] == capsys.readouterr().out.strip() == f"{tmp_path.as_uri()}/{file}"
    assert main(["docs", "own-data", "--path"]) == 0 and len(opened) == 4
    with pytest.raises(ConfigError, match="own-data"):
        documentation.address_of("own-dta")


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


# Tables that are made -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script(DOCS / "generate.py")


def test_tables_can_be_made_and_are_not_committed(generator: ModuleType) -> None:
    for page in generator.PAGES:
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        made = generator.generate(page)
        assert text == generator.MARKED.sub(r"\1\3", made)
        assert len(made) > len(text) + 1000


def test_every_public_name_and_command_is_on_its_page(generator: ModuleType) -> None:
    names, commands = generator.generate("api"), generator.generate("command-line")
    found = re.findall(r"^\.\. auto\w+:: flower_graph\.(\w+)$", names, re.MULTILINE)
    modules = {name for name in declared("flower_graph") if ismodule(getattr(flower_graph, name))}
    assert sorted([*found, *modules]) == sorted(declared("flower_graph"))
    assert names.count(".. automodule:: ") == len(modules)
    shown = set(re.findall(r"^## flower-graph ([\w-]+)", commands, re.MULTILINE))
    assert shown == set(_COMMANDS)


def test_the_configuration_page_has_every_key_of_every_method_and_no_other(
    generator: ModuleType,
) -> None:
    text = generator.generate("configuration")
    parts = text.split("<!-- generated: ")
    _, _, shared, several, *own = (part.partition("<!-- end -->")[0] for part in parts)
    for app, table in zip(known_apps(), own, strict=True):
        ours = [row for row in several.splitlines() if re.search(f"`{app}`[,:]", row)]
        rows = [*shared.splitlines(), *ours, *table.splitlines()]
        named = [row.split("|")[1].strip(" `") for row in rows if row.startswith("| `")]
        assert set(named) == set(known_keys(schema_of(app)))


def test_every_setting_says_what_it_means() -> None:
    for app in known_apps():
        assert [setting.key for setting in settings_of(schema_of(app)) if not setting.help] == []


def test_the_page_on_performance_is_made_of_the_results() -> None:
    results = json.loads(benchmarks.RESULTS.read_text(encoding="utf-8"))
    assert benchmarks.PAGE.read_text(encoding="utf-8") == benchmarks.page(results)


def test_every_test_that_the_page_on_reliability_names_is_there() -> None:
    page = (DOCS / "results" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert len(named) > 10
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# docs/results -------------------------------------------------------------------------------------


FOUND = DOCS / "results" / "README.md"
FIGURE = re.compile(r"(?<![\d.])\d+\.\d+ ± \d\.\d+")


def test_every_figure_stands_in_a_table_of_its_section() -> None:
    sections = FOUND.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 10
    for section in sections:
        tables = [FOUND.parent / link for link in re.findall(r"\]\((\S+?/table\.md)\)", section)]
        known = {one for table in tables for one in FIGURE.findall(table.read_text("utf-8"))}
        figures = set(FIGURE.findall(" ".join(section.split())))
        assert figures and not figures - known, section.splitlines()[0]


@pytest.mark.parametrize(
    "method",
    ["nfedgnn", "lpgnn", "ppfl", "fedscem", "fedgls", "personalised", "fedgcn", "mixed", "links"],
)
def test_figures_and_chances_of_a_method_s_page_stand_in_its_table(method: str) -> None:
    folder = FOUND.parent / method
    said = " ".join((folder / "README.md").read_text("utf-8").split())
    pages = [*folder.glob("*.md"), *FOUND.parent.glob(f"{method}-steady/table.md")]
    table = " ".join(one.read_text("utf-8") for one in pages if one.name != "README.md")
    for figure in (FIGURE, re.compile(r"Holm (?!1\b)[\de.-]*\d")):
        found = set(figure.findall(said))
        assert found and not found - set(figure.findall(table))
